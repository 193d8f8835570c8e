"""Measured speeds and durations of this machine, for plans and admission.  Engine thread."""

from collections import deque

from warmline_backend.generation.step_durations import StepDurations
from warmline_common.measurement.fitted_durations import make_chunk_durations
from warmline_common.measurement.recent_durations import WorkDuration
from warmline_common.protocol.messages import PrefillRate

RECENT_MAX = 15  # samples of a rate: a few slow ones do not count, a slower machine soon does
SECONDS_MIN = 1e-9  # a coarse clock may show 0
SAMPLE_BYTES_MIN = 16 << 20  # the time of smaller reads and writes is that of their calls
COPY_SAMPLE_BYTES_MIN = 1 << 18  # likewise, of copies in memory


class MedianRate:
    """Amount per second of recent samples: the median, by amount; 0 until the first sample.

    Half of the amount was faster, half was slower: a slow sample does not count, and the tokens of a short chunk, which
    take longer each, say little about long chunks.  Amounts below `amount_min` are ignored.
    """

    def __init__(self, amount_min: int = 0) -> None:
        self._amount_min = amount_min
        self._samples: deque[tuple[float, int]] = deque(maxlen=RECENT_MAX)  # rate and amount
        self._median: float | None = 0.0

    def add(self, amount: int, seconds: float) -> None:
        if amount >= self._amount_min:
            self._samples.append((amount / max(seconds, SECONDS_MIN), amount))
            self._median = None

    @property
    def per_second(self) -> float:
        if self._median is None:
            self._median = self._find_median()
        return self._median

    def _find_median(self) -> float:
        half, passed = sum(amount for _, amount in self._samples) / 2, 0
        for rate, amount in sorted(self._samples, reverse=True):  # of two in the middle the faster
            passed += amount
            if passed >= half:
                return rate
        return 0.0


def measure_chunk(length: int, tokens: int, seconds: float) -> WorkDuration:
    """Duration of a chunk of `tokens` that ended at `length`."""
    return WorkDuration(amount=tokens, context=length - (tokens + 1) // 2, seconds=seconds)


class Rates:
    """Prefill tokens/s by context length (powers of two), decode tokens/s, disk bytes/s, durations of recent steps.

    0 for all that has not been measured yet.  `chunks` are the durations of chunks by tokens and context, those of the
    warm-up and of batches, too.
    """

    def __init__(self) -> None:
        self._prefill: dict[int, MedianRate] = {}
        self.chunks = make_chunk_durations()
        self.decode = MedianRate()
        self.restore, self.save = MedianRate(SAMPLE_BYTES_MIN), MedianRate(SAMPLE_BYTES_MIN)
        self.copy = MedianRate(COPY_SAMPLE_BYTES_MIN)  # of rows on this thread, for a save
        self.step_durations = StepDurations()

    def record_prefill(self, length: int, tokens: int, seconds: float) -> None:
        """Record a chunk of `tokens` that ended at `length`."""
        self.step_durations.record_chunk(length, tokens, seconds)
        self._prefill.setdefault(1 << (length - 1).bit_length(), MedianRate()).add(tokens, seconds)
        self.record_chunk(length, tokens, seconds)

    def record_chunk(self, length: int, tokens: int, seconds: float) -> None:
        """Record a chunk for estimates alone, as one of the warm-up: it tells little about the usual speed."""
        self.chunks.add(measure_chunk(length, tokens, seconds))

    def record_batch(self, depth: int, longest: int, tokens: int, seconds: float) -> None:
        """Record a batch of `tokens`, padding included, whose prompts have `longest` each, after `depth` at most."""
        self.step_durations.record_chunk(depth + longest, tokens, seconds)
        self.chunks.add(WorkDuration(amount=tokens, context=depth + longest // 2, seconds=seconds))

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
