"""Lives of a home, errand by errand: all that changes it on disk, by the index and by the backend's writing half.

What a file holds is a pure function of all tokens up to a row, so that content in a wrong place shows.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from unittest import mock

import xxhash

from warmline_backend.kv_cache.segment_io import RawTensor, delete_drafts, write_segment_file
from warmline_common.protocol.messages import KvLayout, SaveReply
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, pack_tokens, prefix_digest
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import FileMeta
from warmline_proxy.archive.exporter import Exporter
from warmline_proxy.archive.importer import KnownModels, import_archive
from warmline_proxy.archive.reader import read_archive
from warmline_proxy.index import eviction
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import pin_session
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import GcRequest, PinRequest, PurgeRequest, RequestRecord, SavePlan, SessionUpdate

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
AGAIN = [*TALK, *range(1000, 1150)]  # it goes on
BRANCH = [*TALK[:220], *range(2000, 2120)]  # leaves it in the middle of a segment
SHORT = list(range(3000, 3040))  # so short that what follows swallows it
LONGER = [*SHORT, *range(3100, 3300)]
NEW = list(range(4000, 4260))
NEWER = list(range(5000, 5100))
TEXTS = {"talk": TALK, "again": AGAIN, "branch": BRANCH, "longer": LONGER, "new": NEW, "newer": NEWER}

Errand = Callable[[Index], object]


@contextmanager
def small_world(name: str) -> Iterator[None]:
    """Segments are cut and swallowed within a few blocks, no more is evicted than must be, ids come in one order, and
    nothing is written because time has passed."""
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


def live(home: Home, life: str, begins: Callable[[str, Index | None], object]) -> None:
    """A whole one.  `begins` is told each errand's name, at last "" for the end, and what is stored by then."""
    with small_world("life"):
        begins("first start", None)
        with start(home) as index:
            for errand in LIVES[life]:
                begins(errand.__name__.replace("_", " "), index)
                errand(index)
            begins("end", index)
        begins("start after a kill", None)
        with start(home) as index:
            begins("", index)


def start(home: Home) -> Index:
    """The index as a start of both processes leaves it."""
    home.prepare()
    home.load_secret()
    delete_drafts(home.segments)
    index = Index(home, BUDGET)
    reconcile(index)
    return index


# ---- errands


def first_save(index: Index) -> None:
    save(index, TALK, [120, 399], prefill_s=9.0)


def second_save(index: Index) -> None:
    save(index, AGAIN, [549], prefill_s=0.1)


def states_alone(index: Index) -> None:
    save(index, TALK, [300, 350])


def branch(index: Index) -> None:
    save(index, BRANCH, [], prefill_s=7.0)


def save_of_little(index: Index) -> None:
    save(index, SHORT, [39], prefill_s=9.0)


def merge(index: Index) -> None:
    """Save that writes a small segment again, with its continuation."""
    save(index, LONGER, [], prefill_s=9.0)


def bookkeeping(index: Index) -> None:
    index.record_use([row.id for row in index.segments()])
    index.record_request(RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source="cold"))
    index.flush()


def save_that_is_given_up(index: Index) -> None:
    plan = planned(index, NEW, [])
    write_plan(index.home, plan)
    index.abort_save(plan)


def eviction_for_a_save(index: Index) -> None:
    plan = planned(index, NEW, [])
    index.abort_save(plan)
    index.budget_bytes = index.totals().bytes_used + plan.bytes_expected - 1
    save(index, NEW, [], prefill_s=90.0)
    index.budget_bytes = BUDGET


def quarantine(index: Index) -> None:
    index.quarantine(leaf(index, BRANCH), "checksum")


def purge_of_a_conversation(index: Index) -> None:
    """Ends with a compaction."""
    purge(index, PurgeRequest(session=session_of(index, LONGER)))


def save_after_it(index: Index) -> None:
    save(index, NEWER, [50], prefill_s=1.0)


def leftovers(index: Index) -> None:
    """Leftovers of kills: a save under way with its files, one that is gone, and orphans."""
    write_plan(index.home, planned(index, [*NEW, 1, 2, 3], []))
    index.home.segment_file(leaf(index, NEWER)).unlink()
    strays(index)


def strays(index: Index) -> None:
    """A file that nobody knows, and a draft."""
    stray = index.home.segment_file("ab" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"nobody's")
    stray.with_name(f".{stray.stem}.x.tmp").write_bytes(b"half")


def two_saves(index: Index) -> None:
    save(index, TALK, [120, 399], prefill_s=9.0)
    save(index, NEW, [100], prefill_s=9.0)


def pin_of_a_conversation(index: Index) -> None:
    pin_session(index, PinRequest(session=session_of(index, TALK)))


def gc_down_to_what_is_pinned(index: Index) -> None:
    """With something to delete; what goes was exported before."""
    with Exporter(index, session_of(index, NEW)) as export:
        ARCHIVE[:] = export.read_chunks()
    strays(index)
    assert collect_garbage(index, GcRequest(to_bytes=0), is_saving=False).evicted


def import_of_a_conversation(index: Index) -> None:
    archive = read_archive(BytesIO(b"".join(ARCHIVE)))
    import_archive(index, archive, "", KnownModels(fingerprints={FINGERPRINT}, description=""))


def purge_of_what_another_one_shares(index: Index) -> None:
    """It leaves in the middle of a segment, of which the rest is written anew."""
    (cut,) = purge(index, PurgeRequest(session=session_of(index, TALK))).cuts
    assert (cut.until, cut.end, cut.why_not) == (220, 300, "")


ARCHIVE: list[bytes] = []  # of NEW

STORING: list[Errand] = [
    first_save,
    second_save,
    states_alone,
    branch,
    save_of_little,
    merge,
    bookkeeping,
    save_that_is_given_up,
    eviction_for_a_save,
    quarantine,
    purge_of_a_conversation,
    save_after_it,
    leftovers,
]
UPKEEP: list[Errand] = [
    two_saves,
    pin_of_a_conversation,
    gc_down_to_what_is_pinned,
    import_of_a_conversation,
    branch,
    purge_of_what_another_one_shares,
]
LIVES = {"storing": STORING, "upkeep": UPKEEP}
SPARED = {
    "storing": set(),
    "upkeep": {"first start", "two saves", "branch", "start after a kill"},
}  # the other one is killed there
AT_ONCE = {"import of a conversation", "purge of what another one shares"}  # all of it is stored, or nothing


# ---- what proxy and backend do in a save


def save(index: Index, ids: Sequence[int], checkpoints: Sequence[int], prefill_s: float = 1.0) -> None:
    plan = planned(index, ids, checkpoints)
    reply = write_plan(index.home, plan)
    index.commit_save(plan, reply, prefill_s=prefill_s, session=SessionUpdate(turn_end=len(ids) - 10))


def planned(index: Index, ids: Sequence[int], checkpoints: Sequence[int]) -> SavePlan:
    plan = index.begin_save(SaveIntent(ROOT, FINGERPRINT, pack_tokens(ids), LAYOUT, checkpoints))
    assert plan is not None
    return plan


def write_plan(home: Home, plan: SavePlan) -> SaveReply:
    values = contents(plan.tokens)
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


def contents(tokens: bytes) -> list[bytes]:
    """Content of the row at each position, and of the state after it."""
    values, value = [], b""
    for at in range(0, len(tokens), TOKEN_BYTES):
        value = xxhash.xxh3_64_digest(value + tokens[at : at + TOKEN_BYTES])
        values.append(value)
    return values


def leaf(index: Index, ids: Sequence[int]) -> str:
    return index.match_prefix(ROOT, pack_tokens(ids), len(ids)).chain[-1].id


def session_of(index: Index, ids: Sequence[int]) -> str:
    """The conversation that ends with these tokens."""
    (session,) = [row for row in index.sessions() if row.leaf == leaf(index, ids)]
    return session.id


def stored(index: Index) -> dict[str, int]:
    """Of each text how many tokens are stored."""
    return {name: index.match_prefix(ROOT, pack_tokens(ids), len(ids)).tokens for name, ids in TEXTS.items()}
