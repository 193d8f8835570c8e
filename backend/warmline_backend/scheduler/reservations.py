"""Memory set aside for restores on their way, and the restores that wait for it.  Engine thread."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _PendingReservation:
    request_id: str
    bytes_needed: int
    on_granted: Callable[[], None]


class Reservations:
    """Granted in the order in which they came."""

    def __init__(self) -> None:
        self._pending: list[_PendingReservation] = []
        self._granted: dict[str, int] = {}  # bytes by request id

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def has_granted(self) -> bool:
        return bool(self._granted)

    @property
    def bytes_granted(self) -> int:
        return sum(self._granted.values())

    def add(self, request_id: str, bytes_needed: int, on_granted: Callable[[], None]) -> None:
        """`granted` is called once, on this thread, unless the request is released before."""
        self._pending.append(_PendingReservation(request_id, bytes_needed, on_granted))

    def release(self, request_id: str) -> None:
        """Give the memory back, or no longer wait for it; no harm where there is nothing."""
        self._pending = [wanted for wanted in self._pending if wanted.request_id != request_id]
        self._granted.pop(request_id, None)

    def grant(self, fits: Callable[[int], bool], may_wait: Callable[[], bool]) -> None:
        """Grant what fits, and what will never fit any better: where nothing is left that could make way."""
        while self._pending and (fits(self._pending[0].bytes_needed) or not may_wait()):
            wanted = self._pending.pop(0)
            self._granted[wanted.request_id] = wanted.bytes_needed
            wanted.on_granted()
