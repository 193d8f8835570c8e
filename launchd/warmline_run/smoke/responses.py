"""Answers of servers parsed into values.  Pure; raises MalformedAnswerError for what is no answer of OpenAI's API."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


class MalformedAnswerError(Exception):
    """Answer of a wrong form."""


@dataclass(frozen=True)
class TokenChoice:
    """One token of an answer.  Tokens are named by their bytes, where the server tells them: two may read alike."""

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
        """All that it says, in order."""
        return self.reasoning + self.text

    @property
    def message(self) -> Message:
        """As its client sends it back in the next turn."""
        calls = {"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text or (None if calls else ""), **calls}

    @property
    def prompt_tokens(self) -> int:
        """Raises Malformed where usage lacks it."""
        return _get_count(self.usage, "prompt_tokens")

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
    if not isinstance(message, Mapping):
        raise MalformedAnswerError("its first choice has no message")
    return ChatCompletion(
        text=_get_text(message, "content"),
        reasoning=_get_text(message, "reasoning_content") or _get_text(message, "reasoning"),
        tool_calls=tuple(_get_list(message, "tool_calls")),
        finish_reason=_get_text(choice, "finish_reason"),
        model=_get_text(data, "model"),
        usage=_get_object(data, "usage"),
        tokens=tuple(parse_tokens(choice.get("logprobs"))),
    )


def parse_tokens(logprobs: Any) -> Iterator[TokenChoice]:
    """Nothing where they are not in OpenAI's shape."""
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
    """Gathers one answer from the chunks of its stream."""

    is_done: bool = False
    models: set[str] = field(default_factory=set)
    _texts: dict[str, list[str]] = field(default_factory=lambda: {"content": [], "reasoning": []})
    _tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _tokens: list[TokenChoice] = field(default_factory=list)
    _finish_reason: str = ""
    _usage: Mapping[str, Any] = field(default_factory=dict)

    def add(self, data: str) -> bool:
        """One event's data; whether it said anything of the answer.  Raises Malformed."""
        if data == "[DONE]":
            self.is_done = True
            return False
        try:
            chunk = json.loads(data)
        except ValueError:
            raise MalformedAnswerError(f"its stream has an event that is no JSON: {data[:80]!r}") from None
        if not isinstance(chunk, Mapping):
            raise MalformedAnswerError(f"its stream has an event that is no object: {data[:80]!r}")
        if error := chunk.get("error"):
            raise MalformedAnswerError(f"its stream ended in an error: {_format_error(error)}")
        self.models.add(_get_text(chunk, "model"))
        self._usage = _get_object(chunk, "usage") or self._usage
        return self._add_choice(_first_choice(chunk)) if chunk.get("choices") else False

    def build(self) -> ChatCompletion:
        return ChatCompletion(
            text="".join(self._texts["content"]),
            reasoning="".join(self._texts["reasoning"]),
            tool_calls=tuple(call for _, call in sorted(self._tool_calls.items())),
            finish_reason=self._finish_reason,
            model=", ".join(sorted(self.models)),
            usage=self._usage,
            tokens=tuple(self._tokens),
            has_done_marker=self.is_done,
        )

    def _add_choice(self, choice: Mapping[str, Any]) -> bool:
        delta = _get_object(choice, "delta")
        content, reasoning = (
            _get_text(delta, "content"),
            _get_text(delta, "reasoning_content") or _get_text(delta, "reasoning"),
        )
        self._texts["content"].append(content)
        self._texts["reasoning"].append(reasoning)
        calls = _get_list(delta, "tool_calls")
        for call in calls:
            self._add_tool_call(call)
        self._tokens += parse_tokens(choice.get("logprobs"))
        self._finish_reason = _get_text(choice, "finish_reason") or self._finish_reason
        return bool(content or reasoning or calls)

    def _add_tool_call(self, delta: Mapping[str, Any]) -> None:
        index, part = delta.get("index"), _get_object(delta, "function")
        if not isinstance(index, int):
            raise MalformedAnswerError("a tool call in its stream has no index")
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._tool_calls.setdefault(index, empty)
        call["id"] = call["id"] or _get_text(delta, "id")
        call["function"]["name"] += _get_text(part, "name")
        call["function"]["arguments"] += _get_text(part, "arguments")


def parse_models(data: Any) -> list[Mapping[str, Any]]:
    """The entries of a list of models, with an id each; [] where it is none."""
    entries = data.get("data") if isinstance(data, Mapping) else None
    listed = entries if isinstance(entries, list) else []
    return [each for each in listed if isinstance(each, Mapping) and isinstance(each.get("id"), str) and each["id"]]


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


def _first_choice(data: Any) -> Mapping[str, Any]:
    choices = data.get("choices") if isinstance(data, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise MalformedAnswerError("it has no choices")
    return choices[0]


def _get_text(data: Mapping[str, Any], name: str) -> str:
    """ "" where it is absent or null."""
    value = data.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise MalformedAnswerError(f"its {name!r} is no text")


def _get_object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """{} where it is absent or null."""
    value = data.get(name)
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise MalformedAnswerError(f"its {name!r} is no object")


def _get_list(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """[] where it is absent or null."""
    value = data.get(name)
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        return value
    raise MalformedAnswerError(f"its {name!r} is no list of objects")


def _get_count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise MalformedAnswerError(f"its usage has no {name!r}")
