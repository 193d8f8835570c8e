"""Errors in Anthropic's words.  Pure."""

import re

import msgspec

from warmline_proxy.errors import ClientError, renamed
from warmline_wire.messages import ErrorBody, ErrorReply, decode, message_in

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# What a backend's refusal calls a field, and what it was in the client's body.
_FIELDS = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens\D+(\d+) tokens")


def error_object(error: ClientError) -> bytes:
    """Anthropic's error envelope as JSON."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": _message(error)}})


def overflow(error: ClientError) -> tuple[int, int] | None:
    """Of a prompt that is longer than the context: its tokens, and how many there may be.  None for other errors."""
    if _read(error).code != "context_length_exceeded" or not (found := _OVERFLOW.search(message_in(error.body))):
        return None
    return int(found[2]), int(found[1])


def _message(error: ClientError) -> str:
    if numbers := overflow(error):
        return f"prompt is too long: {numbers[0]} tokens > {numbers[1]} maximum"  # by these words clients compact
    read = _read(error)
    if read.code in ("context_length_exceeded", "kv_memory_exceeded"):
        return f"prompt is too long: {read.message}"
    return renamed(read, _FIELDS).message


def _read(error: ClientError) -> ErrorBody:
    try:
        return decode(error.body, ErrorReply).error
    except msgspec.DecodeError:
        return ErrorBody(message=message_in(error.body))
