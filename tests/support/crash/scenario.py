"""Scenarios: operations that change a home on disk, by the index and by the backend's writer of segment files.

The content of a file is a pure function of all tokens up to a row, so that content in a wrong place shows.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from unittest import mock

import xxhash

from warmline_backend.kv_cache.segment_io import RawTensor, write_segment_file
from warmline_common.protocol.messages import KvLayout, SaveReply
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, pack_tokens, prefix_digest
from warmline_common.storage.drafts import delete_drafts
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import FileMeta
from warmline_proxy.archive.exporter import Exporter
from warmline_proxy.archive.importer import KnownModels, import_archive
from warmline_proxy.archive.reader import read_archive
from warmline_proxy.index import eviction
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.responses import ResponseEntry, join_keys
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.index.tree import digest_prefix
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import pin_session
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import (
    GcRequest,
    PinRequest,
    PurgeRequest,
    RequestRecord,
    ResponseRow,
    SavePlan,
    SessionUpdate,
)

FINGERPRINT = "model-a"
ROOT = namespace(FINGERPRINT)
ROWS, STATE = "0.kv.keys", "1.arrays.0"
VALUE_BYTES = 8  # of a row, and of a state
BUDGET = 1 << 30
LAYOUT = KvLayout(
    row_bytes=VALUE_BYTES,
    state_bytes=VALUE_BYTES,
    has_rows=True,
    has_states=True,
    has_windows=False,
    persistent=True,
    families=["KVCache", "ArraysCache"],
)

TALK = list(range(400))
AGAIN = [*TALK, *range(1000, 1150)]  # continues TALK
BRANCH = [*TALK[:220], *range(2000, 2120)]  # diverges from TALK in the middle of a segment
SHORT = list(range(3000, 3040))  # so short that its continuation is merged with it
LONGER = [*SHORT, *range(3100, 3300)]
NEW = list(range(4000, 4260))
NEWER = list(range(5000, 5100))
TEXTS = {"talk": TALK, "again": AGAIN, "branch": BRANCH, "longer": LONGER, "new": NEW, "newer": NEWER}

Operation = Callable[[Index], object]


@contextmanager
def deterministic_limits(name: str) -> Iterator[None]:
    """Patch limits so that a run is small and repeatable: segments are cut and merged within a few blocks, evictions
    free no more than needed, ids come in a fixed order, and nothing is written because time has passed."""
    numbers = itertools.count(1)

    def token_hex(count: int) -> str:
        return (xxhash.xxh3_128_hexdigest(f"{name} {next(numbers)}".encode()) * 2)[: 2 * count]

    with (
        mock.patch.multiple("warmline_proxy.index.save", SEGMENT_TOKENS_MAX=150, SMALL_SEGMENT_TOKENS=70),
        mock.patch.object(eviction, "LOW_WATERMARK", 1.0),
        mock.patch("secrets.token_hex", token_hex),
        mock.patch("warmline_proxy.index.index.FLUSH_INTERVAL_S", 3600.0),
    ):
        yield


def run_scenario(home: Home, scenario: str, on_operation: Callable[[str, Index | None], object]) -> None:
    """Run a scenario; `on_operation` gets each operation's name (at last ""), and the index before it if it is open."""
    with deterministic_limits("scenario"):
        on_operation("first start", None)
        with open_index(home) as index:
            for operation in SCENARIOS[scenario]:
                on_operation(operation.__name__.replace("_", " "), index)
                operation(index)
            on_operation("end", index)
        on_operation("start after a kill", None)
        with open_index(home) as index:
            on_operation("", index)


def open_index(home: Home) -> Index:
    """Open the index as a start of both processes does."""
    home.prepare()
    home.load_secret()
    delete_drafts(home.segments)
    index = Index(home, BUDGET)
    reconcile(index)
    return index


# ---- operations


def first_save(index: Index) -> None:
    save(index, TALK, [120, 399], prefill_s=9.0)


def second_save(index: Index) -> None:
    save(index, AGAIN, [549], prefill_s=0.1)


def save_checkpoints(index: Index) -> None:
    save(index, TALK, [300, 350])


def branch(index: Index) -> None:
    save(index, BRANCH, [], prefill_s=7.0)


def small_save(index: Index) -> None:
    save(index, SHORT, [39], prefill_s=9.0)


def merge(index: Index) -> None:
    """Save that writes a small segment again, with its continuation."""
    save(index, LONGER, [], prefill_s=9.0)


def bookkeeping(index: Index) -> None:
    index.record_use([row.id for row in index.segments()])
    index.record_request(RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source="cold"))
    index.flush()


def stored_responses(index: Index) -> None:
    """Store a response of LONGER, whose conversation it does not name, and another one, deleted later."""
    tokens = pack_tokens(LONGER)
    for name, prompt in (("r-1", tokens), ("r-2", b"")):
        row = ResponseRow(
            id=name,
            owner="",
            root=ROOT,
            fingerprint=FINGERPRINT,
            model=FINGERPRINT,
            items=join_keys("", name, ["item", f"item of {name}"]),
            turn_end=len(LONGER),
            turn_digest=digest_prefix(tokens, len(LONGER)),
            tokens=prompt,
            at=time.time(),
        )
        index.record_response(ResponseEntry(row, b"text")).result()
    index.record_response_session("", "r-2", find_session(index, TALK))
    index.flush()


def deleted_response(index: Index) -> None:
    index.delete_response("", "r-2")


def aborted_save(index: Index) -> None:
    plan = begin_save(index, NEW, [])
    write_plan(index.home, plan)
    index.abort_save(plan)


def eviction_for_save(index: Index) -> None:
    plan = begin_save(index, NEW, [])
    index.abort_save(plan)
    index.budget_bytes = index.totals().bytes_used + plan.bytes_expected - 1
    save(index, NEW, [], prefill_s=90.0)
    index.budget_bytes = BUDGET


def quarantine(index: Index) -> None:
    index.quarantine(find_leaf(index, BRANCH), "checksum")


def purge_conversation(index: Index) -> None:
    """Purge, which ends with a compaction."""
    purge(index, PurgeRequest(session=find_session(index, LONGER)))


def save_after_purge(index: Index) -> None:
    save(index, NEWER, [50], prefill_s=1.0)


def leftovers(index: Index) -> None:
    """Make leftovers of kills: an unfinished save with its files, a lost file, and orphans."""
    write_plan(index.home, begin_save(index, [*NEW, 1, 2, 3], []))
    index.home.segment_file(find_leaf(index, NEWER)).unlink()
    write_orphans(index)


def write_orphans(index: Index) -> None:
    """Write a file without a row, and a draft."""
    stray = index.home.segment_file("ab" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"nobody's")
    stray.with_name(f".{stray.stem}.x.tmp").write_bytes(b"half")


def two_saves(index: Index) -> None:
    save(index, TALK, [120, 399], prefill_s=9.0)
    save(index, NEW, [100], prefill_s=9.0)


def pin_conversation(index: Index) -> None:
    pin_session(index, PinRequest(session=find_session(index, TALK)))


def gc_to_pinned(index: Index) -> None:
    """Evict all that is not pinned, with orphans to delete; the evicted conversation is exported before."""
    with Exporter(index, find_session(index, NEW)) as export:
        ARCHIVE[:] = export.read_chunks()
    write_orphans(index)
    assert collect_garbage(index, GcRequest(to_bytes=0), is_saving=False).evicted


def import_conversation(index: Index) -> None:
    archive = read_archive(BytesIO(b"".join(ARCHIVE)))
    import_archive(index, archive, "", KnownModels(fingerprints={FINGERPRINT}, description=""))


def purge_shared_conversation(index: Index) -> None:
    """Purge a conversation that shares part of a segment, whose shared part is written anew."""
    (cut,) = purge(index, PurgeRequest(session=find_session(index, TALK))).cuts
    assert (cut.until, cut.end, cut.why_not) == (220, 300, "")


ARCHIVE: list[bytes] = []  # of NEW

STORING: list[Operation] = [
    first_save,
    second_save,
    save_checkpoints,
    branch,
    small_save,
    merge,
    bookkeeping,
    stored_responses,
    deleted_response,
    aborted_save,
    eviction_for_save,
    quarantine,
    purge_conversation,
    save_after_purge,
    leftovers,
]
UPKEEP: list[Operation] = [
    two_saves,
    pin_conversation,
    gc_to_pinned,
    import_conversation,
    branch,
    purge_shared_conversation,
]
SCENARIOS = {"storing": STORING, "upkeep": UPKEEP}
SKIPPED = {
    "storing": set(),
    "upkeep": {"first start", "two saves", "branch", "start after a kill"},
}  # covered by the other scenario
ATOMIC = {"import conversation", "purge shared conversation"}  # complete or absent


# ---- what proxy and backend do in a save


def save(index: Index, ids: Sequence[int], checkpoints: Sequence[int], prefill_s: float = 1.0) -> None:
    plan = begin_save(index, ids, checkpoints)
    reply = write_plan(index.home, plan)
    index.commit_save(plan, reply, prefill_s=prefill_s, session=SessionUpdate(turn_end=len(ids) - 10))


def begin_save(index: Index, ids: Sequence[int], checkpoints: Sequence[int]) -> SavePlan:
    plan = index.begin_save(SaveIntent(ROOT, FINGERPRINT, pack_tokens(ids), LAYOUT, checkpoints))
    assert plan is not None
    return plan


def write_plan(home: Home, plan: SavePlan) -> SaveReply:
    values = make_contents(plan.tokens)
    segments, checkpoints = [], []
    for spec in plan.segments:
        meta = _meta(plan, "segment", spec.id, start=spec.start, end=spec.end, parent=spec.parent)
        rows = b"".join(values[spec.start : spec.end])
        tokens = plan.tokens[spec.start * TOKEN_BYTES : spec.end * TOKEN_BYTES]
        tensor = RawTensor("U8", (1, 1, spec.end - spec.start, VALUE_BYTES), memoryview(rows))
        segments.append(write_segment_file(home.segment_file(spec.id), meta, {ROWS: tensor}, tokens))
    for ref in plan.checkpoints:
        meta = _meta(plan, "checkpoint", ref.id, position=ref.position)
        tensor = RawTensor("U8", (VALUE_BYTES,), memoryview(values[ref.position - 1]))
        checkpoints.append(write_segment_file(home.segment_file(ref.id), meta, {STATE: tensor}))
    return SaveReply(boot="b", generation=0, segments=segments, checkpoints=checkpoints, seconds=0.0)


def _meta(plan: SavePlan, kind: str, file_id: str, *, start: int = 0, end: int = 0, **place: object) -> FileMeta:
    before = plan.tokens[: (place.get("position") or start) * TOKEN_BYTES]
    return FileMeta(
        kind=kind,
        id=file_id,
        fingerprint=FINGERPRINT,
        root=plan.root.hex(),
        prefix=prefix_digest(plan.root, before),
        model=plan.model,
        start=start,
        end=end,
        **place,
    )


def make_contents(tokens: bytes) -> list[bytes]:
    """Make the content of the row at each position, and of the state after it."""
    values, value = [], b""
    for at in range(0, len(tokens), TOKEN_BYTES):
        value = xxhash.xxh3_64_digest(value + tokens[at : at + TOKEN_BYTES])
        values.append(value)
    return values


def find_leaf(index: Index, ids: Sequence[int]) -> str:
    return index.match_prefix(ROOT, pack_tokens(ids), len(ids)).chain[-1].id


def find_session(index: Index, ids: Sequence[int]) -> str:
    """Find the id of the session that ends with these tokens."""
    (session,) = [row for row in index.sessions() if row.leaf == find_leaf(index, ids)]
    return session.id


def count_stored(index: Index) -> dict[str, int]:
    """Count the stored tokens of each text, and the stored responses."""
    tokens = {name: index.match_prefix(ROOT, pack_tokens(ids), len(ids)).tokens for name, ids in TEXTS.items()}
    return tokens | {"responses": len(index.responses())}
