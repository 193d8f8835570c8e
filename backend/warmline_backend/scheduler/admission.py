"""Who may start: memory and places, given in the order in which they were asked for.  Engine thread."""

from collections.abc import Callable, Iterator

from warmline_backend.generation.sequence import Generation, Sequence
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.kv_cache.segment_io import ROOM_TOKENS
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import TooLarge, check_fits, tokens_alone
from warmline_backend.scheduler.finish import LEADERLESS, Ends
from warmline_backend.scheduler.queues import Lineup

OUT_OF_MEMORY = "the memory budget is used up by answers that grew; try again, or raise --memory-budget-gb"


class Admission:
    """Lets requests and restores in while residents and running requests stay within the budget.

    The budget is for what is kept from one step to the next.  What a chunk works with (scores and activations, by its
    length and the context's) comes on top of it, is freed with the chunk, and is what the default budget leaves free.
    """

    def __init__(
        self, served: ServedModel, lineup: Lineup, residents: Residents, ends: Ends, running_count_max: int
    ) -> None:
        self._served, self._lineup, self._residents, self._ends = served, lineup, residents, ends
        self._running_count_max = running_count_max
        self._budget_bytes = residents.budget_bytes

    # ---- requests

    def check_size(self, request: Generation) -> None:
        """Raises TooLarge."""
        check_fits(self._served, len(request.prompt), request.params.max_tokens, self._budget_bytes)

    @property
    def tokens_max(self) -> int:
        """How long one sequence alone may become."""
        return tokens_alone(self._served, self._budget_bytes)

    def admitted(self) -> Iterator[Sequence]:
        """Whoever may start now; each is to be started before the next is asked for."""
        self.grant()
        self._clear_line()
        while line := self._line():
            if self._all_places_taken and not self._lineup.nobodys:
                return
            if (sequence := self._first_that_fits(line)) is None:
                return  # until somebody ends, or is saved
            if self._all_places_taken:  # only now that somebody can use it
                self._end_youngest(self._lineup.nobodys)
            yield sequence

    @property
    def _all_places_taken(self) -> bool:
        return len(self._lineup.running) >= self._running_count_max

    def _clear_line(self) -> None:
        """End those in line who wait for nothing any more."""
        followers = self._lineup.followers
        for sequence in followers.left_behind:
            self._ends.end(sequence, "leaderless", error=LEADERLESS)
        for sequence in [*self._lineup.waiting, *followers]:
            waits_for_quiet = sequence.request.background and self._costs_nobody(sequence)
            if followers.is_nobodys(sequence) and not waits_for_quiet:
                self._ends.end(sequence, "cancelled")

    def _costs_nobody(self, sequence: Sequence) -> bool:
        """Whether what it takes pushes out nothing but what is first to go."""
        wanted = self._lineup.bytes_held + self._lineup.bytes_to_copy + self._lineup.bytes_to_admit(sequence)
        return self._residents.could_make_room(wanted, only_named=True)

    def _line(self) -> list[Sequence]:
        """Those that could start if there was room.  While a restore waits for it, only those that hold some."""
        waiting = [sequence for sequence in self._lineup.waiting if not sequence.request.background]
        if self._lineup.reservations.waiting:
            return [sequence for sequence in waiting if sequence.kv.length]
        if not (waiting or self._lineup.running):
            return self._lineup.waiting[:1]
        return sorted([*waiting, *self._lineup.followers.ready], key=lambda each: each.arrived)

    def _first_that_fits(self, line: list[Sequence]) -> Sequence | None:
        """The first in line, or nobody; with nothing running, whoever fits."""
        reservations, running = self._lineup.reservations, self._lineup.running
        for sequence in line[:1] if running and not reservations.waiting else line:
            if self._make_room(self._lineup.bytes_to_copy + self._lineup.bytes_to_admit(sequence)):
                return sequence
        if running or reservations.some_granted or self._residents.some_leased:
            return None
        self._residents.drop_unleased()
        return line[0]

    # ---- restores

    def reserve(self, request_id: str, bytes_wanted: int, granted: Callable[[], None]) -> None:
        """As Scheduler.reserve."""
        if bytes_wanted > self._budget_bytes:
            raise TooLarge(f"restoring takes {bytes_wanted / 1e6:.1f} MB, more than the memory budget")
        # Measured with all families: reading and building peak at 1.00 of the KV in buffers of whole ROOM_TOKENS.
        with_room = bytes_wanted + (ROOM_TOKENS - 1) * self._served.row_bytes
        self._lineup.reservations.want(request_id, min(with_room, self._budget_bytes), granted)
        self.grant()

    def release(self, request_id: str) -> None:
        """As Scheduler.release."""
        self._lineup.reservations.release(request_id)
        self.grant()

    def grant(self) -> None:
        self._lineup.reservations.grant(
            fits=lambda wanted: self._make_room(self._lineup.bytes_to_copy + wanted),
            may_wait=self._something_makes_way,
        )

    def _something_makes_way(self) -> bool:
        """Whether memory will be freed without our dropping anything: somebody ends, or is saved or taken over."""
        holding = self._lineup.running or any(sequence.kv.length for sequence in self._lineup.waiting)
        return bool(holding or self._lineup.reservations.some_granted or self._residents.some_leased)

    # ---- making room

    def _make_room(self, bytes_wanted: int) -> bool:
        """Have what is in the background make way, then residents, and then prefills that nobody waits for; False, and
        nothing is ended, where all that would not be enough.
        """
        lineup, residents = self._lineup, self._residents
        if not residents.could_make_room(lineup.bytes_held - lineup.bytes_nobody_needs + bytes_wanted):
            return False
        while lineup.background and not residents.could_make_room(lineup.bytes_held + bytes_wanted, only_named=True):
            self._end_youngest(lineup.background)
        while not residents.make_room(lineup.bytes_held + bytes_wanted):
            if not self._give_way():
                return False
        return True

    def _give_way(self) -> bool:
        """End the youngest that nobody would miss, if there is one."""
        if not (making_way := self._lineup.making_way):
            return False
        self._end_youngest(making_way)
        return True

    def _end_youngest(self, sequences: list[Sequence]) -> None:
        self._ends.end(max(sequences, key=lambda sequence: sequence.arrived), "cancelled")

    def keep_within_budget(self) -> None:
        """Answers grow: who can makes way for them, and then the youngest request, so that the others can end."""
        if self.let_make_way():
            return
        while self._lineup.bytes_held > self._budget_bytes and self._give_way():
            pass
        running = self._lineup.running
        if self._lineup.bytes_held > self._budget_bytes and len(running) > 1:
            youngest = max(running, key=lambda sequence: sequence.arrived)
            self._ends.end(youngest, "discarded", error=OUT_OF_MEMORY)

    def let_make_way(self) -> bool:
        """As `_make_room`, for what has been added; False where there is still too much."""
        if self._make_room(0):
            return True
        self._residents.drop_unleased()
        return False
