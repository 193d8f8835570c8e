"""What a client is told when its request can't be answered: a status and OpenAI's error object."""

import re
from collections.abc import Mapping

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import ErrorBody, ErrorReply, decode, encode, logged_in, message_in
from warmline_proxy.upstream.client import Refused, Unreachable, UpstreamError

RETRY_AFTER_S = 2
_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens\D+(\d+) tokens")  # the backend's words
UNAUTHORIZED = 401  # no key, or a wrong one
CLIENT_CLOSED = 499  # nginx's word for a request that was ended before its answer


class ClientError(Exception):
    """Ends a request.  `body` is OpenAI's error object as JSON; `retry_after_s` becomes a Retry-After header; `by` says
    who wanted it ended, where its code doesn't; `challenge` how to show a key where one is missing.
    """

    challenge = "Bearer"

    def __init__(self, status: int, body: bytes, retry_after_s: int | None = None, *, by: str = "") -> None:
        super().__init__(f"{status}: {logged_in(body)}")
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s
        self.by = by

    def response(self, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
        """`body` is what `apis.Api.refusal` makes of this one's."""
        all_headers = dict(headers or {})
        if self.retry_after_s is not None:
            all_headers["Retry-After"] = str(self.retry_after_s)
        if self.status == UNAUTHORIZED:
            all_headers["WWW-Authenticate"] = self.challenge
        response = web.Response(status=self.status, body=body, content_type="application/json", headers=all_headers)
        response[REFUSAL] = self
        return response


REFUSAL = web.ResponseKey("refusal", ClientError)  # what an answer tells


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    return encode(ErrorReply(error=ErrorBody(message=message, type=kind, code=code, param=param)))


def read_error(error: ClientError) -> ErrorBody:
    """Its error object; where a backend has sent something else, that in one."""
    try:
        return decode(error.body, ErrorReply).error
    except msgspec.DecodeError:
        return ErrorBody(message=message_in(error.body), type="server_error")


def overflow(error: ClientError) -> tuple[int, int] | None:
    """Of a prompt that is longer than the context: its tokens, and how many there may be.  None for other errors."""
    read = read_error(error)
    if read.code != "context_length_exceeded" or not (found := _OVERFLOW.search(read.message)):
        return None
    return int(found[2]), int(found[1])


def renamed(error: ErrorBody, names: Mapping[str, str]) -> ErrorBody:
    """With its field called what the client called it: `names` has chat's names and another API's, the longer first."""
    param = error.param or ""
    for name, theirs in names.items():
        if f"{param}.".startswith(f"{name}."):
            message = error.message.replace(f"'{name}'", f"'{theirs}'").replace(f"'{name}.", f"'{theirs}.")
            return msgspec.structs.replace(error, message=message, param=theirs + param.removeprefix(name))
    return error


def not_allowed(method: str, instead: str) -> ClientError:
    return bad_request(f"{method} is not allowed here; send a {instead}.", status=405)


def bad_request(message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> ClientError:
    """The client is at fault."""
    return ClientError(status, error_body(message, "invalid_request_error", code, param))


def unavailable(message: str, code: str = "backend_unavailable", retry_after_s: int = RETRY_AFTER_S) -> ClientError:
    """Nobody's fault that the client could mend: try again soon."""
    return ClientError(503, error_body(message, "server_error", code), retry_after_s)


def queue_full(message: str, retry_after_s: int) -> ClientError:
    return ClientError(429, error_body(message, "rate_limit_error", "queue_full"), retry_after_s)


def timed_out(what: str, code: str) -> ClientError:
    """A deadline has passed; what was computed is kept, so trying again goes on from there."""
    return ClientError(504, error_body(f"The request was ended: {what}.  What was computed is kept.", "timeout", code))


def cancelled(message: str, by: str = "delete") -> ClientError:
    """Somebody wanted it ended."""
    return ClientError(CLIENT_CLOSED, error_body(message, "cancelled", "cancelled"), by=by)


def bad_gateway(message: str) -> ClientError:
    """The backend broke off or answered nonsense."""
    return ClientError(502, error_body(message, "server_error", "backend_failed"))


def index_failed(message: str) -> ClientError:
    return ClientError(500, error_body(f"The index failed: {message}", "server_error", "index_failed"))


def from_upstream(error: ClientError | UpstreamError) -> ClientError:
    """A failure of the backend in the client's terms; what the backend itself says of a request is passed on."""
    if isinstance(error, ClientError):
        return error
    if isinstance(error, Refused):
        return _passed_on(error)
    if isinstance(error, Unreachable):
        return unavailable(f"The backend can't serve now: {error}.  Try again soon.")
    return bad_gateway(f"Computing the answer failed: {error}.")


def _passed_on(error: Refused) -> ClientError:
    retry_after_s = int(error.retry_after) if error.retry_after.isdigit() else None
    if error.status == UNAUTHORIZED:  # proxy and backend disagree about their secret; that is not the client's key
        return bad_gateway("The backend refused the proxy: do both use one home?")
    if error.status in (429, 503) and retry_after_s is None:
        retry_after_s = RETRY_AFTER_S
    body = error.body if error.body.lstrip().startswith(b"{") else error_body(str(error), "server_error")
    return ClientError(error.status, body, retry_after_s)
