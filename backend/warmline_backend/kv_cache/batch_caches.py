"""Caches of several sequences: mlx-lm's with masks that cost less, and a quantized one, which mlx-lm has only for one.

As in mlx-lm's batches, the rows of all sequences end at one write index, and shorter ones have padding before them.
Engine thread.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, _BaseCache, create_attention_mask, dynamic_roll

BUFFER_STEP_TOKENS = 256  # buffers end on a multiple of this: mlx-lm's own, ours and restored ones
WORD_BITS = 32

Parts = list[mx.array]  # data, scales, biases


def round_up_to_buffer(tokens: int) -> int:
    """Rows of a buffer for `tokens`: buffers grow by BUFFER_STEP_TOKENS."""
    return -(-tokens // BUFFER_STEP_TOKENS) * BUFFER_STEP_TOKENS


class CausalKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """BatchKVCache whose mask for a chunk of one sequence has a name instead of an array.

    One sequence has no padding.  For an array, attention takes heads x chunk x context numbers on some devices: 11 GB
    for 2,048 tokens after 84,000 with 32 heads.  A decode step needs none: with an array it took twice as long after
    24,000 tokens on an H200.  In exact mode it keeps the array: the kernels for no mask at all depend on the size of
    the buffer, which differs between a warm and a cold run.
    """

    masks_decode_steps = True

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:
        if self.left_padding.shape[0] > 1 or (N == 1 and (self.masks_decode_steps or return_array)):
            return super().make_mask(N, return_array, **options)
        return create_attention_mask(N, self._idx, return_array, options.get("window_size"))


class BatchQuantizedKVCache(_BaseCache):  # type: ignore[misc]  # mlx-lm has no types
    """Cache of keys and values as packed data, scales and biases, each [sequences, heads, rows, width].

    mlx-lm's attention reads `bits` and `group_size`.
    """

    def __init__(self, left_padding: Sequence[int], group_size: int, bits: int) -> None:
        self.keys: Parts | None = None
        self.values: Parts | None = None
        self.left_padding = mx.array(list(left_padding))
        self.offset = mx.array([-count for count in left_padding])
        self.group_size, self.bits = group_size, bits
        self._idx = 0
        self._right_padding: mx.array | None = None

    # ---- a step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Add rows [sequences, heads, count, width], and return all of them."""
        start, end = self._idx, self._idx + keys.shape[2]
        if self.keys is None or self.values is None:
            rows = round_up_to_buffer(keys.shape[2])
            self.keys, self.values = self._make_parts(keys, rows), self._make_parts(values, rows)
        elif end > self.count_buffer_rows():
            rows = round_up_to_buffer(keys.shape[2])
            self.keys, self.values = (self._grow(half, start, rows) for half in (self.keys, self.values))
        for half, added in ((self.keys, keys), (self.values, values)):
            quantized = mx.quantize(added, group_size=self.group_size, bits=self.bits)
            for part, written in zip(half, quantized, strict=True):
                part[..., start:end, :] = written
        self.offset, self._idx = self.offset + keys.shape[2], end
        return _map_parts(self.keys, lambda part: part[..., :end, :]), _map_parts(
            self.values, lambda part: part[..., :end, :]
        )

    def _make_parts(self, like: mx.array, rows: int) -> Parts:
        sequences, heads, _, width = like.shape
        shape, groups = (sequences, heads, rows), width // self.group_size
        data = mx.zeros((*shape, width * self.bits // WORD_BITS), mx.uint32)
        return [data, mx.zeros((*shape, groups), like.dtype), mx.zeros((*shape, groups), like.dtype)]

    @staticmethod
    def _grow(half: Parts, used: int, rows: int) -> Parts:
        """Buffers with room for `rows` more than those that are `used`, or than they have, if that is a whole step."""
        kept = half if used % BUFFER_STEP_TOKENS == 0 else _map_parts(half, lambda part: part[..., :used, :])
        return _map_parts(
            kept,
            lambda part: mx.concatenate([part, mx.zeros((*part.shape[:2], rows, part.shape[3]), part.dtype)], axis=2),
        )

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:
        if self.left_padding.shape[0] == 1:
            return create_attention_mask(N, self._idx, return_array, options.get("window_size"))
        return create_causal_mask(N, offset=self._idx, left_padding=self.left_padding, **options)

    def trim(self, n: int) -> int:
        """Drop the last rows; the buffers stay."""
        count = min(self._idx, n)
        self._idx -= count
        self.offset = self.offset - count
        return count

    # ---- a prefill with padding on the right

    def prepare(self, *, lengths: object = None, right_padding: Sequence[int] | None = None) -> None:
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = mx.array(list(right_padding))

    def finalize(self) -> None:
        """Shift rows to the write index, over the padding that was computed behind them."""
        if (padding := self._right_padding) is None:
            return
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (
                _map_parts(half, lambda part: dynamic_roll(part, padding[:, None], axis=2))
                for half in (self.keys, self.values)
            )
        self.offset = self.offset - padding
        self.left_padding = self.left_padding + padding
        self._right_padding = None

    # ---- sequences that come and go

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these sequences alone, with as little padding as they need."""
        self.offset, self.left_padding = self.offset[batch_indices], self.left_padding[batch_indices]
        padding: list[int] = self.left_padding.tolist()  # type: ignore[assignment]
        spare = min(padding)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (
                _map_parts(half, lambda part: part[batch_indices][:, :, spare:]) for half in (self.keys, self.values)
            )
        self._idx -= spare
        self.left_padding = self.left_padding - spare

    def extend(self, other: "BatchQuantizedKVCache") -> None:
        """Add the sequences of another cache."""
        both, end = (self, other), max(self._idx, other._idx)
        filled = [each for each in both if each.keys is not None]
        if filled:
            keys, values = filled[0].keys, filled[0].values
            assert keys is not None and values is not None
            rows = max(end, *(each.count_buffer_rows() for each in both))
            halves = zip(*(each._pad(keys, values, end, rows) for each in both), strict=True)
            self.keys, self.values = (
                [mx.concatenate(list(pair)) for pair in zip(*half, strict=True)] for half in halves
            )
        self.offset = mx.concatenate([each.offset for each in both])
        self.left_padding = mx.concatenate([each.left_padding + (end - each._idx) for each in both])
        self._idx = end

    def count_buffer_rows(self) -> int:
        """Rows of the buffers, used or not."""
        return 0 if self.keys is None else int(self.keys[0].shape[2])

    def _pad(self, keys: Parts, values: Parts, end: int, rows: int) -> tuple[Parts, Parts]:
        """Buffers of `rows` rows whose last one in use is before `end`; of zeros like `keys` where there are none."""
        before = end - self._idx

        def pad(part: mx.array) -> mx.array:
            held = part[:, :, : rows - before]
            return mx.pad(held, [(0, 0), (0, 0), (before, rows - before - held.shape[2]), (0, 0)])

        def empty(part: mx.array) -> mx.array:
            return mx.zeros((self.offset.shape[0], part.shape[1], 0, part.shape[3]), part.dtype)

        if self.keys is None or self.values is None:
            keys, values = _map_parts(keys, empty), _map_parts(values, empty)
        else:
            keys, values = self.keys, self.values
        return _map_parts(keys, pad), _map_parts(values, pad)

    # ---- mlx-lm's interface of a cache

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset, self.left_padding, self._idx

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.left_padding, self._idx = state

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for half in (self.keys, self.values) for part in half or ())


def _map_parts(half: Parts, change: Callable[[mx.array], mx.array]) -> Parts:
    return [change(part) for part in half]
