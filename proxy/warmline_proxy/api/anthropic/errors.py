"""Errors in Anthropic's words.  Pure."""

import msgspec

from warmline_proxy.errors import ClientError, decode_error_body, parse_context_overflow, rename_error_param

ERROR_TYPES = {
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
_FIELD_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}


def encode_error_envelope(error: ClientError) -> bytes:
    """Anthropic's error envelope as JSON."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": _error_message(error)}})


def _error_message(error: ClientError) -> str:
    if numbers := parse_context_overflow(error):
        return f"prompt is too long: {numbers[0]} tokens > {numbers[1]} maximum"  # by these words clients compact
    read = decode_error_body(error)
    if read.code in ("context_length_exceeded", "kv_memory_exceeded"):
        return f"prompt is too long: {read.message}"
    return rename_error_param(read, _FIELD_NAMES).message
