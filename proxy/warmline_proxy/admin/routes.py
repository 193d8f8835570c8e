"""Route tables of the admin API under /warmline/.  Access is checked by a middleware."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from warmline_proxy.errors import ClientError, bad_request, method_not_allowed

ADMIN_PATH_PREFIX = "/warmline/"
ADMIN_PATHS: web.AppKey[list[str]] = web.AppKey("admin_paths")

RouteHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RouteTable = Mapping[tuple[str, str], RouteHandler]  # by method and path


def disable_caching(table: RouteTable) -> RouteTable:
    """The table with handlers whose responses are not cached: they contain conversations."""
    return {place: _disable_caching(handler) for place, handler in table.items()}


def describe_routing_error(request: web.Request, error: web.HTTPNotFound | web.HTTPMethodNotAllowed) -> ClientError:
    """Error for an unknown admin path or method."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return method_not_allowed(request.method, " or a ".join(sorted(error.allowed_methods - {"HEAD"})))
    path, paths = request.path.rstrip("/"), request.app[ADMIN_PATHS]
    return bad_request(
        f'Unknown path "{path[:200]}"; the owner\'s are {", ".join(sorted(paths))}.', status=404, code="not_found"
    )


def _disable_caching(handler: RouteHandler) -> RouteHandler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = await handler(request)
        response.headers["Cache-Control"] = "no-store"
        return response

    return handle
