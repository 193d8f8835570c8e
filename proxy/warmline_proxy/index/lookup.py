"""Lookup of the longest stored prefix: a hash finds the deepest block, then tokens are compared to the last one."""

from dataclasses import dataclass, field
from itertools import pairwise

from warmline_common.protocol.messages import CheckpointRef, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES, chain_hashes, count_common_tokens
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, PrefixMatch, SegmentRow
from warmline_proxy.store.tables import Tables, token_at

BRANCHES_MAX = 32  # in one place that are looked at


@dataclass
class PathStep:
    """One segment of a path, followed up to `upto`."""

    row: SegmentRow
    upto: int


@dataclass
class LookupPath:
    """A path from the root whose tokens were all compared."""

    steps: list[PathStep] = field(default_factory=list)

    @property
    def matched_tokens(self) -> int:
        return self.steps[-1].upto if self.steps else 0

    @property
    def leaf(self) -> str:
        return self.steps[-1].row.id if self.steps else ""

    def step_at(self, position: int) -> PathStep | None:
        """The step in which `position` lies (start < position <= upto)."""
        return next((step for step in self.steps if step.row.start < position <= step.upto), None)


def lookup_path(tables: Tables, root: bytes, tokens: bytes, limit: int) -> LookupPath:
    """Follow packed `tokens` as far as they are stored, at most `limit` of them."""
    limit = min(limit, len(tokens) // TOKEN_BYTES)
    rows = segment_path(tables, _find_deepest_segment(tables, root, tokens, limit))
    steps = _verify_path(tables, rows, tokens, limit) if rows and rows[0].root == root else []
    _extend_path(tables, root, tokens, limit, steps)
    return LookupPath(steps)


def match_prefix(tables: Tables, root: bytes, tokens: bytes, limit: int) -> PrefixMatch:
    limit = min(limit, len(tokens) // TOKEN_BYTES)
    path = lookup_path(tables, root, tokens, limit)
    steps = path.steps
    rows = [row for step in steps for row in tables.checkpoints(step.row.id) if row.position <= step.upto]
    reason, is_divergent = _explain_end(tables, root, tokens, limit, path)
    segment_id, stored_tokens = _read_diverging_tokens(tables, root, path) if is_divergent else ("", b"")
    return PrefixMatch(
        tokens=path.matched_tokens,
        chain=[SegmentRef(id=s.row.id, start=s.row.start, end=s.row.end, upto=s.upto) for s in steps],
        checkpoints=[CheckpointRef(id=row.id, position=row.position) for row in rows],
        end_reason=reason,
        is_divergent=is_divergent,
        divergent_tokens=stored_tokens,
        divergent_segment=segment_id,
    )


def tokens_from(tables: Tables, segment_id: str, at: int, count: int) -> bytes:
    """Packed tokens from `at` in this segment on, and below it along the youngest branch; at most `count`."""
    parts, row = list[bytes](), tables.segment(segment_id)
    while row is not None and count > 0 and at < row.end:
        part = tables.tokens(row.id)[(at - row.start) * TOKEN_BYTES :][: count * TOKEN_BYTES]
        parts.append(part)
        at, count = row.end, count - len(part) // TOKEN_BYTES
        row = _find_youngest_child(tables, row.root, row.id, at)
    return b"".join(parts)


def segment_path(tables: Tables, segment_id: str) -> list[SegmentRow]:
    """Rows from the root to this segment; [] where a link is missing."""
    rows: list[SegmentRow] = []
    while segment_id:
        row = tables.segment(segment_id)
        if row is None or (rows and row.start >= rows[-1].start):
            return []
        rows.append(row)
        segment_id = row.parent
    return rows[::-1]


def path_tokens(tables: Tables, segment_id: str) -> bytes:
    """Packed tokens of the path to the end of this segment; b"" where a link is missing."""
    spans = _list_spans(segment_path(tables, segment_id))
    return b"".join(tables.tokens(row.id)[: (end - row.start) * TOKEN_BYTES] for row, end in spans)


def _list_spans(rows: list[SegmentRow]) -> list[tuple[SegmentRow, int]]:
    """The segments of a path, each with the position where the next one leaves it, or its end."""
    return [(row, child.start) for row, child in pairwise(rows)] + [(row, row.end) for row in rows[-1:]]


def _read_diverging_tokens(tables: Tables, root: bytes, path: LookupPath) -> tuple[str, bytes]:
    """(segment, its tokens from there on) where a prompt differs from the stored tokens."""
    at = path.matched_tokens
    branches = [_find_youngest_child(tables, root, path.leaf, at)]
    if path.steps and at < path.steps[-1].row.end:
        branches.append(path.steps[-1].row)
    row = max(filter(None, branches), key=lambda each: each.created, default=None)
    return (row.id, tokens_from(tables, row.id, at, DIVERGENCE_TOKENS_AFTER)) if row else ("", b"")


def _find_youngest_child(tables: Tables, root: bytes, parent: str, at: int) -> SegmentRow | None:
    """The youngest child that leaves a segment at a position; of very many, of some."""
    rows = (tables.segment(child) for child in tables.children(root, parent, at)[:BRANCHES_MAX])
    return max(filter(None, rows), key=lambda row: row.created, default=None)


def _find_deepest_segment(tables: Tables, root: bytes, tokens: bytes, limit: int) -> str:
    """The segment of the deepest stored block: all blocks before a stored one are stored, so bisection finds it."""
    hashes = chain_hashes(root, tokens[: limit * TOKEN_BYTES])
    low, high, found = 0, len(hashes), ""
    while low < high:
        middle = (low + high) // 2
        if segment_id := tables.block_segment(hashes[middle]):
            low, found = middle + 1, segment_id
        else:
            high = middle
    return found


def _verify_path(tables: Tables, rows: list[SegmentRow], tokens: bytes, limit: int) -> list[PathStep]:
    """As much of a path as has these tokens: an equal hash of other tokens only makes it shorter."""
    steps: list[PathStep] = []
    for row, until in _list_spans(rows):
        reached = _compare_tokens(tables, row, tokens, row.start, min(until, limit))
        if reached > row.start:
            steps.append(PathStep(row, reached))
        if reached < until:
            break
    return steps


def _extend_path(tables: Tables, root: bytes, tokens: bytes, limit: int, steps: list[PathStep]) -> None:
    """Go on from the last step: to its end, then to the child that starts there, and so on."""
    while True:
        if steps:
            last = steps[-1]
            last.upto = _compare_tokens(tables, last.row, tokens, last.upto, limit)
        at, parent = (steps[-1].upto, steps[-1].row.id) if steps else (0, "")
        if at >= limit:
            return
        child = tables.segment(tables.child(root, parent, at, token_at(tokens, at)))
        if child is None:
            return
        steps.append(PathStep(child, at))


def _compare_tokens(tables: Tables, row: SegmentRow, tokens: bytes, at: int, until: int) -> int:
    """First position from `at` on where `tokens` differ from this segment, at most `until` or its end."""
    until = min(until, row.end)
    if at >= until:
        return at
    stored = tables.tokens(row.id)[(at - row.start) * TOKEN_BYTES : (until - row.start) * TOKEN_BYTES]
    return at + count_common_tokens(stored, tokens[at * TOKEN_BYTES : until * TOKEN_BYTES])


def _explain_end(tables: Tables, root: bytes, tokens: bytes, limit: int, path: LookupPath) -> tuple[str, bool]:
    """Reason why a path is no longer, and whether that is a difference."""
    at = path.matched_tokens
    if at >= limit:
        return "all of it", False
    if reason := tables.removal_reason(root, path.leaf, at, token_at(tokens, at)):
        return f"{reason} after token {at}", False
    if not path.steps and not tables.children(root, "", 0):
        return "nothing stored", False
    if not path.steps or at < path.steps[-1].row.end or tables.children(root, path.leaf, at):
        return f"differs from what is stored at token {at}", True
    return f"stored up to token {at}", False
