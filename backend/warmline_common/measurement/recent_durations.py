"""Durations of recent work, and those that are usual for work of its size."""

from collections import deque

import msgspec

RECENT_MAX = 5  # of one class of similar work: two slow ones do not count, three are a slower machine
CLASSES_MAX = 64  # the least recently measured are dropped first

WorkClass = tuple[int, int]  # of similar work: the powers of two above its amount and its context


class UsualDuration(msgspec.Struct, kw_only=True, frozen=True):
    """Median of the recent durations of similar work."""

    amount: int  # in tokens or bytes
    context: int = 0  # mean number of tokens before each of them, where that matters
    seconds: float
    count: int = 1  # recent durations


class RecentDurations:
    """Durations of recent work by class.  One thread."""

    def __init__(self) -> None:
        self._recent: dict[WorkClass, deque[UsualDuration]] = {}
        self._usual: dict[WorkClass, UsualDuration] = {}  # least recently measured first

    def add(self, amount: int, seconds: float, context: int = 0) -> None:
        work_class = (amount.bit_length(), context.bit_length())
        recent = self._recent.setdefault(work_class, deque(maxlen=RECENT_MAX))
        recent.append(UsualDuration(amount=amount, context=context, seconds=seconds))
        self._usual.pop(work_class, None)
        self._usual[work_class] = _choose_median(recent)
        if len(self._usual) > CLASSES_MAX:
            oldest = next(iter(self._usual))
            del self._usual[oldest], self._recent[oldest]

    def list_usual(self) -> list[UsualDuration]:
        """One duration a class, the least recently measured class first.

        It is a measured one: the faster of the two in the middle, where the count is even.
        """
        return list(self._usual.values())


def _choose_median(recent: deque[UsualDuration]) -> UsualDuration:
    ordered = sorted(recent, key=lambda each: each.seconds / max(1, each.amount))
    return msgspec.structs.replace(ordered[(len(ordered) - 1) // 2], count=len(ordered))
