"""Who a request is from, by the key that it shows.  Event loop thread.

The keys are those of HOME/keys.json, read again whenever that has changed, and the one that the settings name.
"""

import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.auth.key_store import ADMIN, CLIENT, ENVIRONMENT_NAME, KeyEntry, KeysUnusable, tenant_of
from warmline_proxy.auth.owners import Holders
from warmline_proxy.config import Config, ConfigError
from warmline_proxy.errors import ClientError, error_body

log = logging.getLogger(__name__)

NO_KEY = "No API key provided: send this server's client key as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'."
WRONG_KEY = "Incorrect API key provided: it is no client key of this server."
NO_KEYS = "This server has no client key, and lets in nobody without one: make one (cachectl key add NAME)."


@dataclass(frozen=True)
class Client:
    """A key's holder; where no key is asked for, everybody."""

    name: str = ""  # of the key
    tenant: str = ""  # whose KV its requests may meet, see `warmline_common.protocol.tokens.namespace`
    holder: str = ""  # who it is: names are given anew, and tenants shared


EVERYBODY = Client()


def bearer(headers: Mapping[str, str]) -> str:
    """The key that a client shows, as OpenAI's or as Anthropic's clients send it; "" where there is none."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def not_let_in(message: str) -> ClientError:
    return ClientError(401, error_body(message, "authentication_error", "invalid_api_key"))


def digest(key: str) -> bytes:
    """For comparisons that take the same time whatever is compared.  Bytes that are no UTF-8 arrive as surrogates."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def same_secret(shown: str, expected: str) -> bool:
    """In constant time; an empty `expected` equals nothing."""
    return bool(expected) and hmac.compare_digest(digest(shown), digest(expected))


def prepare_keys(config: Config) -> None:
    """Before a proxy listens: where others can reach it there is a client key.  Raises ConfigError."""
    try:
        if config.lan:
            keys_file.ensure(config.home, ADMIN)
            if not config.client_key:
                keys_file.ensure(config.home, CLIENT)
        has_key = bool(config.client_key or keys_file.client_keys(config.home))
    except KeysUnusable as error:
        raise ConfigError(str(error)) from error
    if config.open_to_others and not has_key:
        raise ConfigError(
            f"binding {config.bind_host} opens the proxy to others, and no client key keeps strangers out: use --lan, "
            "which makes one, or make one first (cachectl key add NAME, or WARMLINE_CLIENT_KEY)"
        )


class ClientKeys:
    """Keeps digests, no keys.  Raises KeysUnusable where the file is; one that becomes so later changes nothing.

    Nor does one that is gone: that may be an accident, or an editor's way to write, and would open the door to all.
    """

    def __init__(self, config: Config) -> None:
        self._home, self._share = config.home, config.share_cache
        self._closed = config.open_to_others  # also where all keys were removed
        own = KeyEntry(name=ENVIRONMENT_NAME, key=config.client_key, tenant=tenant_of(config.client_key), created=0.0)
        self._settings = [own] if config.client_key else []
        self._mark = keys_file.mark(self._home)
        self._tenants = {""}
        self._take(keys_file.read(self._home))

    @property
    def required(self) -> bool:
        """Whether a client has to show a key."""
        self._look()
        return bool(self._clients) or self._closed

    @property
    def open_nothing(self) -> bool:
        """Whether a client has to show a key, and there is none."""
        self._look()
        return self._closed and not self._clients

    @property
    def tenants(self) -> frozenset[str]:
        """All that there are or were, since the start."""
        self._look()
        return frozenset(self._tenants)

    @property
    def holders(self) -> Holders:
        """Those that there are now."""
        self._look()
        tenants = {client.name: client.holder for _, client in self._clients}
        return Holders(tenants=tenants, shares=self._share)

    def client(self, headers: Mapping[str, str]) -> Client:
        """Raises ClientError 401 where a key is asked for and another, or none, was shown."""
        if not self.required:
            return EVERYBODY
        shown = bearer(headers)
        if (client := self._holder(shown)) is None:
            raise not_let_in(WRONG_KEY if shown else NO_KEY)
        return client

    def is_admin(self, shown: str) -> bool:
        self._look()
        shown_digest = digest(shown)
        return sum(hmac.compare_digest(each, shown_digest) for each in self._admins) > 0  # all are compared

    def _holder(self, shown: str) -> Client | None:
        """All keys are compared, so that the time tells of none."""
        shown_digest = digest(shown)
        found = [client for each, client in self._clients if hmac.compare_digest(each, shown_digest)]
        return found[0] if found else None

    def _look(self) -> None:
        """Take over what has changed; a stat tells."""
        try:
            if (mark := keys_file.mark(self._home)) == self._mark:
                return
            self._mark = mark
            if mark == keys_file.NO_FILE:
                raise KeysUnusable(f"{self._home.keys} is gone: restore it, make new keys, or start the proxy anew")
            self._take(keys_file.read(self._home))
            keys_file.keep_private(self._home)
        except (KeysUnusable, OSError) as error:
            log.error("the client keys stay as they were: %s", error)
        else:
            log.info("client keys: %s", ", ".join(client.name for _, client in self._clients) or "none")

    def _take(self, entries: list[KeyEntry]) -> None:
        clients = [*self._settings, *(each for each in entries if each.kind == CLIENT)]
        self._clients = [(digest(each.key), Client(each.name, self._tenant(each), each.tenant)) for each in clients]
        self._admins = [digest(each.key) for each in entries if each.kind == ADMIN]
        self._tenants.update(client.tenant for _, client in self._clients)

    def _tenant(self, entry: KeyEntry) -> str:
        """Those who share are everybody, also to what was stored before there were keys."""
        return "" if self._share else entry.tenant
