"""HOME/keys.json: the keys that clients show, whose cache each may meet, and the admin key.

    KeysUnusable      the file can't be read or changed, or a name can't be used
    └── NoSuchKey     no key of that name
        └── NoKeys    no client's key at all

Changed as a whole, under a lock, by `cachectl key` and by a proxy that opens to others.  Keys stand there as they are,
since they are to be shown again: the file is as private as the home's secret.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from warmline_common.protocol.messages import decode
from warmline_common.storage import disk
from warmline_common.storage.file_lock import Locked, process_lock
from warmline_common.storage.home import Home
from warmline_common.storage.permissions import FILE_MODE, OTHERS

CLIENT, ADMIN = "client", "admin"  # kinds
DEFAULT_NAME = "default"
ENVIRONMENT_NAME = "environment"  # of the key that WARMLINE_CLIENT_KEY or `client_key` names
RESERVED = (ADMIN, ENVIRONMENT_NAME)
KEYS_MAX = 1000
KEY_BYTES = 32  # of randomness; 43 characters
LOCK_WAIT_S = 5.0
VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class KeysUnusable(Exception):
    """The message is one line for people."""


class NoSuchKey(KeysUnusable):
    """None of that name."""


class NoKeys(NoSuchKey):
    """And no other either."""


class KeyEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One key.  `tenant` says whose stored conversations it meets; it outlives the key itself, see `rotated`."""

    name: str
    key: str
    kind: str = CLIENT  # or ADMIN, which opens the owner's paths and nothing else
    tenant: str
    created: float  # Unix seconds


class _Content(msgspec.Struct, kw_only=True):
    version: int = VERSION
    keys: list[KeyEntry] = []


Mark = tuple[int, int, int]
NO_FILE: Mark = (0, 0, 0)


def mark(home: Home) -> Mark:
    """Differs whenever the file was changed; costs a stat.  Raises OSError."""
    try:
        found = home.keys.stat()
    except FileNotFoundError:
        return NO_FILE
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(home: Home) -> list[KeyEntry]:
    """In the order in which they were made; none where there is no file.  Raises KeysUnusable."""
    try:
        content = decode(home.keys.read_bytes(), _Content)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeysUnusable(f"{home.keys} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError):  # without what it quotes: that may be a key
        raise KeysUnusable(f"{home.keys} is damaged: restore it, or delete it and make new keys") from None
    if content.version != VERSION or not all(each.key and each.kind in (CLIENT, ADMIN) for each in content.keys):
        raise KeysUnusable(f"{home.keys} is of another version of Warmline, or has an empty key")
    if twice := _ambiguous(content.keys):
        raise KeysUnusable(f"{home.keys} has another key called {twice!r}: whose is what is stored?  Rename that key")
    return content.keys


def _ambiguous(entries: Sequence[KeyEntry]) -> str:
    """A name that two keys have, or that one of the settings may have; "" where there is none."""
    names = [each.name for each in entries]
    return next((name for at, name in enumerate(names) if name == ENVIRONMENT_NAME or name in names[:at]), "")


def keep_private(home: Home) -> None:
    """What an editor or a copy has left open to others is its owner's alone again.  Raises OSError."""
    if home.keys.stat().st_mode & OTHERS:
        disk.set_mode(home.keys, FILE_MODE)


def client_keys(home: Home) -> list[KeyEntry]:
    """Raises KeysUnusable."""
    return [each for each in read(home) if each.kind == CLIENT]


def find(entries: Sequence[KeyEntry], name: str) -> KeyEntry:
    """Without a name: the only client's key, or the one called `default`.  Raises NoSuchKey."""
    clients = [each for each in entries if each.kind == CLIENT]
    if not name and len(clients) == 1:
        return clients[0]
    for each in entries:
        if each.name == (name or DEFAULT_NAME):
            return each
    names = ", ".join(each.name for each in clients)
    if not clients:
        raise NoKeys("there is no client key yet")
    raise NoSuchKey(f"there is no key {name!r}; there are {names}" if name else f"which one? there are {names}")


def tenant_of(client_key: str) -> str:
    """Whose KV the holder of the settings' key may meet: a stable hash, never the key.  Without one, everybody's."""
    return hashlib.sha256(client_key.encode()).hexdigest()[:16] if client_key else ""


def last_tenant(home: Home) -> str:
    """Of the settings' key that the last proxy had; "" where it had none, or that is not known."""
    try:
        return home.settings_tenant.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def add(home: Home, name: str) -> KeyEntry:
    """A new client's key.  Raises KeysUnusable, also where the name is taken."""
    check_name(name)
    with _changing(home) as entries:
        if any(each.name == name for each in entries):
            raise KeysUnusable(f"there is a key {name!r} already: `cachectl key rotate {name}` gives it another value")
        if len(entries) >= KEYS_MAX:
            raise KeysUnusable(f"there are {KEYS_MAX} keys already; remove one first")
        entries.append(_entry(name, CLIENT))
        return entries[-1]


def rotate(home: Home, name: str) -> KeyEntry:
    """Another value, the same tenant: what was stored for it is still its own.  Raises NoSuchKey, KeysUnusable."""
    with _changing(home) as entries:
        old = find(entries, name)
        new = msgspec.structs.replace(old, key=_new_key(), created=time.time())
        entries[entries.index(old)] = new
        return new


def remove(home: Home, name: str) -> KeyEntry:
    """What it was.  Raises NoSuchKey, KeysUnusable."""
    with _changing(home) as entries:
        old = find(entries, name)
        entries.remove(old)
        return old


def ensure(home: Home, kind: str) -> KeyEntry:
    """The admin key, or any client's key; made where there is none.  Raises KeysUnusable."""
    if known := next((each for each in read(home) if each.kind == kind), None):
        return known
    with _changing(home) as entries:
        if known := next((each for each in entries if each.kind == kind), None):
            return known
        entries.append(_entry(ADMIN if kind == ADMIN else DEFAULT_NAME, kind))
        return entries[-1]


def check_name(name: str) -> None:
    """Raises KeysUnusable."""
    if not _NAME.fullmatch(name):
        raise KeysUnusable(f"{name[:80]!r} is no name for a key: use 1 to 64 of A-Z a-z 0-9 . _ @ -")
    if name in RESERVED:
        raise KeysUnusable(f"the name {name!r} has a meaning of its own; choose another")


def _entry(name: str, kind: str) -> KeyEntry:
    tenant = secrets.token_hex(8) if kind == CLIENT else ""
    return KeyEntry(name=name, key=_new_key(), kind=kind, tenant=tenant, created=time.time())


def _new_key() -> str:
    return f"wl-{secrets.token_urlsafe(KEY_BYTES)}"


@contextmanager
def _changing(home: Home) -> Iterator[list[KeyEntry]]:
    """What is in the list when the block ends is in the file; nothing changes where the block raises."""
    try:
        disk.make_folders(home.run)
        with process_lock(home.keys_lock, LOCK_WAIT_S):
            for draft in home.root.glob(f".{home.keys.stem}.*{disk.DRAFT_SUFFIX}"):  # of who was killed
                with suppress(OSError):
                    disk.delete(draft)
            before = read(home)
            entries = list(before)
            yield entries
            if entries != before:
                content = msgspec.json.format(msgspec.json.encode(_Content(keys=entries)))
                disk.write_whole(home.keys, [content + b"\n"])
    except Locked as error:
        raise KeysUnusable(f"{home.keys} is being changed by process {error.holder}; try again") from error
    except OSError as error:
        raise KeysUnusable(f"{home.keys} can't be changed: {error.strerror or error}") from error
