"""What this machine was measured to do: the figures that plans and admission go by.  Engine thread."""

from collections import deque

from warmline_wire.messages import Rate

SMOOTHING = 0.3  # weight of the newest sample
RECENT_CHUNKS, RECENT_DECODE_STEPS = 32, 64  # apart: a minute of decode steps must not hide how long a chunk takes


class Smoothed:
    """An exponentially weighted mean; 0 until the first sample."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.value = sample if not self.value else self.value + SMOOTHING * (sample - self.value)


class Rates:
    """Prefill tokens/s by context length (powers of two), decode tokens/s, disk bytes/s, the slowest recent step."""

    def __init__(self) -> None:
        self._prefill: dict[int, Smoothed] = {}
        self._decode, self._restore, self._save = Smoothed(), Smoothed(), Smoothed()
        self._chunks_s: deque[float] = deque(maxlen=RECENT_CHUNKS)
        self._decode_steps_s: deque[float] = deque(maxlen=RECENT_DECODE_STEPS)

    def prefilled(self, length: int, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` ended at `length`."""
        self._chunks_s.append(seconds)
        self._prefill.setdefault(1 << (length - 1).bit_length(), Smoothed()).add(tokens / max(seconds, 1e-9))

    def decoded(self, tokens: int, seconds: float) -> None:
        self._decode_steps_s.append(seconds)
        self._decode.add(tokens / max(seconds, 1e-9))

    def restored(self, bytes_read: int, seconds: float) -> None:
        self._restore.add(bytes_read / max(seconds, 1e-9))

    def saved(self, bytes_written: int, seconds: float) -> None:
        self._save.add(bytes_written / max(seconds, 1e-9))

    @property
    def prefill(self) -> list[Rate]:
        return [Rate(tokens=length, tokens_per_s=rate.value) for length, rate in sorted(self._prefill.items())]

    @property
    def decode_tokens_per_s(self) -> float:
        return self._decode.value

    @property
    def restore_bytes_per_s(self) -> float:
        return self._restore.value

    @property
    def save_bytes_per_s(self) -> float:
        return self._save.value

    @property
    def slowest_recent_step_s(self) -> float:
        return max((*self._chunks_s, *self._decode_steps_s), default=0.0)
