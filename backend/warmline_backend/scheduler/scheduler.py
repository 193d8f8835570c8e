"""The scheduler: admission, decode steps, prefill chunks and ends, one step at a time on the engine thread.

Each turn admits what fits, gives every decode group a few steps, and computes one prefill chunk, so that long prompts
and running streams don't starve each other.  See DESIGN.md.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from warmline_backend.generation.chunk_memory import ChunkMemory, compute_usable_bytes
from warmline_backend.generation.events import StartedEvent
from warmline_backend.generation.rates import Rates
from warmline_backend.generation.sequence import FORK_DISTANCE_TOKENS_MIN, GenerationRequest, Sequence
from warmline_backend.generation.step_stats import StepStats
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.residents import RESTORE_LEASE_S, Adoption, ResidentNotFoundError, Residents
from warmline_backend.model.model import ServedModel, get_machine_bytes
from warmline_backend.scheduler.admission import SequenceAdmission
from warmline_backend.scheduler.capacity import check_capacity, sequence_bytes, sequence_tokens_max
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup, SampledToken
from warmline_backend.scheduler.decoding.merging import GroupMerger
from warmline_backend.scheduler.decoding.token_dispatch import dispatch_tokens
from warmline_backend.scheduler.finish import Finisher
from warmline_backend.scheduler.prefill import Prefiller
from warmline_backend.scheduler.queues import TOKENS_PER_BUDGET_CHECK, QueueFigures, Queues
from warmline_backend.scheduler.save_source import SaveSource
from warmline_backend.speculation.speculation import Speculation
from warmline_common.measurement.scheduling import DECODE_SHARE
from warmline_common.protocol.messages import GenerationResult
from warmline_common.protocol.waits import AUDIT, LEADER, STEP

DECODE_OWED_MAX_S = 30.0
# mlx 0.32.4 counts tasks under way, but not those of an evaluation that failed as done; with some left over, a later
# one may wait for ever (seen from about ten on, and once, on a machine with much else to do, after four).  Chunks
# that found no memory are not counted: an H200 computed on after fifteen of them.
FAILED_STEPS_MAX = 3
STEPS_PER_MERGE_CHECK = 8
STEPS_PER_CLEAN_UP = 512  # how often mlx's buffer pool is emptied while decoding
PROBE_TOKEN = 1


class DeviceBrokenError(Exception):
    """Too many steps have failed, or no token could be computed after a failed one: the process must be restarted."""


@dataclass(frozen=True)
class SchedulerSettings:
    boot: str
    memory_budget_bytes: int
    prefill_step_size: int
    running_count_max: int
    keeps_residents: bool  # false: every request starts cold and leaves no resident
    exact: bool = False  # warm equals cold bit for bit: only full chunks are kept, and no batch is shared

    @property
    def grid(self) -> int:
        """Multiple of tokens at which KV may end in exact mode; 0: anywhere."""
        return self.prefill_step_size if self.exact else 0


class Scheduler(QueueFigures):
    """Owner of all running requests and residents of one model."""

    def __init__(
        self,
        served: ServedModel,
        settings: SchedulerSettings,
        chunk_memory: ChunkMemory | None = None,
        rates: Rates | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.served, self.settings, self._speculation = served, settings, speculation
        usable_bytes = compute_usable_bytes(served.weight_bytes, get_machine_bytes())
        self.chunk_memory = chunk_memory or ChunkMemory(None, usable_bytes)
        self.residents = Residents(settings.memory_budget_bytes)
        self.rates = rates or Rates()
        self.step_stats = StepStats()
        self._queues = Queues(served)
        self.save_source = SaveSource(self._queues, self.residents)
        self.finisher = Finisher(
            served, self._queues, self.residents, self.step_stats, settings.boot, settings.keeps_residents
        )
        costs = None if speculation is None or speculation.is_exact else speculation.costs
        self._merger = GroupMerger(self._queues, self.residents, self.finisher, costs, is_exact=settings.exact)
        self.admission = SequenceAdmission(
            served, self._queues, self.residents, self.finisher, settings.running_count_max
        )
        self._prefiller = Prefiller(
            served,
            self._queues,
            self.residents,
            self.finisher,
            self.chunk_memory,
            self.rates,
            self.step_stats,
            settings.prefill_step_size,
        )
        self._decode_round_count = 0
        self._tokens_since_check = self._round_tokens = 0  # of a sequence at most, since the last budget check
        self.keepalive_steps = 0
        self._is_step_background = False  # the last chunk's request
        self._decode_owed_s = 0.0  # DECODE_SHARE of the time that decoding has waited for chunks

    # ---- requests

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request, which takes its resident over.

        Raises KvTooLargeError, ResidentNotFoundError, ResidentMismatchError; nothing is queued then.
        """
        budget_bytes = self.settings.memory_budget_bytes
        check_capacity(self.served, len(request.prompt), request.params.max_tokens, budget_bytes)
        if request.leader_id and (leader := self._queues.find_leader(request.leader_id)):
            self._queue_follower(self._make_sequence(request, self._make_kv()), leader)
        else:
            request = self._follow_resident(request) if request.leader_id else request
            kv = self._take_resident_kv(request) if request.resident_id else self._make_kv()
            self._queues.add_waiting(self._make_sequence(request, kv))

    @property
    def step_reason(self) -> str:
        """Reason of a command's wait for the last step."""
        return AUDIT if self._is_step_background else STEP

    def _make_sequence(self, request: GenerationRequest, kv: KV) -> Sequence:
        positions = request.checkpoints if self.settings.keeps_residents else ()
        request = replace(request, checkpoints=tuple(at for at in positions if kv.floor_to_grid(at) == at))
        is_adopted = request.resident_id and not request.copy_resident
        adoption = Adoption(request.resident_id, kv.length) if is_adopted else None
        reason = LEADER if request.leader_id else self.step_reason
        sequence = Sequence(request, kv, self.served, self._speculation, adoption=adoption, wait_reason=reason)
        tokens_max = sequence_tokens_max(self.served, self.settings.memory_budget_bytes)
        sequence.answer_tokens_max = min(request.params.max_tokens, tokens_max - len(request.prompt))
        return sequence

    def _take_resident_kv(self, request: GenerationRequest) -> KV:
        kv = self.residents.take(
            request.resident_id, request.prompt, request.reuse_tokens, request.copy_resident, request.root
        )
        # A copy is detached, or while it waits it would hold the whole of a longer resident that is evicted meanwhile.
        bytes_needed = self._queues.bytes_held + sequence_bytes(self.served, kv.length)
        if request.copy_resident and self.residents.make_room(bytes_needed, except_id=request.resident_id):
            return kv.fork(kv.length, detached=True)
        return kv

    def _make_kv(self) -> KV:
        return self.served.make_kv(journals=self.settings.keeps_residents, grid=self.settings.grid)

    def _follow_resident(self, request: GenerationRequest) -> GenerationRequest:
        """Have a follower whose leader has ended start from a copy of the resident that this one left.

        Raises ResidentNotFoundError where there is none that can be copied nearly as far: another plan may reuse more.
        """
        resident_id = self.residents.find_by_request(self._queues.followers.find_leader_id(request.leader_id))
        if (kv := self.residents.find_kv(resident_id)) is None:
            raise ResidentNotFoundError(f"request {request.leader_id}, which was to be followed")
        position = kv.find_continue_position(request.reuse_tokens)
        if not position or kv.floor_to_grid(request.reuse_tokens) - position >= FORK_DISTANCE_TOKENS_MIN:
            raise ResidentNotFoundError(f"request {request.leader_id}, and its resident can't be copied so far")
        return replace(request, leader_id="", resident_id=resident_id, reuse_tokens=position, copy_resident=True)

    def _queue_follower(self, sequence: Sequence, leader: Sequence) -> None:
        self._queues.followers.add(sequence, leader)
        sequence.mark_waiting(LEADER)
        if sequence in self._queues.followers.ready:
            self._admit()  # now: the leader's next step may push rows out of a window

    def cancel(self, request_id: str) -> GenerationResult | None:
        """End a request now, leaving its resident; None where it is not running."""
        sequence = self._queues.find(request_id)
        return self.finisher.finish_sequence(sequence, "cancelled") if sequence else None

    def detach(self, request_id: str) -> bool:
        """Let a request without a client finish its prefill after all others; its end is that of a cancelled one.

        False, and nothing done, where there is no prefill worth finishing: cancel it then.
        """
        queues, sequence = self._queues, self._queues.find(request_id)
        if sequence is None or sequence.decode_started_at or not self.finisher.leaves_resident(sequence):
            return False
        has_prefill = sequence in queues.prefilling and sequence.savable_tokens_left > 0
        sequence.detached = has_prefill or queues.followers.has_followers(sequence)
        return sequence.detached

    def install_resident(self, request_id: str, kv: KV, root: bytes = b"") -> str:
        """Add a restored KV as a leased resident of `root`, and release its reservation; returns the resident's id."""
        kv.grid, kv.grid_end = self.settings.grid, kv.length
        resident = self.residents.add(kv, lease_s=RESTORE_LEASE_S, root=root)
        self.admission.release(request_id)  # last, or its memory would be granted to another
        return resident

    def probe(self) -> None:
        """Compute one token and drop it.  Raises what the device raises."""
        mx.eval(self.served.model(mx.array([[PROBE_TOKEN]]), cache=self.served.layout.make_empty_cache()))

    def run_keepalive(self) -> None:
        """Compute one token to keep an idle device ready.  A failure is treated as that of a step."""
        try:
            self.probe()
        except Exception as error:  # noqa: BLE001  as in _decode_group; `step` checks the device
            self.finisher.discard([], error)
        self.keepalive_steps += 1

    # ---- steps

    def step(self) -> Iterator[None]:
        """Run one turn, yielding after each decode step of a group and each chunk.

        Commands may change the queues at each yield.  Raises DeviceBrokenError.
        """
        self._check_device()  # a command since the last step may have failed
        for _ in self._run_work():
            self._check_device()
            yield

    def _run_work(self) -> Iterator[None]:
        earlier = list(self._queues.prefilling)
        self._admit()
        yield from self._decode_rounds(earlier)
        if self._queues.prefill_candidates:
            yield from self._prefill_next()
            yield

    def _decode_rounds(self, earlier: list[Sequence]) -> Iterator[None]:
        """Decode one step for all groups, and those owed to them for the last chunks.

        With a new prompt besides the `earlier` ones that takes one chunk, that comes first, and owed steps after it.
        """
        rounds = 0
        while self._queues.groups and (not rounds or self._is_decode_owed(earlier)):
            for group in list(self._queues.groups):
                if group in self._queues.groups:
                    self._decode_group(group)
                    yield
            self._finish_decode_round()
            rounds += 1
            if self._queues.waiting:
                self._admit()
        if not self._queues.groups:
            self._decode_owed_s = 0.0

    def _is_decode_owed(self, earlier: list[Sequence]) -> bool:
        if self._decode_owed_s <= 0 or not self._queues.prefilling:
            return False
        newcomers = (each for each in self._queues.prefilling if each not in earlier)
        return all(each.prefill_tokens_left > self.settings.prefill_step_size for each in newcomers)

    def _check_device(self) -> None:
        """After a failure, check that a token can still be computed once the lost memory is free."""
        if not self.finisher.is_device_suspect:
            return
        if self.finisher.failed_steps >= FAILED_STEPS_MAX:
            raise DeviceBrokenError(f"{FAILED_STEPS_MAX} steps have failed; mlx may hang after more")
        try:
            mx.clear_cache()
            self.probe()
        except Exception as error:
            raise DeviceBrokenError(f"after a failed step, a token could not be computed: {error}") from error
        self.finisher.is_device_suspect = False

    def _admit(self) -> None:
        for sequence in self.admission.admit():
            self._start_sequence(sequence)
        for sequence in self._queues.waiting:
            sequence.mark_waiting(self.admission.wait_reason)

    def _start_sequence(self, sequence: Sequence) -> None:
        queues = self._queues
        if sequence in queues.waiting:
            queues.waiting.remove(sequence)
        else:
            try:
                sequence.fork_from_leader()
            except Exception as error:  # noqa: BLE001  as in _decode_group; its leader is only read
                self.finisher.discard(queues.discard_batch(sequence), error)
                return
            queues.followers.remove(sequence)
        sequence.mark_started()
        queues.prefilling.append(sequence)
        sequence.request.listener(StartedEvent())
        if sequence.prefill_tokens_left > self.settings.prefill_step_size:  # a chunk may take a minute: show its start
            self._prefiller.notify_progress(sequence)

    # ---- decoding

    def _decode_group(self, group: DecodeGroup) -> None:
        """Sample a token or more for every sequence of a group."""
        self._is_step_background = False
        began, sequences = time.monotonic(), len(group.sequences)
        if counts := self._dispatch_sampled(group, group.step):
            self._round_tokens = max(self._round_tokens, *counts.values())
            seconds = time.monotonic() - began
            self._decode_owed_s = max(0.0, self._decode_owed_s - seconds)
            self._record_decode(sequences, counts.total(), seconds)
            if len(group.sequences) == sequences:  # else it includes what the ends of sequences took
                group.record_duration(seconds)

    def _record_decode(self, sequences: int, tokens: int, seconds: float) -> None:
        self._record_turn(seconds)
        self.rates.record_decode(tokens, seconds)
        self.step_stats.record_decode(sequences, seconds)

    def _dispatch_sampled(self, group: DecodeGroup, sample: Callable[[], list[SampledToken]]) -> Counter[Sequence]:
        """Dispatch the tokens of `sample`, and end or redraw sequences.

        Returns the number of tokens of each; empty where an exception was raised: the group is lost.
        """
        try:
            counts, endings = dispatch_tokens(sample())
            group.commit(counts)
        except Exception as error:  # noqa: BLE001  after any failure, tokens and rows of the batch disagree
            self.finisher.discard(self._queues.discard_batch(group.sequences[0]), error)
            return Counter()
        self.step_stats.decoded_tokens += counts.total()
        if endings:
            self.finisher.finish_sequences(endings)
        for sequence in list(group.sequences):
            if sequence.redraw_position is None:
                sequence.keep_rewind_point()
            elif sequence in group.sequences:  # else discarded for a failure of another of its batch
                self._redraw(sequence, sequence.redraw_position)
        return counts

    def _redraw(self, sequence: Sequence, count: int) -> None:
        """Go back to the first `count` tokens of the answer; some of them may have to be prefilled again."""
        self.step_stats.redraws += 1
        try:
            self.residents.make_room(self._queues.bytes_held + self._queues.bytes_to_remove([sequence]))
            self._queues.remove([sequence])
            sequence.rewind(count)
        except Exception as error:  # noqa: BLE001  as in _decode_group
            self.finisher.discard(self._queues.discard_batch(sequence), error)
            return
        self._queues.prefilling.append(sequence)
        if sequence.prefill_tokens_left <= 0:
            self._start_decoding([sequence])

    def _finish_decode_round(self) -> None:
        """Check the budget, split and merge groups, and free mlx's buffers, every so many rounds each."""
        if not self._queues.groups:
            return
        self._decode_round_count += 1
        self._tokens_since_check += self._round_tokens
        self._round_tokens = 0
        if self._tokens_since_check >= TOKENS_PER_BUDGET_CHECK:
            self._tokens_since_check = 0
            self.admission.enforce_budget()
        if self._decode_round_count % STEPS_PER_MERGE_CHECK == 0:
            self._merger.split_groups()
            for group in self._queues.groups[1:]:  # their lengths were too unlike before, or there was no room
                self._merge_group(group)
        if self._decode_round_count % STEPS_PER_CLEAN_UP == 0:
            mx.clear_cache()

    def _record_turn(self, seconds: float, computed: Collection[Sequence] = ()) -> None:
        """Count a step's seconds as a wait of all prompts in prefill but the `computed` ones."""
        for sequence in self._queues.prefilling:
            if sequence not in computed and not sequence.decode_started_at:
                sequence.record_turn(seconds)

    # ---- prefilling

    def _prefill_next(self) -> Iterator[None]:
        """Compute one chunk of one prompt, or the rest of several short ones; a last chunk is followed by the first
        decode step.

        Yields after each layer of a background request's chunk.
        """
        sequences = self._prefiller.choose_sequences(self._queues.prefill_candidates)
        self._is_step_background = sequences[0].request.background
        if self._is_step_background:
            is_computed = yield from self._prefiller.compute_by_layers(sequences[0])
        else:
            began = time.monotonic()
            is_computed = self._prefiller.compute(sequences)
            seconds = time.monotonic() - began
            self._record_turn(seconds, sequences)
            if self._queues.groups:
                owed_s = self._decode_owed_s + seconds * DECODE_SHARE / (1 - DECODE_SHARE)
                self._decode_owed_s = min(owed_s, DECODE_OWED_MAX_S)
        if not is_computed:
            return
        if len(sequences) > 1:  # a batch, which nobody may take out of the queue
            self._start_decoding(sequences)
            self.admission.reclaim_memory()
        else:
            self._end_chunk(sequences[0])

    def _end_chunk(self, sequence: Sequence) -> None:
        queues = self._queues
        self._admit_followers([sequence])
        self.admission.reclaim_memory()  # for fork states: admission has counted the rest
        if sequence not in queues.prefilling:
            return
        if sequence.detached and sequence.savable_tokens_left <= 0:
            self.finisher.finish_sequence(sequence, "cancelled")
        elif sequence.prefill_tokens_left <= 0:
            self._start_decoding([sequence])

    def _admit_followers(self, leaders: list[Sequence]) -> None:
        """Start followers that can be copied now: after their leader's next step it may be too late."""
        if any(map(self._queues.followers.has_followers, leaders)):
            self._admit()

    def _start_decoding(self, sequences: list[Sequence]) -> None:
        """Start one sequence, or all that were prefilled in one batch."""
        self._queues.prefilling = [each for each in self._queues.prefilling if each not in sequences]
        began = time.monotonic()
        try:
            newcomer = DecodeGroup.from_sequences(sequences)
        except Exception as error:  # noqa: BLE001  as in _decode_group
            self.finisher.discard(sequences, error)
            return
        is_first = not sequences[0].decode_started_at  # else a part of its answer was computed again
        for sequence in sequences if is_first else ():
            sequence.decode_started_at = time.monotonic()
            sequence.timings.prefilled += 1  # the prompt's last token is computed by the first decode step
            self.step_stats.prefilled_tokens += 1
        self._queues.groups.append(newcomer)
        self._admit_followers(sequences)
        # First tokens don't wait for the step after them.
        reads_first = is_first and newcomer.batch.can_read_sampled
        if reads_first and (counts := self._dispatch_sampled(newcomer, newcomer.read_sampled)):
            self._record_decode(len(sequences), counts.total(), time.monotonic() - began)
        self._merge_group(newcomer)

    def _merge_group(self, newcomer: DecodeGroup) -> None:
        """Merge a group with an earlier one of similar length, if there is one."""
        if (host := self._merger.find_host(newcomer)) is None:
            return
        if newcomer.batch.is_read and host.batch.can_read_sampled:  # for both the same step is under way then
            began, count = time.monotonic(), len(host.sequences)
            if self._dispatch_sampled(host, host.read_sampled):
                self.step_stats.record_decode(count, time.monotonic() - began)
        groups = self._queues.groups
        if host in groups and newcomer in groups:
            self._merger.merge(host, newcomer)
