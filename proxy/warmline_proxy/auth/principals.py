"""Clients by the key that a request presents.  Event loop thread.

Keys are those of HOME/keys.json, read again on change, and the settings' key.
"""

import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from warmline_common.settings.hints import format_command
from warmline_proxy.auth import key_store
from warmline_proxy.auth.key_store import (
    ADMIN_KIND,
    CLIENT_KIND,
    KeyEntry,
    KeyNotFoundError,
    KeyStoreError,
    derive_tenant,
)
from warmline_proxy.auth.owners import KeyTenants
from warmline_proxy.config import ProxyConfig, ProxyConfigError
from warmline_proxy.errors import ClientError, encode_error_body

log = logging.getLogger(__name__)

NO_KEY_MESSAGE = (
    "No API key provided: send this server's client key as 'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'."
)
NO_BEARER_MESSAGE = (
    "No API key provided: the header Authorization does not begin with 'Bearer'; send the key as "
    "'Authorization: Bearer KEY' or as 'X-Api-Key: KEY'."
)
WRONG_KEY_MESSAGE = (
    "Incorrect API key provided: it is no client key of this server.  The server's owner makes keys with 'cachectl key "
    "add NAME' and shows one with 'cachectl key show NAME'."
)
NO_KEYS_MESSAGE = "This server has no client key, and no access without one: make one (`cachectl key add NAME`)."


@dataclass(frozen=True)
class Client:
    """Holder of a key; without keys, everybody."""

    name: str = ""  # key name
    tenant: str = ""  # of its reusable KV, see `warmline_common.protocol.tokens.namespace`; "" for shared caches
    key_tenant: str = ""  # the key's own, unlike a shared tenant or a reused name


ANONYMOUS = Client()


def extract_client_key(headers: Mapping[str, str]) -> str:
    """Key in the headers of OpenAI's or Anthropic's clients; "" without one."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def _explain_missing_key(headers: Mapping[str, str]) -> str:
    scheme = headers.get("Authorization", "").partition(" ")[0].lower()
    return NO_KEY_MESSAGE if scheme in ("", "bearer") else NO_BEARER_MESSAGE


def unauthorized(message: str) -> ClientError:
    return ClientError(401, encode_error_body(message, "authentication_error", "invalid_api_key"))


def hash_key(key: str) -> bytes:
    """SHA-256 digest for constant-time comparison.  Bytes that are not UTF-8 arrive as surrogates."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def is_same_secret(presented: str, expected: str) -> bool:
    """Constant-time comparison; an empty `expected` equals nothing."""
    return bool(expected) and hmac.compare_digest(hash_key(presented), hash_key(expected))


def prepare_keys(config: ProxyConfig) -> None:
    """Create the keys that an open proxy needs.  Raises ProxyConfigError if the proxy is open without a client key."""
    try:
        if config.lan:
            key_store.ensure_key(config.home, ADMIN_KIND)
            if not config.client_key:
                key_store.ensure_key(config.home, CLIENT_KIND)
        has_key = bool(config.client_key or key_store.read_client_keys(config.home))
    except KeyStoreError as error:
        raise ProxyConfigError(str(error)) from error
    if config.is_open_to_network and not has_key:
        raise ProxyConfigError(
            f"binding {config.bind_host} opens the proxy to others, and no client key keeps strangers out: use --lan, "
            f"which makes one, or make one first ({format_command('cachectl key add NAME', config.home.root)}, or "
            "WARMLINE_CLIENT_KEY)"
        )


class ClientKeys:
    """Digests of the present keys.  Raises KeyStoreError for an unusable file at the start; later the old keys stay,
    also if the file disappears: an accident or an editor's rewrite must not open the proxy to everybody.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self._home, self._is_shared = config.home, config.share_cache
        self._is_closed = config.is_open_to_network  # also after all keys were removed
        name, tenant = key_store.ENVIRONMENT_NAME, derive_tenant(config.client_key)
        own = KeyEntry(name=name, key=config.client_key, tenant=tenant, created=0.0)
        self._settings_keys = [own] if config.client_key else []
        self._stamp = key_store.read_stamp(self._home)
        self._tenants = {""}
        self._apply_entries(key_store.read_keys(self._home))

    @property
    def is_required(self) -> bool:
        """True if clients must present a key."""
        self._reload_if_changed()
        return bool(self._clients) or self._is_closed

    @property
    def is_closed_without_keys(self) -> bool:
        """True if clients must present a key and none exists."""
        self._reload_if_changed()
        return self._is_closed and not self._clients

    @property
    def known_tenants(self) -> frozenset[str]:
        """Tenants of all keys since the start."""
        self._reload_if_changed()
        return frozenset(self._tenants)

    @property
    def key_tenants(self) -> KeyTenants:
        """Tenants of the present keys."""
        self._reload_if_changed()
        tenants = {client.name: client.key_tenant for _, client in self._clients}
        return KeyTenants(tenants=tenants, is_shared=self._is_shared)

    def find_client(self, name: str) -> Client:
        """Client of a key's name, "" for requests without a key.  Raises KeyNotFoundError where that is no client."""
        self._reload_if_changed()
        if not name and (self._is_shared or not self._clients):
            return ANONYMOUS
        if found := next((client for _, client in self._clients if client.name == name), None):
            return found
        names = [client.name for _, client in self._clients]
        if not name:
            raise KeyNotFoundError(f"each key has a cache of its own: name one of {key_store.format_names(names)}")
        known = key_store.suggest_key(name, names) if names else "there is none"
        raise KeyNotFoundError(f"there is no client key {name!r}; {known}")

    def authenticate(self, headers: Mapping[str, str]) -> Client:
        """Client of the presented key.  Raises ClientError 401 for a wrong or missing key, if keys are required."""
        if not self.is_required:
            return ANONYMOUS
        presented = extract_client_key(headers)
        presented_digest = hash_key(presented)
        # All keys are compared, so that the time reveals nothing.
        found = [client for digest, client in self._clients if hmac.compare_digest(digest, presented_digest)]
        if not found:
            raise unauthorized(WRONG_KEY_MESSAGE if presented else _explain_missing_key(headers))
        return found[0]

    def is_admin_key(self, presented: str) -> bool:
        self._reload_if_changed()
        presented_digest = hash_key(presented)
        return sum(hmac.compare_digest(each, presented_digest) for each in self._admin_digests) > 0  # constant time

    def _reload_if_changed(self) -> None:
        """Read the keys again if the file's stamp changed."""
        try:
            if (stamp := key_store.read_stamp(self._home)) == self._stamp:
                return
            self._stamp = stamp
            if stamp == key_store.NO_FILE:
                raise KeyStoreError(f"{self._home.keys} is gone: restore it, make new keys, or start the proxy anew")
            self._apply_entries(key_store.read_keys(self._home))
            key_store.restrict_permissions(self._home)
        except (KeyStoreError, OSError) as error:
            log.error("the client keys stay as they were: %s", error)
        else:
            log.info("client keys: %s", ", ".join(client.name for _, client in self._clients) or "none")

    def _apply_entries(self, entries: list[KeyEntry]) -> None:
        keys = [*self._settings_keys, *(entry for entry in entries if entry.kind == CLIENT_KIND)]
        self._clients = [
            (hash_key(key.key), Client(key.name, "" if self._is_shared else key.tenant, key.tenant)) for key in keys
        ]
        self._admin_digests = [hash_key(entry.key) for entry in entries if entry.kind == ADMIN_KIND]
        self._tenants.update(client.tenant for _, client in self._clients)
