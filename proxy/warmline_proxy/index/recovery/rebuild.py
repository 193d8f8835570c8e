"""The tree of segments as their files prove it: each on the parent whose tokens its rows were computed after."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from warmline_common.protocol.tokens import TOKEN_BYTES, Prefix
from warmline_proxy.index.recovery.file_headers import Surveyed
from warmline_proxy.store.tables import first_token, slot


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
    """Grows from the root, in the order of `start`: a segment finds a place only after its parent has."""

    def __init__(self) -> None:
        self.segments: dict[str, Grown] = {}
        self._slots: set[bytes] = set()
        self._proven: dict[tuple[bytes, int], dict[str, str]] = {}  # by root and position, as `_places_at` says

    def grow(self, file: Surveyed) -> str:
        """Place a sound segment; why it has no place, "" where it has."""
        assert file.meta is not None
        meta, parent = file.meta, self._parent(file)
        if meta.parent and parent is None:
            return f"its parent {meta.parent} is not stored"
        if not (_is_within(file, parent) if parent else meta.start == 0):
            return f"starts at {meta.start}, where its parent is not"
        before = parent.until(meta.start) if parent else Prefix(file.root)
        if before.digest != meta.prefix:
            return "was computed after other tokens than are stored before it"
        token = first_token(file.tokens, 0)
        if parent and first_token(parent.tokens, meta.start - parent.start) == token:
            return "begins like the rest of its parent"
        hangs_on = parent.id if parent else ""
        place = slot(file.root, hangs_on, meta.start, token)
        if place in self._slots:
            return "another segment begins alike"
        self._slots.add(place)
        self.segments[file.id] = Grown(file.id, hangs_on, file.root, meta.start, meta.end, file.tokens, before)
        return ""

    def has_named(self, file: Surveyed) -> bool:
        """Whether its parent is the one that it names, or none."""
        assert file.meta is not None
        meta, named = file.meta, self.segments.get(file.meta.parent)
        if named is None:
            return not meta.parent
        return _is_within(file, named) and named.until(meta.start).digest == meta.prefix

    def _parent(self, file: Surveyed) -> Grown | None:
        """The one that it names; else, as that may have been cut, the one with the very tokens before it."""
        assert file.meta is not None
        meta, named = file.meta, self.segments.get(file.meta.parent)
        if self.has_named(file):
            return named
        place = (file.root, meta.start)
        if place not in self._proven:
            self._proven[place] = self._places_at(*place)
        return self.segments.get(self._proven[place].get(meta.prefix, ""), named)

    def _places_at(self, root: bytes, position: int) -> dict[str, str]:
        """The segments in which a position lies, by the digest of all tokens before it: each has others."""
        there = (each for each in self.segments.values() if each.root == root and each.start < position <= each.end)
        return {each.until(position).digest: each.id for each in there}

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


def _is_within(file: Surveyed, parent: Grown) -> bool:
    assert file.meta is not None
    return parent.root == file.root and parent.start < file.meta.start <= parent.end


def _digests(segment: Grown, ascending: list[int]) -> Iterator[tuple[int, str]]:
    """The prefix digests at those of the positions that lie in a segment."""
    prefix = segment.before
    for position in ascending[bisect_right(ascending, segment.start) : bisect_right(ascending, segment.end)]:
        done = prefix.length - segment.start
        prefix = prefix.then(segment.tokens[done * TOKEN_BYTES : (position - segment.start) * TOKEN_BYTES])
        yield position, prefix.digest
