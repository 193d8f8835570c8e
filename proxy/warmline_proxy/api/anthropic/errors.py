"""Errors in Anthropic's words.  Pure."""

import msgspec

from warmline_proxy.errors import ClientError, overflow, read_error, renamed

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


def error_object(error: ClientError) -> bytes:
    """Anthropic's error envelope as JSON."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": _message(error)}})


def _message(error: ClientError) -> str:
    if numbers := overflow(error):
        return f"prompt is too long: {numbers[0]} tokens > {numbers[1]} maximum"  # by these words clients compact
    read = read_error(error)
    if read.code in ("context_length_exceeded", "kv_memory_exceeded"):
        return f"prompt is too long: {read.message}"
    return renamed(read, _FIELDS).message
