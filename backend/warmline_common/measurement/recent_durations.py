"""Durations of recent work, and those that are usual for work of its size."""

from collections import deque

import msgspec

RECENT_MAX = 5  # of one class of similar work: two slow ones do not count, three are a slower machine
CLASSES_MAX = 64  # the least recently measured are dropped first

WorkClass = tuple[int, int]  # of similar work: the powers of two above its amount and its context


class WorkDuration(msgspec.Struct, kw_only=True, frozen=True):
    """Duration of work of one size: measured once, or the median of some."""

    amount: int  # in tokens or bytes
    context: int = 0  # mean number of tokens before each of them, where that matters
    seconds: float
    count: int = 1  # of the durations that it is the median of


class RecentDurations:
    """Durations of recent work by class.  One thread."""

    def __init__(self) -> None:
        self._recent: dict[WorkClass, deque[WorkDuration]] = {}
        self._usual: dict[WorkClass, WorkDuration] = {}  # least recently measured first

    def add(self, duration: WorkDuration) -> None:
        work_class = (duration.amount.bit_length(), duration.context.bit_length())
        recent = self._recent.setdefault(work_class, deque(maxlen=RECENT_MAX))
        recent.append(duration)
        self._usual.pop(work_class, None)
        self._usual[work_class] = _choose_median(recent)
        if len(self._usual) > CLASSES_MAX:
            oldest = next(iter(self._usual))
            del self._usual[oldest], self._recent[oldest]

    def list_usual(self) -> list[WorkDuration]:
        """One duration a class, the least recently measured class first.

        It is a measured one: the faster of the two in the middle, where the count is even.
        """
        return list(self._usual.values())


def _choose_median(recent: deque[WorkDuration]) -> WorkDuration:
    ordered = sorted(recent, key=lambda each: each.seconds / max(1, each.amount))
    return msgspec.structs.replace(ordered[(len(ordered) - 1) // 2], count=len(ordered))
