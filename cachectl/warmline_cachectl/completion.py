"""Shell completion of ids, read from the index.  Quick, and silent where nothing can be read."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warmline_cachectl.views.columns import printable
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import KeyStoreError, read_client_keys
from warmline_proxy.index.index import IndexReader, IndexStoreError
from warmline_proxy.store.rows import SessionRow

SEGMENTS_MAX = 200  # more than that nobody reads


def complete_session_ids(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """Conversations that begin so, last used first, each with what tells it from others."""
    return [(row.id, _describe_session(row)) for row in _read_sessions(ctx) if row.id.startswith(incomplete)]


def complete_ids(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """The same, and segments once something is typed."""
    found = complete_session_ids(ctx, incomplete)
    if incomplete:
        segments = (row_id for row_id in _read_segment_ids(ctx) if row_id.startswith(incomplete))
        found += [(row_id, "a segment") for row_id, _ in zip(segments, range(SEGMENTS_MAX), strict=False)]
    return found


def complete_key_names(ctx: Any, incomplete: str) -> list[str]:
    """Of clients' keys."""
    try:
        return [each.name for each in read_client_keys(_find_home(ctx)) if each.name.startswith(incomplete)]
    except KeyStoreError:
        return []


def _describe_session(row: SessionRow) -> str:
    """A line: clients call their conversations what they like."""
    return f"{row.tokens:,} tokens {printable(' '.join(row.client.split()))}".strip()


def _read_sessions(ctx: Any) -> list[SessionRow]:
    try:
        with IndexReader(_find_home(ctx)) as reader:
            return reader.sessions()
    except (IndexStoreError, OSError):
        return []


def _read_segment_ids(ctx: Any) -> Iterable[str]:
    try:
        with IndexReader(_find_home(ctx)) as reader:
            return [row.id for row in reader.segments()]
    except (IndexStoreError, OSError):
        return []


def _find_home(ctx: Any) -> Home:
    given = ctx.params.get("home") or os.environ.get("WARMLINE_HOME") or "~/.warmline"
    return Home(Path(given).expanduser().absolute())
