"""Aggregates of the stored index for the dashboard: tree, subtrees, conversations.  Pure, over a snapshot.

The tree consists of *runs*: consecutive segments without a branch and without a conversation that ends in between. So
its depth is that of the branches, regardless of a conversation's length.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from warmline_proxy.store.rows import IndexSnapshot, SegmentRow, SessionRow


@dataclass(eq=False)
class SegmentRun:
    """Tree node: tokens [start, end) of one or more segments; without segments, a namespace."""

    id: str  # first segment's; of a namespace, the root in hex
    root: str  # hex
    model: str
    start: int = 0
    end: int = 0
    parent: "SegmentRun | None" = None  # None: a namespace
    segments: list[str] = field(default_factory=list)  # ids
    bytes_own: int = 0  # checkpoints included
    checkpoints: int = 0
    hits: int = 0  # maximum over segments
    last_used: float = 0.0
    pinned: bool = False  # all segments
    sessions: list[SessionRow] = field(default_factory=list)  # conversations that end here, last used first
    children: list["SegmentRun"] = field(default_factory=list)  # the heaviest subtree first
    sibling_index: int = 0  # among its siblings
    # Sums over the subtree:
    bytes_below: int = 0
    segments_below: int = 0
    sessions_below: int = 0

    def path_from_root(self) -> list["SegmentRun"]:
        """Runs from the namespace to this one."""
        steps = [self]
        while steps[-1].parent is not None:
            steps.append(steps[-1].parent)
        return steps[::-1]


@dataclass(eq=False)
class ConversationSummary:
    """A session with the totals of its path."""

    row: SessionRow
    bytes_path: int  # all files of its path
    bytes_alone: int  # files of no other conversation
    segments: int
    pinned: bool  # the whole path


@dataclass(eq=False)
class IndexSummary:
    roots: list[SegmentRun]  # the heaviest first
    runs: dict[str, SegmentRun]  # by id
    run_by_segment: dict[str, SegmentRun]  # by segment id
    conversations: dict[str, ConversationSummary]  # by session id


def summarize_index(snapshot: IndexSnapshot) -> IndexSummary:
    """Summarize a snapshot, in time proportional to its size: about 0.1 s for 10,000 segments."""
    maps = _SegmentMaps(snapshot)
    roots, runs, run_by_segment = maps.roots, maps.runs, maps.run_by_segment
    for row in sorted(snapshot.segments.values(), key=lambda row: row.start):  # a parent starts before its children
        run = _find_or_add_run(row, maps)
        _add_segment(run, row, maps)
        run_by_segment[row.id], top = run, roots[run.root]
        top.end, top.last_used = max(top.end, run.end), max(top.last_used, run.last_used)
    for run in [*reversed(runs), *roots.values()]:
        _sum_subtree(run)
    ordered = _order_siblings(roots.values())
    conversations = _summarize_conversations(snapshot, run_by_segment, runs)
    return IndexSummary(ordered, {run.id: run for run in [*ordered, *runs]}, run_by_segment, conversations)


class _SegmentMaps:
    """Lookups by segment, and the runs found so far (parents first)."""

    def __init__(self, snapshot: IndexSnapshot) -> None:
        self.roots: dict[str, SegmentRun] = {}
        self.runs: list[SegmentRun] = []
        self.run_by_segment: dict[str, SegmentRun] = {}
        self.snapshot = snapshot
        self.children: defaultdict[str, list[SegmentRow]] = defaultdict(list)
        self.sessions_by_leaf: defaultdict[str, list[SessionRow]] = defaultdict(list)
        self.bytes_by_segment = {row.id: row.bytes_on_disk for row in snapshot.segments.values()}
        self.checkpoint_counts: defaultdict[str, int] = defaultdict(int)
        for row in snapshot.segments.values():
            self.children[row.parent].append(row)
        for session in snapshot.sessions.values():
            self.sessions_by_leaf[session.leaf].append(session)
        for checkpoint in snapshot.checkpoints.values():
            self.checkpoint_counts[checkpoint.segment] += 1
            if checkpoint.segment in self.bytes_by_segment:
                self.bytes_by_segment[checkpoint.segment] += checkpoint.bytes_on_disk

    def is_same_run(self, parent: SegmentRow, row: SegmentRow) -> bool:
        """True if a segment continues its parent's run."""
        is_only_child = row.start == parent.end and len(self.children[parent.id]) == 1
        return is_only_child and parent.id not in self.sessions_by_leaf


def _find_or_add_run(row: SegmentRow, maps: _SegmentMaps) -> SegmentRun:
    parent_row = maps.snapshot.segments.get(row.parent)
    if parent_row is not None and maps.is_same_run(parent_row, row):
        return maps.run_by_segment[parent_row.id]
    root = row.root.hex()
    top = maps.roots.setdefault(root, SegmentRun(root, root, row.model))
    parent = maps.run_by_segment[parent_row.id] if parent_row else top
    run = SegmentRun(row.id, root, row.model, row.start, parent=parent, pinned=True)
    parent.children.append(run)
    maps.runs.append(run)
    return run


def _add_segment(run: SegmentRun, row: SegmentRow, maps: _SegmentMaps) -> None:
    usage = maps.snapshot.usage.get(row.id)
    run.segments.append(row.id)
    run.end = row.end
    run.bytes_own += maps.bytes_by_segment[row.id]
    run.checkpoints += maps.checkpoint_counts.get(row.id, 0)
    run.hits = max(run.hits, usage.hits if usage else 0)
    run.last_used = max(run.last_used, row.created, usage.last_used if usage else 0.0)
    run.pinned = run.pinned and row.pinned
    run.sessions += sorted(maps.sessions_by_leaf.get(row.id, ()), key=lambda session: -session.last_used)


def _sum_subtree(run: SegmentRun) -> None:
    """Sum a run whose children are summed already."""
    run.children = _order_siblings(run.children)
    run.bytes_below = run.bytes_own + sum(child.bytes_below for child in run.children)
    run.segments_below = len(run.segments) + sum(child.segments_below for child in run.children)
    run.sessions_below = len(run.sessions) + sum(child.sessions_below for child in run.children)


def _order_siblings(runs: Iterable[SegmentRun]) -> list[SegmentRun]:
    ordered = sorted(runs, key=lambda run: (-run.bytes_below, run.id))
    for place, run in enumerate(ordered):
        run.sibling_index = place
    return ordered


def _summarize_conversations(
    snapshot: IndexSnapshot, run_by_segment: dict[str, SegmentRun], runs: Iterable[SegmentRun]
) -> dict[str, ConversationSummary]:
    """Summaries by session id.  A conversation ends at the end of a run, so sums over runs suffice."""
    path: dict[str, tuple[int, int, bool]] = {}  # bytes, segments, all pinned: from the root, by run id
    for run in runs:  # parents first
        size, count, pinned = path.get(run.parent.id, (0, 0, True)) if run.parent else (0, 0, True)
        path[run.id] = (size + run.bytes_own, count + len(run.segments), pinned and run.pinned)
    found = {}
    for row in snapshot.sessions.values():
        leaf = run_by_segment.get(row.leaf)
        size, count, pinned = path[leaf.id] if leaf else (0, 0, False)
        found[row.id] = ConversationSummary(row, size, _sum_exclusive_bytes(leaf), count, pinned)
    return found


def _sum_exclusive_bytes(run: SegmentRun | None) -> int:
    """Bytes from this run up to the first one on another conversation's path."""
    size = 0
    while run is not None and run.sessions_below == 1:
        size += run.bytes_own
        run = run.parent
    return size
