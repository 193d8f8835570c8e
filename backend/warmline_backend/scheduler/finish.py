"""How requests end: what is kept of them, who is told, and who ends with them.  Engine thread."""

import logging
import time
from collections.abc import Callable, Iterable

from warmline_backend.generation.sequence import Ended, Sequence
from warmline_backend.generation.step_stats import Tally
from warmline_backend.kv_cache.residents import UNSAVED_S, Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.queues import Lineup
from warmline_common.logging import told_of
from warmline_common.protocol.messages import Settled

log = logging.getLogger(__name__)

LEADERLESS = "the request that it followed has ended, or gone on, before this one could start"


def _unheard() -> None:
    """Nobody wants to know."""


class Ends:
    """Takes sequences out of the lineup.  Nothing here raises for what a batch does: that is discarded then."""

    def __init__(
        self, served: ServedModel, lineup: Lineup, residents: Residents, tally: Tally, boot: str, keeps: bool
    ) -> None:
        self._served, self._lineup, self._residents, self._tally = served, lineup, residents, tally
        self._boot, self._keeps = boot, keeps
        self.changed: Callable[[], None] = _unheard  # called before a listener hears of an end
        self.failures = 0  # steps that failed, in all the time of this process
        self.doubtful = False  # a batch was discarded, and it is not known yet whether the device still computes

    def end(self, sequence: Sequence, finish: str, error: str = "") -> Settled:
        """Take one out, keep its KV as a resident where that is wanted, and tell its listener."""
        if sequence.decoding_since:
            sequence.timings.decode_s = time.monotonic() - sequence.decoding_since
        resident = ""
        try:
            self._take_out(sequence)
            if not error and self.leaves_a_resident(sequence):
                resident = self._keep(sequence)
        except Exception as fault:  # noqa: BLE001  half taken out: what is left of its batch can't be trusted
            mates = self._lineup.give_up(sequence)
            self.discard([mate for mate in mates if mate is not sequence], fault)
        return self._tell(sequence, finish, resident, error)

    def discard(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """After an exception in a step: nothing of this batch is kept, and none of it is known to be to blame."""
        batch = list(sequences)
        ids = ", ".join(sequence.request.id for sequence in batch)
        log.error("a step failed and its batch is discarded: %s", ids or "nobody's", exc_info=error)
        self.doubtful = True
        self.failures += 1
        self._tally.failed_steps += 1
        for sequence in batch:
            self._tell(sequence, "discarded", "", f"the engine failed: {told_of(error)}")

    def leaves_a_resident(self, sequence: Sequence) -> bool:
        """Whether what it computes is to be kept."""
        return self._keeps and sequence.request.kept

    def _take_out(self, sequence: Sequence) -> None:
        self._residents.make_room(self._lineup.bytes_held + self._lineup.bytes_to_leave(sequence))
        self._lineup.leave(sequence)

    def _keep(self, sequence: Sequence) -> str:
        kv = sequence.kv
        if not (end := kv.deepest_place(kv.length)):
            return ""
        kv.truncate(end)  # in exact mode, to the grid
        if kv.grid:
            kv.give_room_back()
        kv.capture_window()
        kv.capture_checkpoint()
        self._residents.make_room(self._lineup.bytes_held + kv.nbytes)
        # Kept even without: it takes no more than it took, and what is lost before it is saved is computed again.
        lease_s = 0.0 if self._served.layout.problem else UNSAVED_S
        request = sequence.request
        return self._residents.add(kv, lease_s=lease_s, left_by=request.id, root=request.root)

    def _tell(self, sequence: Sequence, finish: str, resident: str, error: str) -> Settled:
        """What it leaves, and that it has ended, are told; so is the end of all that waited for its rows."""
        generation = self._residents.generation
        settled = sequence.settled(finish, boot=self._boot, generation=generation, resident=resident, error=error)
        lost = self._lineup.followers.lose(sequence)
        self._tally.ended[finish] += 1
        self._tell_changed()
        sequence.request.listener(Ended(settled, sequence.reused))
        for follower in lost:
            self._tell(follower, "leaderless", "", LEADERLESS)
        return settled

    def _tell_changed(self) -> None:
        try:
            self.changed()
        except Exception:  # whoever waits for this end must hear of it all the same
            log.exception("what has changed could not be told")
