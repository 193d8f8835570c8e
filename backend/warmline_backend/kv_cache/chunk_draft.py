"""Drafts of chunks: new rows and states, computed while the KV before them stays as it is.

After an exception inside a computation, a cache object is neither as before nor as after it.  So a chunk is computed
with copies of the cache objects.  Rows are written behind the last row of the KV's own buffers, which no reader of the
KV looks at, and count once all of them exist.

A chunk that is computed layer by layer leaves the buffers alone until its end: its new rows are recorded, and appended
then.  Its price is one more pass over the KV.
Engine thread.
"""

import copy
import re
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from warmline_backend.kv_cache.batch_caches import round_up_to_buffer
from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind, flatten, rebuild

# Texts of mlx, of Metal, CUDA and cuBLAS behind it, and of C++'s std::bad_alloc.
_OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|unable to allocate|insufficient memory|maximum allowed buffer size|resource limit.*exceeded"
    r"|alloc_?failed|bad_alloc",
    re.IGNORECASE,
)


class OutOfMemoryError(RuntimeError):
    """The device had no memory left for a chunk; the KV is as before it.  The text is the device's."""


def _is_out_of_memory(error: Exception) -> bool:
    """True for an error that a device without free memory raises."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


@dataclass
class ChunkDraft:
    """Arrays of a chunk: writes to leaves that keep all rows, and the other leaves as they are after it.  Lazy."""

    layout: CacheLayout
    leaves: list[Any]  # a list of written keys and values, or a cache; whole layers where the layout has a problem

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that have to be computed."""
        return _list_arrays(self.leaves)

    def evaluate_by_layers(self) -> Iterator[None]:
        detach_states(self.layout, self.leaves)
        for leaf in self.leaves:
            mx.eval(_list_arrays([leaf]))
            yield

    def commit(self, layers: list[Any]) -> list[Any]:
        """Write to `layers`, leaf by leaf, and return the layers with the chunk; the draft is used up."""
        if self.layout.problem:
            return self.leaves
        drafts, self.leaves = self.leaves[::-1], []
        committed = []
        for leaf, (_, held) in zip(self.layout.leaves, flatten(layers), strict=True):
            drafted = drafts.pop()
            if leaf.codec.kind is CodecKind.ROWS:
                for keys, values in drafted:
                    held.update_and_fetch(keys, values)
                mx.eval(held.state)  # now: at most one leaf's buffer is there twice
            committed.append(held if leaf.codec.kind is CodecKind.ROWS else drafted)
        return rebuild(self.layout.template, iter(committed))


def detach_states(layout: CacheLayout, leaves: list[Any]) -> None:
    """Make the states of `leaves` copies, lazily: a model may leave views into all that it computed of a chunk."""
    for leaf, drafted in zip(layout.leaves, leaves, strict=False):
        if leaf.codec.kind is CodecKind.STATE:
            leaf.codec.detach_state(drafted)


def _list_arrays(leaves: list[Any]) -> list[mx.array]:
    held = tree_flatten([leaf if isinstance(leaf, list) else leaf.state for leaf in leaves])
    return [value for _, value in held if isinstance(value, mx.array)]


def draft_chunk(model: nn.Module, layout: CacheLayout, layers: list[Any], tokens: mx.array) -> ChunkDraft:
    """Draft `tokens` [1, chunk] after those of `layers`, which are only read."""
    if layout.problem:
        drafted = copy.deepcopy(layers)
        model(tokens, cache=drafted)
        return ChunkDraft(layout, drafted)
    leaves = [leaf.codec.make_draft(held) for leaf, (_, held) in zip(layout.leaves, flatten(layers), strict=True)]
    model(tokens, cache=rebuild(layout.template, iter(leaves)))
    return ChunkDraft(layout, [getattr(leaf, "written", leaf) for leaf in leaves])


def compute_chunk(model: nn.Module, layout: CacheLayout, layers: list[Any], tokens: list[int]) -> list[Any]:
    """Compute `tokens` after those of `layers`, and return the layers with them.

    Raises OutOfMemoryError, and `layers` are as before.  After another error they are unusable.
    """
    try:
        return _compute_chunk(model, layout, layers, mx.array([tokens]))
    except (RuntimeError, MemoryError) as error:
        problem = describe_out_of_memory(error)
    mx.eval(_list_arrays([leaf for _, leaf in flatten(layers)]))  # a write that is left takes no memory
    raise OutOfMemoryError(problem)


def _compute_chunk(model: nn.Module, layout: CacheLayout, layers: list[Any], tokens: mx.array) -> list[Any]:
    if layout.problem:
        draft = draft_chunk(model, layout, layers, tokens)
        mx.eval(draft.arrays)
        return draft.commit(layers)
    held = [leaf for _, leaf in flatten(layers)]
    drafts = [leaf.codec.make_writer(cache) for leaf, cache in zip(layout.leaves, held, strict=True)]
    model(tokens, cache=rebuild(layout.template, iter(drafts)))
    detach_states(layout, drafts)
    mx.eval(_list_arrays(drafts))
    committed = (leaf.codec.commit(*pair) for leaf, *pair in zip(layout.leaves, held, drafts, strict=True))
    return rebuild(layout.template, committed)


def reserve_rows(layout: CacheLayout, layers: list[Any], rows: int) -> None:
    """Grow buffers that have rows to `rows` of them, one after the other: only one is there twice.

    Raises OutOfMemoryError, and no row is lost.
    """
    try:
        for leaf, (_, held) in zip(layout.leaves, flatten(layers), strict=False):
            if leaf.codec.kind is CodecKind.ROWS and 0 < leaf.codec.count_buffer_rows(held) < rows:
                leaf.codec.reserve_rows(held, round_up_to_buffer(rows))
        return
    except (RuntimeError, MemoryError) as error:
        problem = describe_out_of_memory(error)
    raise OutOfMemoryError(problem)


def evaluate_chunk_by_layers(
    model: nn.Module, layout: CacheLayout, layers: list[Any], tokens: list[int]
) -> Generator[None, None, ChunkDraft]:
    """Compute a draft of `tokens`, the generator's value, with a pause after each layer.  Raises as `compute_chunk`."""
    try:
        draft = draft_chunk(model, layout, layers, mx.array([tokens]))
        yield from draft.evaluate_by_layers()
        return draft
    except (RuntimeError, MemoryError) as error:
        problem = describe_out_of_memory(error)
    raise OutOfMemoryError(problem)


def describe_out_of_memory(error: Exception) -> str:
    """Text of a device's error, whose frames then hold no arrays any more.  Raises other errors again."""
    if not _is_out_of_memory(error):
        raise error
    traceback.clear_frames(error.__traceback__)
    return str(error) or type(error).__name__
