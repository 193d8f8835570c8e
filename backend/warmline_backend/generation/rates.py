"""Measured rates of this machine, for plans and admission.  Engine thread."""

from collections import deque

from warmline_common.protocol.messages import PrefillRate

SMOOTHING = 0.3  # weight of the newest sample
SECONDS_MIN = 1e-9  # a coarse clock may show 0
SAMPLE_BYTES_MIN = 16 << 20  # the time of smaller reads and writes is that of their calls
RECENT_CHUNKS, RECENT_DECODE_STEPS = 32, 64  # apart: a minute of decode steps must not hide how long a chunk takes


class SmoothedRate:
    """Amount per second, exponentially smoothed; 0 until the first sample.

    Amounts and times are averaged apart, so that samples weigh by their amount: the tokens of a short chunk, which take
    longer each, say little about long chunks.  Amounts below `amount_min` are ignored.
    """

    def __init__(self, amount_min: int = 0) -> None:
        self._amount_min = amount_min
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> None:
        if amount < self._amount_min:
            return
        weight = SMOOTHING if self._seconds else 1.0
        self._amount += weight * (amount - self._amount)
        self._seconds += weight * (max(seconds, SECONDS_MIN) - self._seconds)

    @property
    def per_second(self) -> float:
        return self._amount / self._seconds if self._seconds else 0.0


class Rates:
    """Prefill tokens/s by context length (powers of two), decode tokens/s, disk bytes/s, the slowest recent step.

    0 for all that has not been measured yet.
    """

    def __init__(self) -> None:
        self._prefill: dict[int, SmoothedRate] = {}
        self.decode = SmoothedRate()
        self.restore, self.save = SmoothedRate(SAMPLE_BYTES_MIN), SmoothedRate(SAMPLE_BYTES_MIN)
        self._chunks_s: deque[float] = deque(maxlen=RECENT_CHUNKS)
        self._decode_steps_s: deque[float] = deque(maxlen=RECENT_DECODE_STEPS)

    def record_prefill(self, length: int, tokens: int, seconds: float) -> None:
        """Record a chunk of `tokens` that ended at `length`."""
        self._chunks_s.append(seconds)
        self._prefill.setdefault(1 << (length - 1).bit_length(), SmoothedRate()).add(tokens, seconds)

    def record_decode(self, tokens: int, seconds: float) -> None:
        self._decode_steps_s.append(seconds)
        self.decode.add(tokens, seconds)

    @property
    def prefill_rates(self) -> list[PrefillRate]:
        rates = sorted(self._prefill.items())
        return [PrefillRate(tokens=length, tokens_per_s=rate.per_second) for length, rate in rates]

    @property
    def slowest_recent_step_s(self) -> float:
        return max((*self._chunks_s, *self._decode_steps_s), default=0.0)
