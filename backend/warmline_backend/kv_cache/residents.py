"""Residents: KV kept in memory for its conversation's next turn.  Engine thread."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from warmline_backend.kv_cache.kv import KV
from warmline_common.protocol.messages import Resident
from warmline_common.protocol.tokens import TokenArray, pack_tokens

RESTORE_LEASE_S = 20.0  # time for a restored resident's request to arrive
UNSAVED_LEASE_S = 60.0  # time for the save of an ended request's resident; each piece written renews it
RESIDENT_BY_REQUEST_MAX = 256  # ended requests whose resident is remembered


class ResidentNotFoundError(Exception):
    """No resident of that id: it was evicted, or another request took it over."""


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
    """Residents by id, under a byte budget.

    `generation` grows by one with each eviction (not with deletions that were asked for).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.generation = 0
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._rank: dict[str, int] = {}  # eviction order: the lowest goes first
        self._resident_by_request: OrderedDict[str, str] = OrderedDict()  # by the id of the request that left it
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
        """Id of the resident that an ended request left, even if it is gone by now; "" where unknown."""
        return self._resident_by_request.get(request_id, "")

    def add(self, kv: KV, *, lease_s: float, request_id: str = "", root: bytes = b"") -> str:
        """Add `kv`, for which the caller has made room; returns the new resident's id.

        Only requests of the same `root` can take it.  It is not evicted for `lease_s`; the lease ends sooner when it is
        taken, saved, or named in the eviction order.
        """
        resident_id = secrets.token_hex(8)
        until = time.monotonic() + lease_s
        self._entries[resident_id] = _Entry(kv, pack_tokens(kv.tokens), kv.nbytes, root, until)
        self._listing = None
        if request_id:
            self._resident_by_request.pop(request_id, None)
            self._resident_by_request[request_id] = resident_id
            if len(self._resident_by_request) > RESIDENT_BY_REQUEST_MAX:
                self._resident_by_request.popitem(last=False)
        return resident_id

    def renew_lease(self, resident_id: str, lease_s: float) -> None:
        """Lease a resident anew where its lease has not ended yet."""
        if (entry := self._entries.get(resident_id)) is not None and entry.is_leased:
            entry.leased_until = time.monotonic() + lease_s

    def mark_saved(self, resident_id: str, *, whole: bool) -> None:
        """Recount a resident after a save; where the `whole` of it is on disk, its lease ends."""
        if (entry := self._entries.get(resident_id)) is not None:
            entry.bytes_held = entry.kv.nbytes
            if whole:
                entry.leased_until = 0.0
            self._listing = None

    def take(
        self, resident_id: str, prompt: TokenArray, reuse_tokens: int, copy_resident: bool, root: bytes = b""
    ) -> KV:
        """Return a KV of exactly `prompt[:reuse_tokens]` for a new owner.

        The resident itself is moved and truncated; with `copy_resident` it is copied and stays.  Raises
        ResidentNotFoundError, ResidentMismatchError.
        """
        entry = self._entries.get(resident_id)
        if entry is None:
            raise ResidentNotFoundError(resident_id)
        kv = entry.kv
        if entry.root != root:
            raise ResidentMismatchError(f"resident {resident_id} is of another model or tenant")
        if not 0 < reuse_tokens < len(prompt) or not kv.can_continue_at(reuse_tokens):
            problem = f"resident {resident_id} of {kv.length} tokens can't be continued at {reuse_tokens}"
            raise ResidentMismatchError(problem)
        if kv.tokens[:reuse_tokens] != prompt[:reuse_tokens]:
            problem = f"resident {resident_id} holds other tokens than the prompt's first {reuse_tokens}"
            raise ResidentMismatchError(problem)
        entry.leased_until, entry.last_used, self._listing = 0.0, time.time(), None
        if copy_resident:
            self._entries[resident_id] = self._entries.pop(resident_id)
            return kv.fork(reuse_tokens)
        del self._entries[resident_id]
        kv.truncate(reuse_tokens)
        return kv

    def delete(self, resident_id: str) -> bool:
        """Delete a resident on request; False where there is none."""
        self._listing = None
        return self._entries.pop(resident_id, None) is not None

    def delete_all(self, except_ids: Collection[str] = ()) -> None:
        """Delete all residents, also leased ones; `except_ids` are ids of residents, or of requests that left one."""
        by_request = self._resident_by_request
        kept_ids = {*except_ids, *(name for left_by, name in by_request.items() if left_by in except_ids)}
        self._entries = {name: entry for name, entry in self._entries.items() if name in kept_ids}
        self._rank.clear()
        self._resident_by_request = OrderedDict(item for item in by_request.items() if item[1] in kept_ids)
        self._listing = None

    def set_eviction_order(self, evict_first: list[str]) -> None:
        """Set which to evict first; the others go after these, least recently used first."""
        self._rank = {resident_id: rank for rank, resident_id in enumerate(evict_first)}
        for resident_id in evict_first:
            if (entry := self._entries.get(resident_id)) is not None:
                entry.leased_until = 0.0

    @property
    def has_leased(self) -> bool:
        """True where some residents will become evictable soon: when they are taken or saved, or their lease ends."""
        return any(entry.is_leased for entry in self._entries.values())

    def make_room(self, bytes_needed: int, *, except_id: str = "") -> bool:
        """Evict unleased residents except `except_id` until at most `budget - bytes_needed` is held.

        False, with none evicted, where that is impossible.
        """
        if not self.can_make_room(bytes_needed, except_id=except_id):
            return False
        held, target = self.bytes_held, self.budget_bytes - bytes_needed
        if held > target:
            ranks, entries = self._rank, self._entries
            evictable = self._list_evictable(except_id)
            for each in sorted(evictable, key=lambda each: (ranks.get(each, len(ranks)), entries[each].last_used)):
                if held <= target:
                    break
                held -= self._evict(each)
        return True

    def can_make_room(self, bytes_needed: int, *, except_id: str = "", only_ranked: bool = False) -> bool:
        """True where `make_room` would succeed, or would by evicting only ranked ones; nothing is evicted."""
        ids = [each for each in self._list_evictable(except_id) if not only_ranked or each in self._rank]
        evictable = sum(self._entries[resident_id].bytes_held for resident_id in ids)
        return self.bytes_held - evictable <= self.budget_bytes - bytes_needed

    def evict_unleased(self) -> None:
        """Evict all that may go, even where that makes too little room."""
        for resident_id in self._list_evictable():
            self._evict(resident_id)

    def _list_evictable(self, except_id: str = "") -> list[str]:
        return [each for each, entry in self._entries.items() if not (entry.is_leased or each == except_id)]

    def _evict(self, resident_id: str) -> int:
        """Evict a resident; returns the bytes that it held."""
        self.generation += 1
        self._listing = None
        return self._entries.pop(resident_id).bytes_held

    def list_residents(self) -> list[Resident]:
        """All residents with their tokens; a shared list, rebuilt only after changes, not to be modified."""
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
