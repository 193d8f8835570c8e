"""Tree of segments rebuilt from their files: each on the parent whose tokens its rows were computed after."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from warmline_common.protocol.tokens import TOKEN_BYTES, PrefixHash
from warmline_proxy.index.recovery.file_headers import ValidFile
from warmline_proxy.store.tables import encode_child_key, token_at


@dataclass(frozen=True)
class RebuiltSegment:
    """A segment in its place."""

    id: str
    parent: str
    root: bytes
    start: int
    end: int
    tokens: bytes
    prefix: PrefixHash  # all tokens of its path before `start`

    @property
    def hashes(self) -> Sequence[bytes]:
        """Its chain hashes."""
        return self.prefix.extend_with_hashes(self.tokens)[1]

    def prefix_at(self, position: int) -> PrefixHash:
        """All tokens of its path before a position in it."""
        return self.prefix.extend(self.tokens[: (position - self.start) * TOKEN_BYTES])


class RebuiltTree:
    """Grows from the root, in the order of `start`: a segment is placed only after its parent."""

    def __init__(self) -> None:
        self.segments: dict[str, RebuiltSegment] = {}
        self._child_keys: set[bytes] = set()
        self._digest_index: dict[tuple[bytes, int], dict[str, str]] = {}  # by root and position, from `_index_digests`

    def add_segment(self, file: ValidFile) -> str:
        """Place a sound segment; returns the reason why it has no place, or ""."""
        meta, parent = file.meta, self._find_parent(file)
        if meta.parent and parent is None:
            return f"its parent {meta.parent} is not stored"
        if not (_is_within(file, parent) if parent else meta.start == 0):
            return f"starts at {meta.start}, where its parent is not"
        before = parent.prefix_at(meta.start) if parent else PrefixHash(file.root)
        if before.digest != meta.prefix:
            return "was computed after other tokens than are stored before it"
        token = token_at(file.tokens, 0)
        if parent and token_at(parent.tokens, meta.start - parent.start) == token:
            return "begins like the rest of its parent"
        base = parent.id if parent else ""
        key = encode_child_key(file.root, base, meta.start, token)
        if key in self._child_keys:
            return "another segment begins alike"
        self._child_keys.add(key)
        self.segments[file.id] = RebuiltSegment(file.id, base, file.root, meta.start, meta.end, file.tokens, before)
        return ""

    def has_named_parent(self, file: ValidFile) -> bool:
        """True where the file's parent is the one that its header names, or none."""
        meta, named = file.meta, self.segments.get(file.meta.parent)
        if named is None:
            return not meta.parent
        return _is_within(file, named) and named.prefix_at(meta.start).digest == meta.prefix

    def _find_parent(self, file: ValidFile) -> RebuiltSegment | None:
        """The parent that a file names; else, as that may have been cut, the segment with the very tokens before it."""
        meta, named = file.meta, self.segments.get(file.meta.parent)
        if self.has_named_parent(file):
            return named
        place = (file.root, meta.start)
        if place not in self._digest_index:
            self._digest_index[place] = self._index_digests(*place)
        return self.segments.get(self._digest_index[place].get(meta.prefix, ""), named)

    def _index_digests(self, root: bytes, position: int) -> dict[str, str]:
        """The segments in which a position lies, by the digest of all tokens before it, which differ."""
        found = (each for each in self.segments.values() if each.root == root and each.start < position <= each.end)
        return {each.prefix_at(position).digest: each.id for each in found}

    def leaves(self) -> list[RebuiltSegment]:
        parents = {segment.parent for segment in self.segments.values()}
        return [segment for segment in self.segments.values() if segment.id not in parents]

    def find_on_path(self, segment_id: str, position: int) -> RebuiltSegment | None:
        """The segment on this segment's path in which a position lies."""
        while segment := self.segments.get(segment_id):
            if segment.start < position:
                return segment
            segment_id = segment.parent
        return None

    def find_places(self, positions_by_root: Iterable[tuple[bytes, int]]) -> dict[tuple[bytes, int, str], str]:
        """Segments by (root, position, prefix digest there), for positions by their root."""
        positions: dict[bytes, set[int]] = defaultdict(set)
        for root, position in positions_by_root:
            positions[root].add(position)
        ascending = {root: sorted(found) for root, found in positions.items()}
        return {
            (segment.root, position, digest): segment.id
            for segment in self.segments.values()
            for position, digest in _prefix_digests(segment, ascending.get(segment.root, []))
        }


def _is_within(file: ValidFile, parent: RebuiltSegment) -> bool:
    return parent.root == file.root and parent.start < file.meta.start <= parent.end


def _prefix_digests(segment: RebuiltSegment, ascending: list[int]) -> Iterator[tuple[int, str]]:
    """The prefix digests at those of the positions that lie in a segment."""
    prefix = segment.prefix
    for position in ascending[bisect_right(ascending, segment.start) : bisect_right(ascending, segment.end)]:
        done = prefix.length - segment.start
        prefix = prefix.extend(segment.tokens[done * TOKEN_BYTES : (position - segment.start) * TOKEN_BYTES])
        yield position, prefix.digest
