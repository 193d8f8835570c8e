"""Parts of messages that a text model can't read: what replaces them in a tool's result, and their refusal.  Pure."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

_IMAGE = "[an image, which this model can't see]"
_DOCUMENT = "[a document, which this model can't read]"
_AUDIO = "[a recording, which this model can't hear]"
_VIDEO = "[a video, which this model can't see]"
IMAGE_TYPES = ("image_url", "input_image", "image")  # names in OpenAI's and Anthropic's APIs
_PLACEHOLDERS = {
    **dict.fromkeys(IMAGE_TYPES, _IMAGE),
    **dict.fromkeys(("file", "input_file", "document"), _DOCUMENT),
    **dict.fromkeys(("input_audio", "audio_url"), _AUDIO),
    "video_url": _VIDEO,
}
_TYPE_CHARS_MAX = 40  # shown of a part's type, which may be any text


def find_placeholder(kind: object) -> str:
    """Line in place of a part of this type in a tool's result; "" for a type that is not known.

    The agent's tools don't know what a model can see, so the conversation goes on.
    """
    return _PLACEHOLDERS.get(kind, "") if isinstance(kind, str) else ""


def join_parts(texts: Iterable[str]) -> str:
    """Join texts, with placeholders on lines of their own."""
    texts = [text for text in texts if text]
    lines = frozenset(_PLACEHOLDERS.values())
    separated = [
        text + ("\n" if {text, after} & lines and not (text[-1].isspace() or after[0].isspace()) else "")
        for text, after in pairwise([*texts, " "])
    ]
    return "".join(separated)


def describe_refusal(kind: Any) -> str:
    """Reason to refuse a part of this type, in words by which clients recognise it and send the text alone.

    They look for phrases of OpenAI, mlx-lm and others: "image_url is not supported", "does not support image input",
    "Only 'text' content type is supported".
    """
    subject = kind if find_placeholder(kind) else "it"
    reason = "does not support image input and reads only text" if kind in IMAGE_TYPES else "reads only text"
    return (
        f'of type "{str(kind)[:_TYPE_CHARS_MAX]}": {subject} is not supported, since this model {reason}. '
        "Only 'text' content type is supported. Leave the part out, or send it as text"
    )
