"""The proxy's HTTP face: who may call what.  Paths are matched by hand, so that a trailing slash is no other path."""

import logging
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from warmline_proxy.admin import Admin
from warmline_proxy.admission import Admission, bearer, check_host, check_key, same_secret, tenant_of
from warmline_proxy.background import Background
from warmline_proxy.bodies import BODY_BYTES_MAX
from warmline_proxy.config import Config
from warmline_proxy.errors import ClientError, bad_request, from_upstream, index_failed
from warmline_proxy.hotpath import HotPath
from warmline_proxy.index import Index, IndexFailure
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.normalize import ENDPOINTS
from warmline_proxy.passthrough import forward
from warmline_proxy.settle import Settler
from warmline_proxy.start import Starter
from warmline_proxy.upstream import Upstream, UpstreamError

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 10.0  # saves under way at a shutdown; what isn't written then is prefilled again


class Face:
    """Dispatches requests; holds no state of its own."""

    def __init__(self, config: Config, secret: str, upstream: Upstream, hot_path: HotPath, admin: Admin) -> None:
        self._config = config
        self._secret = secret
        self._upstream = upstream
        self._hot_path = hot_path
        self._admin = admin

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises ClientError and UpstreamError."""
        check_host(request.host, self._config.client_key)
        path = request.path.rstrip("/") or "/"
        if request.method in ("GET", "HEAD") and path == "/health":
            return web.json_response({"status": "ok"})
        if request.method in ("GET", "HEAD") and path == "/ready":
            return await self._admin.ready()
        if path.startswith("/warmline/"):
            return await self._administer(request, path)
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": "GET, HEAD, POST, OPTIONS"})
        check_key(request.headers, self._config.client_key)
        if endpoint := ENDPOINTS.get(path):
            return await self._generate(request, endpoint)
        return await forward(request, self._upstream)

    async def _generate(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        if request.method != "POST":
            raise bad_request(f"{request.method} is not allowed here; send a POST.", status=405)
        return await self._hot_path.answer(request, endpoint)

    async def _administer(self, request: web.Request, path: str) -> web.StreamResponse:
        if not same_secret(bearer(request.headers), self._secret):
            raise bad_request("This path is for the owner of the home directory.", status=401, code="invalid_api_key")
        if (request.method, path) == ("GET", "/warmline/status"):
            return await self._admin.status()
        if (request.method, path) == ("POST", "/warmline/purge"):
            return await self._admin.purge(request)
        raise bad_request(f"Unknown path {path}", status=404, code="not_found")


@web.middleware
async def errors_as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One envelope for every refusal.  A client that has left gets none."""
    try:
        return await handler(request)
    except (ClientError, UpstreamError) as error:
        return from_upstream(error).response()
    except IndexFailure as error:
        log.error("%s %s: %s", request.method, request.path, error)
        return index_failed(str(error)).response()
    except ConnectionResetError:
        return web.Response(status=499, reason="Client Closed Request")


def build(config: Config, secret: str, index: Index) -> web.Application:
    """The whole proxy, wired together.  The caller owns `index`."""
    background = Background()
    upstream = Upstream(config.backend_url, secret, config.connect_timeout_s)
    tenant, reuse = tenant_of(config.client_key), config.reuse != "off"
    knowledge = Knowledge(upstream, tenant)
    admission = Admission(config.running_count_max, config.queue_count_max)
    hot_path = HotPath(
        upstream=upstream,
        knowledge=knowledge,
        admission=admission,
        starter=Starter(upstream, index, knowledge, background),
        settler=Settler(index, upstream, knowledge, reuse),
        background=background,
        tenant=tenant,
        reuse=reuse,
    )
    admin = Admin(index, upstream, knowledge, admission, hot_path)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors_as_answers])
    app.router.add_route("*", "/{path:.*}", Face(config, secret, upstream, hot_path, admin).handle)

    async def end(_: web.Application) -> AsyncIterator[None]:
        yield
        await background.drain(DRAIN_TIMEOUT_S)
        await upstream.close()

    app.cleanup_ctx.append(end)
    return app
