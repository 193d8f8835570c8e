"""Who may start: memory and places, given in the order in which they were asked for.  Engine thread."""

from collections.abc import Callable, Iterator

from warmline_backend.generation.sequence import GenerationRequest, Sequence
from warmline_backend.kv_cache.codecs import BUFFER_STEP_TOKENS
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import KvTooLargeError, check_capacity, sequence_tokens_max
from warmline_backend.scheduler.finish import LEADERLESS, Finisher
from warmline_backend.scheduler.queues import Queues

OUT_OF_MEMORY = "the memory budget is used up by answers that grew; try again, or raise --memory-budget-gb"


class SequenceAdmission:
    """Lets requests and restores in while residents and running requests stay within the budget.

    The budget is for what is kept from one step to the next.  What a chunk works with (scores and activations, by its
    length and the context's) comes on top of it, is freed with the chunk, and is what the default budget leaves free.
    """

    def __init__(
        self, served: ServedModel, queues: Queues, residents: Residents, finisher: Finisher, running_count_max: int
    ) -> None:
        self._served, self._queues, self._residents, self._finisher = served, queues, residents, finisher
        self._running_count_max = running_count_max
        self._budget_bytes = residents.budget_bytes

    # ---- requests

    def check_size(self, request: GenerationRequest) -> None:
        """Raises TooLarge."""
        check_capacity(self._served, len(request.prompt), request.params.max_tokens, self._budget_bytes)

    @property
    def tokens_max(self) -> int:
        """How long one sequence alone may become."""
        return sequence_tokens_max(self._served, self._budget_bytes)

    def admit(self) -> Iterator[Sequence]:
        """Whoever may start now; each is to be started before the next is asked for."""
        self.grant_reservations()
        self._end_abandoned()
        while line := self._list_candidates():
            if self._is_full and not self._queues.unattended:
                return
            if (sequence := self._find_admissible(line)) is None:
                return  # until somebody ends, or is saved
            if self._is_full:  # only now that somebody can use it
                self._cancel_youngest(self._queues.unattended)
            yield sequence

    @property
    def _is_full(self) -> bool:
        return len(self._queues.running) >= self._running_count_max

    def _end_abandoned(self) -> None:
        """End those in line who wait for nothing any more."""
        followers = self._queues.followers
        for sequence in followers.stale:
            self._finisher.finish_sequence(sequence, "leaderless", error=LEADERLESS)
        for sequence in [*self._queues.waiting, *followers]:
            waits_for_quiet = sequence.request.background and self._evicts_only_ranked(sequence)
            if followers.is_unattended(sequence) and not waits_for_quiet:
                self._finisher.finish_sequence(sequence, "cancelled")

    def _evicts_only_ranked(self, sequence: Sequence) -> bool:
        """Whether what it takes pushes out nothing but what is first to go."""
        wanted = self._queues.bytes_held + self._queues.bytes_to_copy + self._queues.bytes_to_admit(sequence)
        return self._residents.can_make_room(wanted, only_ranked=True)

    def _list_candidates(self) -> list[Sequence]:
        """Those that could start if there was room.  While a restore waits for it, only those that hold some."""
        waiting = [sequence for sequence in self._queues.waiting if not sequence.request.background]
        if self._queues.reservations.has_pending:
            return [sequence for sequence in waiting if sequence.kv.length]
        if not (waiting or self._queues.running):
            return self._queues.waiting[:1]
        return sorted([*waiting, *self._queues.followers.ready], key=lambda each: each.arrival_time)

    def _find_admissible(self, candidates: list[Sequence]) -> Sequence | None:
        """The first in line, or nobody; with nothing running, whoever fits."""
        reservations, running = self._queues.reservations, self._queues.running
        for sequence in candidates[:1] if running and not reservations.has_pending else candidates:
            if self._make_room(self._queues.bytes_to_copy + self._queues.bytes_to_admit(sequence)):
                return sequence
        if running or reservations.has_granted or self._residents.has_leased:
            return None
        self._residents.evict_unleased()
        return candidates[0]

    # ---- restores

    def reserve(self, request_id: str, bytes_needed: int, on_granted: Callable[[], None]) -> None:
        """As Scheduler.reserve."""
        if bytes_needed > self._budget_bytes:
            raise KvTooLargeError(f"restoring takes {bytes_needed / 1e6:.1f} MB, more than the memory budget")
        # Measured with all families: reading and building peak at 1.00 of the KV in buffers of whole ROOM_TOKENS.
        with_room = bytes_needed + (BUFFER_STEP_TOKENS - 1) * self._served.row_bytes
        self._queues.reservations.add(request_id, min(with_room, self._budget_bytes), on_granted)
        self.grant_reservations()

    def release(self, request_id: str) -> None:
        """As Scheduler.release."""
        self._queues.reservations.release(request_id)
        self.grant_reservations()

    def grant_reservations(self) -> None:
        self._queues.reservations.grant(
            fits=lambda wanted: self._make_room(self._queues.bytes_to_copy + wanted),
            may_wait=self._can_free_memory,
        )

    def _can_free_memory(self) -> bool:
        """Whether memory will be freed without our dropping anything: somebody ends, or is saved or taken over."""
        holding = self._queues.running or any(sequence.kv.length for sequence in self._queues.waiting)
        return bool(holding or self._queues.reservations.has_granted or self._residents.has_leased)

    # ---- making room

    def _make_room(self, bytes_needed: int) -> bool:
        """Have what is in the background make way, then residents, and then prefills that nobody waits for; False, and
        nothing is ended, where all that would not be enough.
        """
        lineup, residents = self._queues, self._residents
        if not residents.can_make_room(lineup.bytes_held - lineup.bytes_expendable + bytes_needed):
            return False
        while lineup.background and not residents.can_make_room(lineup.bytes_held + bytes_needed, only_ranked=True):
            self._cancel_youngest(lineup.background)
        while not residents.make_room(lineup.bytes_held + bytes_needed):
            if not self._cancel_expendable():
                return False
        return True

    def _cancel_expendable(self) -> bool:
        """End the youngest that nobody would miss, if there is one."""
        if not (making_way := self._queues.expendable):
            return False
        self._cancel_youngest(making_way)
        return True

    def _cancel_youngest(self, sequences: list[Sequence]) -> None:
        self._finisher.finish_sequence(max(sequences, key=lambda sequence: sequence.arrival_time), "cancelled")

    def enforce_budget(self) -> None:
        """Answers grow: who can makes way for them, and then the youngest request, so that the others can end."""
        if self.reclaim_memory():
            return
        while self._queues.bytes_held > self._budget_bytes and self._cancel_expendable():
            pass
        running = self._queues.running
        if self._queues.bytes_held > self._budget_bytes and len(running) > 1:
            youngest = max(running, key=lambda sequence: sequence.arrival_time)
            self._finisher.finish_sequence(youngest, "discarded", error=OUT_OF_MEMORY)

    def reclaim_memory(self) -> bool:
        """As `_make_room`, for what has been added; False where there is still too much."""
        if self._make_room(0):
            return True
        self._residents.evict_unleased()
        return False
