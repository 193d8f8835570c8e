"""Request ids: given by the client or made here; in every response and in every log line about the request.

SDKs read them from headers of their own: OpenAI's `x-request-id`, Anthropic's `request-id`.
"""

import logging

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from warmline_common.logging import request_context
from warmline_common.process.redaction import redact_path
from warmline_common.protocol.messages import HEADER_REQUEST
from warmline_proxy.errors import CLIENT_ERROR, UNAUTHORIZED, ClientError, decode_error_body
from warmline_proxy.request_log import new_request_id, parse_request_id

log = logging.getLogger(__name__)

SDK_HEADERS = ("X-Request-Id", "Request-Id")
_REQUEST_ID_KEY = web.RequestKey("id", str)


def get_request_id(request: web.BaseRequest) -> str:
    """Id of a request, the same at each call, also for requests that reach no handler."""
    if (request_id := request.get(_REQUEST_ID_KEY)) is None:
        try:
            request_id = parse_request_id(request.headers.get(HEADER_REQUEST))
        except ClientError:  # `check_request_id` reports it
            request_id = new_request_id()
        request[_REQUEST_ID_KEY] = request_id
    return request_id


def check_request_id(request: web.BaseRequest) -> str:
    """Id of a request.  Raises ClientError 400 if the client gave an invalid id."""
    if (given := request.headers.get(HEADER_REQUEST)) is not None:
        parse_request_id(given)
    return get_request_id(request)


def build_id_headers(request_id: str) -> dict[str, str]:
    """Headers of every response."""
    return dict.fromkeys((HEADER_REQUEST, *SDK_HEADERS), request_id)


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost middleware: sets the log context and logs refusals."""
    with request_context(get_request_id(request)):
        response = await handler(request)
        error = response.pop(
            CLIENT_ERROR, None
        )  # aiohttp keeps the response, and an error its frames with their values
        if error is None or error.status == UNAUTHORIZED:  # Authenticator logs a 401, rate-limited
            return response
        body, method, path = decode_error_body(error), request.method[:16], redact_path(request.path)
        with request_context(response.headers.get(HEADER_REQUEST, get_request_id(request))):
            log.log(
                logging.DEBUG if _is_probe(request) else logging.INFO,
                "refused %s %s: %s (%s)",
                method,
                path,
                error,
                body.code or body.type,
            )
        return response


def _is_probe(request: web.Request) -> bool:
    """True for a read of an unknown path: clients look for other servers by such requests."""
    is_unknown = isinstance(request.match_info.http_exception, web.HTTPNotFound)
    return is_unknown and request.method in (hdrs.METH_GET, hdrs.METH_HEAD)


async def set_request_id_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Handler of aiohttp's on_response_prepare signal."""
    response.headers.update(build_id_headers(response.headers.get(HEADER_REQUEST) or get_request_id(request)))
