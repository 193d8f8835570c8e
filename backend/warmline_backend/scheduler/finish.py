"""Ends of requests: their residents, events and followers.  Engine thread."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from warmline_backend.generation.events import EndedEvent
from warmline_backend.generation.sequence import Sequence
from warmline_backend.generation.step_stats import StepStats
from warmline_backend.kv_cache.chunk_draft import OutOfMemoryError
from warmline_backend.kv_cache.residents import UNSAVED_LEASE_S, ResidentMismatchError, Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.output.events import Part
from warmline_backend.scheduler.queues import Queues
from warmline_common.logging import describe_error
from warmline_common.protocol.messages import GenerationResult
from warmline_common.protocol.waits import STEP

log = logging.getLogger(__name__)

LEADERLESS = "the request that it followed has ended, or gone on, before this one could start"


@dataclass(frozen=True)
class Ending:
    """End of a sequence; `parts` and `stop_reason` are those of its EndedEvent."""

    finish: str
    error: str = ""
    parts: Iterable[Part] = ()
    stop_reason: str = ""


class Finisher:
    """Takes sequences out of the queues.  No method raises for a failing batch: it is discarded instead."""

    def __init__(
        self,
        served: ServedModel,
        queues: Queues,
        residents: Residents,
        step_stats: StepStats,
        boot: str,
        keeps_residents: bool,
    ) -> None:
        self._served, self._queues, self._residents, self._step_stats = served, queues, residents, step_stats
        self._boot, self._keeps_residents = boot, keeps_residents
        self.on_changed: Callable[[], None] = lambda: None  # called before a listener gets an EndedEvent
        self.failed_steps = 0  # since the process started
        self.is_device_suspect = False  # a batch was discarded, and the device has not been probed since

    def finish_sequence(self, sequence: Sequence, finish: str, error: str = "") -> GenerationResult:
        """As `finish_sequences`, for one; returns its result."""
        return self.finish_sequences([(sequence, Ending(finish, error))])[0]

    def finish_sequences(self, endings: list[tuple[Sequence, "Ending"]]) -> list[GenerationResult]:
        """Take sequences of one batch out, keep their KV unless there is an error, and notify their listeners.

        The KV is kept by a follower that goes on with it, else as a resident.  A sequence that is in no batch comes
        alone.
        """
        sequences = [sequence for sequence, _ in endings]
        leaders = [sequence.leader for sequence in sequences]
        for sequence in sequences:
            if sequence.decode_started_at:
                sequence.timings.decode_s = time.monotonic() - sequence.decode_started_at
        residents = dict.fromkeys(sequences, "")
        try:
            self._residents.make_room(self._queues.bytes_held + self._queues.bytes_to_remove(sequences))
            self._queues.remove(sequences)
            for (sequence, ending), leader in zip(endings, leaders, strict=True):
                is_taken_over = not ending.error and self._replace_leader(sequence, leader)
                if not (ending.error or is_taken_over) and self.leaves_resident(sequence):
                    residents[sequence] = self._add_resident(sequence)
        except Exception as fault:  # noqa: BLE001  half taken out: the rest of its batch can't be trusted
            batch = self._queues.discard_batch(sequences[0])
            self.discard([member for member in batch if member not in sequences], fault)
        return [self._notify_end(sequence, residents[sequence], ending) for sequence, ending in endings]

    def discard(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End all sequences of a batch whose step raised `error`; no KV of them is kept."""
        batch = list(sequences)
        ids = ", ".join(sequence.request.id for sequence in batch)
        log.error("a step failed and its batch is discarded: %s", ids or "none", exc_info=error)
        self.record_failed_step(error)
        for sequence in batch:
            self._notify_end(sequence, "", Ending("discarded", error=f"the engine failed: {describe_error(error)}"))

    def record_failed_step(self, error: Exception) -> None:
        """Count a step that raised `error`; the device is checked before the next one."""
        self.is_device_suspect = True
        self.failed_steps += not isinstance(error, OutOfMemoryError)
        self._step_stats.failed_steps += 1

    def _replace_leader(self, ended: Sequence, leader: Sequence | None) -> bool:
        """Have a follower of an ended sequence lead the others; True where it goes on with the sequence's KV.

        `leader`: what the sequence itself was following.  Else the followers are left to be planned again.
        """
        queues = self._queues
        if (heir := queues.followers.find_heir(ended)) is None:
            return False
        if leader is not None:
            with suppress(ResidentMismatchError):
                queues.followers.replace_leader(ended, heir, leader)
            return False
        if not heir.can_take_over(ended):
            return False
        heir.take_over(ended)
        queues.followers.replace_leader(ended, heir, None)
        queues.add_waiting(heir)
        heir.mark_waiting(STEP)
        return True

    def leaves_resident(self, sequence: Sequence) -> bool:
        """True where the sequence's KV is to become a resident."""
        return self._keeps_residents and sequence.request.leaves_resident

    def _add_resident(self, sequence: Sequence) -> str:
        kv = sequence.kv
        sequence.drop_held_tokens()
        if kv.length > sequence.sent_length or not (end := kv.find_continue_position(kv.length)):
            return ""
        kv.truncate(end)  # in exact mode, to the grid
        if kv.grid or not sequence.decode_started_at:
            kv.shrink_buffers()
        kv.capture_window()
        kv.capture_checkpoint()
        self._residents.make_room(self._queues.bytes_held + kv.nbytes)
        # Added even without room: it takes no more than before, and an eviction before its save costs a recomputation.
        lease_s = 0.0 if self._served.layout.problem else UNSAVED_LEASE_S
        request = sequence.request
        return self._residents.add(
            kv, lease_s=lease_s, request_id=request.id, root=request.root, adoption=sequence.adoption
        )

    def _notify_end(self, sequence: Sequence, resident: str, ending: "Ending") -> GenerationResult:
        """Send the end events of a sequence and of its followers."""
        result = sequence.make_result(
            ending.finish,
            boot=self._boot,
            generation=self._residents.generation,
            resident=resident,
            error=ending.error,
        )
        if sequence.request.matcher is not None:
            sequence.request.matcher.release()
        orphaned = self._queues.followers.pop_followers(sequence)
        self._step_stats.finish_counts[ending.finish] += 1
        self._step_stats.record_drafts(result.timings.drafts)
        try:
            self.on_changed()
        except Exception:  # the listener must get its event all the same
            log.exception("taking the engine's snapshot failed")
        event = EndedEvent(result, sequence.reused_tokens, tuple(ending.parts), ending.stop_reason)
        sequence.request.listener(event)
        for follower in orphaned:
            self._notify_end(follower, "", Ending("leaderless", error=LEADERLESS))
        return result
