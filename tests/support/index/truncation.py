"""Tokens and lookups of the truncation tests."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from support.index.archives import FINGERPRINT
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeReply, PurgeRequest, SegmentRow
from warmline_proxy.store.tables import TABLES, Tables

ROOT = namespace(FINGERPRINT)
LONG = list(range(1000, 1300))
SHORT = [*LONG[:30], *range(5000, 5040)]
DEEP = [*LONG[:130], *range(6000, 6050)]


def count_stored(index: Index, ids: Sequence[int]) -> int:
    return index.match_prefix(ROOT, pack_tokens(ids), len(ids)).tokens


def find_segment(index: Index, ids: Sequence[int]) -> SegmentRow:
    """Find the segment in which these tokens begin."""
    row = index.segment(index.match_prefix(ROOT, pack_tokens(ids), len(ids)).chain[0].id)
    assert row is not None
    return row


def find_files_containing(home: Home, ids: Sequence[int]) -> list[Path]:
    """Find the files under a home, of any generation, that contain these tokens."""
    wanted = pack_tokens(ids)
    return [path for path in home.root.rglob("*") if path.is_file() and wanted in path.read_bytes()]


def purge_session(index: Index, session: str) -> PurgeReply:
    """Purge a session; the result is that of the dry run before."""
    forecast = purge(index, PurgeRequest(session=session, dry_run=True))
    reply = purge(index, PurgeRequest(session=session))
    assert [msgspec.structs.replace(cut, became="") for cut in reply.cuts] == forecast.cuts
    assert msgspec.structs.replace(forecast, cuts=reply.cuts, dry_run=False) == reply
    return reply


def clear_tables(tables: Tables) -> None:
    """Clear the tables, as of an index that is rebuilt from its files."""
    for name in TABLES:
        for key, _ in list(tables.items(name)) if name != "meta" else []:
            tables.delete(name, key)
