"""Answers of servers parsed into values.  Pure; raises MalformedAnswerError for what is no answer of OpenAI's API."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Message = dict[str, Any]
T = TypeVar("T", str, dict[str, Any], list[Any])
KINDS: dict[type, str] = {str: "text", dict: "object", list: "list of objects"}


class MalformedAnswerError(Exception):
    """Answer of a wrong form."""


@dataclass(frozen=True)
class TokenChoice:
    """One token of an answer, named by its bytes, where the server gives them: two tokens may read alike."""

    token: str
    logprob: float
    top: Mapping[str, float]  # log-probabilities of the likeliest tokens there


@dataclass(frozen=True)
class ChatCompletion:
    """One choice of a chat completion, streamed or not."""

    text: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str
    model: str
    usage: Mapping[str, Any]
    tokens: tuple[TokenChoice, ...] = ()  # () where the server gives no log-probabilities, or not in OpenAI's shape
    has_done_marker: bool = True  # a stream: with [DONE]

    @property
    def full_text(self) -> str:
        """Reasoning and text, in order."""
        return self.reasoning + self.text

    @property
    def message(self) -> Message:
        """The answer as its client sends it back in the next turn."""
        calls = {"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text or (None if calls else ""), **calls}

    @property
    def prompt_tokens(self) -> int:
        """Raises MalformedAnswerError where usage lacks it."""
        count = self.usage.get("prompt_tokens")
        if not isinstance(count, int) or isinstance(count, bool):
            raise MalformedAnswerError("its usage has no 'prompt_tokens'")
        return count

    @property
    def cached_tokens(self) -> int | None:
        """None where the server does not say."""
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return value if isinstance(value, int) else None


def parse_completion(data: Any) -> ChatCompletion:
    """A chat completion's JSON."""
    choice = _first_choice(data)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise MalformedAnswerError("its first choice has no message")
    return ChatCompletion(
        text=_get(message, "content", str),
        reasoning=_get_reasoning(message),
        tool_calls=tuple(_get(message, "tool_calls", list)),
        finish_reason=_get(choice, "finish_reason", str),
        model=_get(data, "model", str),
        usage=_get(data, "usage", dict),
        tokens=tuple(parse_tokens(choice.get("logprobs"))),
    )


def parse_tokens(logprobs: Any) -> Iterator[TokenChoice]:
    """Tokens of `logprobs`; none where they are not in OpenAI's shape."""
    for entry in (logprobs.get("content") or []) if isinstance(logprobs, Mapping) else []:
        try:
            top = {_token_key(other): float(other["logprob"]) for other in entry.get("top_logprobs") or []}
            yield TokenChoice(_token_key(entry), float(entry["logprob"]), top)
        except (AttributeError, KeyError, TypeError, ValueError):
            return


def _token_key(entry: Mapping[str, Any]) -> str:
    raw = entry.get("bytes")
    return bytes(raw).hex() if isinstance(raw, list) and raw else str(entry["token"])


@dataclass
class StreamFold:
    """Fold of a stream's chunks into one answer."""

    _has_done_marker: bool = False
    _models: set[str] = field(default_factory=set)
    _text: str = ""
    _reasoning: str = ""
    _tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _tokens: list[TokenChoice] = field(default_factory=list)
    _finish_reason: str = ""
    _usage: dict[str, Any] = field(default_factory=dict)

    def add(self, event_data: bytes) -> bool:
        """Add one event's data; True where it has a part of the answer.  Raises MalformedAnswerError."""
        data = event_data.decode(errors="replace")
        if data == "[DONE]":
            self._has_done_marker = True
            return False
        try:
            chunk = json.loads(data)
        except ValueError:
            raise MalformedAnswerError(f"its stream has an event that is no JSON: {data[:80]!r}") from None
        if not isinstance(chunk, dict):
            raise MalformedAnswerError(f"its stream has an event that is no object: {data[:80]!r}")
        if error := chunk.get("error"):
            raise MalformedAnswerError(f"its stream ended in an error: {_format_error(error)}")
        self._models.add(_get(chunk, "model", str))
        self._usage = _get(chunk, "usage", dict) or self._usage
        return self._add_choice(_first_choice(chunk)) if chunk.get("choices") else False

    def build(self) -> ChatCompletion:
        return ChatCompletion(
            text=self._text,
            reasoning=self._reasoning,
            tool_calls=tuple(call for _, call in sorted(self._tool_calls.items())),
            finish_reason=self._finish_reason,
            model=", ".join(sorted(self._models)),
            usage=self._usage,
            tokens=tuple(self._tokens),
            has_done_marker=self._has_done_marker,
        )

    def _add_choice(self, choice: dict[str, Any]) -> bool:
        delta = _get(choice, "delta", dict)
        text, reasoning, calls = _get(delta, "content", str), _get_reasoning(delta), _get(delta, "tool_calls", list)
        self._text += text
        self._reasoning += reasoning
        for call in calls:
            self._add_tool_call(call)
        self._tokens += parse_tokens(choice.get("logprobs"))
        self._finish_reason = _get(choice, "finish_reason", str) or self._finish_reason
        return bool(text or reasoning or calls)

    def _add_tool_call(self, delta: dict[str, Any]) -> None:
        index, part = delta.get("index"), _get(delta, "function", dict)
        if not isinstance(index, int):
            raise MalformedAnswerError("a tool call in its stream has no index")
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._tool_calls.setdefault(index, empty)
        call["id"] = call["id"] or _get(delta, "id", str)
        call["function"]["name"] += _get(part, "name", str)
        call["function"]["arguments"] += _get(part, "arguments", str)


def parse_models(data: Any) -> list[Mapping[str, Any]]:
    """Entries of a list of models, with an id each; [] for data of another form."""
    entries = data.get("data") if isinstance(data, Mapping) else None
    models = entries if isinstance(entries, list) else []
    return [each for each in models if isinstance(each, Mapping) and isinstance(each.get("id"), str) and each["id"]]


def format_error_body(body: bytes) -> str:
    """Text of a refusal, in a line."""
    try:
        data = json.loads(body)
    except ValueError:
        data = body.decode(errors="replace")
    return _format_error(data.get("error", data) if isinstance(data, Mapping) else data)


def _format_error(error: Any) -> str:
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message if message is not None else error).split())[:300]


def _first_choice(data: Any) -> dict[str, Any]:
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise MalformedAnswerError("it has no choices")
    return choices[0]


def _get(data: dict[str, Any], name: str, kind: type[T]) -> T:
    """The field's value; an empty one where it is absent or null."""
    value = data.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind) or (kind is list and not all(isinstance(each, dict) for each in value)):
        raise MalformedAnswerError(f"its {name!r} is no {KINDS[kind]}")
    return value


def _get_reasoning(message: dict[str, Any]) -> str:
    return _get(message, "reasoning_content", str) or _get(message, "reasoning", str)
