"""Access to a home's admin paths (pure).

The owner presents the home's secret (as cachectl does) or the admin key, or connects from this machine.  The peer
address counts only without a proxy in between: behind a reverse proxy on this machine every client looks local.

Browsers send credentials on their own, so other sites' pages must not be able to use them: a changing request without
the secret needs a header that such pages can't send, and cross-site requests are refused.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warmline_common.process.loopback import is_local
from warmline_proxy.auth.principals import extract_client_key
from warmline_proxy.errors import bad_request
from warmline_proxy.http.cors import is_same_origin

ADMIN_HEADER = "X-Warmline-Admin"
BASIC_CHALLENGE = 'Basic realm="Warmline", charset="UTF-8"'
SECRET, ADMIN, WRONG, MISSING = "secret", "admin", "wrong", "nothing"  # presented credential

# Headers added by proxies.
FORWARDED_HEADERS = frozenset(
    {"forwarded", "via", "x-forwarded", "x-real-ip", "x-client-ip", "true-client-ip", "x-cluster-client-ip"}
)
FORWARDED_HEADER_PREFIXES = (
    *("x-forwarded-", "x-original-", "cf-", "tailscale-", "ngrok-", "x-envoy-", "x-amzn-", "fly-", "fastly-"),
    *("x-azure-", "x-appengine-", "x-vercel-", "x-arr-", "proxy-"),
)
# HTTP version of an unconfigured nginx, which adds no forwarding header.
PROXY_HTTP_VERSION = (1, 0)
SAFE_METHODS = ("GET", "HEAD")


@dataclass(frozen=True)
class AccessRequest:
    """Properties of a request that decide on its access."""

    method: str
    peer_address: str
    hosts: Sequence[str]  # Host headers
    headers: Mapping[str, str]  # case-insensitive names
    is_page: bool = False  # a dashboard page: browsers may ask for the key, other sites may link to it
    version: tuple[int, int] = (1, 1)  # HTTP version


def is_basic_auth(headers: Mapping[str, str]) -> bool:
    """True for a key in a Basic header, which browsers repeat on their own for any site's page."""
    return headers.get("Authorization", "").partition(" ")[0].lower() == "basic"


def extract_key(headers: Mapping[str, str]) -> str:
    """Key in the clients' headers, or the password of Basic authentication."""
    if not is_basic_auth(headers):
        return extract_client_key(headers)
    encoded = headers.get("Authorization", "").partition(" ")[2]
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True).decode(errors="surrogateescape")
    except (binascii.Error, ValueError):
        return encoded
    return decoded.partition(":")[2]


def check_admin(access_request: AccessRequest, credential: str, needs_key: bool) -> None:
    """Check `credential` (SECRET: not by Basic authentication); `needs_key`: even locally.  Raises ClientError."""
    if credential == SECRET:
        return
    if credential == WRONG or (credential == MISSING and (needs_key or not _is_from_this_machine(access_request))):
        otherwise = "" if needs_key else ", or send the request on the machine itself, to 127.0.0.1 or localhost"
        advice = f"show the admin key (cachectl key show admin){otherwise}"
        message = f"This path is for the owner of the home directory: {advice}."
        error = bad_request(message, status=401, code="invalid_api_key")
        if access_request.is_page:
            error.challenge = BASIC_CHALLENGE
        raise error
    if is_cross_site(access_request):
        raise bad_request("This path is not for other web pages.", status=403, code="foreign_page")
    if access_request.method not in SAFE_METHODS and access_request.headers.get(ADMIN_HEADER) != "1":
        message = f"What changes something here needs the header '{ADMIN_HEADER}: 1', or the home's secret."
        raise bad_request(message, status=403, code="admin_header_missing")


def can_see_refusal_reason(access_request: AccessRequest, credential: str, needs_key: bool) -> bool:
    """True if a refused client may learn that no client keys exist: the owner, and local users with any key."""
    is_owner = credential == ADMIN or (not needs_key and _is_from_this_machine(access_request))
    return credential == SECRET or (is_owner and not is_cross_site(access_request))


def _is_from_this_machine(access_request: AccessRequest) -> bool:
    """True for a local peer and a loopback host name, without a forwarding proxy."""
    if not is_local(access_request.peer_address, access_request.hosts):
        return False
    names = [name.lower() for name in access_request.headers]
    is_forwarded = any(name in FORWARDED_HEADERS or name.startswith(FORWARDED_HEADER_PREFIXES) for name in names)
    return access_request.version > PROXY_HTTP_VERSION and not is_forwarded


def is_cross_site(access_request: AccessRequest) -> bool:
    """True if the browser marks the request as another site's."""
    headers, site = access_request.headers, access_request.headers.get("Sec-Fetch-Site", "none")
    if (origin := headers.get("Origin")) is not None and not is_same_origin(origin, access_request.hosts):
        return True
    if access_request.method not in SAFE_METHODS:
        return site not in ("same-origin", "none")
    is_navigation = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
    return site == "cross-site" and not (access_request.is_page and is_navigation)
