"""Parameters of a generation: read from an OpenAI body, checked, and bounded before the engine sees them.

A null field means absent.  Unknown fields are ignored; the unsupported ones of `request.field_names` are refused.
Defaults are mlx_lm.server's (greedy unless a temperature is given), not OpenAI's, unless settings say otherwise.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard, cast

import msgspec

from warmline_backend.request.field_names import find_unsupported_field
from warmline_common.protocol.json_structure import convert_integer
from warmline_common.protocol.messages import ErrorBody, ErrorReply, encode

STOP_WORDS_MAX = 64
STOP_CHARS_MAX = 4096  # of all words: each has an automaton's node, made on the engine's thread
STOP_TOKENS_MAX = 256
TOP_LOGPROBS_MAX = 20
TOKENS_UNBOUNDED = 1 << 30  # where neither the request, nor a setting, nor the model sets a limit
COMPLETION_TOKENS_DEFAULT = 16  # of OpenAI's specification, for completions without a limit
NO_LIMIT = -1  # llama.cpp's and LM Studio's `max_tokens` without a limit
RANDOM_SEED = -1  # llama.cpp's and vLLM's seed for an unpredictable one
BIAS_MAX = 100.0
TEMPERATURE_GREEDY = 1e-5  # below it, sampling and argmax can't be told apart
_INT64 = 1 << 63

Tools = list[dict[str, Any]] | None  # of a chat body, or those in its prompt


class BadRequestError(Exception):
    """A faulty body: `message` says what was wrong and what was expected, `param` names the field.  Becomes a 400."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def encode_reply(self) -> bytes:
        """Encode OpenAI's error object as JSON."""
        return encode(ErrorReply(error=ErrorBody(message=self.message, param=self.param, code=self.code)))


class FieldError(BadRequestError):
    """A faulty field: the message is its name in quotes and the fault.  `param`: another name for the reply."""

    def __init__(self, field: str, fault: str, param: str | None = None) -> None:
        super().__init__(f"'{field}' {fault}", param or field)


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """Checked parameters of a request."""

    max_tokens: int  # prompt + max_tokens fits the context; 0 only with echo, where nothing is to be generated
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # 1: off; 0: greedy
    top_k: int = 0  # 0: off; may exceed the vocabulary, which is off too
    min_p: float = 0.0  # 0: off
    seed: int | None = None  # None: an unpredictable one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the answer ends before one of these, also with ignore_eos
    min_tokens: int = 0  # nothing but a form that is complete ends the answer before; at most max_tokens
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is sampled; (): anything may be
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1: off
    repetition_context_size: int = 20
    logit_bias: dict[int, float] = {}
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    ignore_eos: bool = False
    echo: bool = False  # the prompt comes before the answer
    tool_choice: str = "auto"  # or "none", or "required"; the grammar decides on the tools
    parallel_tool_calls: bool = True  # one answer may have several calls

    @property
    def is_greedy(self) -> bool:
        return self.temperature < TEMPERATURE_GREEDY or self.top_p == 0 or self.top_k == 1


def parse_params(
    endpoint: str,
    body: object,
    *,
    context_tokens_max: int,
    prompt_tokens: int,
    vocabulary_size: int,
    default_max_tokens: int = 0,
    default_temperature: float = 0.0,
    default_top_p: float = 1.0,
) -> GenerationParams:
    """Check `body` of `endpoint` ("chat" or "completion").  Raises BadRequestError.

    `context_tokens_max` and `default_max_tokens` are 0 for none.  A limit on tokens beyond the context is cut to it;
    only a prompt that leaves no room for one token is refused.
    """
    fields = Fields(body)
    _refuse_unsupported(endpoint, fields)
    logprobs, top_logprobs = _parse_logprobs(endpoint, fields)
    echo = endpoint == "completion" and _parse_echo(fields, logprobs)
    default = default_max_tokens or (COMPLETION_TOKENS_DEFAULT if endpoint == "completion" else 0)
    limit = _parse_limit(fields, default, low=0 if echo else 1)
    max_tokens = min(limit, _compute_room(fields, context_tokens_max, prompt_tokens))
    return GenerationParams(
        max_tokens=max_tokens,
        temperature=fields.get_number("temperature", default_temperature, low=0.0),
        top_p=fields.get_number("top_p", default_top_p, low=0.0, high=1.0),
        top_k=max(fields.get_integer("top_k", 0, low=-1), 0),  # -1: off, as in vLLM
        min_p=fields.get_number("min_p", 0.0, low=0.0, high=1.0),
        seed=_parse_seed(fields),
        stop=_parse_stop(fields),
        stop_token_ids=_parse_token_ids(fields, "stop_token_ids", vocabulary_size, STOP_TOKENS_MAX),
        min_tokens=min(_parse_min_tokens(fields, limit), max_tokens),
        allowed_token_ids=_parse_allowed_token_ids(fields, vocabulary_size),
        presence_penalty=fields.get_number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.get_number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        # 0 would divide by zero, and clients of mlx_lm.server send it for off.
        repetition_penalty=fields.get_number("repetition_penalty", 1.0, low=0.0) or 1.0,
        repetition_context_size=fields.get_integer("repetition_context_size", 20, low=1),
        logit_bias=_parse_logit_bias(fields, vocabulary_size),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stream=fields.get_boolean("stream"),
        include_usage=_parse_include_usage(fields),
        ignore_eos=fields.get_boolean("ignore_eos"),
        echo=echo,
        tool_choice=parse_tool_choice(fields) if endpoint == "chat" else "auto",
        parallel_tool_calls=endpoint != "chat" or parse_parallel_tool_calls(fields),
    )


class Fields:
    """Typed reads of a JSON object in which null means absent.  Every read raises BadRequestError naming the field."""

    def __init__(self, body: object, path: str = "") -> None:
        if not isinstance(body, Mapping):
            what = f"'{path}'" if path else "the body"
            raise BadRequestError(f"{what} must be a JSON object, not {format_json_type(body)}", path or None)
        self.body, self._prefix = body, f"{path}." if path else ""

    def get(self, name: str) -> Any:
        return self.body.get(name)

    def make_error(self, name: str, expected: str, value: object) -> FieldError:
        return FieldError(self._prefix + name, f"must be {expected}, not {format_value(value)}")

    def get_optional_boolean(self, name: str) -> bool | None:
        if (value := self.get(name)) is None or isinstance(value, bool):
            return value
        raise self.make_error(name, "true or false", value)

    def get_boolean(self, name: str) -> bool:
        return bool(self.get_optional_boolean(name))

    def get_number(self, name: str, default: float, *, low: float, high: float = math.inf) -> float:
        if (value := self.get(name)) is None:
            return default
        if _is_number(value) and low <= value <= high:
            return float(value)
        raise self.make_error(name, f"a number {_format_range(low, high)}", value)

    def get_optional_integer(self, name: str, *, low: int, high: float = math.inf) -> int | None:
        if (value := self.get(name)) is None:
            return None
        if (number := convert_integer(value)) is not None and low <= number <= high:
            return number
        raise self.make_error(name, f"an integer {_format_range(low, high)}", value)

    def get_integer(self, name: str, default: int, *, low: int, high: float = math.inf) -> int:
        value = self.get_optional_integer(name, low=low, high=high)
        return default if value is None else value


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    """True for finite numbers within a float's range; a bool is none."""
    try:
        return (_is_integer(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def _format_range(low: float, high: float) -> str:
    return f"of at least {low}" if high == math.inf else f"from {low} to {high}"


def format_json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def format_value(value: object) -> str:
    """Format a short value, else its type: an error message is no place for a transcript."""
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if isinstance(value, str | int | float) and len(text) <= 40 else format_json_type(value)


def _find_limit_field(fields: Fields) -> str:
    return "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"


def _parse_limit(fields: Fields, default: int, low: int) -> int:
    """Most tokens that the body asks for; `default` (0: none) where it does not say."""
    name = _find_limit_field(fields)
    if (value := fields.get(name)) is None:
        return default or TOKENS_UNBOUNDED
    if (limit := convert_integer(value)) == NO_LIMIT:
        return TOKENS_UNBOUNDED
    if limit is None or limit < low:
        raise fields.make_error(name, f"an integer of at least {low}, or -1 for no limit", value)
    return limit


def _compute_room(fields: Fields, context_tokens_max: int, prompt_tokens: int) -> int:
    """Compute the tokens that the context has for an answer.  Raises BadRequestError where it has none."""
    room = context_tokens_max - prompt_tokens if context_tokens_max else TOKENS_UNBOUNDED
    if room < 1:
        field = "messages" if fields.get("messages") is not None else "prompt"
        raise make_context_error(context_tokens_max, prompt_tokens, field)
    return room


def make_context_error(
    context_tokens_max: int, prompt_tokens: int, field: str, *, is_exact: bool = True
) -> BadRequestError:
    """Make the error of a prompt that leaves no room in the context.

    A length that is not exact is one that the prompt exceeds.
    """
    return BadRequestError(
        f"This model's maximum context length is {context_tokens_max} tokens. However, your prompt has "
        f"{'' if is_exact else 'more than '}{prompt_tokens} tokens, which leaves no room for an answer. "
        "Please shorten the prompt.",
        field,
        code="context_length_exceeded",
    )


def _parse_min_tokens(fields: Fields, limit: int) -> int:
    """Parse min_tokens; it may exceed a limit that the context has cut, but not `limit`, the body's."""
    least = fields.get_integer("min_tokens", 0, low=0)
    if least > limit:
        raise FieldError("min_tokens", f"is {least}, which is more than '{_find_limit_field(fields)}', {limit}")
    return least


def _parse_seed(fields: Fields) -> int | None:
    seed = fields.get_optional_integer("seed", low=-_INT64, high=_INT64 - 1)
    return None if seed == RANDOM_SEED else seed


def _parse_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    words = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(words, list) and len(words) > STOP_WORDS_MAX:
        raise FieldError("stop", f"has {len(words)} strings; {STOP_WORDS_MAX} are the most")
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise fields.make_error("stop", f"a string or a list of up to {STOP_WORDS_MAX} strings, none empty", value)
    if (chars := sum(map(len, words))) > STOP_CHARS_MAX:
        raise FieldError("stop", f"has {chars} characters in all; {STOP_CHARS_MAX} are the most")
    return tuple(words)


def _parse_token_ids(fields: Fields, name: str, vocabulary_size: int, count_max: int) -> tuple[int, ...]:
    if (value := fields.get(name)) is None:
        return ()
    if not isinstance(value, list) or len(value) > count_max:
        raise fields.make_error(name, f"a list of up to {count_max} token ids", value)
    tokens = tuple(convert_integer(entry) for entry in value)
    if not all(token is not None and 0 <= token < vocabulary_size for token in tokens):
        raise FieldError(name, f"must be token ids from 0 to {vocabulary_size - 1}")
    return cast(tuple[int, ...], tokens)


def _parse_allowed_token_ids(fields: Fields, vocabulary_size: int) -> tuple[int, ...]:
    if fields.get("allowed_token_ids") == []:
        raise FieldError("allowed_token_ids", "is empty, so no token could follow; leave it out")
    return _parse_token_ids(fields, "allowed_token_ids", vocabulary_size, vocabulary_size)


def _parse_logit_bias(fields: Fields, vocabulary_size: int) -> dict[int, float]:
    """Parse biases by token id: an object, or llama.cpp's list of pairs, in which false bans a token."""
    if (value := fields.get("logit_bias")) is None:
        return {}
    if isinstance(value, list):
        value = dict(_parse_bias_pair(pair) for pair in value)
    entries, biases = Fields(value, "logit_bias"), dict[int, float]()
    if len(entries.body) > vocabulary_size:
        raise FieldError("logit_bias", f"has {len(entries.body)} entries; the model has {vocabulary_size} tokens")
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocabulary_size):
            fault = f"has the key {format_value(key)}; keys must be token ids from 0 to {vocabulary_size - 1}"
            raise FieldError("logit_bias", fault)
        biases[int(key)] = entries.get_number(key, 0.0, low=-BIAS_MAX, high=BIAS_MAX)
    return biases


def _parse_bias_pair(pair: object) -> tuple[str, object]:
    """Parse to an entry of an object."""
    if not isinstance(pair, list) or len(pair) != 2 or (token := convert_integer(pair[0])) is None:
        raise FieldError("logit_bias", "must be an object of token ids and biases, or a list of such pairs")
    return str(token), -BIAS_MAX if pair[1] is False else pair[1]


def _parse_logprobs(endpoint: str, fields: Fields) -> tuple[bool, int]:
    """Parse chat's switch and count, or the completions' count (0 is on, without alternatives)."""
    if endpoint == "completion":
        count = fields.get_optional_integer("logprobs", low=0, high=TOP_LOGPROBS_MAX)
        return count is not None, count or 0
    enabled = fields.get_boolean("logprobs")
    count = fields.get_integer("top_logprobs", 0, low=0, high=TOP_LOGPROBS_MAX)
    if count and not enabled:
        raise FieldError("top_logprobs", "needs 'logprobs' to be true")
    return enabled, count


def _parse_echo(fields: Fields, logprobs: bool) -> bool:
    if (echo := fields.get_boolean("echo")) and logprobs:
        reason = "a prompt's own log-probabilities are not computed; leave one of them out"
        raise FieldError("echo", f"with 'logprobs' is not supported, for {reason}")
    return echo


def _parse_include_usage(fields: Fields) -> bool:
    options = fields.get("stream_options")
    return options is not None and Fields(options, "stream_options").get_boolean("include_usage")


def _refuse_unsupported(endpoint: str, fields: Fields) -> None:
    if fields.get_integer("n", 1, low=1) != 1:
        raise FieldError("n", f"is {fields.get('n')}; the backend computes one choice a request: ask the proxy")
    if refused := find_unsupported_field(endpoint, fields.body):
        name, hint = refused
        raise FieldError(name, f"is not supported here: {hint}")


def parse_tool_choice(fields: Fields) -> str:
    """Parse to "auto", "none" or "required"; a named tool is required, its name is checked by `response_format`."""
    if (choice := fields.get("tool_choice")) in (None, "auto", "none", "required"):
        return choice or "auto"
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return "required"
    if kind == "allowed_tools":
        allowed = Fields(choice.get("allowed_tools"), "tool_choice.allowed_tools")
        if (mode := allowed.get("mode")) in ("auto", "required"):
            return str(mode)
        raise allowed.make_error("mode", '"auto" or "required"', mode)
    expected = '"auto", "none", "required", or an object of type "function" or "allowed_tools"'
    raise fields.make_error("tool_choice", expected, choice if isinstance(choice, str) else kind or choice)


def parse_parallel_tool_calls(fields: Fields) -> bool:
    """True unless the body allows a single call only; a function named in `tool_choice` is called once."""
    choice = fields.get("tool_choice")
    is_named = isinstance(choice, Mapping) and choice.get("type") == "function"
    return fields.get_optional_boolean("parallel_tool_calls") is not False and not is_named
