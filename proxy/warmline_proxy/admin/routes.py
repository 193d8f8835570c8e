"""The owner's paths, of all modules, in one table."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from warmline_proxy.errors import bad_request, method_not_allowed

ADMIN_PATH_PREFIX = "/warmline/"

RouteHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RouteTable = Mapping[tuple[str, str], RouteHandler]  # by method and path


class AdminRouter:
    """Finds the handler; whether the owner asks was checked before."""

    def __init__(self, *tables: RouteTable) -> None:
        self._handlers = {place: handler for table in tables for place, handler in table.items()}

    async def handle(self, request: web.Request, path: str) -> web.StreamResponse:
        """`path` has no trailing slash.  Raises ClientError."""
        method = "GET" if request.method == "HEAD" else request.method
        if handler := self._handlers.get((method, path)):
            response = await handler(request)
            response.headers["Cache-Control"] = "no-store"  # conversations: no browser is to keep them
            return response
        if methods := [known for known, served in self._handlers if served == path]:
            raise method_not_allowed(request.method, " or a ".join(methods))
        served = ", ".join(sorted({served for _, served in self._handlers}))
        raise bad_request(f'Unknown path "{path[:200]}"; the owner\'s are {served}.', status=404, code="not_found")
