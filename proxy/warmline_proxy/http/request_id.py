"""Each request's id: given by its client or made here, on every answer, and in every line of the log that is about it.

SDKs look for it under names of their own, OpenAI's under `x-request-id` and Anthropic's under `request-id`.
"""

import logging

from aiohttp import web
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
    """The id of a request that `named` has seen, or that no handler will; always the same."""
    if (request_id := request.get(_REQUEST_ID_KEY)) is None:
        try:
            request_id = parse_request_id(request.headers.get(HEADER_REQUEST))
        except ClientError:  # which is for whoever needs that name to say
            request_id = new_request_id()
        request[_REQUEST_ID_KEY] = request_id
    return request_id


def check_request_id(request: web.BaseRequest) -> str:
    """The same.  Raises ClientError 400 where its client wants it called something that no request may be called."""
    if (given := request.headers.get(HEADER_REQUEST)) is not None:
        parse_request_id(given)
    return get_request_id(request)


def build_id_headers(request_id: str) -> dict[str, str]:
    """What every answer has."""
    return dict.fromkeys((HEADER_REQUEST, *SDK_HEADERS), request_id)


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost.  What is logged while it is handled is about this request, and a refusal is logged."""
    with request_context(get_request_id(request)):
        response = await handler(request)
        if (error := response.get(CLIENT_ERROR)) is not None:
            _log_refusal(request, error, response.headers.get(HEADER_REQUEST, get_request_id(request)))
        return response


async def set_request_id_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal's handler, for an answer's head that is about to be written."""
    response.headers.update(build_id_headers(response.headers.get(HEADER_REQUEST) or get_request_id(request)))


def _log_refusal(request: web.Request, error: ClientError, request_id: str) -> None:
    if error.status == UNAUTHORIZED:  # `Doors` tells of them, so that whoever tries keys fills no log
        return
    body = decode_error_body(error)
    with request_context(request_id):
        log.info(
            "refused %s %s: %s (%s)", request.method[:16], redact_path(request.path), error, body.code or body.type
        )
