"""The dashboard's files under /admin, as they lie in static/.  They hold no data: the page asks the owner's paths.

Nothing is built and nothing is fetched from elsewhere; the policy has the browser hold the page to that.
"""

from importlib.resources import files

from aiohttp import web

from warmline_proxy.errors import bad_request, not_allowed
from warmline_wire.masking import quoted

ADMIN = "/admin"
PAGE = "dashboard.html"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def is_page(path: str) -> bool:
    return path == ADMIN or path.startswith(f"{ADMIN}/")


class Pages:
    """Read once; whether the owner asks was checked before."""

    def __init__(self) -> None:
        folder = files(__package__) / "static"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if _suffix(each.name) in TYPES}

    def answer(self, request: web.Request, path: str) -> web.Response:
        """`path` has no trailing slash.  Raises ClientError."""
        name = path.removeprefix(ADMIN).removeprefix("/") or PAGE
        if (data := self._files.get(name)) is None:
            raise bad_request(
                f"No such page: {quoted(path[:200])}; the dashboard is {ADMIN}.", status=404, code="not_found"
            )
        if request.method not in ("GET", "HEAD"):
            raise not_allowed(request.method, "GET")
        return web.Response(body=data, content_type=TYPES[_suffix(name)], charset="utf-8", headers=HEADERS)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
