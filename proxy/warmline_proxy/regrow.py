"""The tree of segments as their files prove it: each on the parent whose tokens its rows were computed after."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from warmline_proxy.index_survey import Surveyed
from warmline_proxy.index_tables import first_token, slot
from warmline_wire.keys import TOKEN_BYTES, Prefix


@dataclass(frozen=True)
class Grown:
    """A segment in its place."""

    id: str
    parent: str
    root: bytes
    start: int
    end: int
    tokens: bytes
    before: Prefix  # all tokens of its path before `start`

    @property
    def hashes(self) -> Sequence[bytes]:
        """Its chain hashes."""
        return self.before.with_hashes(self.tokens)[1]

    def until(self, position: int) -> Prefix:
        """All tokens of its path before a position in it."""
        return self.before.then(self.tokens[: (position - self.start) * TOKEN_BYTES])


class Tree:
    """Grows from the root: a segment finds a place only after its parent has."""

    def __init__(self) -> None:
        self.segments: dict[str, Grown] = {}
        self._slots: set[bytes] = set()

    def grow(self, file: Surveyed) -> str:
        """Place a sound segment; why it has no place, "" where it has."""
        assert file.meta is not None
        meta, parent = file.meta, self.segments.get(file.meta.parent)
        if meta.parent and parent is None:
            return f"its parent {meta.parent} is not stored"
        if parent is None:
            fits, before = meta.start == 0, Prefix(file.root)
        else:
            fits = parent.root == file.root and parent.start < meta.start <= parent.end
            before = parent.until(meta.start) if fits else parent.before
        if not fits:
            return f"starts at {meta.start}, where its parent is not"
        if before.digest != meta.prefix:
            return "was computed after other tokens than are stored before it"
        token = first_token(file.tokens, 0)
        if parent and first_token(parent.tokens, meta.start - parent.start) == token:
            return "begins like the rest of its parent"
        place = slot(file.root, meta.parent, meta.start, token)
        if place in self._slots:
            return "another segment begins alike"
        self._slots.add(place)
        self.segments[file.id] = Grown(file.id, meta.parent, file.root, meta.start, meta.end, file.tokens, before)
        return ""

    def leaves(self) -> list[Grown]:
        parents = {segment.parent for segment in self.segments.values()}
        return [segment for segment in self.segments.values() if segment.id not in parents]

    def on_path(self, segment_id: str, position: int) -> Grown | None:
        """The segment of this one's path in which a position lies."""
        while segment := self.segments.get(segment_id):
            if segment.start < position:
                return segment
            segment_id = segment.parent
        return None

    def places(self, wanted: Iterable[tuple[bytes, int]]) -> dict[tuple[bytes, int, str], str]:
        """Segments by (root, position, prefix digest there), for positions that are `wanted` of a root."""
        positions: dict[bytes, set[int]] = defaultdict(set)
        for root, position in wanted:
            positions[root].add(position)
        ascending = {root: sorted(found) for root, found in positions.items()}
        return {
            (segment.root, position, digest): segment.id
            for segment in self.segments.values()
            for position, digest in _digests(segment, ascending.get(segment.root, []))
        }


def _digests(segment: Grown, ascending: list[int]) -> Iterator[tuple[int, str]]:
    """The prefix digests at those of the positions that lie in a segment."""
    prefix = segment.before
    for position in ascending[bisect_right(ascending, segment.start) : bisect_right(ascending, segment.end)]:
        done = prefix.length - segment.start
        prefix = prefix.then(segment.tokens[done * TOKEN_BYTES : (position - segment.start) * TOKEN_BYTES])
        yield position, prefix.digest
