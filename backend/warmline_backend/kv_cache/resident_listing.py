"""Listing of the residents for other threads.  The engine thread changes it, any thread reads it without waiting."""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from warmline_common.protocol.messages import Resident

REMOVALS_MAX = 4096  # remembered; a reader that knows less gets the whole listing


@dataclass(frozen=True)
class ListingChanges:
    """Residents added after the revision `since`, and ids of those removed after it; with `since` 0 all residents."""

    revision: int
    since: int
    residents: list[Resident]
    removed: list[str]


class ResidentListing:
    """Residents by id, the latest last.  `revision` grows by one with each that is added or removed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._residents: dict[str, tuple[int, Resident]] = {}  # with the revision that added it
        self._removals: deque[tuple[int, str]] = deque(maxlen=REMOVALS_MAX)
        self._revision = 0

    def __len__(self) -> int:
        return len(self._residents)

    def add(self, resident: Resident) -> None:
        with self._lock:
            self._revision += 1
            self._residents[resident.id] = self._revision, resident

    def remove(self, resident_id: str) -> None:
        with self._lock:
            if self._residents.pop(resident_id, None) is not None:
                self._revision += 1
                self._removals.append((self._revision, resident_id))

    def update(self, resident_id: str, *, bytes_held: int, last_used: float) -> None:
        """Replace figures of a resident; the revision stays."""
        with self._lock:
            if (found := self._residents.get(resident_id)) is not None:
                revision, resident = found
                resident = msgspec.structs.replace(resident, bytes_held=bytes_held, last_used=last_used)
                self._residents[resident_id] = revision, resident

    def list_residents(self) -> list[Resident]:
        with self._lock:
            return [resident for _, resident in self._residents.values()]

    def find(self, ids: Iterable[str]) -> list[Resident]:
        """Those of these ids that are there."""
        with self._lock:
            return [found[1] for each in ids if (found := self._residents.get(each)) is not None]

    def list_changes(self, since: int) -> ListingChanges:
        """Changes after a revision; the whole listing for 0, and where not all removals after it are remembered."""
        with self._lock:
            is_known = 0 < since <= self._revision and not self._has_forgotten(since)
            since = since if is_known else 0
            residents = [
                each for _, each in takewhile(lambda item: item[0] > since, reversed(self._residents.values()))
            ]
            removed = [each for _, each in takewhile(lambda item: item[0] > since, reversed(self._removals))]
            return ListingChanges(self._revision, since, residents[::-1], removed[::-1] if since else [])

    def _has_forgotten(self, since: int) -> bool:
        is_full = len(self._removals) == self._removals.maxlen
        return is_full and self._removals[0][0] > since + 1


def omit_tokens(residents: Collection[Resident]) -> list[Resident]:
    """The residents without their token ids."""
    return [msgspec.structs.replace(resident, ids=None) for resident in residents]
