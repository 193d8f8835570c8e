"""What the proxy knows of the backend's memory.  No I/O; owned by the event loop.

The backend drops residents on its own; `generation` tells that some went, `boot` that all did.  The mirror may be
behind for a moment; then a generation answers 410, the mirror is refreshed, and the request is planned again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from warmline_common.protocol.messages import Reply, Resident
from warmline_common.protocol.tokens import TOKEN_BYTES, common_prefix
from warmline_proxy.planner import Candidate

SHUNNED_MAX = 1024


@dataclass(frozen=True)
class Held:
    """One resident: packed tokens under a namespace root."""

    root: bytes
    tokens: bytes
    positions: Sequence[int] = ()
    turn_end: int = 0  # where the last message of its prompt ends; see plan.Candidate
    beyond: bytes = b""  # packed tokens from its end to `turn_end`, where that lies further
    durable: bool = False  # known to be on disk, all of it
    head: int = 0  # where system texts and tools end, which are many conversations' alike; 0: not known

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass
class Mirror:
    """Residents by id.  `boot` is "" until the first reply."""

    boot: str = ""
    generation: int = -1
    _held: dict[str, Held] = field(default_factory=dict)
    _shunned: deque[str] = field(default_factory=lambda: deque(maxlen=SHUNNED_MAX))

    def ids(self) -> frozenset[str]:
        return frozenset(self._held)

    def is_behind(self, reply: Reply) -> bool:
        """Whether the backend dropped residents, or is another process, since the mirror last looked."""
        return reply.boot != self.boot or reply.generation > self.generation

    def note(self, reply: Reply) -> None:
        """The mirror now agrees with this reply.  Another boot: nothing that was held is there any more."""
        if reply.boot != self.boot:
            self._held.clear()
            self.generation = reply.generation
        self.boot, self.generation = reply.boot, max(self.generation, reply.generation)

    def add(self, resident: str, held: Held) -> None:
        if resident and len(held):
            self._held[resident] = held

    def add_listed(self, residents: Iterable[Resident]) -> None:
        """Adopt what a listing with ids shows and the mirror didn't know; what doesn't say whose it is, is nobody's."""
        for each in residents:
            if each.root and each.ids is not None and each.id not in self._held and each.id not in self._shunned:
                self.add(each.id, Held(each.root, each.ids, tuple(each.positions), turn_end=each.tokens))

    def held(self, resident: str) -> Held | None:
        return self._held.get(resident)

    def drop(self, resident: str) -> None:
        self._held.pop(resident, None)

    def shun(self, resident: str) -> None:
        """Drop it for good: nobody is to start from it, though the backend may still have it and list it."""
        self.drop(resident)
        self._shunned.append(resident)

    def keep_only(self, listed: Iterable[Resident], among: Collection[str]) -> None:
        """Forget those of `among` (what was known when the listing was asked for) that it lacks; learn the positions
        of the others.
        """
        alive = {each.id: tuple(each.positions) for each in listed}
        for name in among:
            if name not in alive:
                self.drop(name)
            elif held := self._held.get(name):
                self._held[name] = replace(held, positions=alive[name])

    def mark_durable(self, resident: str) -> None:
        """All of it is on disk."""
        if held := self._held.get(resident):
            self._held[resident] = replace(held, durable=True)

    def durable(self) -> list[str]:
        """Those that could be restored, oldest first: what the backend may give up before what exists nowhere else."""
        return [name for name, held in self._held.items() if held.durable]

    def not_durable(self) -> list[tuple[str, Held]]:
        """Those that exist nowhere else, as far as is known."""
        return [(name, held) for name, held in self._held.items() if not held.durable]

    def candidates(self, root: bytes, prompt: bytes) -> list[Candidate]:
        """Residents of this namespace that share a prefix with the packed prompt, tokens compared."""
        found = []
        for name, held in self._held.items():
            if held.root == root and (common := common_prefix(held.tokens, prompt)):
                if held.beyond and common == len(held):
                    common += common_prefix(held.beyond, prompt[len(held.tokens) :])
                found.append(Candidate(name, len(held), common, held.positions, held.turn_end, held.durable))
        return found
