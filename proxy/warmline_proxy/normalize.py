"""A client's body, made into what the backend gets.  Values that we don't need are kept as the bytes that came.

Any model name means the served one, and null means absent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from warmline_proxy.errors import bad_request
from warmline_wire.messages import decode

SESSION_HEADERS = ("X-Session-ID", "X-Claude-Code-Session-Id", "X-Litellm-Session-Id", "Session-Id")
SESSION_FIELDS = ("session_id", "prompt_cache_key")
RETRY_COUNT_HEADER = "X-Stainless-Retry-Count"
SESSION_CHARS_MAX = 128
ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

Fields = dict[str, msgspec.Raw]
_NULL = b"null"
_RETRY_COUNT = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Call:
    """One generation as the client asked for it."""

    endpoint: str  # "chat" or "completion"
    fields: Fields  # without nulls
    client_model: str | None  # as sent; None where absent
    stream: bool
    include_usage: bool
    session_hint: str  # what the client calls the conversation; never proof of anything
    retry_count: int = 0  # the client's own count of this request's tries

    def prompt_body(self, served_model: str) -> dict[str, Any]:
        """For POST /kv/prompts: the client's own body, so that its faults are found there."""
        return {**self.fields, "model": served_model}


def read_call(endpoint: str, body: bytes, headers: Mapping[str, str]) -> Call:
    """Raises ClientError 400 where the body is no JSON object, or `model` no string."""
    fields = _object(body)
    model = _optional(fields, "model", object)
    if model is not None and not isinstance(model, str):
        raise bad_request("'model' must be a string.", param="model")
    options = _optional(fields, "stream_options", dict) or {}
    return Call(
        endpoint=endpoint,
        fields=fields,
        client_model=model,
        stream=_optional(fields, "stream", bool) is True,
        include_usage=options.get("include_usage") is True,
        session_hint=_session_hint(fields, headers),
        retry_count=int(count) if _RETRY_COUNT.fullmatch(count := headers.get(RETRY_COUNT_HEADER, "")) else 0,
    )


def _object(body: bytes) -> Fields:
    try:
        body.decode()  # Raw values are not checked for UTF-8
        fields = decode(body, Fields)
    except msgspec.ValidationError:
        raise bad_request("The body must be a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from None
    return {name: value for name, value in fields.items() if bytes(value) != _NULL}


def _optional(fields: Fields, name: str, kind: type) -> Any:
    """A field's value where it has that type, else None: wrong types are for the backend to refuse."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:  # e.g. a lone surrogate, which skipping over a value doesn't see
        raise bad_request(f"We could not parse {name!r}: {error}", param=name) from None
    return value if isinstance(value, kind) else None


def _session_hint(fields: Fields, headers: Mapping[str, str]) -> str:
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return _printable(value)
    for name in SESSION_FIELDS:
        if value := _optional(fields, name, str):
            return _printable(value)
    return ""


def _printable(text: str) -> str:
    """Fit for a log line and for JSON."""
    return "".join(letter for letter in text[:SESSION_CHARS_MAX] if letter.isprintable())
