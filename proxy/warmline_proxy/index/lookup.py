"""Finding the longest stored prefix: a hash finds the deepest block, equality decides, a walk goes on to the token."""

from dataclasses import dataclass, field

from warmline_common.protocol.messages import CheckpointRef, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES, chain_hashes, common_prefix
from warmline_proxy.store.rows import AFTER_TOKENS, Match, SegmentRow
from warmline_proxy.store.tables import Tables, first_token

BRANCHES_MAX = 32  # in one place that are looked at


@dataclass
class Step:
    """One segment of a path, followed up to `upto`."""

    row: SegmentRow
    upto: int


@dataclass
class Walk:
    """A path from the root whose tokens were all compared; `matched` is where it ends."""

    steps: list[Step] = field(default_factory=list)

    @property
    def matched(self) -> int:
        return self.steps[-1].upto if self.steps else 0

    @property
    def leaf(self) -> str:
        return self.steps[-1].row.id if self.steps else ""

    def step_at(self, position: int) -> Step | None:
        """The one in which `position` lies (start < position <= upto)."""
        return next((step for step in self.steps if step.row.start < position <= step.upto), None)


def walk(tables: Tables, root: bytes, tokens: bytes, limit: int) -> Walk:
    """Follow packed `tokens` as far as they are stored, at most `limit` of them."""
    limit = min(limit, len(tokens) // TOKEN_BYTES)
    found = Walk(_verified(tables, _climb(tables, root, _deepest(tables, root, tokens, limit)), tokens, limit))
    _descend(tables, root, tokens, limit, found.steps)
    return found


def match(tables: Tables, root: bytes, tokens: bytes, limit: int) -> Match:
    limit = min(limit, len(tokens) // TOKEN_BYTES)
    found = walk(tables, root, tokens, limit)
    steps = found.steps
    checkpoints = [
        CheckpointRef(id=row.id, position=row.position)
        for step in steps
        for row in tables.checkpoints(step.row.id)
        if row.position <= step.upto
    ]
    why, differs = _why(tables, root, tokens, limit, found)
    beside_in, beside = _beside(tables, root, found) if differs else ("", b"")
    return Match(
        tokens=found.matched,
        chain=[SegmentRef(id=s.row.id, start=s.row.start, end=s.row.end, upto=s.upto) for s in steps],
        checkpoints=checkpoints,
        why=why,
        differs=differs,
        beside=beside,
        beside_in=beside_in,
    )


def tokens_from(tables: Tables, segment_id: str, at: int, count: int) -> bytes:
    """Packed, from `at` in this segment on, and below it along the youngest branch; at most `count`."""
    parts, row = list[bytes](), tables.segment(segment_id)
    while row is not None and count > 0 and at < row.end:
        part = tables.tokens(row.id)[(at - row.start) * TOKEN_BYTES :][: count * TOKEN_BYTES]
        parts.append(part)
        at, count = row.end, count - len(part) // TOKEN_BYTES
        row = _youngest(tables, row.root, row.id, at)
    return b"".join(parts)


def path(tables: Tables, segment_id: str) -> list[SegmentRow]:
    """From the root to this segment; [] where a link is missing."""
    rows: list[SegmentRow] = []
    while segment_id:
        row = tables.segment(segment_id)
        if row is None or (rows and row.start >= rows[-1].start):
            return []
        rows.append(row)
        segment_id = row.parent
    return rows[::-1]


def tokens_to(tables: Tables, segment_id: str) -> bytes:
    """Packed, of the path to the end of this segment; b"" where a link is missing."""
    rows = path(tables, segment_id)
    leaves_at = [row.start for row in rows[1:]] + [row.end for row in rows[-1:]]
    return b"".join(
        tables.tokens(row.id)[: (until - row.start) * TOKEN_BYTES] for row, until in zip(rows, leaves_at, strict=True)
    )


def _beside(tables: Tables, root: bytes, found: Walk) -> tuple[str, bytes]:
    """What is stored where a prompt differs: the segment and its tokens from there on."""
    at = found.matched
    branches = [_youngest(tables, root, found.leaf, at)]
    if found.steps and at < found.steps[-1].row.end:
        branches.append(found.steps[-1].row)
    row = max(filter(None, branches), key=lambda each: each.created, default=None)
    return (row.id, tokens_from(tables, row.id, at, AFTER_TOKENS)) if row else ("", b"")


def _youngest(tables: Tables, root: bytes, parent: str, at: int) -> SegmentRow | None:
    """Of the children that leave there; of very many, of some."""
    rows = (tables.segment(child) for child in tables.children(root, parent, at)[:BRANCHES_MAX])
    return max(filter(None, rows), key=lambda row: row.created, default=None)


def _deepest(tables: Tables, root: bytes, tokens: bytes, limit: int) -> str:
    """The segment of the deepest stored block: all blocks before a stored one are stored, so bisection finds it."""
    hashes = chain_hashes(root, tokens[: limit * TOKEN_BYTES])
    low, high, found = 0, len(hashes), ""
    while low < high:
        middle = (low + high) // 2
        if segment_id := tables.block(hashes[middle]):
            low, found = middle + 1, segment_id
        else:
            high = middle
    return found


def _climb(tables: Tables, root: bytes, segment_id: str) -> list[SegmentRow]:
    rows = path(tables, segment_id)
    return rows if rows and rows[0].root == root else []


def _verified(tables: Tables, rows: list[SegmentRow], tokens: bytes, limit: int) -> list[Step]:
    """As much of a path as has these tokens; a hash that lied only makes it shorter."""
    steps: list[Step] = []
    leaves_at = [row.start for row in rows[1:]] + [row.end for row in rows[-1:]]
    for row, until in zip(rows, leaves_at, strict=True):
        reached = _compare(tables, row, tokens, row.start, min(until, limit))
        if reached > row.start:
            steps.append(Step(row, reached))
        if reached < until:
            break
    return steps


def _descend(tables: Tables, root: bytes, tokens: bytes, limit: int, steps: list[Step]) -> None:
    """Go on from the last step: to its end, then to the child that starts where it is left, and so on."""
    while True:
        if steps:
            last = steps[-1]
            last.upto = _compare(tables, last.row, tokens, last.upto, limit)
        at, parent = (steps[-1].upto, steps[-1].row.id) if steps else (0, "")
        if at >= limit:
            return
        child = tables.segment(tables.child(root, parent, at, first_token(tokens, at)))
        if child is None:
            return
        steps.append(Step(child, at))


def _compare(tables: Tables, row: SegmentRow, tokens: bytes, at: int, until: int) -> int:
    """The first position from `at` on where `tokens` leave this segment, at most `until` or its end."""
    until = min(until, row.end)
    if at >= until:
        return at
    stored = tables.tokens(row.id)[(at - row.start) * TOKEN_BYTES : (until - row.start) * TOKEN_BYTES]
    return at + common_prefix(stored, tokens[at * TOKEN_BYTES : until * TOKEN_BYTES])


def _why(tables: Tables, root: bytes, tokens: bytes, limit: int, found: Walk) -> tuple[str, bool]:
    """Why it is no longer, and whether that is a difference."""
    at = found.matched
    if at >= limit:
        return "all of it", False
    if gone := tables.gone(root, found.leaf, at, first_token(tokens, at)):
        return f"{gone} after token {at}", False
    if not found.steps and not tables.children(root, "", 0):
        return "nothing stored", False
    if not found.steps or at < found.steps[-1].row.end or tables.children(root, found.leaf, at):
        return f"differs from what is stored at token {at}", True
    return f"stored up to token {at}", False
