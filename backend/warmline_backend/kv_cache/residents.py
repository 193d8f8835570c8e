"""KV that waits in memory for its conversation's next turn.  Owned by the engine thread."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from warmline_backend.kv_cache.kv import KV
from warmline_common.protocol.messages import Resident
from warmline_common.protocol.tokens import pack_tokens

RESTORE_LEASE_S = 20.0  # how long a restored resident is safe from eviction while its request is on the way
UNSAVED_LEASE_S = 60.0  # and one that a request has left, while its save is; each piece that is written renews it
RESIDENT_BY_REQUEST_MAX = 256  # of how many ended requests is known what they left


class ResidentNotFoundError(Exception):
    """No resident of that id: it was dropped, or another request took it over."""


class ResidentMismatchError(Exception):
    """The resident is not a prefix of the prompt, or can't be continued at that position."""


@dataclass
class _Entry:
    kv: KV
    packed_tokens: bytes  # its tokens, u32le
    bytes_held: int
    root: bytes = b""
    leased_until: float = 0.0  # time.monotonic()
    last_used: float = field(default_factory=time.time)

    @property
    def is_leased(self) -> bool:
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
        self._resident_by_request: OrderedDict[str, str] = (
            OrderedDict()
        )  # resident by the id of the request that left it
        self._listing: list[Resident] | None = None  # until the table changes

    def __contains__(self, resident_id: str) -> bool:
        return resident_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_held(self) -> int:
        return sum(entry.bytes_held for entry in self._entries.values())

    def find_kv(self, resident_id: str) -> KV | None:
        entry = self._entries.get(resident_id)
        return entry.kv if entry else None

    def find_by_request(self, request_id: str) -> str:
        """The resident that an ended request left, even if it is gone by now; "" where none is known."""
        return self._resident_by_request.get(request_id, "")

    def add(self, kv: KV, *, lease_s: float, request_id: str = "", root: bytes = b"") -> str:
        """Keep `kv`; the caller has seen to the room (`make_room`).  Returns the new resident's id.

        `root` says whose it is: no other's request can take it.  For `lease_s` nothing pushes it out; the lease ends
        sooner when it is taken, saved, or named in `order`.
        """
        resident_id = secrets.token_hex(8)
        until = time.monotonic() + lease_s
        self._entries[resident_id] = _Entry(kv, pack_tokens(kv.tokens), kv.nbytes, root, until)
        self._listing = None
        if request_id:
            self._record_request(request_id, resident_id)
        return resident_id

    def _record_request(self, request_id: str, resident_id: str) -> None:
        self._resident_by_request[request_id] = resident_id
        self._resident_by_request.move_to_end(request_id)
        while len(self._resident_by_request) > RESIDENT_BY_REQUEST_MAX:
            self._resident_by_request.popitem(last=False)

    def renew_lease(self, resident_id: str, lease_s: float) -> None:
        """Lease a resident anew where its lease has not ended yet."""
        if (entry := self._entries.get(resident_id)) is not None and entry.is_leased:
            entry.leased_until = time.monotonic() + lease_s

    def mark_saved(self, resident_id: str, *, whole: bool) -> None:
        """It has shed what was kept for a save; where the `whole` of it is on disk, it may go."""
        if (entry := self._entries.get(resident_id)) is not None:
            entry.bytes_held = entry.kv.nbytes
            if whole:
                entry.leased_until = 0.0
            self._listing = None

    def take(
        self, resident_id: str, prompt: list[int], reuse_tokens: int, copy_resident: bool, root: bytes = b""
    ) -> KV:
        """A KV of exactly `prompt[:reuse]` for a new owner.  Raises ResidentGone, ResidentMismatch.

        The resident itself is moved, and what it holds beyond `reuse` given up; or, to `keep` it, copied.
        """
        entry = self._entries.get(resident_id)
        if entry is None:
            raise ResidentNotFoundError(resident_id)
        kv = entry.kv
        if entry.root != root:
            raise ResidentMismatchError(f"resident {resident_id} is of another model or tenant")
        if not 0 < reuse_tokens < len(prompt) or not kv.can_continue_at(reuse_tokens):
            raise ResidentMismatchError(
                f"resident {resident_id} of {kv.length} tokens can't be continued at {reuse_tokens}"
            )
        if kv.tokens[:reuse_tokens] != prompt[:reuse_tokens]:
            raise ResidentMismatchError(
                f"resident {resident_id} holds other tokens than the prompt's first {reuse_tokens}"
            )
        entry.leased_until, entry.last_used, self._listing = 0.0, time.time(), None
        if copy_resident:
            self._entries[resident_id] = self._entries.pop(resident_id)
            return kv.fork(reuse_tokens)
        del self._entries[resident_id]
        kv.truncate(reuse_tokens)
        return kv

    def delete(self, resident_id: str) -> bool:
        """Forget a resident because somebody asked to; False where there is none."""
        self._listing = None
        return self._entries.pop(resident_id, None) is not None

    def delete_all(self, except_ids: Collection[str] = ()) -> None:
        """Leased ones too: who was about to start from one is told that it is gone.

        `but`: residents, or requests that left one.
        """
        kept = {*except_ids, *(name for left_by, name in self._resident_by_request.items() if left_by in except_ids)}
        self._entries = {name: entry for name, entry in self._entries.items() if name in kept}
        self._rank.clear()
        self._resident_by_request = OrderedDict(
            (left_by, name) for left_by, name in self._resident_by_request.items() if name in kept
        )
        self._listing = None

    def set_eviction_order(self, evict_first: list[str]) -> None:
        """Which to give up first under pressure; the others go after these, least recently used first."""
        self._rank = {resident_id: rank for rank, resident_id in enumerate(evict_first)}
        for resident_id in evict_first:
            if (entry := self._entries.get(resident_id)) is not None:
                entry.leased_until = 0.0

    @property
    def has_leased(self) -> bool:
        """Some will be free to go in a moment: when they are taken or saved, or their lease ends."""
        return any(entry.is_leased for entry in self._entries.values())

    def make_room(self, bytes_needed: int, *, except_id: str = "") -> bool:
        """Drop unleased residents, but the one to be spared, until at most `budget - bytes_wanted` is held; False, and
        none dropped, where that can't be.
        """
        if not self.can_make_room(bytes_needed, except_id=except_id):
            return False
        self._evict_until(self.budget_bytes - bytes_needed, except_id)
        return True

    def can_make_room(self, bytes_needed: int, *, except_id: str = "", only_ranked: bool = False) -> bool:
        """Whether `make_room` would, or would by dropping only those that `order` named; nothing is dropped."""
        ids = [each for each in self._list_evictable(except_id) if not only_ranked or each in self._rank]
        droppable = sum(self._entries[resident_id].bytes_held for resident_id in ids)
        return self.bytes_held - droppable <= self.budget_bytes - bytes_needed

    def evict_unleased(self) -> None:
        """Drop all that may go, where even that makes too little room."""
        for resident_id in self._list_evictable():
            self._evict(resident_id)

    def _list_evictable(self, except_id: str = "") -> list[str]:
        return [each for each, entry in self._entries.items() if not (entry.is_leased or each == except_id)]

    def _evict_until(self, target: int, except_id: str) -> None:
        held = self.bytes_held
        for resident_id in self._sort_evictable(except_id) if held > target else ():
            if held <= target:
                break
            held -= self._evict(resident_id)

    def _evict(self, resident_id: str) -> int:
        """How many bytes that has freed."""
        self.generation += 1
        self._listing = None
        return self._entries.pop(resident_id).bytes_held

    def _sort_evictable(self, except_id: str) -> list[str]:
        return sorted(
            self._list_evictable(except_id),
            key=lambda each: (self._rank.get(each, len(self._rank)), self._entries[each].last_used),
        )

    def list_residents(self) -> list[Resident]:
        """All residents with their tokens, for whoever asks; not to be changed.  Cheap while nothing changes."""
        if self._listing is None:
            self._listing = [
                Resident(
                    id=resident_id,
                    tokens=entry.kv.length,
                    positions=entry.kv.positions(),
                    bytes_held=entry.bytes_held,
                    last_used=entry.last_used,
                    ids=entry.packed_tokens,
                    root=entry.root,
                )
                for resident_id, entry in self._entries.items()
            ]
        return self._listing
