"""Authentication of every request before its route runs.  Event loop thread."""

import logging
import time
from contextlib import suppress

from aiohttp import hdrs, web

from warmline_common.settings.hints import add_home
from warmline_proxy.auth import admin_access
from warmline_proxy.auth.admin_access import ADMIN, MISSING, SECRET, WRONG, AccessRequest, extract_key, is_basic_auth
from warmline_proxy.auth.principals import ANONYMOUS, NO_KEYS_MESSAGE, Client, ClientKeys, is_same_secret, unauthorized
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import UNAUTHORIZED, ClientError, bad_request
from warmline_proxy.http.cors import is_untrusted_origin
from warmline_proxy.http.host_filter import HostFilter, find_machine_names
from warmline_proxy.metrics import ProxyMetrics

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 1.0
CLIENT_ACCESS, ADMIN_ACCESS = "client", "owner"  # label of refusals


class Authenticator:
    """Access checks; each raises ClientError on refusal."""

    def __init__(self, config: ProxyConfig, secret: str, keys: ClientKeys, metrics: ProxyMetrics) -> None:
        names = find_machine_names(with_domains=config.is_open_to_network) | config.allowed_host_names
        self._host_filter = HostFilter(names | {config.host.lower()})
        self._secret, self._keys, self._metrics = secret, keys, metrics
        self._home, self._is_admin_key_required = config.home.root, config.is_admin_key_required
        self._origins = config.allowed_origins
        self._unlogged_count, self._logged_at = 0, float("-inf")

    def check_host(self, request: web.Request) -> None:
        """Check the Host header, before all else."""
        self._host_filter.check(request.headers.getall(hdrs.HOST, []), request.raw_path, request.version)

    def authenticate_client(self, request: web.Request) -> Client:
        """Client of a request, by its key.  Without keys, pages of untrusted origins are refused."""
        try:
            client = self._keys.authenticate(request.headers)
        except ClientError as error:
            self._record_refusal(CLIENT_ACCESS, request, error)
            shown, needs_key = self._classify_key(request), self._is_admin_key_required
            may_explain = admin_access.can_see_refusal_reason(_build_access_request(request), shown, needs_key)
            if self._keys.is_closed_without_keys and may_explain:
                raise unauthorized(add_home(NO_KEYS_MESSAGE, self._home)) from error
            raise
        origin, hosts = request.headers.get(hdrs.ORIGIN), request.headers.getall(hdrs.HOST, [])
        if client == ANONYMOUS and is_untrusted_origin(origin, hosts, self._origins):
            message = "This is not for other web pages, unless the setting cors_origins names their origin."
            raise bad_request(message, status=403, code="foreign_page")
        return client

    def check_admin(self, request: web.Request, *, is_page: bool = False) -> None:
        """Check admin access; `is_page`: browsers ask the user for the admin key."""
        try:
            self._check_admin(request, is_page)
        except ClientError as error:
            self._record_refusal(ADMIN_ACCESS, request, error)
            raise

    def can_see_pages(self, request: web.Request) -> bool:
        """True if the request may see the dashboard; does not count as a refusal."""
        with suppress(ClientError):
            self._check_admin(request, is_page=True)
            return True
        return False

    def _check_admin(self, request: web.Request, is_page: bool) -> None:
        access_request = _build_access_request(request, is_page)
        admin_access.check_admin(access_request, self._classify_key(request), self._is_admin_key_required)

    def check_client_or_admin(self, request: web.Request) -> None:
        """Check access to paths for clients and the owner."""
        if self._classify_key(request) not in (SECRET, ADMIN):
            self.authenticate_client(request)

    def _classify_key(self, request: web.Request) -> str:
        if not (key := extract_key(request.headers)):
            return MISSING
        is_secret, is_admin = is_same_secret(key, self._secret), self._keys.is_admin_key(key)
        if is_secret and not is_basic_auth(request.headers):
            return SECRET
        return ADMIN if is_secret or is_admin else WRONG

    def _record_refusal(self, access: str, request: web.Request, error: ClientError) -> None:
        """Count a 401 and log it, rate-limited and without the key: wrong keys may be guesses."""
        if error.status != UNAUTHORIZED:
            return
        self._metrics.unauthorized.labels(door=access).inc()
        self._unlogged_count += 1
        if (now := time.monotonic()) - self._logged_at >= LOG_INTERVAL_S:
            level = logging.WARNING if extract_key(request.headers) else logging.INFO
            count = f"{self._unlogged_count} requests" if self._unlogged_count > 1 else "a request"
            message = "%s with a wrong key, or none, for the %s's paths, the last one from %s"
            log.log(level, message, count, access, request.remote)
            self._unlogged_count, self._logged_at = 0, now


def _build_access_request(request: web.Request, is_page: bool = False) -> AccessRequest:
    hosts = request.headers.getall(hdrs.HOST, [])
    return AccessRequest(request.method, request.remote or "", hosts, request.headers, is_page, request.version)
