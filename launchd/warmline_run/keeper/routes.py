"""HTTP routes of the keeper (see `warmline_common.protocol.keeper`).  Event loop thread."""

import hmac
import logging
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from warmline_common.protocol.keeper import POLL_WAIT_S_MAX, LoadRequest, PinModelRequest
from warmline_common.protocol.messages import ErrorBody, ErrorReply, T, decode, encode
from warmline_run.keeper.errors import KeeperError
from warmline_run.keeper.keeper import Keeper

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 65_536
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(keeper: Keeper, secret: str) -> web.Application:
    app = web.Application(middlewares=[_translate_errors, _authenticate(secret)], client_max_size=BODY_BYTES_MAX)
    routes = _Routes(keeper)
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/keeper/models", routes.list_models),
            web.post("/keeper/models/{name:.+}/load", routes.load),
            web.post("/keeper/models/{name:.+}/prepare", routes.prepare),
            web.post("/keeper/models/{name:.+}/unload", routes.unload),
            web.post("/keeper/models/{name:.+}/pin", routes.pin),
        ]
    )
    return app


def _authenticate(secret: str) -> Any:
    expected = f"Bearer {secret}".encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not (request.path == "/health" or hmac.compare_digest(given, expected)):
            return _error(401, "the keeper's secret is missing or wrong; talk to the proxy instead", "authentication")
        return await handler(request)

    return middleware


@web.middleware
async def _translate_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except KeeperError as error:
        return _error(error.status, str(error), error.kind, error.code)
    except msgspec.DecodeError as error:
        return _error(400, f"the body is not as expected: {error}")
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}")


class _Routes:
    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def health(self, request: web.Request) -> web.Response:
        return _json({"keeper": True, "pid": os.getpid()})

    async def list_models(self, request: web.Request) -> web.Response:
        """The state; with `version`, once it is another one, or after `wait_s`."""
        version, wait_s = _read_number(request, "version", -1), _read_number(request, "wait_s", 0)
        await self._keeper.wait_for_change(int(version), min(wait_s, POLL_WAIT_S_MAX))
        return self._reply()

    async def load(self, request: web.Request) -> web.Response:
        asked = await _read_body(request, LoadRequest)
        await self._keeper.load(request.match_info["name"], asked.kv_bytes)
        return self._reply()

    async def prepare(self, request: web.Request) -> web.Response:
        asked = await _read_body(request, LoadRequest)
        await self._keeper.prepare(request.match_info["name"], asked.kv_bytes)
        return self._reply()

    async def unload(self, request: web.Request) -> web.Response:
        self._keeper.unload(request.match_info["name"])
        return self._reply()

    async def pin(self, request: web.Request) -> web.Response:
        asked = await _read_body(request, PinModelRequest)
        self._keeper.pin(request.match_info["name"], asked.pinned)
        return self._reply()

    def _reply(self) -> web.Response:
        return _json(self._keeper.describe())


async def _read_body(request: web.Request, kind: type[T]) -> T:
    return decode(await request.read() or b"{}", kind)


def _read_number(request: web.Request, name: str, default: float) -> float:
    """Number of the query.  Raises KeeperError."""
    try:
        number = float(request.query.get(name, default))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise KeeperError(f"{name}: expected a number, not {request.query[name][:200]!r}")
    return number


def _json(message: object) -> web.Response:
    return web.Response(body=encode(message), content_type="application/json")


def _error(status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> web.Response:
    body = encode(ErrorReply(error=ErrorBody(message=message, type=kind, code=code)))
    return web.Response(status=status, body=body, content_type="application/json")
