"""Residents: KV kept in memory for its conversation's next turn.  Engine thread."""

import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.resident_listing import ResidentListing
from warmline_common.protocol.messages import Resident
from warmline_common.protocol.tokens import TokenArray, pack_tokens

RESTORE_LEASE_S = 20.0  # time for a restored resident's request to arrive
UNSAVED_LEASE_S = 60.0  # time for the save of an ended request's resident; each piece written renews it
RESIDENT_BY_REQUEST_MAX = 256  # ended requests whose resident is remembered
SUCCESSORS_MAX = 256  # residents that were taken over, and are remembered for saves of their rows


class ResidentNotFoundError(Exception):
    """No resident of that id: it was evicted, or another request took it over."""


class ResidentMismatchError(Exception):
    """The resident is not a prefix of the prompt, or can't be continued at that position."""


@dataclass(frozen=True)
class Adoption:
    """A resident that a request has taken over, and how many of its tokens."""

    resident_id: str
    tokens: int


@dataclass
class _Entry:
    kv: KV
    bytes_held: int
    root: bytes = b""
    leased_until: float = 0.0  # time.monotonic()
    last_used: float = field(default_factory=time.time)

    @property
    def is_leased(self) -> bool:
        return self.leased_until > time.monotonic()


class Residents:
    """Residents by id, under a byte budget.  What a call costs does not grow with their number, but for evictions.

    `budget_bytes` is the present budget, which admission sets.  `generation` grows by one with each eviction (not with
    deletions that were asked for).  Other threads read the `listing`.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.generation = 0
        self.listing = ResidentListing()
        self.bytes_held = 0
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._leased: dict[str, None] = {}  # those that may have a lease
        self._ranked: dict[str, None] = {}  # to be evicted first, in this order
        self._resident_by_request: OrderedDict[str, str] = OrderedDict()  # by the id of the request that left it
        self._successors: OrderedDict[str, Adoption] = OrderedDict()  # the next resident with the first rows of one

    def __contains__(self, resident_id: str) -> bool:
        return resident_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def find_kv(self, resident_id: str) -> KV | None:
        entry = self._entries.get(resident_id)
        return entry.kv if entry else None

    def find_by_request(self, request_id: str) -> str:
        """Id of the resident that an ended request left, even if it is gone by now; "" where unknown."""
        return self._resident_by_request.get(request_id, "")

    def find_successor(self, resident_id: str) -> Adoption:
        """Last resident known to have the first rows of this one, and how many of them; itself, with any number."""
        found = Adoption(resident_id, sys.maxsize)
        while (after := self._successors.get(found.resident_id)) is not None:
            found = Adoption(after.resident_id, min(found.tokens, after.tokens))
        return found

    def add(
        self, kv: KV, *, lease_s: float, request_id: str = "", root: bytes = b"", adoption: Adoption | None = None
    ) -> str:
        """Add `kv`, for which the caller has made room; returns the new resident's id.

        Only requests of the same `root` can take it.  It is not evicted for `lease_s`; the lease ends sooner when it is
        taken, saved, or named in the eviction order.  `adoption`: the resident that its request had taken over.
        """
        resident_id = secrets.token_hex(8)
        until = time.monotonic() + lease_s
        entry = self._entries[resident_id] = _Entry(kv, kv.nbytes, root, until)
        self.bytes_held += entry.bytes_held
        self._leased[resident_id] = None
        self.listing.add(
            Resident(
                id=resident_id,
                tokens=kv.length,
                positions=kv.positions(),
                bytes_held=entry.bytes_held,
                last_used=entry.last_used,
                ids=pack_tokens(kv.tokens),
                root=root,
            )
        )
        if adoption is not None:
            self._successors[adoption.resident_id] = Adoption(resident_id, adoption.tokens)
            if len(self._successors) > SUCCESSORS_MAX:
                self._successors.popitem(last=False)
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
            self.bytes_held += entry.kv.nbytes - entry.bytes_held
            entry.bytes_held = entry.kv.nbytes
            if whole:
                entry.leased_until = 0.0
            self._update_listing(resident_id, entry)

    def _update_listing(self, resident_id: str, entry: _Entry) -> None:
        self.listing.update(resident_id, bytes_held=entry.bytes_held, last_used=entry.last_used)

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
        entry.leased_until, entry.last_used = 0.0, time.time()
        if copy_resident:
            self._entries[resident_id] = self._entries.pop(resident_id)
            self._update_listing(resident_id, entry)
            return kv.fork(reuse_tokens)
        self._remove(resident_id)
        kv.truncate(reuse_tokens)
        return kv

    def _remove(self, resident_id: str) -> None:
        entry = self._entries.pop(resident_id)
        self._leased.pop(resident_id, None)
        self._ranked.pop(resident_id, None)
        self.bytes_held -= entry.bytes_held
        self.listing.remove(resident_id)

    def delete(self, resident_id: str) -> bool:
        """Delete a resident on request; False where there is none."""
        if resident_id not in self._entries:
            return False
        self._remove(resident_id)
        return True

    def delete_all(self, except_ids: Collection[str] = ()) -> None:
        """Delete all residents, also leased ones; `except_ids` are ids of residents, or of requests that left one."""
        by_request = self._resident_by_request
        kept_ids = {*except_ids, *(name for left_by, name in by_request.items() if left_by in except_ids)}
        for resident_id in self._entries.keys() - kept_ids:
            self._remove(resident_id)
        self._ranked.clear()
        self._successors.clear()
        self._resident_by_request = OrderedDict(item for item in by_request.items() if item[1] in kept_ids)

    def set_eviction_order(self, evict_first: list[str], *, extends: bool = False) -> None:
        """Set which to evict first; the others go after these, least recently used first.  Their leases end.

        The order is new, or follows the earlier one where it `extends` that.
        """
        if not extends:
            self._ranked.clear()
        for resident_id in evict_first:
            if (entry := self._entries.get(resident_id)) is not None:
                entry.leased_until = 0.0
                self._ranked.setdefault(resident_id)

    @property
    def has_leased(self) -> bool:
        """True where some residents will become evictable soon: when they are taken or saved, or their lease ends."""
        return bool(self._list_leased())

    @property
    def bytes_leased(self) -> int:
        return sum(self._entries[each].bytes_held for each in self._list_leased())

    def _list_leased(self) -> list[str]:
        """Ids with a lease; ended leases are forgotten."""
        self._leased = {each: None for each in self._leased if self._entries[each].is_leased}
        return list(self._leased)

    def make_room(self, bytes_needed: int, *, except_id: str = "") -> bool:
        """Evict unleased residents except `except_id` until at most `budget - bytes_needed` is held.

        False, with none evicted, where that is impossible.
        """
        if (chosen := self._choose_evictions(bytes_needed, except_id)) is None:
            return False
        for resident_id in chosen:
            self._evict(resident_id)
        return True

    def can_make_room(self, bytes_needed: int, *, except_id: str = "", only_ranked: bool = False) -> bool:
        """True where `make_room` would succeed, or would by evicting only ranked ones; nothing is evicted."""
        return self._choose_evictions(bytes_needed, except_id, only_ranked) is not None

    def _choose_evictions(self, bytes_needed: int, except_id: str, only_ranked: bool = False) -> list[str] | None:
        """Ids to evict, in that order; None where too little may be evicted."""
        excess = self.bytes_held - (self.budget_bytes - bytes_needed)
        if excess <= 0:
            return []
        kept = {*self._list_leased(), except_id} & self._entries.keys()
        if self.bytes_held - sum(self._entries[each].bytes_held for each in kept) < excess:
            return None
        chosen = []
        others = () if only_ranked else (each for each in self._entries if each not in self._ranked)
        for resident_id in chain(self._ranked, others):
            if excess <= 0:
                break
            if resident_id not in kept:
                chosen.append(resident_id)
                excess -= self._entries[resident_id].bytes_held
        return chosen if excess <= 0 else None

    def evict_unleased(self) -> None:
        """Evict all that may go, even where that makes too little room."""
        for resident_id in self._entries.keys() - self._list_leased():
            self._evict(resident_id)

    def _evict(self, resident_id: str) -> None:
        self.generation += 1
        self._remove(resident_id)
