"""Where everything lives: one home directory, private to its owner (directories 0700, files 0600)."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The paths under one home directory.  `prepare` makes them; nothing else here touches the disk."""

    root: Path

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.root / "home.lock"

    @property
    def backend_lock(self) -> Path:
        """Held by the backend: two would write and sweep each other's files."""
        return self.run / "backend.lock"

    def segment_file(self, segment_id: str) -> Path:
        """The file of a segment or checkpoint; 256 folders keep each one short."""
        return self.segments / segment_id[:2] / f"{segment_id}.safetensors"

    def pid_file(self, process: str) -> Path:
        """`process` is "proxy" or "backend"."""
        return self.run / f"{process}.pid"

    def prepare(self) -> None:
        """Make the directories.  Raises OSError where the place can't be written."""
        for path in (self.root, self.index, self.segments, self.models, self.logs, self.run):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def secret(self) -> str:
        """What proxy and backend prove themselves with; made by whoever asks first."""
        path = self.root / "secret"
        try:
            # Written aside and linked: the other process never reads half a secret.
            draft = self.root / f".secret.{os.getpid()}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        return path.read_text().strip()


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Replace a small file at once, readable by its owner alone."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)
