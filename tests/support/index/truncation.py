"""Tokens and lookups that the tests of truncation share."""

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
    """The one in which these tokens begin."""
    row = index.segment(index.match_prefix(ROOT, pack_tokens(ids), len(ids)).chain[0].id)
    assert row is not None
    return row


def find_files_containing(home: Home, ids: Sequence[int]) -> list[Path]:
    """The files under a home, of whatever generation, with these tokens in a row."""
    wanted = pack_tokens(ids)
    return [path for path in home.root.rglob("*") if path.is_file() and wanted in path.read_bytes()]


def purge_session(index: Index, session: str) -> PurgeReply:
    """As was told before."""
    forecast = purge(index, PurgeRequest(session=session, dry_run=True))
    reply = purge(index, PurgeRequest(session=session))
    assert [msgspec.structs.replace(cut, became="") for cut in reply.cuts] == forecast.cuts
    assert msgspec.structs.replace(forecast, cuts=reply.cuts, dry_run=False) == reply
    return reply


def clear_tables(tables: Tables) -> None:
    """As of an index that is made anew from its files."""
    for name in TABLES:
        for key, _ in list(tables.items(name)) if name != "meta" else []:
            tables.delete(name, key)
