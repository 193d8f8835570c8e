"""Measured rates of this machine, for plans and admission.  Engine thread."""

from warmline_backend.generation.step_durations import StepDurations
from warmline_common.protocol.messages import PrefillRate

SMOOTHING = 0.3  # weight of the newest sample
SECONDS_MIN = 1e-9  # a coarse clock may show 0
SAMPLE_BYTES_MIN = 16 << 20  # the time of smaller reads and writes is that of their calls


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
    """Prefill tokens/s by context length (powers of two), decode tokens/s, disk bytes/s, durations of recent steps.

    0 for all that has not been measured yet.
    """

    def __init__(self) -> None:
        self._prefill: dict[int, SmoothedRate] = {}
        self.decode = SmoothedRate()
        self.restore, self.save = SmoothedRate(SAMPLE_BYTES_MIN), SmoothedRate(SAMPLE_BYTES_MIN)
        self.step_durations = StepDurations()

    def record_prefill(self, length: int, tokens: int, seconds: float) -> None:
        """Record a chunk of `tokens` that ended at `length`."""
        self.step_durations.record_chunk(length, tokens, seconds)
        self._prefill.setdefault(1 << (length - 1).bit_length(), SmoothedRate()).add(tokens, seconds)

    def record_decode(self, tokens: int, seconds: float) -> None:
        self.step_durations.record_decode(seconds)
        self.decode.add(tokens, seconds)

    @property
    def prefill_rates(self) -> list[PrefillRate]:
        rates = sorted(self._prefill.items())
        return [PrefillRate(tokens=length, tokens_per_s=rate.per_second) for length, rate in rates]

    def estimate_prefill_rate(self, length: int) -> float:
        """Tokens/s of a chunk that begins at `length`, as measured at the next longer context; 0.0: unknown."""
        longer = (rate for at, rate in sorted(self._prefill.items()) if at > length)
        longest = max(self._prefill.items(), default=(0, None))[1]
        rate = next(longer, longest)
        return rate.per_second if rate else 0.0
