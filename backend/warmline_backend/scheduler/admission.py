"""Admission: memory and places for requests and restores, in order of arrival.  Engine thread."""

from collections.abc import Callable, Iterator

from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.batch_caches import BUFFER_STEP_TOKENS
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_backend.scheduler.finish import LEADERLESS, Finisher
from warmline_backend.scheduler.queues import PendingReservation, Queues
from warmline_common.protocol.waits import MEMORY, PLACE, SAVE

OUT_OF_MEMORY = "the memory budget is used up by answers that grew; try again, or raise --memory-budget-gb"


class SequenceAdmission:
    """Admits requests and restores while residents and running requests stay within the memory budget.

    The budget is for KV.  A chunk's own scores and activations come on top, are freed with the chunk, and are left free
    by the default budget.  The present budget, `residents.budget_bytes`, may be a part of the one of the start.
    """

    def __init__(
        self, served: ServedModel, queues: Queues, residents: Residents, finisher: Finisher, running_count_max: int
    ) -> None:
        self._served, self._queues, self._residents, self._finisher = served, queues, residents, finisher
        self._running_count_max, self._budget_bytes_max = running_count_max, residents.budget_bytes

    # ---- the budget

    def set_budget(self, bytes_asked: int) -> int:
        """Set the present budget, and evict residents beyond it; returns it.

        At most the one of the start; at least the bytes of running requests, granted reservations and leased residents.
        """
        residents, running_bytes = self._residents, self._queues.bytes_held
        bytes_wanted = max(bytes_asked, running_bytes + residents.bytes_leased)
        residents.budget_bytes = min(bytes_wanted, self._budget_bytes_max)
        if not residents.make_room(running_bytes):
            residents.evict_unleased()
        return residents.budget_bytes

    # ---- requests

    def admit(self) -> Iterator[Sequence]:
        """Yield each sequence that may start now; the caller starts it before asking for the next."""
        self.grant_reservations()
        self._end_abandoned()
        while candidates := self._list_candidates():
            if self._is_full and not self._queues.unattended:
                return
            if (sequence := self._find_admissible(candidates)) is None:
                return  # until a request ends or is saved
            if self._is_full:  # only once another can use its place
                self._cancel_youngest(self._queues.unattended)
            yield sequence

    @property
    def wait_reason(self) -> str:
        """Reason why the requests that wait were not admitted."""
        if self._is_full:
            return PLACE
        return SAVE if self._residents.has_leased else MEMORY

    @property
    def _is_full(self) -> bool:
        return len(self._queues.running) >= self._running_count_max

    def _end_abandoned(self) -> None:
        """End stale followers, and unattended ones that don't wait for an idle engine."""
        followers = self._queues.followers
        for sequence in followers.stale:
            self._finisher.finish_sequence(sequence, "leaderless", error=LEADERLESS)
        for sequence in [*self._queues.waiting, *followers]:
            waits_for_idle = sequence.request.background and self._evicts_only_ranked(sequence)
            if followers.is_unattended(sequence) and not waits_for_idle:
                self._finisher.finish_sequence(sequence, "cancelled")

    def _evicts_only_ranked(self, sequence: Sequence) -> bool:
        """True where the sequence's memory can be freed by evicting only residents of the eviction order."""
        bytes_needed = self._queues.bytes_held + self._queues.bytes_to_copy + self._queues.bytes_to_admit(sequence)
        return self._residents.can_make_room(bytes_needed, only_ranked=True)

    def _list_candidates(self) -> list[Sequence]:
        """Sequences that could start if there was room; while a restore waits for memory, only those that hold some."""
        waiting = [sequence for sequence in self._queues.waiting if not sequence.request.background]
        if self._queues.reservations.pending:
            return [sequence for sequence in waiting if sequence.kv.length]
        if not (waiting or self._queues.running):
            return self._queues.waiting[:1]
        return sorted([*waiting, *self._queues.followers.ready], key=lambda each: each.arrival_time)

    def _find_admissible(self, candidates: list[Sequence]) -> Sequence | None:
        """Return the first candidate if it fits; with nothing running, the first that fits."""
        reservations, running = self._queues.reservations, self._queues.running
        for sequence in candidates[:1] if running and not reservations.pending else candidates:
            if self._make_room(self._queues.bytes_to_copy + self._queues.bytes_to_admit(sequence)):
                return sequence
        if running or reservations.granted or self._residents.has_leased:
            return None
        self._residents.evict_unleased()
        return candidates[0]

    # ---- restores

    def reserve(
        self,
        request_id: str,
        bytes_needed: int,
        on_granted: Callable[[], None],
        on_refused: Callable[[KvTooLargeError], None] = lambda _: None,
    ) -> None:
        """Set memory aside for a restore; once it is, `on_granted` is called on this thread, unless it was released.

        `on_refused` is called instead where the present budget is too small, and nothing is left to wait for.  Raises
        KvTooLargeError where the budget of the start is too small.
        """
        too_large = KvTooLargeError(f"restoring takes {bytes_needed / 1e6:.1f} MB, more than the memory budget")
        if bytes_needed > self._budget_bytes_max:
            raise too_large
        # Measured with all families: a restore peaks at 1.00 of the KV in buffers of whole BUFFER_STEP_TOKENS.
        with_room = bytes_needed + (BUFFER_STEP_TOKENS - 1) * self._served.row_bytes
        self._queues.reservations.pending[request_id] = PendingReservation(
            bytes_needed, with_room, on_granted, lambda: on_refused(too_large)
        )
        self.grant_reservations()

    def release(self, request_id: str) -> None:
        """Return a reservation, or stop waiting for it; ignores unknown ids."""
        self._queues.reservations.release(request_id)
        self.grant_reservations()

    def grant_reservations(self) -> None:
        self._queues.reservations.grant(
            self._residents.budget_bytes,
            fits=lambda bytes_needed: self._make_room(self._queues.bytes_to_copy + bytes_needed),
            may_wait=self._can_free_memory,
        )

    def _can_free_memory(self) -> bool:
        """True where memory will be freed without an eviction: by an end, a save or a takeover."""
        waiting = (each for each in self._queues.waiting if not each.request.background)  # those make way, or wait
        holding = self._queues.running or any(sequence.kv.length for sequence in waiting)
        return bool(holding or self._queues.reservations.granted or self._residents.has_leased)

    # ---- making room

    def _make_room(self, bytes_needed: int) -> bool:
        """End background requests, then evict residents, then end unattended prefills.

        False, with nothing ended, where all that would not be enough.
        """
        queues, residents = self._queues, self._residents
        if not residents.can_make_room(queues.bytes_held - queues.bytes_expendable + bytes_needed):
            return False
        while queues.background and not residents.can_make_room(queues.bytes_held + bytes_needed, only_ranked=True):
            self._cancel_youngest(queues.background)
        while not residents.make_room(queues.bytes_held + bytes_needed):
            if not self._cancel_expendable():
                return False
        return True

    def _cancel_expendable(self) -> bool:
        """End the youngest expendable request; False where there is none."""
        if expendable := self._queues.expendable:
            self._cancel_youngest(expendable)
        return bool(expendable)

    def _cancel_youngest(self, sequences: list[Sequence]) -> None:
        self._finisher.finish_sequence(max(sequences, key=lambda sequence: sequence.arrival_time), "cancelled")

    def enforce_budget(self) -> None:
        """Make room for grown answers: evict, then end expendable requests, then the youngest one.

        That one only where the whole budget of the start is exceeded: a client reads its answer.
        """
        if self.reclaim_memory():
            return
        while self._queues.bytes_held > self._residents.budget_bytes and self._cancel_expendable():
            pass
        running = self._queues.running
        if self._queues.bytes_held > self._budget_bytes_max and len(running) > 1:
            youngest = max(running, key=lambda sequence: sequence.arrival_time)
            self._finisher.finish_sequence(youngest, "discarded", error=OUT_OF_MEMORY)

    def reclaim_memory(self) -> bool:
        """Make room for what was added; False where the budget is still exceeded."""
        if self._make_room(0):
            return True
        self._residents.evict_unleased()
        return False
