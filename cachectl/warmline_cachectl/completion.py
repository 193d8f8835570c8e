"""Shell completion of ids and of names of keys and models, read from the home.  Silent where nothing can be read."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from warmline_cachectl.views.columns import printable
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import KeyStoreError, read_client_keys
from warmline_proxy.index.index import IndexReader, IndexStoreError
from warmline_proxy.store.rows import SessionRow

SEGMENTS_MAX = 200  # offered at once

T = TypeVar("T")


def complete_session_ids(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """(id, description) of conversations, last used first."""
    rows = _read_index(ctx, IndexReader.sessions)
    return [(row.id, _describe_session(row)) for row in rows if row.id.startswith(incomplete)]


def complete_ids(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """(id, description) of conversations, and of segments once something is typed."""
    found = complete_session_ids(ctx, incomplete)
    if incomplete:
        segments = [row.id for row in _read_index(ctx, IndexReader.segments) if row.id.startswith(incomplete)]
        found += [(row_id, "a segment") for row_id in segments[:SEGMENTS_MAX]]
    return found


def complete_models(ctx: Any, incomplete: str) -> list[str]:
    """Names of models with stored conversations."""
    names = {row.model for row in _read_index(ctx, IndexReader.sessions)}
    return sorted(printable(name) for name in names if name.startswith(incomplete))


def complete_key_names(ctx: Any, incomplete: str) -> list[str]:
    """Names of clients' keys."""
    try:
        return [each.name for each in read_client_keys(_find_home(ctx)) if each.name.startswith(incomplete)]
    except KeyStoreError:
        return []


def _describe_session(row: SessionRow) -> str:
    """Description on one printable line: clients choose the names of conversations."""
    return f"{row.tokens:,} tokens {printable(' '.join(row.client.split()))}".strip()


def _read_index(ctx: Any, read: Callable[[IndexReader], Iterable[T]]) -> list[T]:
    try:
        with IndexReader(_find_home(ctx)) as reader:
            return list(read(reader))
    except (IndexStoreError, OSError):
        return []


def _find_home(ctx: Any) -> Home:
    given = ctx.params.get("home") or os.environ.get("WARMLINE_HOME") or "~/.warmline"
    return Home(Path(given).expanduser().absolute())
