"""Errors of requests: an HTTP status and OpenAI's error object."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from aiohttp import web

from warmline_common.protocol import messages
from warmline_common.protocol.messages import ErrorBody, ErrorReply, decode, encode

RETRY_AFTER_S = 2
# Of the backend.
_CONTEXT_OVERFLOW_PATTERN = re.compile(r"maximum context length is (\d+) tokens\D+?(more than )?(\d+) tokens")
UNAUTHORIZED = 401  # missing or wrong key
CLIENT_CLOSED = 499  # nginx's status of a cancelled request


class ClientError(Exception):
    """Ends a request: `body` is OpenAI's error object, `challenge` the scheme that a 401 asks for.

    `cancel_source`: origin of a cancellation, unless the code implies it.  `headers`: of the response, beside those
    that follow from the rest.
    """

    challenge = "Bearer"

    def __init__(
        self,
        status: int,
        body: bytes,
        retry_after_s: int | None = None,
        *,
        cancel_source: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{status}: {messages.redact_error_message(body)}")
        self.status, self.body = status, body
        self.retry_after_s, self.cancel_source = retry_after_s, cancel_source
        self.headers = dict(headers or {})

    def build_response(self, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
        """Response with `body`, this error's body in the envelope of the client's API."""
        all_headers = self.headers | (headers or {})
        if self.retry_after_s is not None:
            all_headers["Retry-After"] = str(self.retry_after_s)
        if self.status == UNAUTHORIZED:
            all_headers["WWW-Authenticate"] = self.challenge
        response = web.Response(status=self.status, body=body, content_type="application/json", headers=all_headers)
        response[CLIENT_ERROR] = self
        return response


CLIENT_ERROR = web.ResponseKey("refusal", ClientError)  # the error in a response


def encode_error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    return encode(ErrorReply(error=ErrorBody(message=message, type=kind, code=code, param=param)))


def decode_error_body(error: ClientError) -> ErrorBody:
    """Error object of an error; made from the message for a backend's other format."""
    try:
        return decode(error.body, ErrorReply).error
    except msgspec.DecodeError:
        return ErrorBody(message=messages.parse_error_message(error.body), type="server_error")


class ContextOverflow(NamedTuple):
    """Numbers of a prompt that leaves no room in the context."""

    prompt_tokens: int
    context_tokens: int
    is_exact: bool  # False: the prompt is longer, and was not tokenized


def parse_context_overflow(error: ClientError) -> ContextOverflow | None:
    """Numbers of a context overflow; None for other errors."""
    body = decode_error_body(error)
    if body.code != "context_length_exceeded" or not (found := _CONTEXT_OVERFLOW_PATTERN.search(body.message)):
        return None
    return ContextOverflow(int(found[3]), int(found[1]), is_exact=not found[2])


def rename_error_param(error: ErrorBody, name_map: Mapping[str, str]) -> ErrorBody:
    """Error with its parameter renamed: `name_map` maps chat's names to another API's, longer names first."""
    param = error.param or ""
    for name, renamed in name_map.items():
        if f"{param}.".startswith(f"{name}."):
            message = error.message.replace(f"'{name}'", f"'{renamed}'").replace(f"'{name}.", f"'{renamed}.")
            return msgspec.structs.replace(error, message=message, param=renamed + param.removeprefix(name))
    return error


def method_not_allowed(method: str, allowed: str) -> ClientError:
    return bad_request(f"{method} is not allowed here; send a {allowed}.", status=405)


def bad_request(
    message: str,
    *,
    status: int = 400,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ClientError:
    """Error of the client."""
    return ClientError(status, encode_error_body(message, "invalid_request_error", code, param), headers=headers)


def service_unavailable(
    message: str,
    code: str = "backend_unavailable",
    retry_after_s: int = RETRY_AFTER_S,
    headers: Mapping[str, str] | None = None,
) -> ClientError:
    """Temporary error; the client may try again soon."""
    return ClientError(503, encode_error_body(message, "server_error", code), retry_after_s, headers=headers)


def too_many_requests(message: str, retry_after_s: int) -> ClientError:
    return ClientError(429, encode_error_body(message, "rate_limit_error", "queue_full"), retry_after_s)


def gateway_timeout(reason: str, code: str) -> ClientError:
    """A deadline has passed; computed KV is kept, so a retry continues from it."""
    message = f"The request was ended: {reason}.  What was computed is kept."
    return ClientError(504, encode_error_body(message, "timeout", code))


def request_cancelled(message: str, cancel_source: str = "delete") -> ClientError:
    """Deliberate cancellation."""
    return ClientError(CLIENT_CLOSED, encode_error_body(message, "cancelled", "cancelled"), cancel_source=cancel_source)


def bad_gateway(message: str) -> ClientError:
    """The backend disconnected or answered nonsense."""
    return ClientError(502, encode_error_body(message, "server_error", "backend_failed"))
