"""Route tables, registered with aiohttp's router: a path with trailing slashes is the same path."""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from warmline_proxy.routes.middlewares import handle_expect

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SLASHES = "{slashes:/*}"  # at the end of each route's pattern


def add_routes(app: web.Application, table: Mapping[tuple[str, str], Handler]) -> None:
    """Register handlers by method ("*" for any; GET answers HEAD too) and path or pattern."""
    for (method, path), handler in table.items():
        for each in (method, "HEAD") if method == "GET" else (method,):
            app.router.add_route(each, path + SLASHES, handler, expect_handler=handle_expect)
