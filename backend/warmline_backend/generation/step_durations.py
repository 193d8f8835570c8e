"""Durations of recent steps, and the time that a step may be expected to take at most.  Engine thread."""

from collections import defaultdict, deque
from statistics import median_low

RECENT_CHUNKS, RECENT_DECODE_STEPS = 32, 64  # apart: a minute of decode steps must not hide how long a chunk takes
OUTLIER_SHARE = 4  # of similar steps, the slowest one in so many (at least one of two) does not count
# A step without similar ones counts as at most so many times what its tokens would take at the speed of the others: a
# longer context makes a chunk slower, hardly more than this.
LONE_STEP_FACTOR = 4.0

StepClass = tuple[int, int]  # of similar steps: the powers of two above their tokens and their context's length
DECODE_CLASS: StepClass = (1, 0)


class StepDurations:
    """Durations of the last chunks and decode steps.

    Steps are compared with similar ones: a chunk of a few tokens says nothing about a full one, nor a short context
    about a long one.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[StepClass, float]] = deque(maxlen=RECENT_CHUNKS)
        self._decode_steps: deque[tuple[StepClass, float]] = deque(maxlen=RECENT_DECODE_STEPS)

    def record_chunk(self, length: int, tokens: int, seconds: float) -> None:
        """Record a chunk of `tokens` that ended at `length`."""
        self._chunks.append(((_round_up(tokens), _round_up(length)), seconds))

    def record_decode(self, seconds: float) -> None:
        self._decode_steps.append((DECODE_CLASS, seconds))

    @property
    def usual_decode_s(self) -> float:
        """The usual decode step of late; 0.0 before the first."""
        return median_low(seconds for _, seconds in self._decode_steps) if self._decode_steps else 0.0

    @property
    def slowest_s(self) -> float:
        """The slowest recent step, without outliers: a step that was stuck once does not count; 0.0 before the first.

        The first step of a kind counts at once, also where each takes a minute.
        """
        seconds_by_class: defaultdict[StepClass, list[float]] = defaultdict(list)
        for step_class, seconds in (*self._chunks, *self._decode_steps):
            seconds_by_class[step_class].append(seconds)
        usual = {step_class: _drop_outliers(seconds) for step_class, seconds in seconds_by_class.items()}
        lone = {step_class for step_class, seconds in seconds_by_class.items() if len(seconds) == 1}
        return max((_limit_lone(each, usual) if each in lone else usual[each] for each in usual), default=0.0)


def _drop_outliers(seconds: list[float]) -> float:
    """The slowest of similar steps but for the outliers."""
    dropped = min(len(seconds) - 1, -(-len(seconds) // OUTLIER_SHARE))
    return sorted(seconds)[-1 - dropped]


def _limit_lone(lone: StepClass, usual: dict[StepClass, float]) -> float:
    """Duration of a step without similar ones, as far as the others make it plausible; alone, it counts as it is."""
    others = (s * max(1.0, lone[0] / step_class[0]) for step_class, s in usual.items() if step_class != lone)
    return min(usual[lone], LONE_STEP_FACTOR * max(others, default=float("inf")))


def _round_up(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()
