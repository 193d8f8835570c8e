"""Memory set aside for restores on their way, and the restores that wait for it.  Engine thread."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Wanted:
    request_id: str
    bytes_wanted: int
    granted: Callable[[], None]


class Reservations:
    """Granted in the order in which they came."""

    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []
        self._granted: dict[str, int] = {}  # bytes by request id

    @property
    def waiting(self) -> bool:
        return bool(self._wanted)

    @property
    def some_granted(self) -> bool:
        return bool(self._granted)

    @property
    def bytes_granted(self) -> int:
        return sum(self._granted.values())

    def want(self, request_id: str, bytes_wanted: int, granted: Callable[[], None]) -> None:
        """`granted` is called once, on this thread, unless the request is released before."""
        self._wanted.append(_Wanted(request_id, bytes_wanted, granted))

    def release(self, request_id: str) -> None:
        """Give the memory back, or no longer wait for it; no harm where there is nothing."""
        self._wanted = [wanted for wanted in self._wanted if wanted.request_id != request_id]
        self._granted.pop(request_id, None)

    def grant(self, fits: Callable[[int], bool], may_wait: Callable[[], bool]) -> None:
        """Grant what fits, and what will never fit any better: where nothing is left that could make way."""
        while self._wanted and (fits(self._wanted[0].bytes_wanted) or not may_wait()):
            wanted = self._wanted.pop(0)
            self._granted[wanted.request_id] = wanted.bytes_wanted
            wanted.granted()
