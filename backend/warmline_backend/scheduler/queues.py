"""Scheduler queues: waiting, followers, prefilling, decoding, with their KV bytes and reservations.  Engine thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.codecs import CodecKind
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import request_bytes, sequence_bytes
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
from warmline_backend.scheduler.prefix_sharing import PrefixFollowers
from warmline_backend.speculation.pass_costs import PASS_TOKENS_MAX

TOKENS_PER_BUDGET_CHECK = 32  # that a sequence may get between two budget checks, but for those of one pass more
# Joining copies a group layer by layer, each old layer freed on the way: at most 1.7 layers were measured on top
# (llama, qwen3_5, deepseek_v32 and a llama of 8 layers, 3,000 tokens each).
LAYERS_COPIED_AT_ONCE = 2
REWIND_POINTS_MAX = 2  # of a sequence: the one in use, and its successor


class Queues:
    """All requests of one model by stage.

    Bytes are counted as buffers are allocated: multiples of BUFFER_STEP_TOKENS rows, a batch as long as its longest.
    A KV that waits counts as the resident did that it was: taking it over needs no room.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.waiting: list[Sequence] = []
        self.followers = PrefixFollowers()
        self.prefilling: list[Sequence] = []
        self.groups: list[DecodeGroup] = []
        self.reservations = Reservations()  # of restores

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.followers
        yield from self.running

    def add_waiting(self, sequence: Sequence) -> None:
        sequence.waiting_bytes = sequence.kv.nbytes if sequence.kv.length else 0
        self.waiting.append(sequence)

    @property
    def running(self) -> list[Sequence]:
        return [*self.prefilling, *(member for group in self.groups for member in group.sequences)]

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self if sequence.request.id == request_id), None)

    def find_leader(self, request_id: str) -> Sequence | None:
        """Find a request, or the one that goes on in its place after its end."""
        return self.find(request_id) or self.find(self.followers.find_leader_id(request_id))

    def find_group(self, sequence: Sequence) -> DecodeGroup | None:
        return next((group for group in self.groups if sequence in group.sequences), None)

    @property
    def unattended(self) -> list[Sequence]:
        """Prefills that neither a client nor a follower waits for."""
        return [each for each in self.prefilling if self.followers.is_unattended(each)]

    @property
    def background(self) -> list[Sequence]:
        """Background requests that hold KV, computing or waiting."""
        holding = [*self.prefilling, *(each for each in self.waiting if each.kv.length)]
        return [each for each in holding if each.request.background]

    @property
    def expendable(self) -> list[Sequence]:
        """Requests whose end frees memory and that no client would miss."""
        unattended = self.unattended
        return [*unattended, *(each for each in self.background if each not in unattended)]

    @property
    def prefill_candidates(self) -> list[Sequence]:
        """Prefills that a client waits for; else detached ones; else background ones while nothing else computes."""
        unattended = self.unattended
        attended = [each for each in self.prefilling if each not in unattended]
        detached = [each for each in unattended if not each.request.background]
        if attended or detached:
            return attended or detached
        return [] if any(not each.request.background for each in self.running) else unattended

    @property
    def has_attended(self) -> bool:
        """True where any request is no background request."""
        return any(not sequence.request.background for sequence in self)

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences of one batch, or one that is in none, out of their queue; each KV owns its layers then."""
        if (group := self.find_group(sequences[0])) is not None:
            group.remove(sequences)
            self.groups = [group for group in self.groups if group.sequences]
        else:
            self._remove_unbatched(sequences[0])

    def discard_batch(self, sequence: Sequence) -> list[Sequence]:
        """Remove a sequence and all that share its batch, whose rows can't be trusted; returns them."""
        if (group := self.find_group(sequence)) is None:
            self._remove_unbatched(sequence)
            return [sequence]
        self.groups.remove(group)
        return group.dissolve()

    def _remove_unbatched(self, sequence: Sequence) -> None:
        for holding in (self.waiting, self.prefilling, self.followers):
            if sequence in holding:
                holding.remove(sequence)

    # ---- bytes

    @property
    def bytes_held(self) -> int:
        """KV bytes of all requests, with padding, the rest of their prompts, and granted reservations."""
        decoding = sum(map(self._bytes_of_group, self.groups))
        waiting = sum(sequence.waiting_bytes for sequence in self.waiting)
        prefilling = sum(map(self._bytes_of_request, self.prefilling))
        return decoding + waiting + prefilling + sum(self.reservations.granted.values())

    @property
    def bytes_to_copy(self) -> int:
        """Most bytes that copying one sequence out of its batch takes on top, for a moment."""
        return max((self.bytes_to_remove(group.sequences[:1]) for group in self.groups), default=0)

    def bytes_to_remove(self, sequences: list[Sequence]) -> int:
        """Bytes that taking sequences of one batch out takes on top: copies from it, none for one that is alone."""
        group = self.find_group(sequences[0])
        return len(sequences) * self._bytes_per_row(group) if group and len(group.sequences) > 1 else 0

    def bytes_to_admit(self, sequence: Sequence) -> int:
        """Bytes that starting a waiting sequence takes on top of its present KV."""
        return self._bytes_of_request(sequence) - sequence.waiting_bytes

    @property
    def bytes_expendable(self) -> int:
        """Bytes that the end of all expendable requests would free."""
        return sum(self._bytes_freed(each) for each in self.expendable)

    def _bytes_freed(self, sequence: Sequence) -> int:
        """Bytes that the end of a sequence frees; a prefill keeps its KV until it is saved."""
        held = self._bytes_of_request(sequence) if sequence in self.prefilling else sequence.waiting_bytes
        if not sequence.request.leaves_resident or self._served.layout.problem:
            return held
        rows = sequence_bytes(self._served, sequence.kv.rows_at_rest) if sequence.kv.length else 0
        return held - min(held, rows + self._bytes_of_states(sequence))

    def bytes_to_copy_into_batch(self, sequences: list[Sequence]) -> int:
        """Bytes that a batch of copies of these KVs takes, beside them."""
        rows = max(len(each.inputs) for each in sequences)
        return len(sequences) * sequence_bytes(self._served, rows) if any(each.kv.length for each in sequences) else 0

    def bytes_to_merge(self, host: DecodeGroup, newcomer: DecodeGroup) -> int:
        """Bytes that one batch of both takes on top of the two: padding, and copies."""
        hosts, newcomers = len(host.sequences), len(newcomer.sequences)
        before = hosts * self._bytes_per_row(host) + newcomers * self._bytes_per_row(newcomer)
        each = max(self._bytes_per_row(host), self._bytes_per_row(newcomer))
        together = (hosts + newcomers) * each
        layers = max(1, len(self._served.layout.leaves_of_kind(CodecKind.ROWS)))
        return together - before + max(LAYERS_COPIED_AT_ONCE * together // layers, each)

    def _bytes_of_group(self, group: DecodeGroup) -> int:
        rows = len(group.sequences) * self._bytes_per_row(group)
        return rows + sum(map(self._bytes_of_states, group.sequences))

    def _bytes_per_row(self, group: DecodeGroup) -> int:
        """Bytes of each row of a batch, as long as it may be at the next budget check."""
        more = TOKENS_PER_BUDGET_CHECK + (PASS_TOKENS_MAX if group.sequences[0].drafter is not None else 0)
        soon = (min(each.kv.length + more, each.tokens_max) for each in group.sequences)
        return sequence_bytes(self._served, max(group.sequences[0].kv.buffer_rows, *soon))

    def _bytes_of_states(self, sequence: Sequence, *, include_pending: bool = False) -> int:
        """Bytes of checkpoint states, and of states and windows at rollback and rewind points.

        On request with those still to come.
        """
        points = len(sequence.kv.rewind_points)
        if include_pending and sequence.can_redraw and sequence.kv.needs_rewind_points:
            points = REWIND_POINTS_MAX
        states = points + len(sequence.kv.checkpoints) + (sequence.pending_checkpoint_count if include_pending else 0)
        has_rollback_window = sequence.kv.rollback_window[0] or (include_pending and sequence.needs_rollback_point)
        windows = points + bool(has_rollback_window)
        return states * self._served.state_bytes + windows * self._served.window_bytes

    def _bytes_of_request(self, sequence: Sequence) -> int:
        """Bytes of a request with a part of its answer; at least its present ones."""
        request = sequence.request
        needed = request_bytes(self._served, len(request.prompt), request.params.max_tokens)
        rows = max(sequence_bytes(self._served, sequence.kv.buffer_rows), needed)
        return rows + self._bytes_of_states(sequence, include_pending=True)


@dataclass(frozen=True)
class PendingReservation:
    """A restore that waits for memory; one of the calls is made once."""

    bytes_needed: int
    bytes_wanted: int  # with room for buffers of whole steps; fewer where the budget has fewer
    on_granted: Callable[[], None]
    on_refused: Callable[[], None]


@dataclass
class Reservations:
    """Memory set aside for restores by request id, granted in order of arrival."""

    pending: dict[str, PendingReservation] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)  # bytes

    def release(self, request_id: str) -> None:
        """Return the memory, or stop waiting for it; ignores unknown ids."""
        self.pending.pop(request_id, None)
        self.granted.pop(request_id, None)

    def grant(self, budget_bytes: int, fits: Callable[[int], bool], may_wait: Callable[[], bool]) -> None:
        """Grant each next reservation that fits, or that could not fit better because no memory will be freed.

        Where none will be freed, one that needs more than the present budget is refused.
        """
        while self.pending:
            request_id, pending = next(iter(self.pending.items()))
            granted_bytes = min(pending.bytes_wanted, budget_bytes)
            is_possible = pending.bytes_needed <= budget_bytes
            if not (is_possible and fits(granted_bytes)) and may_wait():
                return
            del self.pending[request_id]
            if is_possible:
                self.granted[request_id] = granted_bytes
            (pending.on_granted if is_possible else pending.on_refused)()


class QueueFigures:
    """Figures of the queues, for the engine."""

    _queues: Queues

    @property
    def is_idle(self) -> bool:
        return not self._queues.reservations.pending and next(iter(self._queues), None) is None

    @property
    def is_blocked(self) -> bool:
        """True where all requests wait for a resident to be saved or taken, or for a lease to end."""
        return not (self._queues.prefilling or self._queues.groups or self.is_idle)

    @property
    def is_decoding(self) -> bool:
        return bool(self._queues.groups)

    @property
    def is_prefilling(self) -> bool:
        return bool(self._queues.prefilling)

    @property
    def running_count(self) -> int:
        return len(self._queues.running)

    @property
    def queued_count(self) -> int:
        return len(self._queues.waiting) + len(self._queues.followers)

    @property
    def running_bytes(self) -> int:
        """KV bytes of all requests, with padding, the rest of their prompts, and reservations."""
        return self._queues.bytes_held
