"""Codecs, one a cache class: mlx-lm's cache objects to named rows and states, and back.

A model's cache is a list of layers; a layer is one cache object or a `CacheList` of them.  Flattened in order, these
are the *leaves*.  Each leaf has a codec of one of three kinds:

* **rows**: one row a token, all of them in memory (KVCache, QuantizedKVCache);
* **window**: one row a token, only the last in memory (RotatingKVCache);
* **state**: one value at one position (ArraysCache).

Codecs work on the *batched form* that passes compute with: ours for rows (batch_caches.py), mlx-lm's for windows, the
class itself for states.  Where a sequence's rows lie in it is found by Python arithmetic, without waiting for the
device.  mlx objects: engine thread only.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from warmline_backend.kv_cache.batch_caches import BatchFloatKVCache, BatchQuantizedKVCache, BatchRowsCache
from warmline_backend.kv_cache.quantization.mixed_cache import (
    MixedQuantizedKVCache,
    get_kv_format,
    make_quantized_cache,
)

Fields = dict[str, mx.array]  # field name -> (1, heads, rows, width) for rows, any shape with leading 1 for states


class CodecKind(StrEnum):
    ROWS = "rows"
    WINDOW = "window"
    STATE = "state"


class _WriteRecorder:
    """Mixin of a cache that records what is written to it, so that it can be written to another one."""

    written: list[tuple[mx.array, mx.array]]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.written.append((keys, values))
        return super().update_and_fetch(keys, values)  # type: ignore[misc]


class _DraftKVCache(_WriteRecorder, BatchFloatKVCache):
    pass


class _DraftQuantizedKVCache(_WriteRecorder, BatchQuantizedKVCache):
    pass


class _RowWriter:
    """Mixin of a cache that writes behind the last row of another one's buffers, which it shares.

    New rows are sent to the device before they are written.  So where the device has no memory for them, the buffers
    are evaluated or need no more than a write.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        mx.async_eval(keys, values)  # type: ignore[no-untyped-call]
        return super().update_and_fetch(keys, values)  # type: ignore[misc]


class _KVCacheWriter(_RowWriter, BatchFloatKVCache):
    pass


class _QuantizedKVCacheWriter(_RowWriter, BatchQuantizedKVCache):
    pass


class Codec:
    """Base of all codecs."""

    kind: CodecKind

    def to_batched(self, single: Any) -> Any:
        """The batched form of a cache of one sequence; rows are shared, not copied, where that is possible."""
        raise NotImplementedError

    def make_draft(self, leaf: Any) -> Any:
        """Copy of a leaf of one sequence, for one chunk; shares its memory until it is written to."""
        return copy.deepcopy(leaf)

    def make_writer(self, leaf: Any) -> Any:
        """Copy of a leaf of one sequence, for one chunk that `commit` makes a part of the leaf; until then it is as
        before.
        """
        return copy.deepcopy(leaf)

    def commit(self, leaf: Any, writer: Any) -> Any:
        """The leaf with what was written to its writer."""
        return writer

    def make_scratch(self, leaf: Any) -> Any:
        """Copy of a leaf, for tokens that are dropped afterwards; the leaf stays as it is."""
        return copy.deepcopy(leaf)

    def share_buffers(self, leaf: Any, scratch: Any) -> None:
        """Let a leaf have the buffers of its scratch copy, where its own rows are in them, so that no copy is made."""

    def extract_sequence(self, leaf: Any, i: int) -> Any:
        """Sequence `i` of a batch as a batched form of its own (evaluated by the caller)."""
        return self.to_batched(leaf.extract(i))

    def remember(self, leaf: Any) -> dict[str, Any]:
        """Attributes of a leaf before a pass of several tokens, for `restore`; no row or state is copied."""
        return dict(vars(leaf))

    def restore(self, leaf: Any, remembered: dict[str, Any]) -> None:
        """Go back to the start of the pass that has just been computed."""
        vars(leaf).update(remembered)

    def drop_last(self, leaf: Any, counts: Sequence[int]) -> None:
        """Drop the last `counts[i]` tokens, but not all, of sequence i in the pass that has just been computed."""
        raise NotImplementedError


class RowsCodec(Codec):
    """KVCache."""

    kind = CodecKind.ROWS
    _draft_class: Any = _DraftKVCache
    _writer_class: Any = _KVCacheWriter

    def to_batched(self, single: KVCache) -> BatchRowsCache:
        batch = BatchFloatKVCache([single.offset])
        batch.keys, batch.values = single.keys, single.values
        return batch

    def rows(self, leaf: Any, i: int, length: int, start: int, end: int) -> Fields:
        """Rows [start, end) of sequence `i`; a lazy view."""
        return {"keys": leaf.keys[i : i + 1, :, start:end], "values": leaf.values[i : i + 1, :, start:end]}

    def build(self, fields: Fields, position: int, template: Any) -> BatchRowsCache:
        """Make a leaf of rows [0, position); `fields` become its buffers."""
        single = type(template)()
        single.keys, single.values, single.offset = fields["keys"], fields["values"], position
        return self.to_batched(single)

    def make_draft(self, leaf: Any) -> Any:
        """Copy of a leaf for one chunk: shares its memory, and records the rows that are written to it."""
        draft = self._draft_class.__new__(self._draft_class)
        vars(draft).update(vars(copy.deepcopy(leaf)), written=[])
        return draft

    def make_writer(self, leaf: Any) -> Any:
        """Cache with the leaf's own buffers: rows that are written behind its last one do not change it."""
        writer = self._writer_class.__new__(self._writer_class)
        vars(writer).update(vars(leaf))
        return writer

    def commit(self, leaf: Any, writer: Any) -> Any:
        vars(leaf).update(vars(writer))
        return leaf

    def make_scratch(self, leaf: BatchRowsCache) -> BatchRowsCache:
        """Copy with the leaf's own buffers: rows are written behind its last one."""
        return copy.copy(leaf)

    def share_buffers(self, leaf: BatchRowsCache, scratch: BatchRowsCache) -> None:
        leaf.keys, leaf.values = scratch.keys, scratch.values

    def reserve_rows(self, leaf: BatchRowsCache, rows: int) -> None:
        """Grow the buffers to `rows` rows, all or none of them."""
        leaf.reserve_rows(rows)

    def count_buffer_rows(self, leaf: BatchRowsCache) -> int:
        """Rows of the buffer, used or not."""
        return leaf.count_buffer_rows()

    def truncate(self, leaf: BatchRowsCache, count: int) -> None:
        """Drop the last `count` rows; the buffer stays."""
        leaf.trim(count)

    def extract_sequence(self, leaf: BatchRowsCache, i: int) -> BatchRowsCache:
        return leaf.extract(i)

    def remember(self, leaf: BatchRowsCache) -> dict[str, Any]:
        return {"lengths": leaf.lengths}  # rows are written behind the others, into the same buffers

    def restore(self, leaf: BatchRowsCache, remembered: dict[str, Any]) -> None:
        leaf.set_lengths(remembered["lengths"])

    def drop_last(self, leaf: BatchRowsCache, counts: Sequence[int]) -> None:
        leaf.drop_last(counts)


class QuantizedRowsCodec(RowsCodec):
    """QuantizedKVCache, and ours with formats for keys and values: packed data, scales and biases, a row a token."""

    _draft_class = _DraftQuantizedKVCache
    _writer_class = _QuantizedKVCacheWriter
    _tensor_names = ("data", "scales", "biases")

    def to_batched(self, single: Any) -> BatchRowsCache:
        batch = BatchQuantizedKVCache([single.offset], get_kv_format(single))
        if single.keys is not None:
            batch.keys, batch.values = list(single.keys), list(single.values)
        return batch

    def rows(self, leaf: BatchRowsCache, i: int, length: int, start: int, end: int) -> Fields:
        return {
            f"{half}_{part}": array[i : i + 1, :, start:end]
            for half in ("keys", "values")
            for part, array in zip(self._tensor_names, getattr(leaf, half), strict=True)
        }

    def build(self, fields: Fields, position: int, template: Any) -> BatchRowsCache:
        single = make_quantized_cache(get_kv_format(template))
        single.keys = [fields[f"keys_{part}"] for part in self._tensor_names]
        single.values = [fields[f"values_{part}"] for part in self._tensor_names]
        single.offset = position
        return self.to_batched(single)


class WindowCodec(Codec):
    """RotatingKVCache without `keep`: rows leave memory once the window has passed them."""

    kind = CodecKind.WINDOW

    def to_batched(self, single: RotatingKVCache) -> BatchRotatingKVCache:
        return BatchRotatingKVCache.merge([single])

    def is_single(self, leaf: BatchRotatingKVCache) -> bool:
        """True where the batch has one sequence, and no padding before it.

        One that is left of several keeps its padding, of which mlx-lm 0.32.2 masks a row too many in a chunk once the
        ring has rotated.
        """
        return int(leaf.left_padding.shape[0]) == 1 and int(leaf.left_padding[0]) <= 0

    def count_rows_in_memory(self, leaf: BatchRotatingKVCache, length: int) -> int:
        """Number of last rows in memory, for a sequence of `length` tokens."""
        if leaf.keys is None:
            return 0
        stored: int = leaf.keys.shape[2] if leaf.rotated else leaf._idx
        return min(length, stored)

    def rows(self, leaf: BatchRotatingKVCache, i: int, length: int, start: int, end: int) -> Fields:
        size = leaf.keys.shape[2]
        first = leaf._idx - (length - start)  # the newest row lies just before the write index
        return {
            "keys": _ring_slice(leaf.keys[i : i + 1], first, end - start, size),
            "values": _ring_slice(leaf.values[i : i + 1], first, end - start, size),
        }

    def build(self, fields: Fields, position: int, template: RotatingKVCache) -> BatchRotatingKVCache:
        """Make a leaf of rows [max(0, position - window), position); `fields` become its ring."""
        leaf = BatchRotatingKVCache(template.max_size, [0])
        leaf.keys, leaf.values = fields["keys"], fields["values"]
        leaf.offset, leaf._idx = mx.array([position]), leaf.keys.shape[2]
        leaf._offset = leaf._idx
        return leaf

    def remember(self, leaf: BatchRotatingKVCache) -> dict[str, Any]:
        # A pass of several tokens makes new buffers, but changes this array.
        return {**vars(leaf), "left_padding": mx.array(leaf.left_padding)}

    def drop_last(self, leaf: BatchRotatingKVCache, counts: Sequence[int]) -> None:
        """Drop the last rows of one sequence: a pass of several tokens keeps all rows that its first one needs."""
        (count,) = counts
        leaf.trim(count)
        leaf.keys, leaf.values = leaf.keys[:, :, : leaf._idx], leaf.values[:, :, : leaf._idx]


def _ring_slice(buffer: mx.array, first: int, count: int, size: int) -> mx.array:
    """`count` rows from index `first` of a ring of `size` rows; a negative index counts back over its start."""
    if first >= 0:
        return buffer[:, :, first : first + count]
    wrapped = buffer[:, :, size + first : min(size, size + first + count)]
    rest = count - wrapped.shape[2]
    return mx.concatenate([wrapped, buffer[:, :, :rest]], axis=2) if rest else wrapped


class StateCodec(Codec):
    """ArraysCache (gated delta net, Mamba): only the state after the last token."""

    kind = CodecKind.STATE

    def to_batched(self, single: ArraysCache) -> ArraysCache:
        if single.empty():
            return ArraysCache.merge([single])
        batch = ArraysCache(size=len(single.cache))
        batch.cache = list(single.cache)
        return batch

    def extract_sequence(self, leaf: ArraysCache, i: int) -> ArraysCache:
        state = {name: mx.contiguous(array) for name, array in self.state(leaf, i).items()}  # a view holds the batch
        return self.build(state, 0, leaf)

    def state(self, leaf: ArraysCache, i: int) -> Fields:
        """The state of sequence `i`, a lazy view.  Entries that a model leaves unused are left out."""
        return {f"state{n}": array[i : i + 1] for n, array in enumerate(leaf.cache) if array is not None}

    def remember(self, leaf: ArraysCache) -> dict[str, Any]:
        # Models replace states, and write into none, but `advance` changes these two arrays.
        counters = {name: getattr(leaf, name) for name in ("left_padding", "lengths")}
        copies = {name: None if array is None else mx.array(array) for name, array in counters.items()}
        return {**vars(leaf), "cache": list(leaf.cache), **copies}

    def detach_state(self, leaf: ArraysCache) -> None:
        """Copy the state, lazily: a model may leave a view there, into all that it computed of a chunk."""
        leaf.cache = [None if array is None else mx.contiguous(array) for array in leaf.cache]

    def build(self, fields: Fields, position: int, template: ArraysCache) -> ArraysCache:
        single = ArraysCache(size=len(template.cache))
        for name, array in fields.items():
            single[int(name.removeprefix("state"))] = array
        return self.to_batched(single)


ROWS, QUANTIZED, WINDOW, STATE = RowsCodec(), QuantizedRowsCodec(), WindowCodec(), StateCodec()

# By exact class: a subclass may keep more than its parent does.
_CODECS: dict[type, Codec] = {
    KVCache: ROWS,
    QuantizedKVCache: QUANTIZED,
    MixedQuantizedKVCache: QUANTIZED,
    RotatingKVCache: WINDOW,
    ArraysCache: STATE,
}


def flatten(layers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each leaf with its name `layer.component`, in order."""
    for number, layer in enumerate(layers):
        for component, leaf in enumerate(_components(layer)):
            yield f"{number}.{component}", leaf


def _components(layer: Any) -> Iterator[Any]:
    if isinstance(layer, CacheList):
        for child in layer.caches:
            yield from _components(child)
    else:
        yield layer


def rebuild(template: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    """Layers nested as in `template`, with `leaves` in flattened order."""
    return [_rebuild_layer(layer, leaves) for layer in template]


def _rebuild_layer(layer: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_rebuild_layer(child, leaves) for child in layer.caches))
    return next(leaves)


@dataclass(frozen=True)
class CacheLeaf:
    name: str  # "layer.component"
    codec: Any  # Codec
    template: Any  # an empty cache of the model's own class, for its parameters


@dataclass(frozen=True)
class CacheLayout:
    """Leaves of a model's cache.  `problem` says why it can't be persisted; there are no leaves then."""

    make_cache: Callable[[], list[Any]]  # a fresh cache of the model's own classes
    template: list[Any]
    leaves: tuple[CacheLeaf, ...]
    problem: str = ""

    @classmethod
    def from_factory(cls, make_cache: Callable[[], list[Any]]) -> "CacheLayout":
        template = make_cache()
        leaves, unknown = [], set()
        for name, leaf in flatten(template):
            codec = _CODECS.get(type(leaf))
            if codec is None or (codec is WINDOW and leaf.keep):
                unknown.add(type(leaf).__name__)
            else:
                leaves.append(CacheLeaf(name, codec, leaf))
        if unknown:
            names = ", ".join(sorted(unknown))
            return cls(make_cache, template, (), f"no codec for the cache class {names}")
        return cls(make_cache, template, tuple(leaves))

    def leaves_of_kind(self, kind: CodecKind) -> list[CacheLeaf]:
        """Leaves of one kind in flattened order."""
        return [leaf for leaf in self.leaves if leaf.codec.kind is kind]

    @property
    def has_states(self) -> bool:
        return bool(self.leaves_of_kind(CodecKind.STATE))

    @property
    def window(self) -> int:
        """The longest window in tokens; 0 without rotating layers."""
        return max((leaf.template.max_size for leaf in self.leaves_of_kind(CodecKind.WINDOW)), default=0)

    @property
    def quantization(self) -> str:
        """Bits of quantized rows, those of most layers first: "q8", "q8,4" for keys and values, "q8,4+q8"; else ""."""
        formats = Counter(str(get_kv_format(leaf.template)) for leaf in self.leaves if leaf.codec is QUANTIZED)
        return "+".join(f"q{bits}" for bits, _ in formats.most_common())

    @property
    def has_rows_alone(self) -> bool:
        """True where each sequence of a batch can take back another number of tokens."""
        return bool(self.leaves) and all(leaf.codec.kind is CodecKind.ROWS for leaf in self.leaves)

    @property
    def is_batchable(self) -> bool:
        """True where several sequences can share one decode batch."""
        return not self.problem

    @property
    def class_names(self) -> list[str]:
        return sorted({type(leaf).__name__ for _, leaf in flatten(self.template)})

    def make_empty_cache(self) -> list[Any]:
        """An empty cache in batched form.  Classes without a codec stay as the model made them: batches of one."""
        layers = self.make_cache()
        if self.problem:
            return layers
        batched = (
            leaf.codec.to_batched(single) for leaf, (_, single) in zip(self.leaves, flatten(layers), strict=True)
        )
        return rebuild(self.template, batched)
