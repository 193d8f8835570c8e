"""Middlewares of the proxy (access, error envelopes, CORS headers) and registration of routes.  Event loop thread."""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import wraps

import aiohttp
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from warmline_common.process.redaction import redact_path
from warmline_proxy.api.openai import MODELS_PATH
from warmline_proxy.api.registry import APIS, COUNT_TOKENS_PATH, find_api
from warmline_proxy.auth.authenticator import Authenticator
from warmline_proxy.auth.principals import Client
from warmline_proxy.dashboard.pages import is_browser_visit, is_dashboard_path, redirect_to_dashboard
from warmline_proxy.errors import ClientError, bad_request, encode_error_body, method_not_allowed
from warmline_proxy.http.cors import build_cors_headers
from warmline_proxy.http.request_head import check_head
from warmline_proxy.index.index import IndexStoreError
from warmline_proxy.metrics import METRICS
from warmline_proxy.upstream.client import UpstreamError, translate_upstream_error

log = logging.getLogger(__name__)

RouteHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RouteTable = Mapping[tuple[str, str], RouteHandler]  # by method and path

CLIENT = web.RequestKey("client", Client)
ADMIN_PATH_PREFIX = "/warmline/"
ADMIN_PATHS: web.AppKey[list[str]] = web.AppKey("admin_paths")
READ_METHODS = (hdrs.METH_GET, hdrs.METH_HEAD)
PUBLIC_PATHS = ("/health", "/ready")
METRICS_PATH = "/metrics"
SERVED_PATHS = (*APIS, COUNT_TOKENS_PATH, MODELS_PATH)
SLASHES = "{slashes:/*}"  # at the end of each pattern: a path with trailing slashes is the same path
ALLOWED_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"


def trim_path(request: web.Request) -> str:
    """Path without trailing slashes."""
    return request.path.rstrip("/") or "/"


def build_access_middleware(authenticator: Authenticator) -> Middleware:
    """Middleware that checks access to every path, also unknown paths, before the route runs."""

    @web.middleware
    async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        authenticator.check_host(request)
        check_head(request.method, request.version, request.headers)
        path, reads = trim_path(request), request.method in READ_METHODS
        if reads and path == METRICS_PATH:
            authenticator.check_client_or_admin(request)
        elif path.startswith(ADMIN_PATH_PREFIX):
            authenticator.check_admin(request)
        elif is_dashboard_path(path):
            authenticator.check_admin(request, is_page=True)
        elif is_browser_visit(request, path) and authenticator.can_see_pages(request):
            return redirect_to_dashboard()
        elif request.method == hdrs.METH_OPTIONS:
            return web.Response(status=204, headers={"Allow": ALLOWED_METHODS})
        elif not (reads and path in PUBLIC_PATHS):
            request[CLIENT] = authenticator.authenticate_client(request)
        return await handler(request)

    return access_middleware


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Encode every error in the envelope of the client's API.  Disconnected clients get no answer."""
    try:
        return await handler(request)
    except (ClientError, UpstreamError) as error:
        return _build_error_response(request, translate_upstream_error(error))
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return _build_error_response(request, _translate_routing_error(request, error))
    except IndexStoreError as error:
        log.error("%s %s: %s", request.method, redact_path(request.path), error)
        body = encode_error_body(f"The index failed: {error}", "server_error", "index_failed")
        return _build_error_response(request, ClientError(500, body))
    except ConnectionResetError:
        return web.Response(status=499, reason="Client Closed Request")


def _build_error_response(request: web.Request, error: ClientError) -> web.Response:
    request.app[METRICS].record_error(error)
    return error.build_response(find_api(trim_path(request)).encode_error(error))


def _translate_routing_error(request: web.Request, error: web.HTTPNotFound | web.HTTPMethodNotAllowed) -> ClientError:
    path = trim_path(request)
    if path.startswith(ADMIN_PATH_PREFIX):
        if isinstance(error, web.HTTPMethodNotAllowed):
            return method_not_allowed(request.method, " or a ".join(sorted(error.allowed_methods - {"HEAD"})))
        paths = request.app[ADMIN_PATHS]
        message = f'Unknown path "{path[:200]}"; the owner\'s are {", ".join(sorted(paths))}.'
        return bad_request(message, status=404, code="not_found")
    is_advertised = path in SERVED_PATHS or path.startswith(f"{MODELS_PATH}/")
    if isinstance(error, web.HTTPMethodNotAllowed) and is_advertised:
        return method_not_allowed(request.method, "GET" if path.startswith(MODELS_PATH) else "POST")
    message = f'Unknown path "{request.path[:200]}"; served are {", ".join(SERVED_PATHS)}.'
    if similar := [served for served in SERVED_PATHS if request.path.endswith(served.removeprefix("/v1"))]:
        message += f"  If {max(similar, key=len)} was meant: the base URL that the client was given doesn't lead there."
    elif path.strip("/") in ("", "v1"):  # a person in a browser
        message += "  The dashboard is at /admin."
    return bad_request(message, status=404, code="not_found")  # at once: clients probe for other servers' paths


async def handle_expect(request: web.Request) -> None:
    """Expect handler of all routes.  aiohttp's own copies unencodable header text into its error."""
    if request.version < aiohttp.HttpVersion11:
        return
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        error = bad_request("The header Expect must be 100-continue, or not there.", status=417)
        raise web.HTTPExpectationFailed(text=error.body.decode(), content_type="application/json")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the interim response is not part of the answer


def build_cors_handler(origins: Collection[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Handler of aiohttp's on_response_prepare signal: lets pages of these origins read responses."""

    async def set_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(build_cors_headers(origins, request.method, request.path, request.headers))

    return set_cors_headers


def disable_caching(handler: RouteHandler) -> RouteHandler:
    """Handler whose responses are not cached: they contain conversations."""

    @wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        response = await handler(request)
        response.headers["Cache-Control"] = "no-store"
        return response

    return handle


def add_routes(app: web.Application, table: RouteTable) -> None:
    """Register handlers by method ("*" for any; GET answers HEAD too) and path or pattern."""
    for (method, path), handler in table.items():
        for each in (method, "HEAD") if method == "GET" else (method,):
            app.router.add_route(each, path + SLASHES, handler, expect_handler=handle_expect)
