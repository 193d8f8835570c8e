"""Caches of several sequences whose lengths differ: sequence i has its rows first, and free room after them.

mlx-lm's batches align rows on the right and pad on the left.  Here all rows begin at 0, so that a pass may add another
number of rows to each sequence, and none moves when sequences come, go, or take tokens back.  Attention does not see
the room after a sequence's rows.  Engine thread.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from warmline_common.settings.quantization import KvFormat

BUFFER_STEP_TOKENS = 256  # buffers end on a multiple of this: mlx-lm's own, ours and restored ones

Half = Any  # keys or values: an array [sequences, heads, rows, width], or a list of such arrays


def round_up_to_buffer(tokens: int) -> int:
    """Rows of a buffer for `tokens`: buffers grow by BUFFER_STEP_TOKENS."""
    return -(-tokens // BUFFER_STEP_TOKENS) * BUFFER_STEP_TOKENS


class BatchRowsCache(_BaseCache):  # type: ignore[misc]  # mlx-lm has no types
    """Keys and values of several sequences, in mlx-lm's interface of a cache.

    `lengths`: rows of each sequence, never changed in place.  `offset` is the same as an array, for positions.
    """

    # A decode step of one sequence needs no mask, and with one takes up to twice as long.  In exact mode it has one:
    # the kernels for no mask at all depend on the size of the buffer, which differs between a warm and a cold run.
    masks_decode_steps = True

    def __init__(self, lengths: Sequence[int]) -> None:
        self.keys: Half | None = None
        self.values: Half | None = None
        self.set_lengths(lengths)
        self._right_padding: Sequence[int] | None = None

    def _encode(self, half: str, rows: mx.array) -> Half:
        """New rows [sequences, heads, count, width] of "keys" or "values" as they are kept."""
        raise NotImplementedError

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the rows of each sequence; the buffers stay."""
        self.lengths = tuple(lengths)
        self.offset = mx.array(self.lengths)

    # ---- a pass

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Half, Half]:
        """Add rows [sequences, heads, count, width], and return those of all, as long as the longest."""
        added, start = keys.shape[2], self.lengths
        end = max(start) + added
        has_room = end <= self.count_buffer_rows()  # of both halves: the first one grows before the second
        places = None if self._are_equally_long else self._find_places(added)
        for name, rows in (("keys", keys), ("values", values)):
            encoded, held = self._encode(name, rows), getattr(self, name)
            if held is None:
                held = _map(encoded, lambda part: _make_rows(part, round_up_to_buffer(added)))
            elif not has_room:
                held = _map(held, lambda part: _add_rows(part, max(start), round_up_to_buffer(added)))
            setattr(self, name, tree_map(lambda part, new: self._write(part, new, places), held, encoded))
        self.lengths, self.offset = tuple(length + added for length in start), self.offset + added
        return _map(self.keys, lambda part: part[:, :, :end]), _map(self.values, lambda part: part[:, :, :end])

    def _write(self, part: mx.array, new: mx.array, places: mx.array | None) -> mx.array:
        """Write new rows behind those of each sequence, in place where nothing else holds the buffer."""
        first, count = self.lengths[0], new.shape[2]
        if places is None or not new.size:  # some models have keys alone
            part[:, :, first : first + count] = new
            return part
        return mx.put_along_axis(part, mx.broadcast_to(mx.expand_dims(places, (1, 3)), new.shape), new, axis=2)

    def _find_places(self, count: int) -> mx.array:
        """Positions [sequences, count] of the next tokens."""
        return self.offset[:, None] + mx.arange(count)

    @property
    def _are_equally_long(self) -> bool:
        return all(length == self.lengths[0] for length in self.lengths)

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:
        """Mask for N more tokens; by name instead of an array where all sequences are equally long.

        For an array, attention takes heads x chunk x context numbers on some devices: 11 GB for 2,048 tokens after
        84,000 with 32 heads.
        """
        window: int | None = options.get("window_size")
        needs_array = N == 1 and (return_array or self.masks_decode_steps)
        if self._are_equally_long and not needs_array:
            return create_attention_mask(N, self.lengths[0], return_array, window)
        return self._make_array_mask(N, window)

    def _make_array_mask(self, count: int, window: int | None) -> mx.array:
        """[sequences, 1, count, rows], true where a new token attends to a row."""
        rows = mx.arange(max(self.lengths) + count)
        places = mx.expand_dims(self._find_places(count), (1, 3))
        mask = rows <= places
        return mask if window is None else mask & (places < rows + window)

    # ---- taking back

    def trim(self, n: int) -> int:
        """Drop the last rows of each sequence; the buffers stay."""
        count = min(*self.lengths, n)
        self.drop_last([count] * len(self.lengths))
        return count

    def drop_last(self, counts: Sequence[int]) -> None:
        """Drop the last `counts[i]` rows of sequence i; the buffers stay."""
        self.set_lengths([length - count for length, count in zip(self.lengths, counts, strict=True)])

    # ---- a prefill with padding on the right

    def prepare(self, *, lengths: object = None, right_padding: Sequence[int] | None = None) -> None:
        self._right_padding = right_padding

    def finalize(self) -> None:
        """Drop the padding that was computed behind the rows."""
        if self._right_padding is not None:
            self.drop_last(self._right_padding)
            self._right_padding = None

    # ---- sequences that come and go

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these sequences alone, in buffers no longer than they need."""
        self.set_lengths([self.lengths[index] for index in batch_indices])
        rows, indices = round_up_to_buffer(max(self.lengths)), mx.array(list(batch_indices))
        self._change_parts(lambda part: part[:, :, :rows][indices])

    def extend(self, other: "BatchRowsCache") -> None:
        """Add the sequences of another cache."""
        both = (self, other)
        rows = max(each.count_buffer_rows() for each in both)
        for name in ("keys", "values") if any(each.keys is not None for each in both) else ():
            like = next(getattr(each, name) for each in both if getattr(each, name) is not None)
            halves = [each._pad(getattr(each, name), like, rows) for each in both]
            setattr(self, name, tree_map(lambda one, two: mx.concatenate([one, two]), *halves))
        self.set_lengths([*self.lengths, *other.lengths])

    def _pad(self, half: Half | None, like: Half, rows: int) -> Half:
        """Buffers of `rows` rows; where there are none yet, of zeros like the other's."""
        if half is None:
            count = len(self.lengths)
            return _map(like, lambda part: mx.zeros((count, part.shape[1], rows, part.shape[3]), part.dtype))
        return _map(half, lambda part: mx.pad(part, [(0, 0), (0, 0), (0, rows - part.shape[2]), (0, 0)]))

    def extract(self, index: int) -> "BatchRowsCache":
        """A cache of one sequence, in buffers without room; lazy, and shares none once it is evaluated."""
        alone, length = copy.copy(self), self.lengths[index]
        alone.set_lengths([length])
        alone._change_parts(lambda part: mx.contiguous(part[index : index + 1, :, :length]))
        return alone

    def count_buffer_rows(self) -> int:
        """Rows of the buffers, used or not."""
        return 0 if self.keys is None else int(self._parts[0].shape[2])

    def reserve_rows(self, rows: int) -> None:
        """Grow the buffers to `rows` rows, all or none of them; evaluated."""
        self.keys, self.values = (_map(half, lambda part: _grow(part, rows)) for half in (self.keys, self.values))

    def _change_parts(self, change: Callable[[mx.array], mx.array]) -> None:
        if self.keys is not None:
            self.keys, self.values = _map(self.keys, change), _map(self.values, change)

    @property
    def _parts(self) -> list[mx.array]:
        return [part for _, part in tree_flatten([self.keys, self.values]) if part is not None]

    # ---- the rest of mlx-lm's interface

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.offset

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return max(self.lengths)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)


class BatchFloatKVCache(BatchRowsCache):
    """Keys and values as the model computes them."""

    def _encode(self, half: str, rows: mx.array) -> mx.array:
        return rows


class BatchQuantizedKVCache(BatchRowsCache):
    """Keys and values as packed data, scales and biases, each [sequences, heads, rows, width].

    mlx-lm's attention reads `bits` and `group_size`, which only a cache with one format for keys and values has.
    """

    def __init__(self, lengths: Sequence[int], kv_format: KvFormat) -> None:
        super().__init__(lengths)
        self.format = kv_format
        if kv_format.is_uniform:
            self.group_size, self.bits = kv_format.keys.group_size, kv_format.keys.bits

    def _encode(self, half: str, rows: mx.array) -> list[mx.array]:
        """Data, scales and biases."""
        row_format = self.format.keys if half == "keys" else self.format.values
        return list(mx.quantize(rows, group_size=row_format.group_size, bits=row_format.bits))


def _map(half: Half, change: Callable[[mx.array], mx.array]) -> Half:
    return tree_map(change, half)


def _make_rows(like: mx.array, rows: int) -> mx.array:
    return mx.zeros((*like.shape[:2], rows, like.shape[3]), like.dtype)


def _add_rows(part: mx.array, used: int, rows: int) -> mx.array:
    """Buffer with room for `rows` more than those `used`, or than it has, if that is a whole step."""
    kept = part if used % BUFFER_STEP_TOKENS == 0 else part[:, :, :used]
    return mx.concatenate([kept, _make_rows(part, rows)], axis=2)


def _grow(part: mx.array, rows: int) -> mx.array:
    """Copy of a buffer with room for more rows, evaluated."""
    grown = mx.concatenate([part, _make_rows(part, rows - part.shape[2])], axis=2)
    mx.eval(grown)
    return grown
