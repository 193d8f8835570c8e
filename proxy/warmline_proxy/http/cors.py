"""CORS for paths under /v1: web pages of the named origins only.  Pure.

Browsers send a page's requests and hide the responses without these headers.  Requests without a preflight arrive all
the same: where no key is required, `is_untrusted_origin` identifies them.
"""

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from warmline_common.process.loopback import is_loopback_name, parse_host

ANY_ORIGIN = "*"
CORS_PATH_PREFIX = "/v1/"
ALLOWED_METHODS = "GET, HEAD, POST, DELETE"
# Headers of clients in a page.  Prefixes can't be listed, so the requested names are echoed.
ALLOWED_HEADERS = frozenset(
    {"accept", "authorization", "content-type", "idempotency-key", "session-id", "user-agent", "x-api-key"}
    | {"x-claude-code-session-id", "x-litellm-session-id", "x-session-id"}
)
ALLOWED_HEADER_PREFIXES = ("anthropic-", "openai-", "x-stainless-", "x-warmline-")
EXPOSED_HEADERS = "Request-Id, Retry-After, X-Request-Id, X-Warmline-Cache, X-Warmline-Request, X-Warmline-Stabilized"
MAX_AGE_S = 3600  # a browser's cache of the preflight
WEB_SCHEMES = ("http", "https")


def is_same_origin(origin: str, hosts: Sequence[str]) -> bool:
    """True for the proxy's own origin; `hosts`: the Host headers of the request."""
    url = _split_origin(origin)
    return url.scheme in WEB_SCHEMES and [url.netloc.lower()] == [host.lower() for host in hosts]


def is_untrusted_origin(origin: str | None, hosts: Sequence[str], allowed_origins: Collection[str]) -> bool:
    """True for a page's request whose origin is neither named, nor the proxy's, nor on this machine.

    Sandboxed pages send "null".  Apps and extensions, which users install, have other schemes, such as "file://" for
    apps made of files; for a page in a file, browsers send "null".
    """
    if not origin or _is_named_origin(origin, allowed_origins) or is_same_origin(origin, hosts):
        return False
    url = _split_origin(origin)
    return not url.scheme or (url.scheme in WEB_SCHEMES and not is_loopback_name(parse_host(url.netloc)))


def _split_origin(origin: str) -> SplitResult:
    """Parts of the origin, empty if it is no URL."""
    try:
        return urlsplit(origin)
    except ValueError:
        return urlsplit("")


def build_cors_headers(
    allowed_origins: Collection[str], method: str, path: str, request_headers: Mapping[str, str]
) -> dict[str, str]:
    """CORS headers of a response, refusals included; empty without a page, or if it may not read the response."""
    if not allowed_origins or not f"{path}/".startswith(CORS_PATH_PREFIX):
        return {}
    # For caches between several pages and the proxy.
    vary = {} if ANY_ORIGIN in allowed_origins else {"Vary": "Origin"}
    origin = request_headers.get("Origin", "")
    if not origin or not _is_named_origin(origin, allowed_origins):
        return vary
    headers = {"Access-Control-Allow-Origin": ANY_ORIGIN if ANY_ORIGIN in allowed_origins else origin, **vary}
    if method != "OPTIONS":
        return headers | {"Access-Control-Expose-Headers": EXPOSED_HEADERS}
    names = (name.strip() for name in request_headers.get("Access-Control-Request-Headers", "").split(","))
    allowed = (n for n in names if n.lower() in ALLOWED_HEADERS or n.lower().startswith(ALLOWED_HEADER_PREFIXES))
    headers |= {
        "Access-Control-Allow-Methods": ALLOWED_METHODS,
        "Access-Control-Allow-Headers": ", ".join(allowed),
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    if request_headers.get("Access-Control-Request-Private-Network") == "true":  # page of a public address
        headers["Access-Control-Allow-Private-Network"] = "true"
    return headers


def _is_named_origin(origin: str, allowed_origins: Collection[str]) -> bool:
    return ANY_ORIGIN in allowed_origins or origin.lower() in allowed_origins
