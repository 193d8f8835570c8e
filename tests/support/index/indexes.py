"""Backend that writes a plan's files, and shortcuts for tests of the index."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from support.index.segment_files import write_segment_file
from warmline_common.protocol.messages import KvLayout, SavedFile, SaveReply
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, pack_tokens, prefix_digest
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import FileMeta, file_checksum, read_checksums
from warmline_proxy.index.index import Index
from warmline_proxy.index.responses import ResponseEntry, join_keys
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.index.tree import digest_prefix
from warmline_proxy.store.rows import ResponseRow, SavePlan, SaveResult, SessionUpdate, TurnRow

ROOT = namespace("model-a")
MODEL = "model-a"
BUDGET = 1 << 30
ROW_BYTES = 16
STATE_BYTES = 64
PAGE_BYTES, HEADER_BYTES, FLAGS_AT, BRANCH, LEAF, OVERFLOW = 4096, 16, 10, 1, 2, 4  # of LMDB
LAYOUT = KvLayout(
    row_bytes=ROW_BYTES,
    state_bytes=STATE_BYTES,
    has_rows=True,
    has_states=True,
    has_windows=False,
    persistent=True,
    families=["KVCache", "ArraysCache"],
)


def make_turn(*calls: int, root: bytes = ROOT, **fields: Any) -> TurnRow:
    """Make a sampled turn whose calls have these numbers."""
    ids = [f"call_{call:024x}" for call in calls]
    return TurnRow(
        **{"root": root, "model": MODEL, "calls": ids, "tokens": pack_tokens(list(calls)), "at": 1.0} | fields
    )


def make_response(name: str, *items: str, owner: str = "", body: str = "", **fields: Any) -> ResponseEntry:
    """Make a stored response that has an item of its own name, and these."""
    at = {"root": namespace(MODEL, owner), "fingerprint": MODEL, "model": MODEL, "at": time.time()} | fields
    row = ResponseRow(id=name, owner=owner, items=join_keys(owner, name, (*items, name)), **at)
    return ResponseEntry(row, (body or f"text of {name}").encode())


def make_prompted_response(name: str, ids: Sequence[int], turn_end: int, **fields: Any) -> ResponseEntry:
    """Make a stored response to a prompt of these tokens, whose conversation is not known yet."""
    tokens = pack_tokens(ids)
    digest = digest_prefix(tokens, turn_end)
    return make_response(name, **{"root": ROOT, "tokens": tokens, "turn_end": turn_end, "turn_digest": digest} | fields)


def make_home(path: Path) -> Home:
    home = Home(path)
    home.prepare()
    return home


def break_page(home: Home, segment_id: str) -> None:
    """Damage the page with this segment's row so that LMDB asserts and ends the process that reads it."""
    (data,) = home.index.glob("*/data.mdb")
    pages = bytearray(data.read_bytes())
    for at in range(2 * PAGE_BYTES, len(pages), PAGE_BYTES):
        page = pages[at : at + PAGE_BYTES]
        if bytes.fromhex(segment_id) in _list_keys(page) and b"prefill_s" in page:
            pages[at + FLAGS_AT] = BRANCH
    data.write_bytes(pages)


def _list_keys(page: bytearray) -> list[bytes]:
    """List the keys of an LMDB page, if it is a leaf; stale copies may occur in it and elsewhere."""

    def number(at: int) -> int:
        return int.from_bytes(page[at : at + 2], "little")

    if number(FLAGS_AT) != LEAF:
        return []
    entries = [number(at) for at in range(HEADER_BYTES, number(FLAGS_AT + 2), 2)]
    return [bytes(page[entry + 8 : entry + 8 + number(entry + 6)]) for entry in entries]


def begin_save(
    index: Index,
    ids: Sequence[int],
    checkpoints: Sequence[int] = (),
    root: bytes = ROOT,
    may_replace: bool = True,
    model: str = "",
) -> SavePlan | None:
    return index.begin_save(SaveIntent(root, model or MODEL, pack_tokens(ids), LAYOUT, checkpoints, may_replace))


def plan_save(index: Index, ids: Sequence[int], checkpoints: Sequence[int] = (), may_replace: bool = True) -> SavePlan:
    """Plan a save that has something to write."""
    plan = begin_save(index, ids, checkpoints, may_replace=may_replace)
    assert plan is not None
    return plan


def write_plan(home: Home, plan: SavePlan, fingerprint: str = "model-a") -> SaveReply:
    """Write the plan's files as a backend does on POST /kv/save."""
    segments, checkpoints, root = [], [], plan.root
    for spec in plan.segments:
        meta = FileMeta(
            kind="segment",
            id=spec.id,
            fingerprint=fingerprint,
            root=root.hex(),
            prefix=prefix_digest(root, plan.tokens[: spec.start * TOKEN_BYTES]),
            start=spec.start,
            end=spec.end,
            parent=spec.parent,
            model=MODEL,
        )
        tokens = plan.tokens[spec.start * TOKEN_BYTES : spec.end * TOKEN_BYTES]
        segments.append(_write(home, meta, tokens, {"0.kv.keys": bytes(ROW_BYTES) * (spec.end - spec.start)}))
    for ref in plan.checkpoints:
        at = ref.position
        prefix = prefix_digest(root, plan.tokens[: at * TOKEN_BYTES])
        meta = FileMeta(
            kind="checkpoint",
            id=ref.id,
            fingerprint=fingerprint,
            root=root.hex(),
            prefix=prefix,
            start=at,
            end=at,
            position=at,
            model=MODEL,
        )
        checkpoints.append(_write(home, meta, None, {"1.arrays.0": bytes(STATE_BYTES)}))
    return SaveReply(boot="b", generation=0, segments=segments, checkpoints=checkpoints, seconds=0.0)


def _write(home: Home, meta: FileMeta, tokens: bytes | None, tensors: dict[str, bytes]) -> SavedFile:
    path = home.segment_file(meta.id)
    size = write_segment_file(path, meta, tokens, tensors)
    return SavedFile(id=meta.id, bytes_written=size, checksum=file_checksum(read_checksums(path)))


def commit_save(
    index: Index, plan: SavePlan, turn_end: int = 0, client: str = "", prefill_s: float = 1.0, title: str = ""
) -> SaveResult:
    reply = write_plan(index.home, plan)
    session = SessionUpdate(turn_end=turn_end, client=client, title=title)
    return index.commit_save(plan, reply, prefill_s=prefill_s, session=session)


def save(
    index: Index,
    ids: Sequence[int],
    checkpoints: Sequence[int] = (),
    turn_end: int = 0,
    client: str = "",
    prefill_s: float = 1.0,
    may_replace: bool = True,
    title: str = "",
) -> SaveResult:
    plan = plan_save(index, ids, checkpoints, may_replace)
    return commit_save(index, plan, turn_end, client, prefill_s, title)


def count_matched(index: Index, ids: Sequence[int], root: bytes = ROOT) -> int:
    return index.match_prefix(root, pack_tokens(ids), len(ids)).tokens


def find_end_reason(index: Index, ids: Sequence[int]) -> str:
    return index.match_prefix(ROOT, pack_tokens(ids), len(ids)).end_reason


def count_file_bytes(home: Home) -> int:
    return sum(path.stat().st_size for path in home.segments.rglob("*") if path.is_file())


@contextmanager
def short_segments() -> Iterator[None]:
    """Cuts and swallowing happen within a few blocks."""
    with mock.patch.multiple("warmline_proxy.index.save", SEGMENT_TOKENS_MAX=150, SMALL_SEGMENT_TOKENS=70):
        yield
