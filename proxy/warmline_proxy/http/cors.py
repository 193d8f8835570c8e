"""Which web pages may use what is served under /v1 (CORS): none, unless their origins are named.  Pure.

A browser sends a page's requests for it, and shows it the answer only where that says so.  What it does not ask about
first it sends all the same, a prompt too: where no key is asked for, `is_strange` tells such requests.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from warmline_common.process.loopback import host_name, is_loopback_name

ANY = "*"
SCOPE = "/v1/"
METHODS = "GET, HEAD, POST, DELETE"
# What clients in a page send and a browser asks about first.  Some can't be listed, so what is asked for is echoed.
HEADERS = frozenset(
    {"accept", "authorization", "content-type", "idempotency-key", "session-id", "user-agent", "x-api-key"}
    | {"x-claude-code-session-id", "x-litellm-session-id", "x-session-id"}
)
HEADER_PREFIXES = ("anthropic-", "openai-", "x-stainless-", "x-warmline-")
EXPOSED = "Request-Id, Retry-After, X-Request-Id, X-Warmline-Cache, X-Warmline-Request, X-Warmline-Stabilized"
MAX_AGE_S = 3600  # for which a browser need not ask again
WEB = ("http", "https")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


def origins(setting: str) -> frozenset[str]:
    """Those in a list separated by commas.  Raises ValueError for what no browser sends as an origin."""
    names = frozenset(filter(None, (name.strip().lower() for name in setting.split(","))))
    for name in names - {ANY}:
        if not _ORIGIN.fullmatch(name):
            raise ValueError(f"{name}: expected origins such as https://app.example or http://localhost:3000, or {ANY}")
    return names


def is_own(origin: str, hosts: Sequence[str]) -> bool:
    """Whether it is that of a page of ours; `hosts`: the Host headers of the request."""
    parts = _parts(origin)
    return parts.scheme in WEB and [parts.netloc.lower()] == [host.lower() for host in hosts]


def is_strange(origin: str | None, hosts: Sequence[str], allowed: Collection[str]) -> bool:
    """Whether a page is behind a request that is neither named, nor ours, nor served on this machine.

    A sandboxed page says "null", whosever it is.  Apps and extensions have other schemes: somebody installed them; so
    have apps that are made of files ("file://"), where a browser says "null" of a page in a file.
    """
    if not origin or ANY in allowed or origin.lower() in allowed or is_own(origin, hosts):
        return False
    parts = _parts(origin)
    return not parts.scheme or (parts.scheme in WEB and not is_loopback_name(host_name(parts.netloc)))


def _parts(origin: str) -> SplitResult:
    """Empty ones where it is no URL."""
    try:
        return urlsplit(origin)
    except ValueError:
        return urlsplit("")


def cors_headers(allowed: Collection[str], method: str, path: str, asked: Mapping[str, str]) -> dict[str, str]:
    """What an answer, a refusal too, says to the browser of a page; `asked`: the request's headers.

    Nothing where no page is involved, or one that is not to read it.
    """
    if not allowed or not f"{path}/".startswith(SCOPE):
        return {}
    vary = {} if ANY in allowed else {"Vary": "Origin"}  # or a cache would give one page's answer to another
    origin = asked.get("Origin", "")
    if not origin or not (ANY in allowed or origin.lower() in allowed):
        return vary
    more = _preflight(asked) if method == "OPTIONS" else {"Access-Control-Expose-Headers": EXPOSED}
    return {"Access-Control-Allow-Origin": ANY if ANY in allowed else origin, **vary, **more}


def _preflight(asked: Mapping[str, str]) -> dict[str, str]:
    wanted = [name.strip() for name in asked.get("Access-Control-Request-Headers", "").split(",")]
    answer = {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": ", ".join(name for name in wanted if _may_be_sent(name.lower())),
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    if asked.get("Access-Control-Request-Private-Network") == "true":  # a public page, and we are at a private address
        answer["Access-Control-Allow-Private-Network"] = "true"
    return answer


def _may_be_sent(header: str) -> bool:
    return header in HEADERS or header.startswith(HEADER_PREFIXES)
