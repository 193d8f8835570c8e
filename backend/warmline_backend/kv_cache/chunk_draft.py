"""Drafts of chunks: new rows and states, computed while the KV before them stays as it is.

After an exception inside a computation, a cache object is neither as before nor as after it.  So a chunk is computed
with copies of the cache objects, which share their memory until they are written to, and only the new rows are kept of
the copies.  They are appended once all of them exist.  The price is one more pass over the KV a chunk.
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

    def evaluate(self) -> None:
        mx.eval(self.arrays)
        self.detach_states()

    def evaluate_by_layers(self) -> Iterator[None]:
        for leaf in self.leaves:
            mx.eval(_list_arrays([leaf]))
            yield
        self.detach_states()

    def detach_states(self) -> None:
        for leaf, drafted in zip(self.layout.leaves, self.leaves, strict=False):
            if leaf.codec.kind is CodecKind.STATE:
                leaf.codec.detach_state(drafted)

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


def evaluate_chunk(model: nn.Module, layout: CacheLayout, layers: list[Any], tokens: list[int]) -> ChunkDraft:
    """Compute a draft of `tokens`.  Raises OutOfMemoryError, and what the device raises; `layers` are as before."""
    try:
        draft = draft_chunk(model, layout, layers, mx.array([tokens]))
        draft.evaluate()
        return draft
    except (RuntimeError, MemoryError) as error:
        problem = _describe_out_of_memory(error)
    raise OutOfMemoryError(problem)


def evaluate_chunk_by_layers(
    model: nn.Module, layout: CacheLayout, layers: list[Any], tokens: list[int]
) -> Generator[None, None, ChunkDraft]:
    """As `evaluate_chunk`, with a pause after each layer; the draft is the generator's value."""
    try:
        draft = draft_chunk(model, layout, layers, mx.array([tokens]))
        yield from draft.evaluate_by_layers()
        return draft
    except (RuntimeError, MemoryError) as error:
        problem = _describe_out_of_memory(error)
    raise OutOfMemoryError(problem)


def _describe_out_of_memory(error: Exception) -> str:
    """Text of a device's error, whose frames then hold no arrays any more.  Raises other errors again."""
    if not _is_out_of_memory(error):
        raise error
    traceback.clear_frames(error.__traceback__)
    return str(error) or type(error).__name__
