"""Chunks of a prefill: where one ends, and one that is computed layer by layer.  Engine thread."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class LayerwiseChunk:
    """A chunk that is computed layer by layer: others wait for a layer of it, not for the whole.  Engine thread."""

    tokens: int
    _layers: Iterator[None]
    seconds: float = 0.0  # spent on it so far

    def compute_layer(self) -> bool:
        """Compute the next layer; False once all are computed.  Raises what the device raises."""
        began = time.monotonic()
        is_open = next(self._layers, self) is not self
        self.seconds += time.monotonic() - began
        return is_open


def find_chunk_end(start: int, end: int, step: int, chunk_ends: Iterable[int]) -> int:
    """End of the chunk that begins at `start`: after `step` tokens, at the next of `chunk_ends`, or at `end`."""
    following = (position for position in chunk_ends if position > start)
    return min(end, start + step, next(following, end))
