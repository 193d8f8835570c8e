"""Who comes in at all, and as whom: the first thing that is asked of each request.  Event loop thread."""

import logging
import time

from aiohttp import hdrs, web

from warmline_proxy.auth.admin_access import (
    ADMIN,
    NOTHING,
    SECRET,
    WRONG,
    Asked,
    check_owner,
    is_by_password,
    is_told_how_it_stands,
    shown_key,
)
from warmline_proxy.auth.principals import EVERYBODY, NO_KEYS, Client, ClientKeys, not_let_in, same_secret
from warmline_proxy.config import Config
from warmline_proxy.errors import UNAUTHORIZED, ClientError, bad_request
from warmline_proxy.http.cors import is_strange
from warmline_proxy.http.host_filter import Hosts, machine_names
from warmline_proxy.metrics import Metrics

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 1.0
CLIENTS, OWNERS = "client", "owner"  # what was not let in


class Doors:
    """Each check raises ClientError where it does not let the request in."""

    def __init__(self, config: Config, secret: str, keys: ClientKeys, metrics: Metrics) -> None:
        names = machine_names(with_domains=config.open_to_others) | config.allowed_names
        self._hosts = Hosts(names | {config.host.lower()})
        self._secret, self._keys, self._metrics = secret, keys, metrics
        self._owner_needs_key = config.owner_needs_key
        self._origins = config.allowed_origins
        self._unlogged, self._logged_at = 0, float("-inf")

    def check_host(self, request: web.Request) -> None:
        """Before anything else."""
        self._hosts.check(request.headers.getall(hdrs.HOST, []), request.raw_path, _version(request))

    def client(self, request: web.Request) -> Client:
        """Whose request this is.  No page shows a key that it was not given; without keys no stranger's may ask."""
        try:
            client = self._keys.client(request.headers)
        except ClientError as error:
            self._note_refusal(CLIENTS, request, error)
            if self._keys.open_nothing and self._is_told_how_it_stands(request):
                raise not_let_in(NO_KEYS) from error
            raise
        origin, hosts = request.headers.get(hdrs.ORIGIN), request.headers.getall(hdrs.HOST, [])
        if client == EVERYBODY and is_strange(origin, hosts, self._origins):
            message = "This is not for other web pages, unless the setting cors_origins names their origin."
            raise bad_request(message, status=403, code="foreign_page")
        return client

    def check_owner(self, request: web.Request, *, page: bool = False) -> None:
        """`page`: it is for people, whose browser is to ask them for the admin key."""
        try:
            self._check_owner(request, page)
        except ClientError as error:
            self._note_refusal(OWNERS, request, error)
            raise

    def may_see_pages(self, request: web.Request) -> bool:
        """Of whoever asked for something else, and is refused nothing by this."""
        try:
            self._check_owner(request, page=True)
        except ClientError:
            return False
        return True

    def _check_owner(self, request: web.Request, page: bool) -> None:
        check_owner(_asked(request, page), self._shown(request), self._owner_needs_key)

    def check_client_or_owner(self, request: web.Request) -> None:
        """For what both may see."""
        if self._shown(request) not in (SECRET, ADMIN):
            self.client(request)

    def _is_told_how_it_stands(self, request: web.Request) -> bool:
        return is_told_how_it_stands(_asked(request), self._shown(request), self._owner_needs_key)

    def _shown(self, request: web.Request) -> str:
        if not (key := shown_key(request.headers)):
            return NOTHING
        is_secret, is_admin = same_secret(key, self._secret), self._keys.is_admin(key)
        if is_secret and not is_by_password(request.headers):
            return SECRET
        return ADMIN if is_secret or is_admin else WRONG

    def _note_refusal(self, door: str, request: web.Request, error: ClientError) -> None:
        """Who shows a wrong key may be guessing.  No key is logged, and a flood of them fills no log.

        Whoever was refused for something else is told of where all refusals are.
        """
        if error.status != UNAUTHORIZED:
            return
        self._metrics.unauthorized.labels(door=door).inc()
        self._unlogged += 1
        if (now := time.monotonic()) - self._logged_at >= LOG_INTERVAL_S:
            level = logging.WARNING if shown_key(request.headers) else logging.INFO
            count = f"{self._unlogged} requests" if self._unlogged > 1 else "a request"
            message = "%s with a wrong key, or none, for the %s's paths, the last one from %s"
            log.log(level, message, count, door, request.remote)
            self._unlogged, self._logged_at = 0, now


def _asked(request: web.Request, page: bool = False) -> Asked:
    hosts = request.headers.getall(hdrs.HOST, [])
    return Asked(request.method, request.remote or "", hosts, request.headers, page, _version(request))


def _version(request: web.Request) -> tuple[int, int]:
    return request.version.major, request.version.minor
