"""Whose what is stored is, in a word.  The proxy and cachectl both say it in these.

    laptop           the name of a client key that there is now
    no key           what requests without a key have stored; nothing is said where there never was a key
    shared           the same, while `share_cache` has all keys use it
    a removed key    what a key has stored that is no more, though another may be called as it was

All that is under one root is of one model and one tenant, and only a hash of both: so each model that a file names is
tried with each tenant that is known.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from warmline_common.protocol.tokens import namespace
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import SegmentFileError, read_header
from warmline_proxy.auth.key_store import ENVIRONMENT_NAME, NoSuchKey, client_keys, last_tenant, tenant_of
from warmline_proxy.store.rows import RequestRecord, SegmentRow

NO_KEY, SHARED, REMOVED = "no key", "shared", "a removed key"
SHARED_BY_ALL = "shared by all keys"  # where a key is called `shared`
FILES_ASKED_MAX = 3  # of a root, for its model, until one can be read
_REMOVED_ONE = re.compile(rf"{REMOVED} \(?([0-9a-f]{{4,32}})\)?")  # with the beginning of its root


class Holders(msgspec.Struct, kw_only=True, frozen=True):
    """The client keys that there are now."""

    tenants: dict[str, str]  # by the key's name
    shares: bool = False  # all use what requests without a key do

    def tenant(self, name: str) -> str:
        """Of the key called `name`; "" names the only one, or where there is none, everybody.

        Raises NoSuchKey, also where several could be meant.
        """
        if name and name not in self.tenants:
            raise NoSuchKey(_no_key_called(name, self.tenants))
        if self.shares or not self.tenants:
            return ""
        if not name and len(self.tenants) > 1:
            names = ", ".join(self.tenants)
            raise NoSuchKey(f"whose is it to be?  Each key has a cache of its own: add --key with one of {names}")
        return self.tenants[name] if name else next(iter(self.tenants.values()))

    def words(self) -> dict[str, str]:
        """By tenant."""
        shared = SHARED_BY_ALL if SHARED in self.tenants else SHARED
        everybody = shared if self.shares and self.tenants else NO_KEY
        return {"": everybody, **{tenant: name for name, tenant in self.tenants.items()}}


class Whose(msgspec.Struct, kw_only=True, frozen=True):
    """GET /warmline/whose of the proxy."""

    keys: list[str] = []  # the names of the client keys that there are
    words: dict[str, str] = {}  # by root in hex, whether or not anything is stored there; "" where there are no keys

    def word(self, root: bytes) -> str:
        """ "" also where it can't be told: none of its files can be read."""
        return self.words.get(root.hex(), "")

    def roots(self, asked: str) -> list[str]:
        """In hex, of what is called so: by a word, of a removed key also by that and the beginning of its root.

        Raises NoSuchKey.
        """
        one = _REMOVED_ONE.fullmatch(asked)
        word, begins = (REMOVED, one[1]) if one else (asked, "")
        found = [root for root, each in self.words.items() if each == word != "" and root.startswith(begins)]
        if begins and len(found) > 1:
            raise NoSuchKey(f"{asked} may be any of {', '.join(found)}")
        if not found and word not in self.keys:
            raise NoSuchKey(_no_key_called(asked, [*self.keys, *self.words.values()]))
        return found

    def shown(self, record: RequestRecord) -> str:
        """The name of the key that a request showed, and that it is no more, where its root tells."""
        is_gone = record.key and self.word(record.root) == REMOVED
        return f"{record.key} (removed)" if is_gone else record.key


def _no_key_called(name: str, known: Iterable[str]) -> str:
    names = ", ".join(filter(None, dict.fromkeys(known)))
    return f"there is no client key {name!r}; " + (f"there are {names}" if names else "there is none")


def in_a_sentence(word: str) -> str:
    """Something is stored for ..."""
    told = {
        "": "another key, or for none",
        NO_KEY: "requests without a key",
        SHARED: "all keys, which share it",
        SHARED_BY_ALL: "all keys, which share it",
        REMOVED: "a key that was removed",
    }
    return told.get(word, f"the key {word}")


def holders(home: Home, *, client_key: str, share_cache: bool) -> Holders:
    """`client_key` is the settings' own, as far as they are known here: without one, a proxy may have been given one.

    Raises KeysUnusable.
    """
    tenant = tenant_of(client_key) or last_tenant(home)
    own = {ENVIRONMENT_NAME: tenant} if tenant else {}
    return Holders(tenants=own | {each.name: each.tenant for each in client_keys(home)}, shares=share_cache)


def whose(known: Holders, models: Mapping[bytes, str], served: str = "") -> Whose:
    """`models`: by root, as `models_of` finds them; `served`: the fingerprint of the model that is served.  Pure."""
    fingerprints = dict.fromkeys(filter(None, (served, *models.values())))
    words = {namespace(each, tenant).hex(): word for each in fingerprints for tenant, word in known.words().items()}
    for root, fingerprint in models.items():
        if fingerprint:
            words.setdefault(root.hex(), REMOVED)
    if not known.tenants and REMOVED not in words.values():
        words = dict.fromkeys(words, "")
    return Whose(keys=list(known.tenants), words=words)


def models_of(home: Home, rows: Iterable[SegmentRow], known: Mapping[bytes, str] | None = None) -> dict[bytes, str]:
    """By root, the fingerprint that its files name, "" where none can be read.

    Reads a header for each root that is not `known`, a few where they are damaged.
    """
    known = known or {}
    by_root: defaultdict[bytes, list[SegmentRow]] = defaultdict(list)
    for row in rows:
        if len(by_root[row.root]) < FILES_ASKED_MAX:
            by_root[row.root].append(row)
    return {root: known.get(root) or fingerprint_in(home, few) for root, few in by_root.items()}


def fingerprint_in(home: Home, rows: Iterable[SegmentRow]) -> str:
    """Of the model that wrote these, which have one root, as the first few files say; "" where none does."""
    for row in itertools.islice(rows, FILES_ASKED_MAX):
        try:
            meta = read_header(home.segment_file(row.id)).meta
        except (SegmentFileError, OSError):
            continue
        if meta.root == row.root.hex():
            return meta.fingerprint
    return ""
