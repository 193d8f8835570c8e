"""Which web pages may read what is served under /v1 (CORS): none, unless their origins are named.  Pure.

A browser sends a page's requests for it, and shows it the answer only where that says so.  Nothing here keeps a request
out: Host and key do.
"""

import re
from collections.abc import Collection, Mapping

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
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


def origins(setting: str) -> frozenset[str]:
    """Those in a list separated by commas.  Raises ValueError for what no browser sends as an origin."""
    names = frozenset(filter(None, (name.strip().lower() for name in setting.split(","))))
    for name in names - {ANY}:
        if not _ORIGIN.fullmatch(name):
            raise ValueError(f"{name}: expected origins such as https://app.example or http://localhost:3000, or {ANY}")
    return names


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
