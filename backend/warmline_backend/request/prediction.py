"""OpenAI's `prediction`: the text that a client expects back, such as a file that it has asked a change of.  Pure."""

from warmline_backend.request.params import BadRequestError, Fields, format_json_type

PREDICTION_CHARS_MAX = 2_000_000  # the rest is left out: it takes time to tokenize, and only saves some
PREDICTION_CHARS_PER_TOKEN = 16  # of the answer at most: more of the text can't be of use
EXPECTED = 'expected {"type": "content", "content": "the text"}, or a list of text parts as its content'


def parse_prediction(body: object) -> str:
    """The expected text of a body, "" for none.  Raises BadRequestError."""
    if (value := Fields(body).get("prediction")) is None:
        return ""
    prediction = Fields(value, "prediction")
    if prediction.get("type") != "content":
        raise BadRequestError(f"'prediction.type' must be \"content\"; {EXPECTED}", "prediction")
    content = prediction.get("content")
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        given = f"not {format_json_type(content)}" if "content" in prediction.body else "and is missing"
        raise BadRequestError(f"'prediction.content' must be a string or a list, {given}; {EXPECTED}", "prediction")
    return "".join(map(_read_part, parts))[:PREDICTION_CHARS_MAX]


def _read_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    raise BadRequestError(f"'prediction.content' has a part that is no text; {EXPECTED}", "prediction")
