"""View of the residents in the backend's memory.  No I/O; event loop thread.

The backend drops residents on its own: another `generation` says that some are gone, another `boot` that all are.  With
a stale view a generation gets 410; then the view is refreshed and the request is planned again.

What a request costs here does not grow with the residents: they are found by their place among others in the order of
tokens (`prefix_index`), and what the backend is told of them is what has changed.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from warmline_common.protocol.messages import Reply, Resident, ResidentsReply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.planner import ResidentCandidate
from warmline_proxy.upstream.prefix_index import PrefixIndex

EXCLUDED_MAX = 1024
# Candidates of a plan: few are enough, since the first ones share most with the prompt, or are continued by it.
NEAREST_MAX = 4
CONTINUED_MAX = 8


@dataclass(frozen=True)
class ResidentEntry:
    """One resident: packed tokens under a namespace root."""

    root: bytes
    tokens: bytes
    positions: Sequence[int] = ()
    turn_end: int = 0  # end of the prompt's last message; see planner.ResidentCandidate
    turn_tail: bytes = b""  # packed tokens from the resident's end to a later `turn_end`
    durable: bool = False  # all of it is known to be on disk
    head_end: int = 0  # end of system texts and tools, which many conversations share; 0: not known
    serial: int = 0  # place in the order of addition, given by the view

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def sequence(self) -> bytes:
        """Packed tokens up to the end of its turn, with rows or without."""
        return self.tokens + self.turn_tail

    @property
    def continued_prefixes(self) -> Iterator[bytes]:
        """Prefixes that a prompt begins with where it continues the conversation, or can start from a position."""
        sequence = self.sequence
        for end in {*self.positions, self.turn_end or len(self)}:
            yield sequence[: end * TOKEN_BYTES]


@dataclass
class _Namespace:
    """Residents of one root, by what a prompt may share with them."""

    sequences: PrefixIndex = field(default_factory=PrefixIndex)
    continued: PrefixIndex = field(default_factory=PrefixIndex)


@dataclass
class ResidentView:
    """Residents by id.  `boot` is "" until the first reply."""

    boot: str = ""
    generation: int = -1
    revision: int = 0  # of the backend's table, as last listed
    change_count: int = 0  # of this view: equal ones mean equal candidates
    _entries: dict[str, ResidentEntry] = field(default_factory=dict)
    _excluded: deque[str] = field(default_factory=lambda: deque(maxlen=EXCLUDED_MAX))
    _namespaces: defaultdict[bytes, _Namespace] = field(default_factory=lambda: defaultdict(_Namespace))
    _non_durable: dict[str, None] = field(default_factory=dict)
    _unordered: dict[str, None] = field(default_factory=dict)  # durable, and the backend is not told yet
    _serial: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def ids(self) -> frozenset[str]:
        return frozenset(self._entries)

    def is_stale(self, reply: Reply) -> bool:
        """Say whether the backend dropped residents, or is another process, since the last listing."""
        return reply.boot != self.boot or reply.generation > self.generation

    def update(self, listing: ResidentsReply, known_ids: Collection[str]) -> None:
        """Take over a listing: boot, generation, removals and, where it has token ids, unknown residents with a root.

        `known_ids`: the entries when the listing was requested; those that a complete listing lacks are removed, all
        at a new boot.
        """
        if listing.boot != self.boot:
            for name in list(self._entries):
                self.remove(name)
            self.generation = listing.generation
        self.boot, self.generation = listing.boot, max(self.generation, listing.generation)
        self.revision = listing.revision
        is_complete = not listing.since
        gone = set(known_ids).difference(each.id for each in listing.residents) if is_complete else listing.removed
        for name in gone:
            self.remove(name)
        for each in listing.residents:
            if each.ids is not None and self.is_unknown(each):
                self.add(each.id, ResidentEntry(each.root, each.ids, tuple(each.positions), turn_end=each.tokens))

    def clear(self) -> None:
        """Forget all residents: their process is gone.  The next reply shows that the view is stale."""
        for name in list(self._entries):
            self.remove(name)
        self.boot, self.generation, self.revision = "", -1, 0

    def is_unknown(self, resident: Resident) -> bool:
        """True for a listed resident that could be used, and is not in this view."""
        return bool(resident.root) and resident.id not in self._entries and resident.id not in self._excluded

    def add(self, resident: str, entry: ResidentEntry) -> None:
        if not resident or not len(entry):
            return
        self.remove(resident)
        self._serial += 1
        self._entries[resident] = entry = replace(entry, serial=self._serial)
        (self._unordered if entry.durable else self._non_durable)[resident] = None
        namespace = self._namespaces[entry.root]
        namespace.sequences.add(entry.sequence, entry.serial, resident)
        for prefix in entry.continued_prefixes:
            namespace.continued.add(prefix, entry.serial, resident)
        self.change_count += 1

    def get(self, resident: str) -> ResidentEntry | None:
        return self._entries.get(resident)

    def remove(self, resident: str) -> None:
        if (entry := self._entries.pop(resident, None)) is None:
            return
        self._non_durable.pop(resident, None)
        self._unordered.pop(resident, None)
        namespace = self._namespaces[entry.root]
        namespace.sequences.remove(entry.sequence, entry.serial, resident)
        for prefix in entry.continued_prefixes:
            namespace.continued.remove(prefix, entry.serial, resident)
        if not len(namespace.sequences):
            del self._namespaces[entry.root]
        self.change_count += 1

    def exclude(self, resident: str) -> None:
        """Remove a resident and never add it again, though the backend may still list it."""
        self.remove(resident)
        self._excluded.append(resident)

    def mark_durable(self, resident: str) -> None:
        """Record that all of a resident is on disk."""
        if (entry := self._entries.get(resident)) and not entry.durable:
            self._entries[resident] = replace(entry, durable=True)
            del self._non_durable[resident]
            self._unordered[resident] = None
            self.change_count += 1

    def durable_ids(self) -> list[str]:
        """List restorable residents, oldest first, which the backend may drop before the others."""
        return [name for name, entry in self._entries.items() if entry.durable]

    def take_unordered_ids(self) -> list[str]:
        """Durable residents that were not returned before, in the order in which they became durable."""
        names, self._unordered = list(self._unordered), {}
        return names

    def return_unordered_ids(self, names: Sequence[str]) -> None:
        """Return them again, as the backend could not be told."""
        self._unordered = {**dict.fromkeys(name for name in names if name in self._entries), **self._unordered}

    def non_durable_entries(self) -> list[tuple[str, ResidentEntry]]:
        """List residents that are not known to be on disk."""
        return [(name, self._entries[name]) for name in self._non_durable]

    @property
    def non_durable_count(self) -> int:
        return len(self._non_durable)

    def candidates(self, root: bytes, prompt: bytes, common_max: int | None = None) -> list[ResidentCandidate]:
        """List the residents of this namespace that a prompt may start from, oldest first.

        They are those that share most with it, and those whose conversation it continues, or that have a position in
        it, furthest first; tokens are compared.  `common_max`: residents that share more tokens are left out.
        """
        if (namespace := self._namespaces.get(root)) is None:
            return []
        limit = len(prompt) // TOKEN_BYTES if common_max is None else common_max
        nearest = (name for common, name in namespace.sequences.iterate_nearest(prompt) if common <= limit)
        names = dict.fromkeys(islice(nearest, NEAREST_MAX))
        continued = self._iterate_continued(namespace, prompt, limit)
        names.update(dict.fromkeys(islice(continued, CONTINUED_MAX)))
        entries = sorted(((name, self._entries[name]) for name in names), key=lambda item: item[1].serial)
        return [
            ResidentCandidate(
                name,
                len(entry),
                count_common_tokens(entry.sequence, prompt),
                entry.positions,
                entry.turn_end,
                entry.durable,
            )
            for name, entry in entries
        ]

    def _iterate_continued(self, namespace: _Namespace, prompt: bytes, common_max: int) -> Iterator[str]:
        """Yield each once; the prompt's last token is left out, since it is computed in any case."""
        seen = set[str]()
        for _, name in namespace.continued.iterate_prefixes(prompt[:-TOKEN_BYTES]):
            if name not in seen:
                seen.add(name)
                if count_common_tokens(self._entries[name].sequence, prompt) <= common_max:
                    yield name

    def count_shared_tokens(self, root: bytes, tokens: bytes) -> dict[str, int]:
        """Count the leading tokens that each resident of this namespace shares, where it shares any."""
        namespace = self._namespaces.get(root)
        return {name: common for common, name in namespace.sequences.iterate_nearest(tokens)} if namespace else {}
