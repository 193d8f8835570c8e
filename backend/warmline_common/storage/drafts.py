"""Drafts of segment files: names that tell which backend writes one, and deletion of those that were left.

Several backends write into one home.  The names of an instance's drafts include a digest of its name, of fixed width,
so that no instance's pattern matches another's drafts.
"""

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path

from warmline_common.storage import disk

OWNER_CHARS = TOKEN_CHARS = 8  # hexadecimal digits


def make_draft_path(path: Path, owner: str = "") -> Path:
    """Path of a new draft of the file `path`; `owner` is the instance of the backend that writes it, "" for others."""
    token = secrets.token_hex(TOKEN_CHARS // 2)
    return path.with_name(f".{path.stem}.{_format_owner(owner)}{token}{disk.DRAFT_SUFFIX}")


def delete_drafts(folder: Path, owner: str = "") -> int:
    """Delete drafts of saves that a killed process has left below `folder`, and return their number.

    Those of the instance `owner`, or all of them: call it before any save of that instance, or of any.
    """
    ending = f".{_format_owner(owner)}{'?' * TOKEN_CHARS}" if owner else ""
    deleted = 0
    for draft in list(folder.glob(f"*/.*{ending}{disk.DRAFT_SUFFIX}")):
        with suppress(OSError):  # a read-only disk, or worse, is reported by the first save
            disk.delete(draft)
            deleted += 1
    return deleted


def _format_owner(owner: str) -> str:
    return f"{hashlib.sha256(owner.encode()).hexdigest()[:OWNER_CHARS]}-" if owner else ""
