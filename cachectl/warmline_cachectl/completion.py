"""What a shell may complete: ids from the index, read directly.  Quick, and silent where nothing can be read."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from warmline_cachectl.views.columns import printable
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import KeysUnusable, client_keys
from warmline_proxy.index.index import IndexFailure, IndexReader
from warmline_proxy.store.rows import SessionRow

SEGMENTS_MAX = 200  # more than that nobody reads


def session_ids(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """Conversations that begin so, last used first, each with what tells it from others."""
    return [(row.id, _told(row)) for row in _sessions(ctx) if row.id.startswith(incomplete)]


def any_ids(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """The same, and segments once something is typed."""
    found = session_ids(ctx, incomplete)
    if incomplete:
        segments = (row_id for row_id in _segments(ctx) if row_id.startswith(incomplete))
        found += [(row_id, "a segment") for row_id, _ in zip(segments, range(SEGMENTS_MAX), strict=False)]
    return found


def key_names(ctx: Any, incomplete: str) -> list[str]:
    """Of clients' keys."""
    try:
        return [each.name for each in client_keys(_home(ctx)) if each.name.startswith(incomplete)]
    except KeysUnusable:
        return []


def _told(row: SessionRow) -> str:
    """A line: clients call their conversations what they like."""
    return f"{row.tokens:,} tokens {printable(' '.join(row.client.split()))}".strip()


def _sessions(ctx: Any) -> list[SessionRow]:
    try:
        with IndexReader(_home(ctx)) as reader:
            return reader.sessions()
    except (IndexFailure, OSError):
        return []


def _segments(ctx: Any) -> Iterable[str]:
    try:
        with IndexReader(_home(ctx)) as reader:
            return [row.id for row in reader.segments()]
    except (IndexFailure, OSError):
        return []


def _home(ctx: Any) -> Home:
    given = ctx.params.get("home") or os.environ.get("WARMLINE_HOME") or "~/.warmline"
    return Home(Path(given).expanduser().absolute())
