"""Each request's id: given by its client or made here, on every answer, and in every line of the log that is about it.

SDKs look for it under names of their own, OpenAI's under `x-request-id` and Anthropic's under `request-id`.
"""

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from warmline_common.logging import about
from warmline_common.process.redaction import shown_path
from warmline_common.protocol.messages import HEADER_REQUEST
from warmline_proxy.errors import REFUSAL, UNAUTHORIZED, ClientError, read_error
from warmline_proxy.request_log import new_request_id, read_request_id

log = logging.getLogger(__name__)

SDK_HEADERS = ("X-Request-Id", "Request-Id")
_KEY = web.RequestKey("id", str)


def id_of(request: web.BaseRequest) -> str:
    """The id of a request that `named` has seen, or that no handler will; always the same."""
    if (known := request.get(_KEY)) is None:
        try:
            known = read_request_id(request.headers.get(HEADER_REQUEST))
        except ClientError:  # which is for whoever needs that name to say
            known = new_request_id()
        request[_KEY] = known
    return known


def checked_id_of(request: web.BaseRequest) -> str:
    """The same.  Raises ClientError 400 where its client wants it called something that no request may be called."""
    if (given := request.headers.get(HEADER_REQUEST)) is not None:
        read_request_id(given)
    return id_of(request)


def id_headers(request_id: str) -> dict[str, str]:
    """What every answer has."""
    return dict.fromkeys((HEADER_REQUEST, *SDK_HEADERS), request_id)


@web.middleware
async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost.  What is logged while it is handled is about this request, and a refusal is logged."""
    with about(id_of(request)):
        response = await handler(request)
        if (error := response.get(REFUSAL)) is not None:
            _tell(request, error, response.headers.get(HEADER_REQUEST, id_of(request)))
        return response


async def marked(request: web.Request, response: web.StreamResponse) -> None:
    """A signal's handler, for an answer's head that is about to be written."""
    response.headers.update(id_headers(response.headers.get(HEADER_REQUEST) or id_of(request)))


def _tell(request: web.Request, error: ClientError, request_id: str) -> None:
    if error.status == UNAUTHORIZED:  # `Doors` tells of them, so that whoever tries keys fills no log
        return
    read = read_error(error)
    with about(request_id):
        log.info("refused %s %s: %s (%s)", request.method[:16], shown_path(request.path), error, read.code or read.type)
