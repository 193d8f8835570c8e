"""Who computes next: admission, prefill chunks, decode steps, ends.  One step at a time, on the engine thread.

A turn admits what fits, gives every decode group a few steps, and computes one prefill chunk, so a long prompt never
stops a running stream and a running stream never starves a prompt.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from warmline_backend.generation.rates import Rates
from warmline_backend.generation.sampling import pick_logprobs
from warmline_backend.generation.sequence import Generation, Piece, Progress, Sequence, Started, TokenLogprobs
from warmline_backend.generation.step_stats import Tally
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.residents import LEASE_S, ResidentGone, Residents
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.admission import Admission
from warmline_backend.scheduler.capacity import bytes_alone
from warmline_backend.scheduler.decode_batch import DecodeGroup
from warmline_backend.scheduler.finish import Ends
from warmline_backend.scheduler.queues import STEPS_PER_WEIGHING, Lineup
from warmline_backend.scheduler.snapshots import Saving
from warmline_common.logging import about, told_of
from warmline_common.protocol.messages import Settled

log = logging.getLogger(__name__)

DECODE_STEPS_PER_CHUNK = 8  # at least
DECODE_SHARE = 0.25  # of the time, while prompts prefill: a chunk may take as long as a thousand decode steps
DECODE_OWED_MAX_S = 30.0
CHUNKS_PASSED_OVER_MAX = 4  # a long prompt waits at most this many chunks of shorter ones,
CHUNK_COUNTED_MIN = 1 / 8  # of which a small prompt's is no whole one
# mlx 0.32.4 counts tasks under way, but not those of an evaluation that failed as done; with some left over, a later
# one may wait for ever (seen from about ten on, and once, on a machine with much else to do, after four).
FAILURES_MAX = 3
STEPS_PER_CLEAN_UP = 512  # how often mlx's buffer pool is emptied while decoding
PROBE_TOKEN = 1


class DeviceBroken(Exception):
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
        self.tally = Tally()
        self._lineup = Lineup(served)
        self._saving = Saving(self._lineup, self.residents)
        self._ends = Ends(served, self._lineup, self.residents, self.tally, settings.boot, settings.keeps_residents)
        self._admission = Admission(served, self._lineup, self.residents, self._ends, settings.running_count_max)
        self._steps = 0
        self.keepalive_steps = 0
        self._decode_owed_s = 0.0  # what decoding has waited for chunks, its share of it

    # ---- what others ask for

    def submit(self, request: Generation) -> None:
        """Queue a request; its resident is its own from now on.

        Raises TooLarge, ResidentGone, ResidentMismatch; nothing is queued then.
        """
        self._admission.check_size(request)
        if request.follow:
            self._follow(self._sequence(request, self._fresh_kv()))
        elif request.resident:
            self._lineup.waiting.append(self._sequence(request, self._kv_of_resident(request)))
        else:
            self._lineup.waiting.append(self._sequence(request, self._fresh_kv()))

    def _sequence(self, request: Generation, kv: KV) -> Sequence:
        wanted = request.checkpoints if self.settings.keeps_residents else ()
        request = replace(request, checkpoints=tuple(at for at in wanted if kv.on_grid(at) == at))
        sequence = Sequence(request, kv, self.served, adopted="" if request.keep else request.resident)
        sequence.answer_tokens_max = min(request.params.max_tokens, self._admission.tokens_max - len(request.prompt))
        return sequence

    def _kv_of_resident(self, request: Generation) -> KV:
        kv = self.residents.take(request.resident, request.prompt, request.reuse, request.keep, request.root)
        if not request.keep:
            return kv
        # Apart, or while it waits it would hold the whole of a longer resident that is dropped meanwhile.
        wanted = self._lineup.bytes_held + bytes_alone(self.served, kv.length)
        return kv.branch(kv.length, apart=True) if self.residents.make_room(wanted, sparing=request.resident) else kv

    def _fresh_kv(self) -> KV:
        return self.served.fresh_kv(journals=self.settings.keeps_residents, grid=self.settings.grid)

    def _follow(self, sequence: Sequence) -> None:
        if (leader := self._lineup.find(sequence.request.follow)) is None:
            raise ResidentGone(f"request {sequence.request.follow}, which was to be followed")
        self._lineup.followers.add(sequence, leader)
        if sequence in self._lineup.followers.ready:
            self._admit()  # now: a rotating layer is past the place after the leader's next step

    def cancel(self, request_id: str) -> Settled | None:
        """End a request now and keep what it has computed; None where it is not running."""
        sequence = self._lineup.find(request_id)
        return self._ends.end(sequence, "cancelled") if sequence else None

    def detach(self, request_id: str) -> bool:
        """Nobody waits for its answer any more: let it finish its prefill, whenever nobody else needs the engine.

        It ends as cancelled, and what it has computed is kept.  False, and nothing done, where there is no prefill
        worth finishing: cancel it then.
        """
        lineup, sequence = self._lineup, self._lineup.find(request_id)
        if sequence is None or sequence.decoding_since or not self._ends.leaves_a_resident(sequence):
            return False
        goes_on = sequence in lineup.prefilling and sequence.left_to_keep > 0
        sequence.detached = goes_on or lineup.followers.is_followed(sequence)
        return sequence.detached

    def kv_of(self, until: int, *, resident: str = "", running: str = "") -> KV:
        """The KV of a resident's first `until` tokens, or of the running request that took it over; or of a running
        request, or what it has left.

        Raises ResidentGone, or RowsGone where less than that is left of it: who took it over may have gone on from its
        middle.
        """
        return self._saving.kv_of(until, resident, running)

    def saved(self, resident: str, running: str, until: int) -> None:
        """Rows below `until` are on disk, and the states too where that is all there is: what was kept only for the
        save may go.
        """
        self._saving.saved(resident, running, until)

    def reserve(self, request_id: str, bytes_wanted: int, granted: Callable[[], None]) -> None:
        """Set memory aside for a restore; `granted` is called on this thread once it is.  Raises TooLarge."""
        self._admission.reserve(request_id, bytes_wanted, granted)

    def release(self, request_id: str) -> None:
        """Give a reservation back, or no longer wait for it; no harm where there is none."""
        self._admission.release(request_id)

    def install(self, request_id: str, kv: KV, root: bytes = b"") -> str:
        """Make a restored KV a resident of this `root`, leased for the request that it is for; its reservation ends."""
        kv.grid, kv.grid_end = self.settings.grid, kv.length
        resident = self.residents.add(kv, lease_s=LEASE_S, root=root)
        self.release(request_id)  # after it, or what it takes would be given to whoever waits
        return resident

    def probe(self) -> None:
        """Compute one token.  Raises whatever keeps the device from it."""
        mx.eval(self.served.model(mx.array([[PROBE_TOKEN]]), cache=self.served.layout.fresh()))

    def keep_awake(self) -> None:
        """Compute one token for nobody, so that an idle device stays ready.  A failure is treated as any step's."""
        try:
            self.probe()
        except Exception as error:  # noqa: BLE001  as in _decode; `turn` looks whether the device still computes
            self._ends.discard([], error)
        self.keepalive_steps += 1

    # ---- figures

    @property
    def idle(self) -> bool:
        return not self._lineup.reservations.waiting and next(iter(self._lineup), None) is None

    @property
    def blocked(self) -> bool:
        """Nothing can go on before a resident is saved or taken, or its lease ends."""
        return not (self._lineup.prefilling or self._lineup.groups or self.idle)

    @property
    def changed(self) -> Callable[[], None]:
        """Called whenever a request has ended, before its listener hears of it."""
        return self._ends.changed

    @changed.setter
    def changed(self, changed: Callable[[], None]) -> None:
        self._ends.changed = changed

    @property
    def running(self) -> int:
        return len(self._lineup.running)

    @property
    def queued(self) -> int:
        return len(self._lineup.waiting) + len(self._lineup.followers)

    @property
    def running_bytes(self) -> int:
        """KV of all requests, padding, the rest of their prompts and what is reserved for restores counted."""
        return self._lineup.bytes_held

    # ---- a turn

    def turn(self) -> Iterator[None]:
        """Do a bounded piece of everybody's work; yields after each step, one decode step of a group or one chunk.

        At a yield anything may be asked: what it changes is looked at anew.  Raises DeviceBroken.
        """
        self._check_device()  # what was asked since the last step may have failed, too
        for _ in self._work():
            self._check_device()
            yield

    def _work(self) -> Iterator[None]:
        prefilling = len(self._lineup.prefilling)
        self._admit()
        yield from self._decode_rounds(prefilling)
        if self._lineup.wanted_prefills:
            self._prefill_one()
            yield

    def _decode_rounds(self, prefilling: int) -> Iterator[None]:
        """Decode for everybody what the last chunks have kept them from.

        Where there is a newcomer besides the `prefilling` that were there before, its prompt comes first: what is
        owed is decoded after that, also for it.
        """
        rounds = 0
        while self._lineup.groups and (rounds < DECODE_STEPS_PER_CHUNK or self._lets_decode(prefilling)):
            for group in list(self._lineup.groups):
                if group in self._lineup.groups:
                    self._decode(group)
                    yield
            self._decoded_round()
            rounds += 1
            if self._lineup.waiting and rounds >= DECODE_STEPS_PER_CHUNK:
                self._admit()
        if not self._lineup.groups:
            self._decode_owed_s = 0.0

    def _lets_decode(self, prefilling: int) -> bool:
        return self._decode_owed_s > 0 and 0 < len(self._lineup.prefilling) <= prefilling

    def _check_device(self) -> None:
        """After a failure, whether a token can still be computed, now that all that it has lost is free."""
        if not self._ends.doubtful:
            return
        if self._ends.failures >= FAILURES_MAX:
            raise DeviceBroken(f"{FAILURES_MAX} steps have failed; mlx may hang after more")
        try:
            mx.clear_cache()
            self.probe()
        except Exception as error:
            raise DeviceBroken(f"after a failed step, a token could not be computed: {error}") from error
        self._ends.doubtful = False

    def _admit(self) -> None:
        """Start whoever fits, first come first served."""
        for sequence in self._admission.admitted():
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        lineup = self._lineup
        if sequence in lineup.waiting:
            lineup.waiting.remove(sequence)
        else:
            try:
                sequence.start_from_leader()
            except Exception as error:  # noqa: BLE001  as in _decode; its leader is only read
                self._ends.discard(lineup.give_up(sequence), error)
                return
            lineup.followers.remove(sequence)
        sequence.started()
        lineup.prefilling.append(sequence)
        sequence.request.listener(Started())
        if sequence.prefill_left > self.settings.prefill_step_size:  # a chunk may take a minute: say that it began
            self._tell_progress(sequence)

    # ---- decoding

    def _decode(self, group: DecodeGroup) -> None:
        """One token for every sequence of a group."""
        began, count = time.monotonic(), len(group.sequences)
        try:
            heard = group.step()
        except Exception as error:  # noqa: BLE001  whatever it is: tokens and rows of this batch disagree now
            self._ends.discard(self._lineup.give_up(group.sequences[0]), error)
            return
        for sequence, token, logprobs in heard:
            if group in self._lineup.groups:  # else it was given up for a fault of one of them
                self._tell(sequence, token, logprobs)
        seconds = time.monotonic() - began
        self._decode_owed_s = max(0.0, self._decode_owed_s - seconds)
        self.rates.decoded(count, seconds)
        self.tally.decode(count, seconds)

    def _decoded_round(self) -> None:
        """Now and then, between rounds of decode steps: the budget is kept, mlx's buffers are freed."""
        if not self._lineup.groups:
            return
        self._steps += 1
        if self._steps % STEPS_PER_WEIGHING == 0:
            self._admission.keep_within_budget()
        if self._steps % STEPS_PER_CLEAN_UP == 0:
            mx.clear_cache()

    def _tell(self, sequence: Sequence, token: int, logprobs: mx.array) -> None:
        try:
            self._hear(sequence, token, logprobs)
        except Exception as error:  # its text, its log-probabilities: its own fault alone
            with about(sequence.request.id):
                log.error("request %s failed", sequence.request.id, exc_info=error)
            self._ends.end(sequence, "error", error=f"the answer could not be told: {told_of(error)}")

    def _hear(self, sequence: Sequence, token: int, logprobs: mx.array) -> None:
        """Tell the listener of a token; end the sequence where this was its last."""
        params = sequence.request.params
        sequence.generated += 1
        sequence.timings.decoded += 1
        self.tally.decoded_tokens += 1
        if sequence.fault.error is not None:
            self._ends.end(sequence, "error", error=f"sampling failed: {told_of(sequence.fault.error)}")
            return
        ends = sequence.ends_at(token)
        parts = () if ends else sequence.text.add(token)
        full = sequence.generated >= sequence.answer_tokens_max
        if ends or full:
            parts = (*parts, *sequence.text.finish(natural=ends))
        detail = None
        if params.logprobs and not ends:
            detail = TokenLogprobs(token, *pick_logprobs(logprobs, token, params.top_logprobs))
        sequence.request.listener(Piece(parts, token, detail, sequence.text.reasons, sequence.text.stop_word))
        if sequence.first is None:  # after it was told: nobody waits for this
            sequence.note_first(logprobs)
        if ends or sequence.text.stopped:
            self._ends.end(sequence, "stop")
        elif full:
            self._ends.end(sequence, "length")

    # ---- prefilling

    def _prefill_one(self) -> None:
        """One chunk of one prompt; the last chunk is followed by the first decode step."""
        lineup = self._lineup
        sequence = next_prefill(lineup.wanted_prefills, self.settings.prefill_step_size)
        if sequence.prefill_left > 0 and not self._chunk(sequence):
            return
        self._let_follow(sequence)
        self._admission.let_make_way()  # for the states of those who follow: the rest was seen to on admission
        if sequence not in lineup.prefilling:
            return
        if sequence.detached and sequence.left_to_keep <= 0:
            self._ends.end(sequence, "cancelled")
        elif sequence.prefill_left <= 0:
            self._start_decoding(sequence)

    def _chunk(self, sequence: Sequence) -> bool:
        """Whether the next chunk could be computed."""
        began = time.monotonic()
        try:
            tokens = sequence.prefill_chunk(self.settings.prefill_step_size)
        except Exception as error:  # noqa: BLE001  as in _decode
            self._ends.discard(self._lineup.give_up(sequence), error)
            return False
        seconds = time.monotonic() - began
        owed_s = self._decode_owed_s + seconds * DECODE_SHARE / (1 - DECODE_SHARE)
        self._decode_owed_s = min(owed_s, DECODE_OWED_MAX_S)
        sequence.timings.prefilled += tokens
        sequence.timings.prefill_s += seconds
        self.rates.prefilled(sequence.kv.length, tokens, seconds)
        self.tally.chunk(tokens, seconds)
        self._tell_progress(sequence)
        return True

    def _tell_progress(self, sequence: Sequence) -> None:
        sequence.request.listener(Progress(sequence.kv.length, len(sequence.request.prompt)))
        self._lineup.followers.hear(sequence)

    def _let_follow(self, leader: Sequence) -> None:
        """Start who can be copied from it now, before it goes on: then it may be too late."""
        if self._lineup.followers.is_followed(leader):
            self._admit()

    def _start_decoding(self, sequence: Sequence) -> None:
        try:
            newcomer = DecodeGroup.of(sequence)
        except Exception as error:  # noqa: BLE001  as in _decode
            self._ends.discard(self._lineup.give_up(sequence), error)
            return
        sequence.decoding_since = time.monotonic()
        sequence.timings.prefilled += 1  # the prompt's last token is computed by the first decode step
        self.tally.prefilled_tokens += 1
        self._lineup.prefilling.remove(sequence)
        self._lineup.groups.append(newcomer)
        self._let_follow(sequence)
        host = next((group for group in self._lineup.groups if self._may_join(group, newcomer)), None)
        if host is not None:
            self._join(host, newcomer)

    def _may_join(self, host: DecodeGroup, newcomer: DecodeGroup) -> bool:
        """Whether they may share a batch: the padding stays small, and there is room for it and for copying.

        Never in exact mode: a row's bits depend on how many rows there are.
        """
        if self.settings.exact:
            return False
        if newcomer.sequences[0].request.background or host is newcomer or not host.welcomes(newcomer.sequences[0]):
            return False
        return self.residents.make_room(self.running_bytes + self._lineup.bytes_to_join(host, newcomer))

    def _join(self, host: DecodeGroup, newcomer: DecodeGroup) -> None:
        self._lineup.groups.remove(newcomer)
        members = [*host.sequences, *newcomer.sequences]
        try:
            host.join(newcomer)
        except Exception as error:  # noqa: BLE001  half joined, neither can be trusted
            self._lineup.groups.remove(host)
            host.dissolve()
            newcomer.dissolve()
            self._ends.discard(members, error)


def next_prefill(prefilling: list[Sequence], step: int) -> Sequence:
    """The shortest remaining prompt, unless another was passed over too often; counts who is, in chunks of `step`."""
    starved = [sequence for sequence in prefilling if sequence.chunks_passed_over >= CHUNKS_PASSED_OVER_MAX]
    chosen = starved[0] if starved else min(prefilling, key=lambda sequence: sequence.prefill_left)
    chunks = max(min(chosen.prefill_left, step) / step, CHUNK_COUNTED_MIN)
    for sequence in prefilling:
        sequence.chunks_passed_over = 0.0 if sequence is chosen else sequence.chunks_passed_over + chunks
    return chosen
