"""HOME/keys.json: client keys with their tenants, and the admin key.

Rewritten as a whole, under a lock, by `cachectl key` and by a proxy that opens to the network.  Keys are stored as they
are, since they are shown again: the file is as private as the home's secret.
"""

import difflib
import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from warmline_common.protocol.messages import decode
from warmline_common.storage import disk
from warmline_common.storage.file_lock import LockedError, process_lock
from warmline_common.storage.home import Home
from warmline_common.storage.permissions import FILE_MODE, OTHERS_MASK

CLIENT_KIND, ADMIN_KIND = "client", "admin"
DEFAULT_NAME = "default"
ENVIRONMENT_NAME = "environment"  # of the key in WARMLINE_CLIENT_KEY or `client_key`
RESERVED_NAMES = (ADMIN_KIND, ENVIRONMENT_NAME)
KEYS_MAX = 1000
KEY_BYTES = 32  # random; 43 characters
LOCK_WAIT_S = 5.0
VERSION = 1
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class KeyStoreError(Exception):
    """Key file or key name unusable; the message is one line for users."""


class KeyNotFoundError(KeyStoreError):
    """No key has that name."""


class NoClientKeysError(KeyNotFoundError):
    """There is no client key."""


class KeyEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One key.  `tenant` selects the stored conversations it may reuse; it survives `rotate_key`."""

    name: str
    key: str
    kind: str = CLIENT_KIND  # or ADMIN_KIND, for admin paths only
    tenant: str
    created: float  # Unix seconds


class _KeyFile(msgspec.Struct, kw_only=True):
    version: int = VERSION
    keys: list[KeyEntry] = []


KeyFileStamp = tuple[int, int, int]
NO_FILE: KeyFileStamp = (0, 0, 0)


def read_stamp(home: Home) -> KeyFileStamp:
    """Stamp that differs after each change of the file; costs a stat.  Raises OSError."""
    try:
        stat = home.keys.stat()
    except FileNotFoundError:
        return NO_FILE
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_keys(home: Home) -> list[KeyEntry]:
    """Keys by creation; none without a file.  Raises KeyStoreError."""
    try:
        content = decode(disk.read_file(home.keys), _KeyFile)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeyStoreError(f"{home.keys} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError):  # no cause: it may quote a key
        raise KeyStoreError(f"{home.keys} is damaged: restore it, or delete it and make new keys") from None
    are_valid = all(each.key and each.kind in (CLIENT_KIND, ADMIN_KIND) for each in content.keys)
    if content.version != VERSION or not are_valid:
        raise KeyStoreError(f"{home.keys} is of another version of Warmline, or has an empty key")
    names = [ENVIRONMENT_NAME, *(entry.name for entry in content.keys)]
    if twin := next((name for at, name in enumerate(names) if name in names[:at]), ""):
        raise KeyStoreError(f"{home.keys} has another key called {twin!r}: owners would be ambiguous; rename that key")
    return content.keys


def restrict_permissions(home: Home) -> None:
    """Make the file private again after an editor or a copy opened it to others.  Raises OSError."""
    if home.keys.stat().st_mode & OTHERS_MASK:
        disk.set_mode(home.keys, FILE_MODE)


def read_client_keys(home: Home) -> list[KeyEntry]:
    """Client keys by creation.  Raises KeyStoreError."""
    return [each for each in read_keys(home) if each.kind == CLIENT_KIND]


def find_key(entries: Sequence[KeyEntry], name: str) -> KeyEntry:
    """Key by name; without a name: the only client key, or `default`.  Raises KeyNotFoundError."""
    clients = [each for each in entries if each.kind == CLIENT_KIND]
    if not name and len(clients) == 1:
        return clients[0]
    for each in entries:
        if each.name == (name or DEFAULT_NAME):
            return each
    if not clients:
        raise NoClientKeysError("there is no client key yet")
    names = [each.name for each in clients]
    if name:
        raise KeyNotFoundError(f"there is no key {name!r}; {suggest_key(name, names)}")
    raise KeyNotFoundError(f"name one of the keys: {format_names(names)}")


def suggest_key(name: str, known_names: Sequence[str]) -> str:
    """End of a message about a name that no key has: the nearest one, or all."""
    near = difflib.get_close_matches(name, known_names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {format_names(known_names)}"


def format_names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def derive_tenant(client_key: str) -> str:
    """Tenant of the settings' key: a stable hash; "" without a key."""
    return hashlib.sha256(client_key.encode()).hexdigest()[:16] if client_key else ""


def read_last_tenant(home: Home) -> str:
    """Tenant of the last proxy's settings key; "" if none or unknown."""
    try:
        return disk.read_file(home.settings_tenant).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def add_key(home: Home, name: str) -> KeyEntry:
    """Create a client key.  Raises KeyStoreError, also for a taken name."""
    check_key_name(name)
    with _edit_keys(home) as entries:
        if any(each.name == name for each in entries):
            raise KeyStoreError(f"there is a key {name!r} already: `cachectl key rotate {name}` gives it another value")
        if len(entries) >= KEYS_MAX:
            raise KeyStoreError(f"there are {KEYS_MAX} keys already; remove one first")
        entries.append(_create_entry(name, CLIENT_KIND))
        return entries[-1]


def rotate_key(home: Home, name: str) -> KeyEntry:
    """Give a key another value and keep its tenant.  Raises KeyStoreError."""
    with _edit_keys(home) as entries:
        old = find_key(entries, name)
        new = msgspec.structs.replace(old, key=_generate_key(), created=time.time())
        entries[entries.index(old)] = new
        return new


def remove_key(home: Home, name: str) -> KeyEntry:
    """Remove and return a key.  Raises KeyStoreError."""
    with _edit_keys(home) as entries:
        old = find_key(entries, name)
        entries.remove(old)
        return old


def ensure_key(home: Home, kind: str) -> KeyEntry:
    """The admin key, or any client key; created if missing.  Raises KeyStoreError."""
    if present := next((each for each in read_keys(home) if each.kind == kind), None):
        return present
    with _edit_keys(home) as entries:
        if present := next((each for each in entries if each.kind == kind), None):
            return present
        entries.append(_create_entry(ADMIN_KIND if kind == ADMIN_KIND else DEFAULT_NAME, kind))
        return entries[-1]


def check_key_name(name: str) -> None:
    """Raise KeyStoreError for an invalid or reserved name."""
    if not _NAME_PATTERN.fullmatch(name):
        raise KeyStoreError(f"{name[:80]!r} is no name for a key: use 1 to 64 of A-Z a-z 0-9 . _ @ -")
    if name in RESERVED_NAMES:
        raise KeyStoreError(f"the name {name!r} has a meaning of its own; choose another")


def _create_entry(name: str, kind: str) -> KeyEntry:
    tenant = secrets.token_hex(8) if kind == CLIENT_KIND else ""
    return KeyEntry(name=name, key=_generate_key(), kind=kind, tenant=tenant, created=time.time())


def _generate_key() -> str:
    return f"wl-{secrets.token_urlsafe(KEY_BYTES)}"


@contextmanager
def _edit_keys(home: Home) -> Iterator[list[KeyEntry]]:
    """List of keys to edit in place, written when the block ends without an error."""
    try:
        disk.make_folders(home.run)
        with process_lock(home.keys_lock, LOCK_WAIT_S):
            for draft in home.root.glob(f".{home.keys.stem}.*{disk.DRAFT_SUFFIX}"):  # of killed processes
                with suppress(OSError):
                    disk.delete(draft)
            before = read_keys(home)
            entries = list(before)
            yield entries
            if entries != before:
                content = msgspec.json.format(msgspec.json.encode(_KeyFile(keys=entries)))
                disk.write_durable(home.keys, [content + b"\n"])
    except LockedError as error:
        raise KeyStoreError(f"{home.keys} is being changed by process {error.holder}; try again") from error
    except OSError as error:
        raise KeyStoreError(f"{error.filename or home.keys} can't be changed: {error.strerror or error}") from error
