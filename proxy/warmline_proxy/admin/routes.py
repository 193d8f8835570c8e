"""The owner's paths, of all modules, in one table."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from warmline_proxy.errors import bad_request, not_allowed

PREFIX = "/warmline/"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Paths = Mapping[tuple[str, str], Handler]  # by method and path


class OwnerPaths:
    """Finds the handler; whether the owner asks was checked before."""

    def __init__(self, *tables: Paths) -> None:
        self._handlers = {place: handler for table in tables for place, handler in table.items()}

    async def answer(self, request: web.Request, path: str) -> web.StreamResponse:
        """`path` has no trailing slash.  Raises ClientError."""
        method = "GET" if request.method == "HEAD" else request.method
        if handler := self._handlers.get((method, path)):
            response = await handler(request)
            response.headers["Cache-Control"] = "no-store"  # conversations: no browser is to keep them
            return response
        if methods := [known for known, served in self._handlers if served == path]:
            raise not_allowed(request.method, " or a ".join(methods))
        served = ", ".join(sorted({served for _, served in self._handlers}))
        raise bad_request(f'Unknown path "{path[:200]}"; the owner\'s are {served}.', status=404, code="not_found")
