"""Who computes next: admission, prefill chunks, decode steps, ends.  One step at a time, on the engine thread.

A turn admits what fits, gives every decode group a few steps, and computes one prefill chunk, so a long prompt never
stops a running stream and a running stream never starves a prompt.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from warmline_backend.generation.events import PrefillProgress, SampledLogprobs, StartedEvent, TokenEvent
from warmline_backend.generation.rates import Rates
from warmline_backend.generation.sampling import pick_logprobs
from warmline_backend.generation.sequence import GenerationRequest, Sequence
from warmline_backend.generation.step_stats import StepStats
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.residents import RESTORE_LEASE_S, ResidentNotFoundError, Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.admission import SequenceAdmission
from warmline_backend.scheduler.capacity import sequence_bytes
from warmline_backend.scheduler.decode_group import DecodeGroup
from warmline_backend.scheduler.finish import Finisher
from warmline_backend.scheduler.queues import STEPS_PER_BUDGET_CHECK, Queues
from warmline_backend.scheduler.save_source import SaveSource
from warmline_common.logging import describe_error, request_context
from warmline_common.protocol.messages import GenerationResult

log = logging.getLogger(__name__)

DECODE_STEPS_PER_CHUNK = 8  # at least
DECODE_SHARE = 0.25  # of the time, while prompts prefill: a chunk may take as long as a thousand decode steps
DECODE_OWED_MAX_S = 30.0
CHUNKS_SKIPPED_MAX = 4  # a long prompt waits at most this many chunks of shorter ones,
CHUNK_COUNTED_MIN = 1 / 8  # of which a small prompt's is no whole one
# mlx 0.32.4 counts tasks under way, but not those of an evaluation that failed as done; with some left over, a later
# one may wait for ever (seen from about ten on, and once, on a machine with much else to do, after four).
FAILED_STEPS_MAX = 3
STEPS_PER_CLEAN_UP = 512  # how often mlx's buffer pool is emptied while decoding
PROBE_TOKEN = 1


class DeviceBrokenError(Exception):
    """Not even one token could be computed after a failed step, or too many steps have failed: this process is of no
    use any more.
    """


@dataclass(frozen=True)
class SchedulerSettings:
    boot: str
    memory_budget_bytes: int
    prefill_step_size: int
    running_count_max: int
    keeps_residents: bool  # false: every request starts cold and leaves nothing
    exact: bool = False  # warm is cold, bit for bit: what is kept was computed in full chunks, nobody shares a batch

    @property
    def grid(self) -> int:
        """Where KV may end in exact mode: at multiples of this; 0: anywhere."""
        return self.prefill_step_size if self.exact else 0


class Scheduler:
    """All running requests and residents of one model."""

    def __init__(self, served: ServedModel, settings: SchedulerSettings) -> None:
        self.served, self.settings = served, settings
        self.residents = Residents(settings.memory_budget_bytes)
        self.rates = Rates()
        self.step_stats = StepStats()
        self._queues = Queues(served)
        self._snapshots = SaveSource(self._queues, self.residents)
        self._finisher = Finisher(
            served, self._queues, self.residents, self.step_stats, settings.boot, settings.keeps_residents
        )
        self._admission = SequenceAdmission(
            served, self._queues, self.residents, self._finisher, settings.running_count_max
        )
        self._decode_round_count = 0
        self.keepalive_steps = 0
        self._decode_owed_s = 0.0  # what decoding has waited for chunks, its share of it

    # ---- what others ask for

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its resident is its own from now on.

        Raises TooLarge, ResidentGone, ResidentMismatch; nothing is queued then.
        """
        self._admission.check_size(request)
        if request.leader_id:
            self._queue_follower(self._make_sequence(request, self._make_kv()))
        elif request.resident_id:
            self._queues.waiting.append(self._make_sequence(request, self._take_resident_kv(request)))
        else:
            self._queues.waiting.append(self._make_sequence(request, self._make_kv()))

    def _make_sequence(self, request: GenerationRequest, kv: KV) -> Sequence:
        wanted = request.checkpoints if self.settings.keeps_residents else ()
        request = replace(request, checkpoints=tuple(at for at in wanted if kv.floor_to_grid(at) == at))
        sequence = Sequence(
            request, kv, self.served, adopted_resident_id="" if request.copy_resident else request.resident_id
        )
        sequence.answer_tokens_max = min(request.params.max_tokens, self._admission.tokens_max - len(request.prompt))
        return sequence

    def _take_resident_kv(self, request: GenerationRequest) -> KV:
        kv = self.residents.take(
            request.resident_id, request.prompt, request.reuse_tokens, request.copy_resident, request.root
        )
        if not request.copy_resident:
            return kv
        # Apart, or while it waits it would hold the whole of a longer resident that is dropped meanwhile.
        wanted = self._queues.bytes_held + sequence_bytes(self.served, kv.length)
        return (
            kv.fork(kv.length, detached=True) if self.residents.make_room(wanted, except_id=request.resident_id) else kv
        )

    def _make_kv(self) -> KV:
        return self.served.make_kv(journals=self.settings.keeps_residents, grid=self.settings.grid)

    def _queue_follower(self, sequence: Sequence) -> None:
        if (leader := self._queues.find(sequence.request.leader_id)) is None:
            raise ResidentNotFoundError(f"request {sequence.request.leader_id}, which was to be followed")
        self._queues.followers.add(sequence, leader)
        if sequence in self._queues.followers.ready:
            self._admit()  # now: a rotating layer is past the place after the leader's next step

    def cancel(self, request_id: str) -> GenerationResult | None:
        """End a request now and keep what it has computed; None where it is not running."""
        sequence = self._queues.find(request_id)
        return self._finisher.finish_sequence(sequence, "cancelled") if sequence else None

    def detach(self, request_id: str) -> bool:
        """Nobody waits for its answer any more: let it finish its prefill, whenever nobody else needs the engine.

        It ends as cancelled, and what it has computed is kept.  False, and nothing done, where there is no prefill
        worth finishing: cancel it then.
        """
        lineup, sequence = self._queues, self._queues.find(request_id)
        if sequence is None or sequence.decode_started_at or not self._finisher.leaves_a_resident(sequence):
            return False
        goes_on = sequence in lineup.prefilling and sequence.savable_tokens_left > 0
        sequence.detached = goes_on or lineup.followers.has_followers(sequence)
        return sequence.detached

    def find_kv(self, end: int, *, resident_id: str = "", running_id: str = "") -> KV:
        """The KV of a resident's first `until` tokens, or of the running request that took it over; or of a running
        request, or what it has left.

        Raises ResidentGone, or RowsGone where less than that is left of it: who took it over may have gone on from its
        middle.
        """
        return self._snapshots.find_kv(end, resident_id, running_id)

    def mark_saved(self, resident_id: str, running_id: str, end: int) -> None:
        """Rows below `until` are on disk, and the states too where that is all there is: what was kept only for the
        save may go.
        """
        self._snapshots.mark_saved(resident_id, running_id, end)

    def reserve(self, request_id: str, bytes_needed: int, on_granted: Callable[[], None]) -> None:
        """Set memory aside for a restore; `granted` is called on this thread once it is.  Raises TooLarge."""
        self._admission.reserve(request_id, bytes_needed, on_granted)

    def release(self, request_id: str) -> None:
        """Give a reservation back, or no longer wait for it; no harm where there is none."""
        self._admission.release(request_id)

    def install_resident(self, request_id: str, kv: KV, root: bytes = b"") -> str:
        """Make a restored KV a resident of this `root`, leased for the request that it is for; its reservation ends."""
        kv.grid, kv.grid_end = self.settings.grid, kv.length
        resident = self.residents.add(kv, lease_s=RESTORE_LEASE_S, root=root)
        self.release(request_id)  # after it, or what it takes would be given to whoever waits
        return resident

    def probe(self) -> None:
        """Compute one token.  Raises whatever keeps the device from it."""
        mx.eval(self.served.model(mx.array([[PROBE_TOKEN]]), cache=self.served.layout.make_empty_cache()))

    def run_keepalive(self) -> None:
        """Compute one token for nobody, so that an idle device stays ready.  A failure is treated as any step's."""
        try:
            self.probe()
        except Exception as error:  # noqa: BLE001  as in _decode; `turn` looks whether the device still computes
            self._finisher.discard([], error)
        self.keepalive_steps += 1

    # ---- figures

    @property
    def is_idle(self) -> bool:
        return not self._queues.reservations.has_pending and next(iter(self._queues), None) is None

    @property
    def is_blocked(self) -> bool:
        """Nothing can go on before a resident is saved or taken, or its lease ends."""
        return not (self._queues.prefilling or self._queues.groups or self.is_idle)

    @property
    def on_changed(self) -> Callable[[], None]:
        """Called whenever a request has ended, before its listener hears of it."""
        return self._finisher.on_changed

    @on_changed.setter
    def on_changed(self, changed: Callable[[], None]) -> None:
        self._finisher.on_changed = changed

    @property
    def running_count(self) -> int:
        return len(self._queues.running)

    @property
    def queued_count(self) -> int:
        return len(self._queues.waiting) + len(self._queues.followers)

    @property
    def running_bytes(self) -> int:
        """KV of all requests, padding, the rest of their prompts and what is reserved for restores counted."""
        return self._queues.bytes_held

    # ---- a turn

    def step(self) -> Iterator[None]:
        """Do a bounded piece of everybody's work; yields after each step, one decode step of a group or one chunk.

        At a yield anything may be asked: what it changes is looked at anew.  Raises DeviceBroken.
        """
        self._check_device()  # what was asked since the last step may have failed, too
        for _ in self._run_work():
            self._check_device()
            yield

    def _run_work(self) -> Iterator[None]:
        prefilling = len(self._queues.prefilling)
        self._admit()
        yield from self._decode_rounds(prefilling)
        if self._queues.prefill_candidates:
            self._prefill_next()
            yield

    def _decode_rounds(self, prefilling: int) -> Iterator[None]:
        """Decode for everybody what the last chunks have kept them from.

        Where there is a newcomer besides the `prefilling` that were there before, its prompt comes first: what is
        owed is decoded after that, also for it.
        """
        rounds = 0
        while self._queues.groups and (rounds < DECODE_STEPS_PER_CHUNK or self._is_decode_owed(prefilling)):
            for group in list(self._queues.groups):
                if group in self._queues.groups:
                    self._decode_group(group)
                    yield
            self._finish_decode_round()
            rounds += 1
            if self._queues.waiting and rounds >= DECODE_STEPS_PER_CHUNK:
                self._admit()
        if not self._queues.groups:
            self._decode_owed_s = 0.0

    def _is_decode_owed(self, prefilling: int) -> bool:
        return self._decode_owed_s > 0 and 0 < len(self._queues.prefilling) <= prefilling

    def _check_device(self) -> None:
        """After a failure, whether a token can still be computed, now that all that it has lost is free."""
        if not self._finisher.is_device_suspect:
            return
        if self._finisher.failed_steps >= FAILED_STEPS_MAX:
            raise DeviceBrokenError(f"{FAILED_STEPS_MAX} steps have failed; mlx may hang after more")
        try:
            mx.clear_cache()
            self.probe()
        except Exception as error:
            raise DeviceBrokenError(f"after a failed step, a token could not be computed: {error}") from error
        self._finisher.is_device_suspect = False

    def _admit(self) -> None:
        """Start whoever fits, first come first served."""
        for sequence in self._admission.admit():
            self._start_sequence(sequence)

    def _start_sequence(self, sequence: Sequence) -> None:
        lineup = self._queues
        if sequence in lineup.waiting:
            lineup.waiting.remove(sequence)
        else:
            try:
                sequence.fork_from_leader()
            except Exception as error:  # noqa: BLE001  as in _decode; its leader is only read
                self._finisher.discard(lineup.discard_batch(sequence), error)
                return
            lineup.followers.remove(sequence)
        sequence.mark_started()
        lineup.prefilling.append(sequence)
        sequence.request.listener(StartedEvent())
        if (
            sequence.prefill_tokens_left > self.settings.prefill_step_size
        ):  # a chunk may take a minute: say that it began
            self._notify_progress(sequence)

    # ---- decoding

    def _decode_group(self, group: DecodeGroup) -> None:
        """One token for every sequence of a group."""
        began, count = time.monotonic(), len(group.sequences)
        try:
            heard = group.step()
        except Exception as error:  # noqa: BLE001  whatever it is: tokens and rows of this batch disagree now
            self._finisher.discard(self._queues.discard_batch(group.sequences[0]), error)
            return
        for sequence, token, logprobs in heard:
            if group in self._queues.groups:  # else it was given up for a fault of one of them
                self._try_process_token(sequence, token, logprobs)
        seconds = time.monotonic() - began
        self._decode_owed_s = max(0.0, self._decode_owed_s - seconds)
        self.rates.record_decode(count, seconds)
        self.step_stats.record_decode(count, seconds)

    def _finish_decode_round(self) -> None:
        """Now and then, between rounds of decode steps: the budget is kept, mlx's buffers are freed."""
        if not self._queues.groups:
            return
        self._decode_round_count += 1
        if self._decode_round_count % STEPS_PER_BUDGET_CHECK == 0:
            self._admission.enforce_budget()
        if self._decode_round_count % STEPS_PER_CLEAN_UP == 0:
            mx.clear_cache()

    def _try_process_token(self, sequence: Sequence, token: int, logprobs: mx.array) -> None:
        try:
            self._process_token(sequence, token, logprobs)
        except Exception as error:  # its text, its log-probabilities: its own fault alone
            with request_context(sequence.request.id):
                log.error("request %s failed", sequence.request.id, exc_info=error)
            self._finisher.finish_sequence(
                sequence, "error", error=f"the answer could not be told: {describe_error(error)}"
            )

    def _process_token(self, sequence: Sequence, token: int, logprobs: mx.array) -> None:
        """Tell the listener of a token; end the sequence where this was its last."""
        params = sequence.request.params
        sequence.generated_count += 1
        sequence.timings.decoded += 1
        self.step_stats.decoded_tokens += 1
        if sequence.sampler_fault.error is not None:
            self._finisher.finish_sequence(
                sequence, "error", error=f"sampling failed: {describe_error(sequence.sampler_fault.error)}"
            )
            return
        ends = sequence.is_end(token)
        parts = () if ends else sequence.output_parser.add(token)
        full = sequence.generated_count >= sequence.answer_tokens_max
        if ends or full:
            parts = (*parts, *sequence.output_parser.finish(natural=ends))
        detail = None
        if params.logprobs and not ends:
            detail = SampledLogprobs(token, *pick_logprobs(logprobs, token, params.top_logprobs))
        sequence.request.listener(
            TokenEvent(parts, token, detail, sequence.output_parser.is_reasoning, sequence.output_parser.stop_word)
        )
        if sequence.first_logits is None:  # after it was told: nobody waits for this
            sequence.record_first_logits(logprobs)
        if ends or sequence.output_parser.is_stopped:
            self._finisher.finish_sequence(sequence, "stop")
        elif full:
            self._finisher.finish_sequence(sequence, "length")

    # ---- prefilling

    def _prefill_next(self) -> None:
        """One chunk of one prompt; the last chunk is followed by the first decode step."""
        lineup = self._queues
        sequence = choose_prefill(lineup.prefill_candidates, self.settings.prefill_step_size)
        if sequence.prefill_tokens_left > 0 and not self._prefill_chunk(sequence):
            return
        self._admit_followers(sequence)
        self._admission.reclaim_memory()  # for the states of those who follow: the rest was seen to on admission
        if sequence not in lineup.prefilling:
            return
        if sequence.detached and sequence.savable_tokens_left <= 0:
            self._finisher.finish_sequence(sequence, "cancelled")
        elif sequence.prefill_tokens_left <= 0:
            self._start_decoding(sequence)

    def _prefill_chunk(self, sequence: Sequence) -> bool:
        """Whether the next chunk could be computed."""
        began = time.monotonic()
        try:
            tokens = sequence.prefill_chunk(self.settings.prefill_step_size)
        except Exception as error:  # noqa: BLE001  as in _decode
            self._finisher.discard(self._queues.discard_batch(sequence), error)
            return False
        seconds = time.monotonic() - began
        owed_s = self._decode_owed_s + seconds * DECODE_SHARE / (1 - DECODE_SHARE)
        self._decode_owed_s = min(owed_s, DECODE_OWED_MAX_S)
        sequence.timings.prefilled += tokens
        sequence.timings.prefill_s += seconds
        self.rates.record_prefill(sequence.kv.length, tokens, seconds)
        self.step_stats.record_chunk(tokens, seconds)
        self._notify_progress(sequence)
        return True

    def _notify_progress(self, sequence: Sequence) -> None:
        sequence.request.listener(PrefillProgress(sequence.kv.length, len(sequence.request.prompt)))
        self._queues.followers.notify_progress(sequence)

    def _admit_followers(self, leader: Sequence) -> None:
        """Start who can be copied from it now, before it goes on: then it may be too late."""
        if self._queues.followers.has_followers(leader):
            self._admit()

    def _start_decoding(self, sequence: Sequence) -> None:
        try:
            newcomer = DecodeGroup.from_sequence(sequence)
        except Exception as error:  # noqa: BLE001  as in _decode
            self._finisher.discard(self._queues.discard_batch(sequence), error)
            return
        sequence.decode_started_at = time.monotonic()
        sequence.timings.prefilled += 1  # the prompt's last token is computed by the first decode step
        self.step_stats.prefilled_tokens += 1
        self._queues.prefilling.remove(sequence)
        self._queues.groups.append(newcomer)
        self._admit_followers(sequence)
        host = next((group for group in self._queues.groups if self._can_merge(group, newcomer)), None)
        if host is not None:
            self._merge_groups(host, newcomer)

    def _can_merge(self, host: DecodeGroup, newcomer: DecodeGroup) -> bool:
        """Whether they may share a batch: the padding stays small, and there is room for it and for copying.

        Never in exact mode: a row's bits depend on how many rows there are.
        """
        if self.settings.exact:
            return False
        if newcomer.sequences[0].request.background or host is newcomer or not host.can_accept(newcomer.sequences[0]):
            return False
        return self.residents.make_room(self.running_bytes + self._queues.bytes_to_merge(host, newcomer))

    def _merge_groups(self, host: DecodeGroup, newcomer: DecodeGroup) -> None:
        self._queues.groups.remove(newcomer)
        members = [*host.sequences, *newcomer.sequences]
        try:
            host.merge(newcomer)
        except Exception as error:  # noqa: BLE001  half joined, neither can be trusted
            self._queues.groups.remove(host)
            host.dissolve()
            newcomer.dissolve()
            self._finisher.discard(members, error)


def choose_prefill(prefilling: list[Sequence], step: int) -> Sequence:
    """The shortest remaining prompt, unless another was passed over too often; counts who is, in chunks of `step`."""
    starved = [sequence for sequence in prefilling if sequence.chunks_skipped >= CHUNKS_SKIPPED_MAX]
    chosen = starved[0] if starved else min(prefilling, key=lambda sequence: sequence.prefill_tokens_left)
    chunks = max(min(chosen.prefill_tokens_left, step) / step, CHUNK_COUNTED_MIN)
    for sequence in prefilling:
        sequence.chunks_skipped = 0.0 if sequence is chosen else sequence.chunks_skipped + chunks
    return chosen
