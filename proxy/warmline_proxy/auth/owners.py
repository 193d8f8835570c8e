"""Owner labels of stored conversations, for the proxy and cachectl.

    laptop           the name of a present client key
    no key           requests without a key; empty if there never was a key
    shared           the same, while `share_cache` has all keys use it
    a removed key    a key that was removed, though a new one may have its name

A root hashes one model and one tenant, so each known fingerprint is tried with each known tenant.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from warmline_common.protocol.tokens import namespace
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import SegmentFileError, read_header
from warmline_proxy.auth import key_store
from warmline_proxy.auth.key_store import KeyNotFoundError
from warmline_proxy.store.rows import RequestRecord, SegmentRow

NO_KEY_LABEL, SHARED_LABEL, REMOVED_LABEL = "no key", "shared", "a removed key"
SHARED_BY_ALL_LABEL = "shared by all keys"  # if a key has the name `shared`
FILES_READ_MAX = 3  # per root, to find its model
_REMOVED_LABEL_PATTERN = re.compile(rf"{REMOVED_LABEL} \(?([0-9a-f]{{4,32}})\)?")  # root prefix


class KeyTenants(msgspec.Struct, kw_only=True, frozen=True):
    """Tenants of the present client keys."""

    tenants: dict[str, str]  # by key name
    is_shared: bool = False  # all keys use the tenant of requests without a key

    def find_tenant(self, name: str) -> str:
        """Tenant of a key; "" names the only key, or no key if there is none.  Raises KeyNotFoundError if ambiguous."""
        if name and name not in self.tenants:
            raise KeyNotFoundError(_format_unknown_key(name, self.tenants))
        if self.is_shared or not self.tenants:
            return ""
        if not name and len(self.tenants) > 1:
            names = key_store.format_names(self.tenants)
            raise KeyNotFoundError(f"each key has a cache of its own: add --key with the owner's, one of {names}")
        return self.tenants[name] if name else next(iter(self.tenants.values()))

    def build_labels(self) -> dict[str, str]:
        """Labels by tenant."""
        label_shared_by_all = SHARED_BY_ALL_LABEL if SHARED_LABEL in self.tenants else SHARED_LABEL
        shared_label = label_shared_by_all if self.is_shared and self.tenants else NO_KEY_LABEL
        return {"": shared_label, **{tenant: name for name, tenant in self.tenants.items()}}


class OwnerLabels(msgspec.Struct, kw_only=True, frozen=True):
    """Reply of GET /warmline/whose."""

    keys: list[str] = []  # names of the present client keys
    words: dict[str, str] = {}  # label by root in hex, stored or not; "" without keys

    def find_label(self, root: bytes) -> str:
        """Label of a root; "" if unknown because none of its files can be read."""
        return self.words.get(root.hex(), "")

    def find_roots(self, label: str) -> list[str]:
        """Roots in hex by label; "a removed key (PREFIX)" selects by the root's prefix.  Raises KeyNotFoundError."""
        match = _REMOVED_LABEL_PATTERN.fullmatch(label)
        base_label, root_prefix = (REMOVED_LABEL, match[1]) if match else (label, "")
        labelled = [root for root, each in self.words.items() if each == base_label != ""]
        found = [root for root in labelled if root.startswith(root_prefix)]
        if root_prefix and len(found) > 1:
            raise KeyNotFoundError(f"{label} may be any of {', '.join(found)}")
        if not found and base_label not in self.keys:
            raise KeyNotFoundError(_format_unknown_key(label, [*self.keys, *self.words.values()]))
        return found

    def format_key_name(self, record: RequestRecord) -> str:
        """Name of a request's key, marked if it was removed."""
        is_removed = record.key and self.find_label(record.root) == REMOVED_LABEL
        return f"{record.key} (removed)" if is_removed else record.key


def _format_unknown_key(name: str, known_names: Iterable[str]) -> str:
    names = list(filter(None, dict.fromkeys(known_names)))
    if not names:
        return f"there is no client key {name!r}; there is none"
    if _REMOVED_LABEL_PATTERN.fullmatch(name):  # the nearest one would be all removed keys
        return f"there is no client key {name!r}; there are {key_store.format_names(names)}"
    return f"there is no client key {name!r}; {key_store.suggest_key(name, names)}"


def describe_owner(label: str) -> str:
    """Completion of "Something is stored for ..."."""
    phrases = {
        "": "another key, or for none",
        NO_KEY_LABEL: "requests without a key",
        SHARED_LABEL: "all keys, which share it",
        SHARED_BY_ALL_LABEL: "all keys, which share it",
        REMOVED_LABEL: "a key that was removed",
    }
    return phrases.get(label, f"the key {label}")


def load_key_tenants(home: Home, *, client_key: str, share_cache: bool) -> KeyTenants:
    """Tenants of the home's keys.  Without `client_key`, the last settings key counts.  Raises KeyStoreError."""
    tenant = key_store.derive_tenant(client_key) or key_store.read_last_tenant(home)
    tenants = {key_store.ENVIRONMENT_NAME: tenant} if tenant else {}
    tenants |= {entry.name: entry.tenant for entry in key_store.read_client_keys(home)}
    return KeyTenants(tenants=tenants, is_shared=share_cache)


def build_owner_labels(
    key_tenants: KeyTenants, fingerprint_by_root: Mapping[bytes, str], served_fingerprints: Iterable[str] = ()
) -> OwnerLabels:
    """Labels by root, from the fingerprints that `find_fingerprints` finds and those of the served models.  Pure."""
    fingerprints = dict.fromkeys(filter(None, (*served_fingerprints, *fingerprint_by_root.values())))
    names = key_tenants.build_labels()
    labels = {namespace(each, tenant).hex(): name for each in fingerprints for tenant, name in names.items()}
    for root, fingerprint in fingerprint_by_root.items():
        if fingerprint:
            labels.setdefault(root.hex(), REMOVED_LABEL)
    if not key_tenants.tenants and REMOVED_LABEL not in labels.values():
        labels = dict.fromkeys(labels, "")
    return OwnerLabels(keys=list(key_tenants.tenants), words=labels)


def find_fingerprints(
    home: Home, rows: Iterable[SegmentRow], known_fingerprints: Mapping[bytes, str] | None = None
) -> dict[bytes, str]:
    """Model fingerprint by root, "" if no file is readable.

    Reads one header for each root without a known fingerprint, up to FILES_READ_MAX if they are damaged.
    """
    known_fingerprints = known_fingerprints or {}
    by_root: defaultdict[bytes, list[SegmentRow]] = defaultdict(list)
    for row in rows:
        if len(by_root[row.root]) < FILES_READ_MAX:
            by_root[row.root].append(row)
    return {root: known_fingerprints.get(root) or read_fingerprint(home, own) for root, own in by_root.items()}


def read_fingerprint(home: Home, rows: Iterable[SegmentRow]) -> str:
    """Model fingerprint in the first readable file of these rows, which have one root; "" without one."""
    for row in itertools.islice(rows, FILES_READ_MAX):
        try:
            meta = read_header(home.segment_file(row.id)).meta
        except (SegmentFileError, OSError):
            continue
        if meta.root == row.root.hex():
            return meta.fingerprint
    return ""
