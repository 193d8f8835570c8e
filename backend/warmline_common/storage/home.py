"""Paths of the home directory, private to its owner (directories 0700, files 0600)."""

import errno
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.regular_file import NOT_REGULAR


def describe_unusable_home(home: "Home", error: OSError) -> str:
    """Message for a home that `prepare` or `load_secret` failed on."""
    root = home.root
    if root.is_symlink() and not root.exists():
        return f"the home {root} is a link to {root.readlink()}, which does not exist; make that, or use another --home"
    place = f"{error.filename}: " if error.filename not in (None, str(root)) else ""
    reason = f"{place}{error.strerror}" if error.strerror else str(error)
    return f"the home {root} is not complete and can't be made so: {reason}; make it writable or use another --home"


class _PathBelow:
    """Attribute of a home: the path of this name below its root."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: "Home", _: type) -> Path:
        return home.root / self._name


@dataclass(frozen=True)
class Home:
    """Paths under one home directory.

    `prepare` creates them, `load_secret` its file; the rest but `read_secret` touches no disk.  `instance` tells the
    backends of several models apart; "" for the only one, and for the keeper of several.
    """

    root: Path
    instance: str = ""

    index = _PathBelow("index")
    segments = _PathBelow("segments")
    models = _PathBelow("models")
    logs = _PathBelow("logs")
    run = _PathBelow("run")
    prewarm = _PathBelow("prewarm")  # made once something is kept there
    prompt_heads = _PathBelow("prewarm/heads.json")  # last seen heads of configured clients' prompts
    reserve = _PathBelow("spare")  # a file of zeros: reserved space for a full disk
    lock = _PathBelow("home.lock")
    keys = _PathBelow("keys.json")  # clients' keys and the admin key
    keys_lock = _PathBelow("run/keys.lock")  # held while the file of keys is changed
    # tenant of the settings' own key, as the proxy last found it: other processes may not know the key
    settings_tenant = _PathBelow("run/settings-tenant")

    @property
    def backend_name(self) -> str:
        """Name of the backend's files, without their suffix."""
        return f"backend-{self.instance}" if self.instance else "backend"

    @property
    def backend_lock(self) -> Path:
        """File that is held by the backend, or by the keeper of several: two would sweep each other's files."""
        return self.run / f"{self.backend_name}.lock"

    @property
    def backend_state(self) -> Path:
        """File with the pid and port of the backend."""
        return self.run / f"{self.backend_name}.json"

    def segment_file(self, segment_id: str) -> Path:
        """File of a segment or checkpoint; 256 folders keep each one short."""
        return self.segments / segment_id[:2] / f"{segment_id}.safetensors"

    def pid_file(self, process: str) -> Path:
        """File with a process's pid; `process` is "proxy" or "backend"."""
        return self.run / f"{self.backend_name if process == 'backend' else process}.pid"

    def prepare(self) -> None:
        """Create the directories.  Raises OSError where the home can't be written, or a lock can't be a file."""
        for path in (self.root, self.segments, self.models, self.logs, self.run):  # the index's owner makes that one
            disk.make_folders(path)
        for path in (self.lock, self.backend_lock):
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, NOT_REGULAR, str(path))

    def load_secret(self) -> str:
        """Shared secret of proxy and backend, created by the first caller.  Raises OSError."""
        path = self.root / "secret"
        if not path.exists():
            self._create_secret(path)
        for draft in self.root.glob(f".secret.*{disk.DRAFT_SUFFIX}"):  # ours, and of killed processes
            disk.delete(draft)
        return self.read_secret()

    def read_secret(self) -> str:
        """Shared secret of proxy and backend.  Raises OSError where there is none yet, or it can't be used."""
        path = self.root / "secret"
        secret = disk.read_file(path).decode("latin-1").strip()
        if not secret or not (secret.isascii() and secret.isprintable()):
            raise OSError(f"{path} holds no secret; delete it, and a new one is made")
        return secret

    def _create_secret(self, path: Path) -> None:
        """Write the secret to a draft and link it: the other process never reads half a secret."""
        draft = self.root / f".secret.{secrets.token_hex(8)}{disk.DRAFT_SUFFIX}"
        with disk.create(draft) as file:
            disk.write(file, secrets.token_hex(32).encode())
            disk.sync(file)
        with suppress(FileExistsError, FileNotFoundError):  # another process was sooner, and has swept
            disk.link(draft, path)
        disk.sync_folder(self.root)
