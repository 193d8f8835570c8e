"""Who computes next: admission, prefill chunks, decode steps, ends.  One turn at a time, on the engine thread.

A turn admits what fits, gives every decode group a few steps, and computes one prefill chunk, so a long prompt never
stops a running stream and a running stream never starves a prompt.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from warmline_backend.decode import DecodeGroup
from warmline_backend.kv import KV, RowsGone
from warmline_backend.model import ServedModel
from warmline_backend.rates import Rates
from warmline_backend.reservations import Reservations
from warmline_backend.residents import LEASE_S, UNSAVED_S, ResidentGone, Residents
from warmline_backend.sampling import pick_logprobs
from warmline_backend.sequence import Ended, Generation, Piece, Progress, Sequence, Started, TokenLogprobs
from warmline_wire.keys import pack_tokens
from warmline_wire.messages import Settled

log = logging.getLogger(__name__)

DECODE_STEPS_PER_CHUNK = 8
CHUNKS_PASSED_OVER_MAX = 4  # a long prompt waits at most this many chunks of shorter ones
ANSWER_TOKENS_RESERVED = 256  # admission counts this much of an answer that may be longer
STEPS_PER_WEIGHING = 32
STEPS_PER_CLEAN_UP = 512  # how often mlx's buffer pool is emptied while decoding


OUT_OF_MEMORY = "the memory budget is used up by answers that grew; try again, or raise --memory-budget-gb"


class TooLarge(Exception):
    """The request's KV can't fit the memory budget, whatever is dropped."""


@dataclass(frozen=True)
class SchedulerSettings:
    boot: str
    memory_budget_bytes: int
    prefill_step_size: int
    running_count_max: int
    keeps_residents: bool  # false: every request starts cold and leaves nothing


def _unheard() -> None:
    """Nobody wants to know."""


class Scheduler:
    """All running requests and residents of one model."""

    def __init__(self, served: ServedModel, settings: SchedulerSettings) -> None:
        self.served, self.settings = served, settings
        self.changed: Callable[[], None] = _unheard  # called before a listener hears of an end
        self.residents = Residents(settings.memory_budget_bytes)
        self.rates = Rates()
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._groups: list[DecodeGroup] = []
        self._reservations = Reservations()
        self._steps = 0

    # ---- what others ask for

    def submit(self, request: Generation) -> None:
        """Queue a request; its resident is its own from now on.

        Raises TooLarge, ResidentGone, ResidentMismatch; nothing is queued then.
        """
        needed, budget = self._bytes_needed(request), self.settings.memory_budget_bytes
        if needed > budget:
            raise TooLarge(
                f"the KV of {len(request.prompt)} prompt tokens and their answer takes {needed / 1e6:.1f} MB, the "
                f"memory budget is {budget / 1e6:.1f} MB; shorten the prompt or raise --memory-budget-gb"
            )
        if request.resident:
            kv = self.residents.take(request.resident, request.prompt, request.reuse, request.keep)
        else:
            kv = self._fresh_kv()
        sequence = Sequence(request, kv, self.served, adopted="" if request.keep else request.resident)
        sequence.answer_tokens_max = min(request.params.max_tokens, self._tokens_within_budget - len(request.prompt))
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> Settled | None:
        """End a request now and keep what it has computed; None where it is not running."""
        sequence = next((s for s in self._all() if s.request.id == request_id), None)
        return self._end(sequence, "cancelled") if sequence else None

    def kv_of(self, until: int, *, resident: str = "", running: str = "") -> KV:
        """The KV of a resident's first `until` tokens, or of the running request that took it over.

        Raises ResidentGone, or RowsGone where less than that is left of it: who took it over may have gone on from its
        middle.
        """
        if (kv := self.residents.kv(resident)) is not None:
            self.residents.renew(resident, UNSAVED_S)  # whoever asks is saving it
            return _holding(kv, until, kv.length)
        for sequence in self._all():
            if resident and sequence.adopted == resident:
                return _holding(sequence.kv, until, sequence.reused)
            if sequence.request.id == running:
                return _holding(sequence.kv, until, sequence.kv.length)
        raise ResidentGone(resident or running)

    def reserve(self, request_id: str, bytes_wanted: int, granted: Callable[[], None]) -> None:
        """Set memory aside for a restore; `granted` is called on this thread once it is.  Raises TooLarge."""
        if bytes_wanted > self.settings.memory_budget_bytes:
            raise TooLarge(f"restoring takes {bytes_wanted / 1e6:.1f} MB, more than the memory budget")
        self._reservations.want(request_id, bytes_wanted, granted)
        self._grant()

    def release(self, request_id: str) -> None:
        """Give a reservation back, or no longer wait for it; no harm where there is none."""
        self._reservations.release(request_id)
        self._grant()

    def _grant(self) -> None:
        self._reservations.grant(
            fits=lambda wanted: self.residents.make_room(self.running_bytes + wanted),
            may_wait=self._something_makes_way,
        )

    def _something_makes_way(self) -> bool:
        """Whether memory will be freed without our dropping anything: somebody ends, or is saved or taken over."""
        holding = self.running or any(sequence.kv.length for sequence in self._waiting)
        return bool(holding or self._reservations.some_granted or self.residents.some_leased)

    def install(self, request_id: str, kv: KV) -> str:
        """Make a restored KV a resident, leased for the request that it is for; its reservation ends."""
        self.release(request_id)
        return self.residents.add(kv, lease_s=LEASE_S)

    def saved(self, resident: str, running: str, until: int) -> None:
        """Rows and states below `until` are on disk: what was kept only for the save may go."""
        try:
            self.kv_of(until, resident=resident, running=running).forget_saved(until)
        except (ResidentGone, RowsGone):
            return
        self.residents.saved(resident)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._reservations.waiting or self._prefilling or self._groups)

    @property
    def blocked(self) -> bool:
        """Nothing can go on before a resident is saved or taken, or its lease ends."""
        return not (self._prefilling or self._groups or self.idle)

    @property
    def running(self) -> int:
        return len(self._prefilling) + sum(len(group.sequences) for group in self._groups)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running_bytes(self) -> int:
        """KV of all requests, padding and the rest of their prompts counted."""
        decoding = (
            len(group.sequences) * self.served.bytes_of(max(member.kv.length for member in group.sequences))
            for group in self._groups
        )
        waiting = (self.served.bytes_of(sequence.kv.length) for sequence in self._waiting if sequence.kv.length)
        prefilling = (self._bytes_needed(sequence.request) for sequence in self._prefilling)
        return sum(decoding) + sum(waiting) + sum(prefilling) + self._reservations.bytes_granted

    # ---- a turn

    def turn(self) -> Iterator[None]:
        """Do a bounded piece of everybody's work; yields after each step, one decode step of a group or one chunk.

        At a yield anything may be asked: what it changes is looked at anew.
        """
        self._admit()
        for _ in range(DECODE_STEPS_PER_CHUNK):
            for group in list(self._groups):
                if group in self._groups:
                    self._decode(group)
                    yield
            self._decoded_round()
        if self._prefilling:
            self._prefill_one()
            yield

    def _admit(self) -> None:
        self._grant()
        while self._waiting and self.running < self.settings.running_count_max:
            if (sequence := self._next_admissible()) is None:
                return  # until somebody ends, or is saved
            self._waiting.remove(sequence)
            sequence.started()
            self._prefilling.append(sequence)
            sequence.request.listener(Started())
            if sequence.prefill_left > self.settings.prefill_step_size:  # a chunk may take a minute: say that it began
                sequence.request.listener(Progress(sequence.kv.length, len(sequence.request.prompt)))

    def _next_admissible(self) -> Sequence | None:
        """The first in line, if it fits.

        While a restore waits for memory, only those that hold some themselves; with nothing running, whoever fits.
        """
        if self._reservations.waiting:
            line = [sequence for sequence in self._waiting if sequence.kv.length]
        else:
            line = self._waiting[:1] if self.running else self._waiting
        for sequence in line:
            needed = self._bytes_needed(sequence.request) - self.served.bytes_of(sequence.kv.length)
            if self.residents.make_room(self.running_bytes + needed):
                return sequence
        if self.running or self._reservations.some_granted or self.residents.some_leased or not line:
            return None
        self.residents.drop_unleased()
        return line[0]

    def _decode(self, group: DecodeGroup) -> None:
        """One token for every sequence of a group."""
        began, count = time.monotonic(), len(group.sequences)
        try:
            heard = group.step()
        except Exception as error:  # noqa: BLE001  whatever it is: tokens and rows of this batch disagree now
            self._groups.remove(group)
            self._discard(group.sequences, error)
            return
        for sequence, token, logprobs in heard:
            if group in self._groups:  # else it was given up for a fault of one of them
                self._tell(sequence, token, logprobs)
        self.rates.decoded(count, time.monotonic() - began)

    def _decoded_round(self) -> None:
        """Now and then, between rounds of decode steps: the budget is kept, mlx's buffers are freed."""
        if not self._groups:
            return
        self._steps += 1
        if self._steps % STEPS_PER_WEIGHING == 0:
            self._keep_within_budget()
        if self._steps % STEPS_PER_CLEAN_UP == 0:
            mx.clear_cache()

    def _keep_within_budget(self) -> None:
        """Answers grow: residents make way for them, and then the youngest request, so that the others can end."""
        if self.residents.make_room(self.running_bytes):
            return
        self.residents.drop_unleased()
        running = [*self._prefilling, *(member for group in self._groups for member in group.sequences)]
        if self.running_bytes > self.settings.memory_budget_bytes and len(running) > 1:
            youngest = max(running, key=lambda sequence: sequence.arrived)
            self._end(youngest, "error", error=OUT_OF_MEMORY)

    def _tell(self, sequence: Sequence, token: int, logprobs: mx.array) -> None:
        try:
            self._hear(sequence, token, logprobs)
        except Exception as error:  # noqa: BLE001  its text, its log-probabilities: its own fault alone
            self._fail(sequence, error)

    def _hear(self, sequence: Sequence, token: int, logprobs: mx.array) -> None:
        """Tell the listener of a token; end the sequence where this was its last."""
        params = sequence.request.params
        sequence.generated += 1
        sequence.timings.decoded += 1
        if sequence.fault.error is not None:
            self._end(sequence, "error", error=f"sampling failed: {sequence.fault.error}")
            return
        ends = token in self.served.tokenizer.eos_token_ids and not params.ignore_eos
        text = "" if ends else sequence.text.add(token)
        full = sequence.generated >= sequence.answer_tokens_max
        if ends or full:
            text += sequence.text.finish()
        detail = None
        if params.logprobs and not ends:
            detail = TokenLogprobs(token, *pick_logprobs(logprobs, token, params.top_logprobs))
        sequence.spoken |= bool(text)
        sequence.request.listener(Piece(text, detail))
        if ends or sequence.text.stopped:
            self._end(sequence, "stop")
        elif full:
            self._end(sequence, "length")

    def _prefill_one(self) -> None:
        """One chunk of one prompt; the last chunk is followed by the first decode step."""
        sequence = next_prefill(self._prefilling, self.settings.prefill_step_size)
        began = time.monotonic()
        try:
            if sequence.prefill_left > 0:
                tokens = sequence.prefill_chunk(self.settings.prefill_step_size)
                self._prefilled(sequence, tokens, time.monotonic() - began)
            if sequence.prefill_left == 0:
                self._start_decoding(sequence)
        except Exception as error:  # noqa: BLE001  as in _decode
            self._discard([sequence], error)

    def _prefilled(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        sequence.timings.prefilled += tokens
        sequence.timings.prefill_s += seconds
        self.rates.prefilled(sequence.kv.length, tokens, seconds)
        sequence.request.listener(Progress(sequence.kv.length, len(sequence.request.prompt)))

    def _start_decoding(self, sequence: Sequence) -> None:
        newcomer = DecodeGroup.of(sequence)
        sequence.decoding_since = time.monotonic()
        sequence.timings.prefilled += 1  # the prompt's last token is computed by the first decode step
        self._prefilling.remove(sequence)
        host = next((group for group in self._groups if group.welcomes(sequence)), None)
        if host is None:
            self._groups.append(newcomer)
        else:
            self._join(host, newcomer)

    def _join(self, host: DecodeGroup, newcomer: DecodeGroup) -> None:
        try:
            host.join(newcomer)
        except Exception as error:  # noqa: BLE001  half joined, neither can be trusted
            self._groups.remove(host)
            self._discard({*host.sequences, *newcomer.sequences}, error)

    # ---- ends

    def _end(self, sequence: Sequence, finish: str, error: str = "") -> Settled:
        """Take a sequence out, keep its KV as a resident where that is wanted, and tell its listener."""
        self._leave(sequence)
        if sequence.decoding_since:
            sequence.timings.decode_s = time.monotonic() - sequence.decoding_since
        resident = "" if error or not sequence.request.kept else self._keep(sequence.kv)
        settled = self._settled(sequence, finish, resident, error)
        self.changed()
        sequence.request.listener(Ended(settled, sequence.reused))
        return settled

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence for a fault of its own; where even that fails, its batch can't be trusted any more."""
        log.error("request %s failed", sequence.request.id, exc_info=error)
        try:
            self._end(sequence, "error", error=f"the answer could not be told: {error}")
        except Exception as second:  # noqa: BLE001  as in _decode
            broken = [group for group in self._groups if sequence in group.sequences]
            self._groups = [group for group in self._groups if group not in broken]
            self._discard([member for group in broken for member in group.sequences], second)

    def _leave(self, sequence: Sequence) -> None:
        for holding in (self._waiting, self._prefilling):
            if sequence in holding:
                holding.remove(sequence)
        for group in self._groups:
            if sequence in group.sequences:
                group.leave(sequence)
        self._groups = [group for group in self._groups if group.sequences]

    def _keep(self, kv: KV) -> str:
        if not self.settings.keeps_residents or not kv.length:
            return ""
        kv.capture_window()
        kv.capture_checkpoint()
        self.residents.make_room(self.running_bytes + kv.nbytes)
        # Kept even without: it takes no more than it took, and what is lost before it is saved is computed again.
        return self.residents.add(kv, lease_s=0.0 if self.served.layout.problem else UNSAVED_S)

    def _settled(self, sequence: Sequence, finish: str, resident: str, error: str) -> Settled:
        kv, prompt = sequence.kv, len(sequence.request.prompt)
        return Settled(
            boot=self.settings.boot,
            generation=self.residents.generation,
            request_id=sequence.request.id,
            finish=finish,
            resident=resident,
            generated=pack_tokens(kv.tokens[prompt:]) if resident else b"",
            prefilled_until=kv.length if resident else 0,
            checkpoints=sorted(kv.checkpoints) if resident else [],
            positions=kv.positions() if resident else [],
            timings=sequence.timings,
            error=error,
        )

    def _discard(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """After an exception in a step: nothing of this batch is kept; who has said nothing yet starts over, once."""
        log.error("a step failed and its batch is discarded", exc_info=error)
        for sequence in sequences:
            self._leave_discarded(sequence)
            if sequence.spoken or sequence.retried:
                settled = self._settled(sequence, "error", "", f"the engine failed: {error}")
                self.changed()
                sequence.request.listener(Ended(settled, sequence.reused))
            else:
                request = replace(sequence.request, resident="", reuse=0)
                again = Sequence(request, self._fresh_kv(), self.served, retried=True, arrived=sequence.arrived)
                again.answer_tokens_max = sequence.answer_tokens_max
                self._waiting.insert(0, again)

    def _leave_discarded(self, sequence: Sequence) -> None:
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    # ---- figures

    def _all(self) -> Iterable[Sequence]:
        yield from self._waiting
        yield from self._prefilling
        for group in self._groups:
            yield from group.sequences

    @property
    def _tokens_within_budget(self) -> int:
        """How long one sequence alone may become."""
        return (self.settings.memory_budget_bytes - self.served.state_bytes) // max(1, self.served.row_bytes)

    def _fresh_kv(self) -> KV:
        return self.served.fresh_kv(journals=self.settings.keeps_residents)

    def _bytes_needed(self, request: Generation) -> int:
        answer = min(request.params.max_tokens, ANSWER_TOKENS_RESERVED)
        return self.served.bytes_of(len(request.prompt) + answer)


def _holding(kv: KV, until: int, held: int) -> KV:
    if until > held:
        raise RowsGone(f"{held} tokens are left, {until} were asked for")
    return kv


def next_prefill(prefilling: list[Sequence], step: int) -> Sequence:
    """The shortest remaining prompt, unless another was passed over too often; counts who is."""
    starved = [sequence for sequence in prefilling if sequence.chunks_passed_over >= CHUNKS_PASSED_OVER_MAX]
    chosen = starved[0] if starved else min(prefilling, key=lambda sequence: max(sequence.prefill_left, step))
    for sequence in prefilling:
        sequence.chunks_passed_over = 0 if sequence is chosen else sequence.chunks_passed_over + 1
    return chosen
