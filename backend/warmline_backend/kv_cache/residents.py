"""KV that waits in memory for its conversation's next turn.  Owned by the engine thread."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from warmline_backend.kv_cache.kv import KV
from warmline_common.protocol.messages import Resident
from warmline_common.protocol.tokens import pack_tokens

LEASE_S = 20.0  # how long a restored resident is safe from eviction while its request is on the way
UNSAVED_S = 60.0  # and one that a request has left, while its save is; each piece that is written renews it
LEFT_BY_KEPT_MAX = 256  # of how many ended requests is known what they left


class ResidentGone(Exception):
    """No resident of that id: it was dropped, or another request took it over."""


class ResidentMismatch(Exception):
    """The resident is not a prefix of the prompt, or can't be continued at that position."""


@dataclass
class _Entry:
    kv: KV
    packed: bytes  # its tokens, u32le
    bytes_held: int
    root: bytes = b""
    leased_until: float = 0.0  # time.monotonic()
    last_used: float = field(default_factory=time.time)

    @property
    def leased(self) -> bool:
        return self.leased_until > time.monotonic()


class Residents:
    """The table of residents under a byte budget.

    `generation` grows by one whenever a resident is dropped that nobody asked to drop.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.generation = 0
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._rank: dict[str, int] = {}  # of those that `order` named: the lowest goes first
        self._left_by: OrderedDict[str, str] = OrderedDict()  # resident by the id of the request that left it
        self._listed: list[Resident] | None = None  # until the table changes

    def __contains__(self, resident_id: str) -> bool:
        return resident_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_held(self) -> int:
        return sum(entry.bytes_held for entry in self._entries.values())

    def kv(self, resident_id: str) -> KV | None:
        entry = self._entries.get(resident_id)
        return entry.kv if entry else None

    def left_by(self, request_id: str) -> str:
        """The resident that an ended request left, even if it is gone by now; "" where none is known."""
        return self._left_by.get(request_id, "")

    def add(self, kv: KV, *, lease_s: float, left_by: str = "", root: bytes = b"") -> str:
        """Keep `kv`; the caller has seen to the room (`make_room`).  Returns the new resident's id.

        `root` says whose it is: no other's request can take it.  For `lease_s` nothing pushes it out; the lease ends
        sooner when it is taken, saved, or named in `order`.
        """
        resident_id = secrets.token_hex(8)
        until = time.monotonic() + lease_s
        self._entries[resident_id] = _Entry(kv, pack_tokens(kv.tokens), kv.nbytes, root, until)
        self._listed = None
        if left_by:
            self._note_left_by(left_by, resident_id)
        return resident_id

    def _note_left_by(self, request_id: str, resident_id: str) -> None:
        self._left_by[request_id] = resident_id
        self._left_by.move_to_end(request_id)
        while len(self._left_by) > LEFT_BY_KEPT_MAX:
            self._left_by.popitem(last=False)

    def renew(self, resident_id: str, lease_s: float) -> None:
        """Lease a resident anew where its lease has not ended yet."""
        if (entry := self._entries.get(resident_id)) is not None and entry.leased:
            entry.leased_until = time.monotonic() + lease_s

    def saved(self, resident_id: str, *, whole: bool) -> None:
        """It has shed what was kept for a save; where the `whole` of it is on disk, it may go."""
        if (entry := self._entries.get(resident_id)) is not None:
            entry.bytes_held = entry.kv.nbytes
            if whole:
                entry.leased_until = 0.0
            self._listed = None

    def take(self, resident_id: str, prompt: list[int], reuse: int, keep: bool, root: bytes = b"") -> KV:
        """A KV of exactly `prompt[:reuse]` for a new owner.  Raises ResidentGone, ResidentMismatch.

        The resident itself is moved, and what it holds beyond `reuse` given up; or, to `keep` it, copied.
        """
        entry = self._entries.get(resident_id)
        if entry is None:
            raise ResidentGone(resident_id)
        kv = entry.kv
        if entry.root != root:
            raise ResidentMismatch(f"resident {resident_id} is of another model or tenant")
        if not 0 < reuse < len(prompt) or not kv.can_continue_at(reuse):
            raise ResidentMismatch(f"resident {resident_id} of {kv.length} tokens can't be continued at {reuse}")
        if kv.tokens[:reuse] != prompt[:reuse]:
            raise ResidentMismatch(f"resident {resident_id} holds other tokens than the prompt's first {reuse}")
        entry.leased_until, entry.last_used, self._listed = 0.0, time.time(), None
        if keep:
            self._entries[resident_id] = self._entries.pop(resident_id)
            return kv.branch(reuse)
        del self._entries[resident_id]
        kv.truncate(reuse)
        return kv

    def drop(self, resident_id: str) -> bool:
        """Forget a resident because somebody asked to; False where there is none."""
        self._listed = None
        return self._entries.pop(resident_id, None) is not None

    def drop_all(self, but: Collection[str] = ()) -> None:
        """Leased ones too: who was about to start from one is told that it is gone.

        `but`: residents, or requests that left one.
        """
        kept = {*but, *(name for left_by, name in self._left_by.items() if left_by in but)}
        self._entries = {name: entry for name, entry in self._entries.items() if name in kept}
        self._rank.clear()
        self._left_by = OrderedDict((left_by, name) for left_by, name in self._left_by.items() if name in kept)
        self._listed = None

    def order(self, drop_first: list[str]) -> None:
        """Which to give up first under pressure; the others go after these, least recently used first."""
        self._rank = {resident_id: rank for rank, resident_id in enumerate(drop_first)}
        for resident_id in drop_first:
            if (entry := self._entries.get(resident_id)) is not None:
                entry.leased_until = 0.0

    @property
    def some_leased(self) -> bool:
        """Some will be free to go in a moment: when they are taken or saved, or their lease ends."""
        return any(entry.leased for entry in self._entries.values())

    def make_room(self, bytes_wanted: int, *, sparing: str = "") -> bool:
        """Drop unleased residents, but the one to be spared, until at most `budget - bytes_wanted` is held; False, and
        none dropped, where that can't be.
        """
        if not self.could_make_room(bytes_wanted, sparing=sparing):
            return False
        self._drop_until(self.budget_bytes - bytes_wanted, sparing)
        return True

    def could_make_room(self, bytes_wanted: int, *, sparing: str = "", only_named: bool = False) -> bool:
        """Whether `make_room` would, or would by dropping only those that `order` named; nothing is dropped."""
        ids = [each for each in self._droppable(sparing) if not only_named or each in self._rank]
        droppable = sum(self._entries[resident_id].bytes_held for resident_id in ids)
        return self.bytes_held - droppable <= self.budget_bytes - bytes_wanted

    def drop_unleased(self) -> None:
        """Drop all that may go, where even that makes too little room."""
        for resident_id in self._droppable():
            self._drop(resident_id)

    def _droppable(self, sparing: str = "") -> list[str]:
        return [each for each, entry in self._entries.items() if not (entry.leased or each == sparing)]

    def _drop_until(self, target: int, sparing: str) -> None:
        held = self.bytes_held
        for resident_id in self._in_drop_order(sparing) if held > target else ():
            if held <= target:
                break
            held -= self._drop(resident_id)

    def _drop(self, resident_id: str) -> int:
        """How many bytes that has freed."""
        self.generation += 1
        self._listed = None
        return self._entries.pop(resident_id).bytes_held

    def _in_drop_order(self, sparing: str) -> list[str]:
        return sorted(
            self._droppable(sparing),
            key=lambda each: (self._rank.get(each, len(self._rank)), self._entries[each].last_used),
        )

    def listed(self) -> list[Resident]:
        """All residents with their tokens, for whoever asks; not to be changed.  Cheap while nothing changes."""
        if self._listed is None:
            self._listed = [
                Resident(
                    id=resident_id,
                    tokens=entry.kv.length,
                    positions=entry.kv.positions(),
                    bytes_held=entry.bytes_held,
                    last_used=entry.last_used,
                    ids=entry.packed,
                    root=entry.root,
                )
                for resident_id, entry in self._entries.items()
            ]
        return self._listed
