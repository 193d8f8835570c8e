"""KV of one token sequence, at rest as a resident or as one row of a running batch.  Engine thread only."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from warmline_backend.kv_cache.batch_caches import BatchRowsCache
from warmline_backend.kv_cache.chunk_draft import compute_chunk, evaluate_chunk_by_layers, reserve_rows
from warmline_backend.kv_cache.codecs import CacheLayout, CacheLeaf, CodecKind, Fields, flatten, rebuild
from warmline_common.protocol.tokens import TokenArray

LAST_CHECKPOINTS_COUNT = 3  # kept besides the first (end of system and tools): where a next turn may diverge
BUFFER_RATIO_MAX = 1.25  # buffer rows / rows of a KV whose buffers were shrunk

T = TypeVar("T")
_ALL = slice(None)
NamedArrays = dict[str, mx.array]  # "layer.component.field" -> array


class RowsUnavailableError(Exception):
    """Rows of a rotating layer are neither in its window nor in the journal."""


@dataclass(frozen=True)
class RewindPoint:
    """States and windows at a position of an answer, of the layers that can't be cut anywhere."""

    position: int
    states: NamedArrays
    windows: NamedArrays


@dataclass
class KV:
    """The KV of `tokens`: every leaf with rows has exactly `len(tokens)` of them.

    `journal` holds rows of rotating layers as they were produced, oldest first, for the next save.  `checkpoints` holds
    the state of all recurrent layers by position.

    In exact mode only rows computed on the grid are kept, saved or continued; `grid_end` is their end.  Later rows (the
    prompt's last partial chunk, the answer) would round differently when they are prefilled.
    """

    layout: CacheLayout
    tokens: TokenArray
    layers: list[Any]  # batched form
    journal: list[tuple[int, int, NamedArrays]] = field(default_factory=list)
    checkpoints: dict[int, NamedArrays] = field(default_factory=dict)
    index: int = 0  # row of the batch
    journal_until: int = 0  # rows below this are in the journal or were dropped from it
    journal_enabled: bool = True  # rows of rotating layers are kept for a save
    grid: int = 0  # exact mode: tokens in a full chunk, at whose multiples it can be continued; 0: anywhere
    grid_end: int = 0  # with a grid: end of the rows computed on it
    rollback_window: tuple[int, NamedArrays] = (0, {})  # a position, and the windows' rows there
    rewind_points: list[RewindPoint] = field(default_factory=list)  # ascending, while an answer may be drawn again

    @classmethod
    def from_leaves(cls, layout: CacheLayout, tokens: TokenArray, leaves: Iterator[Any]) -> "KV":
        """Make a KV of leaves in batched form, in flattened order; all its rows count as saved."""
        return cls(layout, tokens, rebuild(layout.template, leaves), journal_until=len(tokens))

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def savable_length(self) -> int:
        """Number of tokens that may be kept."""
        return self.floor_to_grid(min(self.length, self.grid_end)) if self.grid else self.length

    def floor_to_grid(self, position: int) -> int:
        """The last multiple of the grid up to `position`; `position` where there is no grid."""
        return position - position % self.grid if self.grid else position

    @property
    def nbytes(self) -> int:
        """Bytes held when this sequence is alone in its batch.  A checkpoint at its end is its layers' own state."""
        journal = sum(_nbytes(rows) for *_, rows in self.journal)
        states = sum(_nbytes(held) for position, held in self.checkpoints.items() if position != self.length)
        states += _nbytes(self.rollback_window[1])
        points = sum(_nbytes(point.states) + _nbytes(point.windows) for point in self.rewind_points)
        return layers_nbytes(self.layers) + journal + states + points

    @property
    def buffer_rows(self) -> int:
        """Rows of its buffers, at least one a token."""
        for leaf, (_, cache) in zip(self.layout.leaves, flatten(self.layers), strict=False):
            if leaf.codec.kind is CodecKind.ROWS:
                return max(self.length, int(leaf.codec.count_buffer_rows(cache)))
        return self.length

    # ---- prefill

    def reserve_rows(self, rows: int) -> None:
        """Give buffers that have rows room for `rows` of them.  Raises OutOfMemoryError, with all rows as before."""
        reserve_rows(self.layout, self.layers, rows)

    def prefill(self, model: nn.Module, tokens: list[int]) -> None:
        """Compute the rows of `tokens`, alone in its batch.

        Raises OutOfMemoryError where memory ran out and this KV is as before; after another exception it is unusable.
        """
        self.reserve_rows(self.length + len(tokens))
        self.layers = compute_chunk(model, self.layout, self.layers, tokens)
        self.tokens += tokens

    def prefill_by_layers(self, model: nn.Module, tokens: list[int]) -> Iterator[None]:
        """As `prefill`, with a pause after each layer; until the end this KV is as before.

        No shape depends on the pauses, so neither does any bit.
        """
        draft = yield from evaluate_chunk_by_layers(model, self.layout, self.layers, tokens)
        self.layers = draft.commit(self.layers)
        self.tokens += tokens

    def prepare_decoding(self) -> None:
        """Have decode steps of this sequence alone use no mask, unless in exact mode."""
        for _, cache in flatten(self.layers):
            if isinstance(cache, BatchRowsCache):
                cache.masks_decode_steps = bool(self.grid)

    # ---- capture

    def capture_window(self) -> None:
        """Copy rows of rotating layers, produced since the last call, into the journal."""
        start, end = self.journal_until, max(self.journal_until, self.savable_length)
        self.journal_until = end
        if self.layout.window and self.journal_enabled and start < end:
            self.journal.append((start, end, self._copy_window_rows(lambda _: start, end)))

    def _copy_window_rows(self, start_of: Callable[[CacheLeaf], int], end: int) -> NamedArrays:
        """Copies of rows [start, end) of rotating layers, all of which must be in memory."""
        leaves = self._leaves_of_kind(CodecKind.WINDOW)
        fields = (leaf.codec.rows(held, self.index, self.length, start_of(leaf), end) for leaf, held in leaves)
        return _detach(_name_arrays(leaves, fields))

    def capture_rollback_point(self) -> None:
        """Keep the state and windows of the present length, for a later rollback, in place of the last ones."""
        self.capture_checkpoint()
        if self.layout.window and self.length:
            self.rollback_window = self.length, self._copy_windows()

    def _copy_windows(self) -> NamedArrays:
        """Copies of the rows that the windows hold at the present length."""
        at = self.length
        return self._copy_window_rows(lambda leaf: max(0, at - leaf.template.max_size), at)

    def needs_capture(self, tokens: int) -> bool:
        """True where so many more tokens could push uncaptured rows out of a window."""
        window = min((leaf.template.max_size for leaf in self.layout.leaves_of_kind(CodecKind.WINDOW)), default=0)
        return 0 < window <= self.length + tokens - self.journal_until and self.savable_length > self.journal_until

    def capture_checkpoint(self) -> None:
        """Keep the state of all recurrent layers at the present length."""
        if self.layout.has_states and self.length and self.length not in self.checkpoints:
            self.checkpoints[self.length] = self._copy_states()

    def _copy_states(self) -> NamedArrays:
        leaves = self._leaves_of_kind(CodecKind.STATE)
        fields = (leaf.codec.state(held, self.index) for leaf, held in leaves)
        return _detach(_name_arrays(leaves, fields))

    def release_saved(self, end: int, *, states: bool = True) -> None:
        """Drop journal rows below `end`, and states up to it but for the first and the last ones."""
        self.journal = [entry for entry in self.journal if entry[1] > end]
        saved = sorted(position for position in self.checkpoints if position <= end)
        for position in saved[1:-LAST_CHECKPOINTS_COUNT] if states else ():
            del self.checkpoints[position]

    # ---- rewinding within an answer

    @property
    def needs_rewind_points(self) -> bool:
        """True where some layers can't be cut at any position."""
        return not self.layout.problem and (self.layout.has_states or self.layout.window > 0)

    def capture_rewind_point(self) -> None:
        """Keep states and windows of the present length, where they are needed to rewind to it later."""
        if self.needs_rewind_points and self.length:
            self.rewind_points.append(RewindPoint(self.length, self._copy_states(), self._copy_windows()))

    def release_rewind_points(self, position: int) -> None:
        """Drop the rewind points that a rewind to `position`, or to a later one, does not need."""
        usable = [point for point in self.rewind_points if point.position <= position]
        self.rewind_points = [*usable[-1:], *(point for point in self.rewind_points if point.position > position)]

    def rewind(self, position: int) -> None:
        """Drop all but the first `position` tokens, and those back to a rewind point where one is needed.

        Only on a sequence that is out of its batch, and without a problem in its layout.
        """
        if position >= self.length:
            return
        if self.needs_rewind_points:
            position = max((point.position for point in self.rewind_points if point.position <= position), default=0)
            self.rewind_points = [point for point in self.rewind_points if point.position <= position]
        if position:
            self._roll_back(position)
        else:
            self.layers, self.index, self.tokens = self.layout.make_empty_cache(), 0, TokenArray()
            self.journal_until = 0
            self._copy_history_below(0, self)

    # ---- reading for a save

    def slice_rows(
        self,
        start: int,
        end: int,
        leaf_names: Collection[str] | None = None,
        piece: tuple[slice, ...] = (),
    ) -> NamedArrays:
        """Rows [start, end) of these leaves, or of all: contiguous, lazy.  Raises RowsUnavailableError.

        `piece` selects a part of each array: an index of (1, heads, end - start), its slices with a start and a stop.
        """
        _, heads, rows = (*piece, _ALL, _ALL, _ALL)[:3]
        first, last, _ = rows.indices(end - start)
        start, end = start + first, start + last
        leaves = self._leaves_of_kind(CodecKind.ROWS)
        if leaf_names is not None:
            leaves = [(leaf, held) for leaf, held in leaves if leaf.name in leaf_names]
        fields = (leaf.codec.rows(held, self.index, self.length, start, end) for leaf, held in leaves)
        arrays = {name: mx.contiguous(array[:, heads]) for name, array in _name_arrays(leaves, fields).items()}
        if self.layout.window:
            self.capture_window()
            arrays |= self._slice_journal(start, end, leaf_names, heads)
        return arrays

    def _slice_journal(
        self, start: int, end: int, leaf_names: Collection[str] | None = None, heads: slice = _ALL
    ) -> NamedArrays:
        """Rows [start, end) of some leaves, or of all: contiguous, lazy.  Raises RowsUnavailableError."""
        parts: dict[str, list[mx.array]] = {}
        reached = start
        for first, last, rows in self.journal:
            if last <= reached or first >= end:
                continue
            if first > reached:
                break
            wanted = {name: array for name, array in rows.items() if leaf_names is None or leaf_of(name) in leaf_names}
            for name, array in wanted.items():
                parts.setdefault(name, []).append(array[:, heads, reached - first : min(end, last) - first])
            reached = min(end, last)
        if reached < end:
            raise RowsUnavailableError(f"rows [{reached}, {end}) of rotating layers are no longer in memory")
        return {name: mx.contiguous(mx.concatenate(arrays, axis=2)) for name, arrays in parts.items()}

    # ---- continuing

    def positions(self) -> list[int]:
        """Ascending positions where this KV, at rest, can be continued; empty: anywhere on the grid."""
        return self._find_positions() or []

    def can_continue_at(self, position: int) -> bool:
        return position > 0 and self.find_continue_position(position) == position

    def find_continue_position(self, position: int) -> int:
        """The last position up to `position` where it can be continued; 0 where there is none."""
        upto = self.floor_to_grid(min(position, self.savable_length))
        places = self._find_positions()
        if places is None or self._has_windows_at(upto):
            return upto
        return max((at for at in places if at <= upto), default=0)

    def _find_positions(self) -> list[int] | None:
        """As `positions`, but None means anywhere, and empty nowhere."""
        end, on_grid = self.savable_length, self.savable_length == self.length
        if self.layout.problem or not self._is_window_complete():  # a state is of no use without its window
            return [end] if on_grid or self.rollback_window[0] == end else []
        if not self.layout.has_states:
            return None
        present = {end} if on_grid else set()
        return sorted(present.union(at for at in self.checkpoints if at <= end and self.floor_to_grid(at) == at))

    @property
    def has_single_windows(self) -> bool:
        """True where each window has one sequence, without padding: it need not be extracted."""
        return all(leaf.codec.is_single(held) for leaf, held in self._leaves_of_kind(CodecKind.WINDOW))

    def _is_window_complete(self) -> bool:
        """True where every row of every rotating layer is still in its window."""
        return all(
            leaf.codec.count_rows_in_memory(held, self.length) >= self.length and self.length <= leaf.template.max_size
            for leaf, held in self._leaves_of_kind(CodecKind.WINDOW)
        )

    def _has_windows_at(self, position: int) -> bool:
        """True where the journal has all rows of the windows at `position`, and nothing else is needed there."""
        if self.layout.problem or self.layout.has_states or not 0 < position < self.length:
            return False
        reached = max(0, position - self.layout.window)
        for start, end, _ in self.journal:
            reached = end if start <= reached < end else reached
        return reached >= position

    def fork(self, position: int, *, detached: bool = False) -> "KV":
        """Make a KV of the first `position` tokens; this one stays as it is.  Only where `can_continue_at(position)`.

        It shares memory with this one until either is written to; `detached`, it is a copy from the start, as needed
        where this one is written to all the time.
        """
        leaves = (
            self._build_leaf_at(leaf, held, position, detached)
            for leaf, held in zip(self.layout.leaves, self._leaves(), strict=True)
        )
        forked = KV.from_leaves(self.layout, self.tokens[:position], leaves)
        forked.journal_enabled, forked.journal_until = self.journal_enabled, min(self.journal_until, position)
        forked.grid, forked.grid_end = self.grid, position
        forked._copy_history_below(position, self)
        return forked

    def truncate(self, position: int) -> None:
        """Drop all but the first `position` tokens, in place.  Only where `can_continue_at(position)`."""
        if position < self.length:
            self._roll_back(position)
        self.rollback_window, self.grid_end, self.rewind_points = (0, {}), position, []

    @property
    def rows_at_rest(self) -> int:
        """Rows of its buffers after `shrink_buffers`."""
        rows = self.buffer_rows
        return rows if rows <= BUFFER_RATIO_MAX * self.length else self.length

    def shrink_buffers(self) -> None:
        """Shrink buffers that are much longer than the rows, as those of a prompt that was not computed to its end.

        Only on a sequence that is out of its batch.
        """
        if self.rows_at_rest == self.buffer_rows:
            return
        for leaf, held in self._leaves_of_kind(CodecKind.ROWS):  # one after the other: only one is there twice
            rows = _detach(leaf.codec.rows(held, self.index, self.length, 0, self.length))
            leaf.codec.commit(held, leaf.codec.build(rows, self.length, leaf.template))

    def _roll_back(self, position: int) -> None:
        leaves = self._leaves()
        for n, leaf in enumerate(self.layout.leaves):
            if leaf.codec.kind is CodecKind.ROWS:  # the buffer, with room to grow, is kept
                leaf.codec.truncate(leaves[n], self.length - position)
            else:
                leaves[n] = self._build_leaf_at(leaf, leaves[n], position)
        self.layers = rebuild(self.layout.template, iter(leaves))
        self.tokens = self.tokens[:position]
        self.journal_until = min(self.journal_until, position)
        self._copy_history_below(position, self)

    def _build_leaf_at(self, leaf: CacheLeaf, held: Any, position: int, detached: bool = False) -> Any:
        point = next((point for point in self.rewind_points if point.position == position), None)
        if leaf.codec.kind is CodecKind.STATE:
            state = point.states if point else self.checkpoints.get(position)
            fields = leaf.codec.state(held, self.index) if state is None else select_fields(state, leaf.name)
        elif leaf.codec.kind is CodecKind.WINDOW and position == self.length:
            # past its start, a ring has no row 0
            return copy.deepcopy(held) if leaf.codec.is_single(held) else leaf.codec.extract_sequence(held, self.index)
        elif leaf.codec.kind is CodecKind.WINDOW and point is not None:
            fields = select_fields(point.windows, leaf.name)
        elif leaf.codec.kind is CodecKind.WINDOW and position == self.rollback_window[0]:
            fields = select_fields(self.rollback_window[1], leaf.name)
        elif leaf.codec.kind is CodecKind.WINDOW and not self._is_window_complete():
            first = max(0, position - leaf.template.max_size)
            fields = select_fields(self._slice_journal(first, position, {leaf.name}), leaf.name)
        else:
            fields = leaf.codec.rows(held, self.index, self.length, 0, position)
        if detached or leaf.codec.kind is CodecKind.WINDOW:  # a ring is written to in place
            fields = _detach(fields)
        return leaf.codec.build(fields, position, leaf.template)

    def _copy_history_below(self, position: int, other: "KV") -> None:
        self.checkpoints = {at: state for at, state in other.checkpoints.items() if at <= position}
        self.journal = [_truncate_entry(entry, position) for entry in other.journal if entry[0] < position]

    def _leaves(self) -> list[Any]:
        return [leaf for _, leaf in flatten(self.layers)]

    def _leaves_of_kind(self, kind: CodecKind) -> list[tuple[CacheLeaf, Any]]:
        """Leaves of one kind, each with its cache."""
        pairs = zip(self.layout.leaves, self._leaves(), strict=False)  # no leaves where the layout has a problem
        return [(leaf, held) for leaf, held in pairs if leaf.codec.kind is kind]


def _name_arrays(leaves: list[tuple[CacheLeaf, Any]], fields: Iterable[Fields]) -> NamedArrays:
    pairs = zip(leaves, fields, strict=True)
    return {f"{leaf.name}.{key}": array for (leaf, _), named in pairs for key, array in named.items()}


def leaf_of(name: str) -> str:
    """Name of the leaf that a named array belongs to."""
    return name.rpartition(".")[0]


def select_fields(entries: Mapping[str, T], leaf: str) -> dict[str, T]:
    """The entries of one leaf, by field name."""
    return {name.removeprefix(leaf + "."): value for name, value in entries.items() if name.startswith(leaf + ".")}


def _detach(arrays: NamedArrays) -> NamedArrays:
    """Evaluated copies that keep nothing else alive: a slice would hold its whole base."""
    copies = {name: mx.contiguous(array) for name, array in arrays.items()}
    mx.eval(copies)
    return copies


def _truncate_entry(entry: tuple[int, int, NamedArrays], position: int) -> tuple[int, int, NamedArrays]:
    start, end, rows = entry
    if end <= position:
        return entry
    return start, position, {name: array[:, :, : position - start] for name, array in rows.items()}


def layers_nbytes(layers: list[Any]) -> int:
    """Bytes of all arrays of a cache of any class, buffers as allocated; without a sequence's offset and padding."""
    total: int = tree_reduce(
        lambda held, value: held + value.nbytes if isinstance(value, mx.array) and value.ndim > 1 else held,
        [layer.state for layer in layers],
        0,
    )
    return total


def _nbytes(arrays: NamedArrays) -> int:
    return sum(array.nbytes for array in arrays.values())
