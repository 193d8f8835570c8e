"""What the proxy knows of the backend's memory.  No I/O; owned by the event loop.

The backend drops residents on its own; `generation` tells that some went, `boot` that all did.  The mirror may be
behind for a moment; then a generation answers 410, the mirror is refreshed, and the request is planned again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from warmline_common.protocol.messages import Reply, Resident
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.planner import ResidentCandidate

EXCLUDED_MAX = 1024


@dataclass(frozen=True)
class ResidentEntry:
    """One resident: packed tokens under a namespace root."""

    root: bytes
    tokens: bytes
    positions: Sequence[int] = ()
    turn_end: int = 0  # where the last message of its prompt ends; see plan.Candidate
    turn_tail: bytes = b""  # packed tokens from its end to `turn_end`, where that lies further
    durable: bool = False  # known to be on disk, all of it
    head_end: int = 0  # where system texts and tools end, which are many conversations' alike; 0: not known

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
        """Whether the backend dropped residents, or is another process, since the mirror last looked."""
        return reply.boot != self.boot or reply.generation > self.generation

    def update_generation(self, reply: Reply) -> None:
        """The mirror now agrees with this reply.  Another boot: nothing that was held is there any more."""
        if reply.boot != self.boot:
            self._entries.clear()
            self.generation = reply.generation
        self.boot, self.generation = reply.boot, max(self.generation, reply.generation)

    def add(self, resident: str, entry: ResidentEntry) -> None:
        if resident and len(entry):
            self._entries[resident] = entry

    def add_listed(self, residents: Iterable[Resident]) -> None:
        """Adopt what a listing with ids shows and the mirror didn't know; what doesn't say whose it is, is nobody's."""
        for each in residents:
            if each.root and each.ids is not None and each.id not in self._entries and each.id not in self._excluded:
                self.add(each.id, ResidentEntry(each.root, each.ids, tuple(each.positions), turn_end=each.tokens))

    def get(self, resident: str) -> ResidentEntry | None:
        return self._entries.get(resident)

    def remove(self, resident: str) -> None:
        self._entries.pop(resident, None)

    def exclude(self, resident: str) -> None:
        """Drop it for good: nobody is to start from it, though the backend may still have it and list it."""
        self.remove(resident)
        self._excluded.append(resident)

    def prune(self, listed: Iterable[Resident], known_ids: Collection[str]) -> None:
        """Forget those of `among` (what was known when the listing was asked for) that it lacks; learn the positions
        of the others.
        """
        alive = {each.id: tuple(each.positions) for each in listed}
        for name in known_ids:
            if name not in alive:
                self.remove(name)
            elif held := self._entries.get(name):
                self._entries[name] = replace(held, positions=alive[name])

    def mark_durable(self, resident: str) -> None:
        """All of it is on disk."""
        if held := self._entries.get(resident):
            self._entries[resident] = replace(held, durable=True)

    def durable_ids(self) -> list[str]:
        """Those that could be restored, oldest first: what the backend may give up before what exists nowhere else."""
        return [name for name, held in self._entries.items() if held.durable]

    def non_durable_entries(self) -> list[tuple[str, ResidentEntry]]:
        """Those that exist nowhere else, as far as is known."""
        return [(name, held) for name, held in self._entries.items() if not held.durable]

    def candidates(self, root: bytes, prompt: bytes) -> list[ResidentCandidate]:
        """Residents of this namespace that share a prefix with the packed prompt, tokens compared."""
        found = []
        for name, held in self._entries.items():
            if held.root == root and (common := count_common_tokens(held.tokens, prompt)):
                if held.turn_tail and common == len(held):
                    common += count_common_tokens(held.turn_tail, prompt[len(held.tokens) :])
                found.append(ResidentCandidate(name, len(held), common, held.positions, held.turn_end, held.durable))
        return found
