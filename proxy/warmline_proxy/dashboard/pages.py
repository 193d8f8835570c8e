"""The dashboard's files under /admin, as they lie in static/.  They hold no data: the page asks the owner's paths.

Nothing is built and nothing is fetched from elsewhere; the policy has the browser hold the page to that.
"""

from importlib.resources import files

from aiohttp import hdrs, web

from warmline_common.process.loopback import host_name, is_loopback_name
from warmline_common.process.redaction import quoted
from warmline_proxy.errors import bad_request, not_allowed

ADMIN = "/admin"
PAGE = "dashboard.html"
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
ALONE = {"Cross-Origin-Opener-Policy": "same-origin"}  # where it counts, see `_is_trusted`


def is_page(path: str) -> bool:
    return path == ADMIN or path.startswith(f"{ADMIN}/")


def is_visit(request: web.Request, path: str) -> bool:
    """Whether a person has typed our address alone into a browser, as far as that can be told."""
    kinds = (kind.partition(";")[0].strip().lower() for kind in request.headers.get(hdrs.ACCEPT, "").split(","))
    return path == "/" and request.method in (hdrs.METH_GET, hdrs.METH_HEAD) and "text/html" in kinds


def to_the_page() -> web.Response:
    """Kept by no browser: whoever asks next may be somebody else, or want something else."""
    return web.Response(status=303, headers={"Location": ADMIN, "Cache-Control": "no-store", "Vary": "Accept"})


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
        headers = HEADERS | ALONE if _is_trusted(request) else HEADERS
        return web.Response(body=data, content_type=TYPES[_suffix(name)], charset="utf-8", headers=headers)


def _is_trusted(request: web.Request) -> bool:
    """Whether the browser trusts the connection: HTTPS (which ends at a proxy before us), or this machine.

    Elsewhere it takes no such policy and complains of it.  It sends Sec-Fetch headers only where it does trust.
    """
    return "Sec-Fetch-Dest" in request.headers or is_loopback_name(host_name(request.headers.get(hdrs.HOST, "")))


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]
