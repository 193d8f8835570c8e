"""Index aggregates: runs, subtrees, shared bytes; and request history."""

import pytest

from warmline_proxy.dashboard.aggregates import IndexSummary, summarize_index
from warmline_proxy.dashboard.history import BUCKETS_MAX, DAY_S, HOUR_S, MINUTE_S, build_history
from warmline_proxy.store.rows import CheckpointRow, FileUsage, IndexSnapshot, RequestRecord, SegmentRow, SessionRow

ROOT, OTHER = bytes(16), bytes([1]) * 16
NOW = 1_700_000_000.0


def make_segment(
    name: str, parent: str, start: int, end: int, size: int, root: bytes = ROOT, **more: object
) -> SegmentRow:
    row = SegmentRow(id=name, parent=parent, root=root, model="m", start=start, end=end, bytes_on_disk=size)
    for field, value in more.items():
        setattr(row, field, value)
    return row


def make_session(name: str, leaf: str, used: float = 0.0) -> SessionRow:
    return SessionRow(
        id=name,
        root=ROOT,
        model="m",
        leaf=leaf,
        tokens=1,
        turn_end=1,
        turn_digest=bytes(16),
        turn_segment="",
        created=0.0,
        last_used=used,
    )


def summarize(segments: list[SegmentRow], sessions: list[SessionRow], **more: dict[str, object]) -> IndexSummary:
    parts = {"checkpoints": {}, "quarantined": {}, "usage": {}, **more}
    named = {row.id: row for row in segments}
    return summarize_index(IndexSnapshot(segments=named, sessions={row.id: row for row in sessions}, **parts))  # type: ignore[arg-type]


def test_run_extends_to_branch() -> None:
    found = summarize(
        [
            make_segment("a", "", 0, 10, 1),
            make_segment("b", "a", 10, 20, 2),
            make_segment("c", "b", 20, 30, 4),
            make_segment("d", "b", 15, 40, 8),
            make_segment("e", "d", 40, 50, 16),
        ],
        [make_session("long", "e"), make_session("short", "c")],
    )
    (root,) = found.roots
    (stem,) = root.children
    assert (stem.id, stem.segments, stem.start, stem.end, stem.bytes_own) == ("a", ["a", "b"], 0, 20, 3)
    assert [(run.id, run.segments, run.start, run.bytes_below) for run in stem.children] == [
        ("d", ["d", "e"], 15, 24),
        ("c", ["c"], 20, 4),
    ], "the heaviest first"
    assert (root.bytes_below, root.segments_below, root.sessions_below, root.end) == (31, 5, 2, 50)
    assert found.run_by_segment["e"].path_from_root() == [root, stem, stem.children[0]]
    assert [run.sibling_index for run in stem.children] == [0, 1]


def test_run_ends_at_session_leaf_and_early_branch() -> None:
    ended = summarize(
        [make_segment("a", "", 0, 10, 1), make_segment("b", "a", 10, 20, 1)],
        [make_session("old", "a", 1), make_session("new", "a", 2)],
    )
    (run,) = ended.roots[0].children
    assert run.segments == ["a"] and [row.id for row in run.sessions] == ["new", "old"]
    early = summarize([make_segment("a", "", 0, 10, 1), make_segment("b", "a", 5, 20, 1)], [])
    assert early.roots[0].children[0].segments == ["a"]


def test_shared_and_exclusive_bytes() -> None:
    found = summarize(
        [
            make_segment("a", "", 0, 10, 100),
            make_segment("b", "a", 10, 20, 20),
            make_segment("c", "a", 10, 20, 3, pinned=True),
        ],
        [
            make_session("one", "b"),
            make_session("two", "c"),
            make_session("inner", "a"),
            make_session("lost", "nowhere"),
        ],
        checkpoints={"k": CheckpointRow(id="k", segment="b", position=12, bytes_on_disk=7)},
    )
    one, two, inner = (found.conversations[name] for name in ("one", "two", "inner"))
    assert (one.bytes_path, one.bytes_alone, one.segments) == (127, 27, 2)
    assert (two.bytes_path, two.bytes_alone, two.pinned) == (103, 3, False)
    assert (inner.bytes_path, inner.bytes_alone) == (100, 0)
    assert found.conversations["lost"].bytes_path == 0


def test_run_hits_and_pinned() -> None:
    segments = [make_segment("a", "", 0, 10, 1, pinned=True), make_segment("b", "a", 10, 20, 1, created=7.0)]
    found = summarize(segments, [], usage={"a": FileUsage(hits=3, last_used=5.0), "b": FileUsage(hits=9)})
    run = found.runs["a"]
    assert (run.hits, run.last_used, run.pinned) == (9, 7.0, False)


def test_namespaces_and_orphan_segments() -> None:
    found = summarize([make_segment("a", "", 0, 1, 1), make_segment("b", "gone", 5, 9, 50, root=OTHER)], [])
    assert [(root.root, root.bytes_below) for root in found.roots] == [(OTHER.hex(), 50), (ROOT.hex(), 1)]


def test_long_chain_is_one_run() -> None:
    count = 5000
    chain = [make_segment(str(at), str(at - 1) if at else "", at, at + 1, 1) for at in range(count)]
    found = summarize(chain, [make_session("s", str(count - 1))])
    assert len(found.runs) == 2 and found.conversations["s"].segments == count


def make_record(at: float, prompt: int = 10, cached: int = 0, ttft_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        id="r",
        at=at,
        endpoint="chat",
        client_model="m",
        outcome="ok",
        source="cold",
        prompt_tokens=prompt,
        cached_tokens=cached,
        ttft_s=ttft_s,
    )


@pytest.mark.parametrize(
    ("span_s", "width_s"),
    [
        (0, MINUTE_S),
        (40 * MINUTE_S, MINUTE_S),
        (3 * HOUR_S, 5 * MINUTE_S),
        (20 * DAY_S, 12 * HOUR_S),
        (30_000 * DAY_S, 30 * DAY_S),
    ],
)
def test_bucket_width(span_s: int, width_s: int) -> None:
    found = build_history([make_record(NOW), make_record(NOW - span_s)], NOW)
    assert found.width_s == width_s and 1 <= len(found.buckets) <= BUCKETS_MAX
    assert sum(bucket.requests for bucket in found.buckets) == found.requests == 2
    starts = [bucket.at for bucket in found.buckets]
    assert starts == [starts[0] + number * width_s for number in range(len(starts))] and starts[-1] <= NOW
    assert all(start % width_s == 0 for start in starts)


def test_history_reuse_and_ttft() -> None:
    records = [
        make_record(NOW, 100, 0, ttft_s=4.0),
        make_record(NOW, 100, 80, ttft_s=0.1),
        make_record(NOW, 200, 160, ttft_s=0.3),
        make_record(NOW, 100, 5, ttft_s=6.0),  # shares a template's first words only
        make_record(NOW, 40, 38, ttft_s=0.01),  # short and reused: neither hit nor cold
    ]
    found = build_history(records, NOW)
    assert (found.hits, found.prompt_tokens, found.cached_tokens) == (2, 540, 283)
    assert (found.ttft_warm_s, found.ttft_cold_s) == (0.2, 5.0)


def test_history_empty_and_future() -> None:
    assert build_history([], NOW).requests == 0 and len(build_history([], NOW).buckets) == 1
    assert build_history([make_record(NOW + DAY_S)], NOW).buckets[-1].requests == 1
