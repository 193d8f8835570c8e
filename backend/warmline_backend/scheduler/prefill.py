"""Computation of prefill chunks, alone or in a batch: their sizes, their records, and what follows a failure.

Engine thread.
"""

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass

from warmline_backend.generation.chunk_memory import ChunkMemory
from warmline_backend.generation.events import PrefillProgress
from warmline_backend.generation.rates import Rates, measure_chunk
from warmline_backend.generation.sequence import Sequence, prefill_last_chunks
from warmline_backend.generation.step_stats import StepStats
from warmline_backend.kv_cache.batch_prefill import takes_padding
from warmline_backend.kv_cache.chunk_draft import OutOfMemoryError
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import ANSWER_TOKENS_RESERVED
from warmline_backend.scheduler.decoding.decode_group import can_share_batch
from warmline_backend.scheduler.finish import Finisher
from warmline_backend.scheduler.queues import Queues
from warmline_common.measurement.scheduling import choose_batch_size, is_padding_small

log = logging.getLogger(__name__)

# A request that comes meanwhile waits for one layer of a background request's chunk.
BACKGROUND_LAYER_S = 0.5
BACKGROUND_STEP_MIN = 32  # tokens, also while the speed is not known
CHUNKS_SKIPPED_MAX = 4  # chunks of shorter prompts that one of a few long ones waits for, at most
CHUNKS_REPORTED_MAX = 16  # of a prompt, the last ones
BATCH_SCORES_MAX = 1 << 22  # of a head, in a batch of prompts: 1 GB with 64 heads in float32
CHUNK_COUNTED_MIN = 1 / 8  # a small prompt's chunk counts as at least this part of one
KV_MEMORY_EXCEEDED = "kv_memory_exceeded"  # the code of errors about prompts that the memory has no room for


def choose_prefill(prefilling: list[Sequence], step: int) -> Sequence:
    """Return the shortest remaining prompt, or the one skipped most, if too often.

    Many long prompts take turns, each skipped as often as there are others; a short one need not wait for all of them.
    """
    shortest = min(prefilling, key=lambda sequence: sequence.prefill_tokens_left)
    most_skipped = max(prefilling, key=lambda sequence: sequence.chunks_skipped)
    is_short = shortest.prefill_tokens_left <= step
    limit = max(CHUNKS_SKIPPED_MAX, len(prefilling)) if is_short else CHUNKS_SKIPPED_MAX
    return most_skipped if most_skipped.chunks_skipped >= limit else shortest


def count_skipped_chunks(prefilling: list[Sequence], chosen: list[Sequence], step: int) -> None:
    """Count the next chunk of the `chosen` ones, in steps, as skipped for all others."""
    chunks = max(min(count_batch_tokens(chosen), step) / step, CHUNK_COUNTED_MIN)
    for sequence in prefilling:
        sequence.chunks_skipped = 0.0 if sequence in chosen else sequence.chunks_skipped + chunks


def choose_batch(chosen: Sequence, mates: list[Sequence], tokens_max: int) -> list[Sequence]:
    """Return `chosen` and those of its mates, in order, that fit into a batch of `tokens_max` tokens with padding.

    Its padding is small, for chunks and for whole prompts, and so are its scores: with padding, attention may write
    them.
    """
    batch = [chosen]
    for mate in mates:
        wider = [*batch, mate]
        rows, longest = count_batch_tokens(wider), max(len(each.inputs) for each in wider)
        is_small = rows <= tokens_max and rows * longest <= BATCH_SCORES_MAX
        if is_small and is_padding_small([each.prefill_tokens_left for each in wider]) and can_share_batch(wider):
            batch = wider
    return batch


def count_batch_tokens(sequences: list[Sequence]) -> int:
    """Tokens of a batch of the sequences' last chunks, with padding."""
    return len(sequences) * max(sequence.prefill_tokens_left for sequence in sequences)


def find_depth(sequences: list[Sequence]) -> int:
    """Length of the longest KV."""
    return max(sequence.kv.length for sequence in sequences)


@dataclass(eq=False)
class Prefiller:
    """Computes chunks of at most `step_size` tokens of the scheduler's sequences, one at a time, or several together
    where all are short.
    """

    served: ServedModel
    queues: Queues
    residents: Residents
    finisher: Finisher
    chunk_memory: ChunkMemory
    rates: Rates
    step_stats: StepStats
    step_size: int

    def choose_sequences(self, candidates: list[Sequence]) -> list[Sequence]:
        """Choose whose next chunk is computed: one sequence, or several whose last chunks fit into one batch."""
        chosen = choose_prefill(candidates, self.step_size)
        batch = self._choose_mates(chosen, candidates) if self._can_share_batch(chosen) else [chosen]
        count_skipped_chunks(candidates, batch, self.step_size)
        return batch

    def _choose_mates(self, chosen: Sequence, candidates: list[Sequence]) -> list[Sequence]:
        mates = [each for each in candidates if each is not chosen and self._can_share_batch(each)]
        mates = [each for each in mates if bool(each.prefill_tokens_left) == bool(chosen.prefill_tokens_left)]
        if not takes_padding(self.served.model, self.served.layout):
            mates = [each for each in mates if each.prefill_tokens_left == chosen.prefill_tokens_left]
        batch = choose_batch(chosen, mates, self.step_size)
        batch = batch[: choose_batch_size([self._estimate_batch_s(batch[: n + 1]) for n in range(len(batch))])]
        return batch if len(batch) == 1 or self._has_room_for_batch(batch) else [chosen]

    def _estimate_batch_s(self, batch: list[Sequence]) -> float:
        """Seconds of a batch, and of the decode step that follows it."""
        rows, longest = count_batch_tokens(batch), max(sequence.prefill_tokens_left for sequence in batch)
        batch_s = self.rates.chunks.model.estimate_s(rows, find_depth(batch) + longest // 2)
        return batch_s + self.rates.step_durations.usual_decode_s

    def _has_room_for_batch(self, batch: list[Sequence]) -> bool:
        copied_bytes = self.queues.bytes_to_copy_into_batch(batch)
        if not self.residents.make_room(self.queues.bytes_held + copied_bytes):
            return False
        return self.chunk_memory.fits(
            count_batch_tokens(batch), find_depth(batch), self._committed_bytes + copied_bytes
        )

    def _can_share_batch(self, sequence: Sequence) -> bool:
        """True where one chunk is left, or none, and nothing needs the KV while it is no group's yet."""
        kv, tokens = sequence.kv, sequence.prefill_tokens_left
        if sequence.request.background or sequence.detached or sequence.prefills_alone or kv.grid:
            return False
        if not kv.layout.is_batchable or sequence.decode_started_at or self.queues.followers.has_followers(sequence):
            return False
        step = min(self.step_size, sequence.chunk_tokens_max)
        return (tokens > 0 or kv.length > 0) and tokens == sequence.find_next_chunk_end(step) - kv.length

    def compute(self, sequences: list[Sequence]) -> bool:
        """Compute what `choose_sequences` chose; False where it failed."""
        if len(sequences) > 1:
            return self._compute_batch(sequences)
        return sequences[0].prefill_tokens_left <= 0 or self._compute_chunk(sequences[0])

    def _compute_batch(self, sequences: list[Sequence]) -> bool:
        """Compute the last chunks of several prompts in one forward pass; where it fails, each goes on alone.

        Of prompts that are computed already, as those of followers, only a batch is made.
        """
        began, rows = time.monotonic(), count_batch_tokens(sequences)
        chunks = [sequence.prefill_tokens_left for sequence in sequences]
        depth = find_depth(sequences)
        try:
            with self.chunk_memory.bound_chunk(rows, depth, self._committed_bytes):
                prefill_last_chunks(sequences)
        except Exception as error:  # whosever fault it was: their KV is as before
            for sequence in sequences:
                sequence.prefills_alone = True
            log.warning("a batch of prompts failed, and they go on one by one", exc_info=error)
            self.finisher.record_failed_step(error)
            return False
        if not rows:
            return True
        seconds = time.monotonic() - began
        self.rates.record_batch(depth, max(chunks), rows, seconds)
        self.step_stats.record_chunk(sum(chunks), seconds)
        for sequence, tokens in zip(sequences, chunks, strict=True):
            self._record_prefill(sequence, tokens, seconds)
        return True

    def _compute_chunk(self, sequence: Sequence) -> bool:
        """Compute a chunk; False where it failed: the sequence has ended, or its next chunk will be smaller."""
        began, depth, step = time.monotonic(), sequence.kv.length, self._choose_step(sequence)
        tokens = sequence.find_next_chunk_end(step) - depth
        rows = len(sequence.inputs) + min(sequence.answer_tokens_max, ANSWER_TOKENS_RESERVED)  # as admission counts
        try:
            sequence.kv.reserve_rows(rows)  # before the bound, which is for what the chunk takes
            with self.chunk_memory.bound_chunk(tokens, depth, self._committed_bytes):
                sequence.prefill_chunk(step)
        except OutOfMemoryError as error:
            self._recover_memory(sequence, tokens, str(error))
            return False
        except Exception as error:  # noqa: BLE001  as in Scheduler._decode_group
            self.finisher.discard(self.queues.discard_batch(sequence), error)
            return False
        seconds = time.monotonic() - began
        self.rates.record_prefill(sequence.kv.length, tokens, seconds)
        self._record_chunk(sequence, tokens, seconds)
        return True

    def compute_by_layers(self, sequence: Sequence) -> Generator[None, None, bool]:
        """Compute a background request's chunk, yielding after each layer; its value is False without a whole chunk.

        Where a command has brought another request meanwhile, the rest is computed after that one.
        """
        try:
            if sequence.layerwise_chunk is None and sequence.prefill_tokens_left > 0:
                sequence.layerwise_chunk = sequence.begin_layerwise_chunk(self._choose_background_step(sequence))
            while (chunk := sequence.layerwise_chunk) and chunk.compute_layer():
                yield
                if sequence not in self.queues.prefilling or self.queues.has_attended:
                    return False
        except OutOfMemoryError as error:
            sequence.layerwise_chunk = None
            self._recover_memory(sequence, chunk.tokens if chunk else 0, str(error))
            return False
        except Exception as error:  # noqa: BLE001  as in Scheduler._decode_group
            self.finisher.discard(self.queues.discard_batch(sequence), error)
            return False
        if chunk:
            sequence.layerwise_chunk = None
            self._record_chunk(sequence, chunk.tokens, chunk.seconds)
        return True

    def notify_progress(self, sequence: Sequence) -> None:
        sequence.request.listener(PrefillProgress(sequence.kv.length, len(sequence.request.prompt)))
        self.queues.followers.notify_progress(sequence)

    def _choose_background_step(self, sequence: Sequence) -> int:
        """Most tokens of a chunk of which a layer takes BACKGROUND_LAYER_S; in exact mode a chunk is a chunk."""
        step = self._choose_step(sequence)
        if sequence.kv.grid:
            return step
        tokens_per_s = self.rates.estimate_prefill_rate(sequence.kv.length)
        layers = max(1, len(sequence.kv.layers))
        tokens = int(tokens_per_s * layers * BACKGROUND_LAYER_S) or BACKGROUND_STEP_MIN
        return min(step, max(tokens, BACKGROUND_STEP_MIN))

    def _choose_step(self, sequence: Sequence) -> int:
        """Most tokens of the next chunk that fit the memory, if need be without the residents that are not leased."""
        step = self.step_size
        if not self.chunk_memory.has_room(sequence, step, self._committed_bytes):
            self.residents.evict_unleased()
        return self.chunk_memory.choose_tokens(sequence, step, self._committed_bytes)

    def _record_chunk(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        self.step_stats.record_chunk(tokens, seconds)
        if not sequence.decode_started_at:  # else a part of its answer is computed again
            chunk = measure_chunk(sequence.kv.length, tokens, seconds)
            sequence.timings.chunks = [*sequence.timings.chunks, chunk][-CHUNKS_REPORTED_MAX:]
        self._record_prefill(sequence, tokens, seconds)

    def _record_prefill(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        if not sequence.decode_started_at:  # else a part of its answer is computed again
            sequence.timings.prefilled += tokens
            sequence.timings.prefill_s += seconds
            self.notify_progress(sequence)

    @property
    def _committed_bytes(self) -> int:
        """Bytes of weights and residents, and of all that requests were admitted for."""
        return self.served.weight_bytes + self.residents.bytes_held + self.queues.bytes_held

    def _recover_memory(self, sequence: Sequence, tokens: int, problem: str) -> None:
        """Free memory after a chunk of `tokens` found none, and plan its retry; else end its sequence."""
        self.finisher.is_device_suspect = True  # its check returns freed buffers first
        self.step_stats.failed_steps += 1
        if self.chunk_memory.plan_retry(sequence, tokens, problem):
            if sequence.needs_eviction:
                self.residents.evict_unleased()
            return
        sequence.error_code = KV_MEMORY_EXCEEDED
        error = self.chunk_memory.describe_lack(sequence, tokens, problem)
        self.finisher.finish_sequence(sequence, "error", error=error)
