"""Static files of the dashboard under /admin.  They contain no data: the page calls the admin API.

Nothing is built or loaded from other hosts, which the content security policy enforces.
"""

from importlib.resources import files

from aiohttp import hdrs, web

from warmline_common.process.loopback import is_loopback_name, parse_host
from warmline_common.process.redaction import quote_text
from warmline_proxy.errors import bad_request, method_not_allowed

DASHBOARD_PATH = "/admin"
DASHBOARD_FILE = "dashboard.html"
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
OPENER_POLICY_HEADERS = {"Cross-Origin-Opener-Policy": "same-origin"}  # in secure contexts only


def is_dashboard_path(path: str) -> bool:
    return path == DASHBOARD_PATH or path.startswith(f"{DASHBOARD_PATH}/")


def is_browser_visit(request: web.Request, path: str) -> bool:
    """True for a browser's navigation to "/", by the Accept header."""
    kinds = (kind.partition(";")[0].strip().lower() for kind in request.headers.get(hdrs.ACCEPT, "").split(","))
    return path == "/" and request.method in (hdrs.METH_GET, hdrs.METH_HEAD) and "text/html" in kinds


def redirect_to_dashboard() -> web.Response:
    """Uncached redirect: the next request for "/" may be another client's."""
    return web.Response(status=303, headers={"Location": DASHBOARD_PATH, "Cache-Control": "no-store", "Vary": "Accept"})


class DashboardPages:
    """Files read once at the start; admin access was checked before."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str]] = {}  # content and its type, by name
        for file in (files(__package__) / "static").iterdir():
            if content_type := CONTENT_TYPES.get(file.name.rpartition(".")[2]):
                self._files[file.name] = file.read_bytes(), content_type

    async def serve_file(self, request: web.Request) -> web.Response:
        """Serve a file below /admin.  Raises ClientError."""
        path = request.path.rstrip("/")
        name = path.removeprefix(DASHBOARD_PATH).removeprefix("/") or DASHBOARD_FILE
        if (file := self._files.get(name)) is None:
            message = f"No such page: {quote_text(path[:200])}; the dashboard is {DASHBOARD_PATH}."
            raise bad_request(message, status=404, code="not_found")
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed(request.method, "GET")
        headers = SECURITY_HEADERS | OPENER_POLICY_HEADERS if _is_secure_context(request) else SECURITY_HEADERS
        return web.Response(body=file[0], content_type=file[1], charset="utf-8", headers=headers)


def _is_secure_context(request: web.Request) -> bool:
    """True if the browser trusts the connection: HTTPS, terminated by a proxy in front, or loopback.

    Elsewhere it warns about the opener policy.  It sends Sec-Fetch headers in secure contexts only.
    """
    return "Sec-Fetch-Dest" in request.headers or is_loopback_name(parse_host(request.headers.get(hdrs.HOST, "")))
