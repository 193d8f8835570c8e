"""View of the residents in the backend's memory.  No I/O; event loop thread.

The backend drops residents on its own: another `generation` says that some are gone, another `boot` that all are.  With
a stale view a generation gets 410; then the view is refreshed and the request is planned again.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from warmline_common.protocol.messages import Reply, ResidentsReply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.planner import ResidentCandidate

EXCLUDED_MAX = 1024


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

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass
class ResidentView:
    """Residents by id.  `boot` is "" until the first reply."""

    boot: str = ""
    generation: int = -1
    _entries: dict[str, ResidentEntry] = field(default_factory=dict)
    _excluded: deque[str] = field(default_factory=lambda: deque(maxlen=EXCLUDED_MAX))

    def ids(self) -> frozenset[str]:
        return frozenset(self._entries)

    def is_stale(self, reply: Reply) -> bool:
        """Say whether the backend dropped residents, or is another process, since the last listing."""
        return reply.boot != self.boot or reply.generation > self.generation

    def update(self, listing: ResidentsReply, known_ids: Collection[str]) -> None:
        """Take over a listing: boot, generation, positions and, where it has token ids, unknown residents with a root.

        `known_ids`: the entries when the listing was requested; those that it lacks are removed, all at a new boot.
        """
        if listing.boot != self.boot:
            self._entries.clear()
            self.generation = listing.generation
        self.boot, self.generation = listing.boot, max(self.generation, listing.generation)
        for name in set(known_ids).difference(each.id for each in listing.residents):
            self.remove(name)
        for each in listing.residents:
            if (entry := self._entries.get(each.id)) and each.id in known_ids:
                self._entries[each.id] = replace(entry, positions=tuple(each.positions))
            elif entry is None and each.id not in self._excluded and each.root and each.ids is not None:
                self.add(each.id, ResidentEntry(each.root, each.ids, tuple(each.positions), turn_end=each.tokens))

    def add(self, resident: str, entry: ResidentEntry) -> None:
        if resident and len(entry):
            self._entries[resident] = entry

    def get(self, resident: str) -> ResidentEntry | None:
        return self._entries.get(resident)

    def remove(self, resident: str) -> None:
        self._entries.pop(resident, None)

    def exclude(self, resident: str) -> None:
        """Remove a resident and never add it again, though the backend may still list it."""
        self.remove(resident)
        self._excluded.append(resident)

    def mark_durable(self, resident: str) -> None:
        """Record that all of a resident is on disk."""
        if entry := self._entries.get(resident):
            self._entries[resident] = replace(entry, durable=True)

    def durable_ids(self) -> list[str]:
        """List restorable residents, oldest first, which the backend may drop before the others."""
        return [name for name, entry in self._entries.items() if entry.durable]

    def non_durable_entries(self) -> list[tuple[str, ResidentEntry]]:
        """List residents that are not known to be on disk."""
        return [(name, entry) for name, entry in self._entries.items() if not entry.durable]

    def candidates(self, root: bytes, prompt: bytes) -> list[ResidentCandidate]:
        """List residents of this namespace that share a prefix with the packed prompt, token by token."""
        found = []
        for name, entry in self._entries.items():
            if entry.root == root and (common := count_common_tokens(entry.tokens, prompt)):
                if entry.turn_tail and common == len(entry):
                    common += count_common_tokens(entry.turn_tail, prompt[len(entry.tokens) :])
                resident = ResidentCandidate(name, len(entry), common, entry.positions, entry.turn_end, entry.durable)
                found.append(resident)
        return found
