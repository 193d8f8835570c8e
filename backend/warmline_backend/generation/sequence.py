"""One request as the engine runs it, and what it tells its listener.

waiting, or following -> prefill (chunk after chunk) -> decode (in a group) -> settled
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.events import EventListener
from warmline_backend.generation.sampling import (
    LogprobsCapture,
    SamplerFault,
    make_first_logits,
    make_processors,
    make_sampler,
)
from warmline_backend.kv_cache.kv import KV
from warmline_backend.model.model import ServedModel
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser
from warmline_backend.request.params import GenerationParams
from warmline_backend.structured_output.matcher import Matcher
from warmline_common.protocol.messages import FirstLogits, GenerationResult, Timings
from warmline_common.protocol.tokens import pack_tokens

# Between the places where a chunk ends only for a follower: each costs a state and a short chunk, and what lies between
# is soon computed again.
FORK_DISTANCE_TOKENS_MIN = 64
UNBOUNDED = 1 << 30  # ends are the engine's to find, so mlx-lm's own limits are out of the way


@dataclass(frozen=True)
class GenerationRequest:
    """A request, checked: what the engine is asked to do."""

    id: str
    prompt: list[int]
    params: GenerationParams
    listener: EventListener
    matcher: Matcher | None = None  # what its answer must be; of this run alone
    resident_id: str = ""
    leader_id: str = ""  # the request that computes the prompt's first `reuse` tokens; no resident then
    reuse_tokens: int = 0
    copy_resident: bool = False  # copy the resident and leave it for others, rather than take it over
    leaves_resident: bool = True  # what it has computed becomes a resident
    root: bytes = b""  # namespace of fingerprint and tenant: it starts from nobody else's rows
    background: bool = False  # computed only while nobody else is; it makes way for whoever wants its memory
    checkpoints: tuple[int, ...] = ()  # ascending positions in the prompt at which to keep recurrent state
    expected_output: ExpectedOutput = ExpectedOutput()  # noqa: RUF009  frozen


@dataclass(eq=False)
class Sequence:
    """A request with its KV.  Engine thread only."""

    request: GenerationRequest
    kv: KV
    served: ServedModel
    adopted_resident_id: str = ""  # the resident whose KV this was
    leader: "Sequence | None" = None  # whom it follows, while it waits
    fork_position: int = 0  # how much of the leader's KV it starts from
    detached: bool = False  # nobody waits for its answer: it ends with its prefill
    chunks_skipped: float = 0.0
    decode_started_at: float = 0.0  # time.monotonic()
    generated_count: int = 0
    timings: Timings = field(default_factory=Timings)
    first_logits: FirstLogits | None = None  # what its first token was chosen from
    arrival_time: float = field(default_factory=time.monotonic)
    _prefill_batch: PromptProcessingBatch | None = None

    def __post_init__(self) -> None:
        self._set_grid_end()
        self.sampler_fault = SamplerFault()
        params = self.request.params
        self.output_parser = OutputParser(
            self.served.tokenizer, params.stop, self.request.expected_output, params.min_tokens
        )
        self.reused_tokens = self.kv.length
        self._logprobs_capture = LogprobsCapture()
        self._fork_positions: set[int] = (
            set()
        )  # where a chunk ends only for those who follow, and no longer than they do
        self.answer_tokens_max = params.max_tokens  # or what the memory budget leaves

    def _set_grid_end(self) -> None:
        """Where its last full chunk ends; what comes after that is not kept in exact mode."""
        self.kv.grid_end = self.kv.floor_to_grid(len(self.request.prompt) - 1)

    @property
    def prefill_tokens_left(self) -> int:
        """Prompt tokens before the last one, which is the first decode step's."""
        return len(self.request.prompt) - 1 - self.kv.length

    @property
    def savable_tokens_left(self) -> int:
        """Of these, those that can be kept: in exact mode not those after its last full chunk."""
        return self.kv.grid_end - self.kv.length

    @property
    def tokens_max(self) -> int:
        """How long prompt and answer can become."""
        return len(self.request.prompt) + self.answer_tokens_max

    @property
    def all_tokens(self) -> list[int]:
        """What it computes: its prompt, and the answer so far."""
        return max(self.request.prompt, self.kv.tokens, key=len)

    def is_end(self, token: int) -> bool:
        """Whether the model ends its answer here, or has nothing left to say in the form that was asked for."""
        if token in self.request.params.stop_token_ids:
            return True
        if token not in self.served.tokenizer.eos_token_ids:
            return False
        guide = self.request.matcher
        return not self.request.params.ignore_eos or (guide is not None and guide.is_complete)

    def mark_started(self) -> None:
        self.timings.queue_s = time.monotonic() - self.arrival_time

    @property
    def chunk_ends(self) -> list[int]:
        """Where a chunk ends and a state is kept, ascending; in exact mode all are on the grid, where chunks end."""
        last = [self.kv.grid_end] if self.needs_rollback_point else []
        return sorted({*self.request.checkpoints, *self._fork_positions, *last})

    @property
    def needs_rollback_point(self) -> bool:
        """It will come back to where its last full chunk ends, for that is what is kept of it."""
        return bool(self.request.leaves_resident and self.kv.grid and self.kv.grid_end)

    @property
    def pending_checkpoint_count(self) -> int:
        """How many states are still to be kept on the way to the answer."""
        return sum(self.kv.length < cut < len(self.request.prompt) for cut in self.chunk_ends)

    # ---- leading and following

    def fork_from_leader(self) -> None:
        """Take a copy of the leader's first `meeting` tokens, or as many as can be had."""
        assert self.leader
        held = self.leader.kv
        self.kv = held.fork(held.find_continue_position(self.fork_position), detached=True)
        for meeting in self.leader._fork_positions.difference(self.request.checkpoints):
            self.kv.checkpoints.pop(meeting, None)
        self._set_grid_end()
        self.reused_tokens = self.kv.length

    def choose_fork_position(self, position: int) -> int:
        """Where a follower of the first `wanted` tokens is to be given its copy; 0 where it can't be, or not any more.

        Where the model can't be copied just anywhere, a chunk will end there.
        """
        kv = self.kv
        if kv.length >= position:
            return kv.find_continue_position(position)
        if kv.grid:
            meeting = kv.floor_to_grid(min(position, kv.grid_end))  # a chunk ends there anyway
        elif position < len(self.request.prompt) - 1 and (kv.layout.has_states or kv.layout.window):
            meeting = self._space_fork_position(position)
        else:
            meeting = position
        if not (kv.layout.has_states or kv.layout.window):
            return meeting
        if meeting > kv.length and meeting not in self.chunk_ends:
            self._fork_positions.add(meeting)
        return meeting

    def _space_fork_position(self, position: int) -> int:
        """The last place up to `wanted` that is a cut, or far enough from all cuts to become one."""
        kv, prompt = self.kv, len(self.request.prompt)
        cuts = [cut for cut in self.chunk_ends if kv.length < cut < prompt - 1 or kv.can_continue_at(cut)]
        before = max((cut for cut in cuts if cut <= position), default=0)
        after = min((cut for cut in cuts if cut > position), default=prompt + FORK_DISTANCE_TOKENS_MIN)
        free = min(position, after - FORK_DISTANCE_TOKENS_MIN)
        return before if before and free - before < FORK_DISTANCE_TOKENS_MIN else max(free, kv.length)

    def remove_fork_position(self, position: int) -> None:
        """Nobody is to be given a copy there any more: its state goes, unless this request wants it too."""
        if position in self._fork_positions:
            self._fork_positions.remove(position)
            self.kv.checkpoints.pop(position, None)

    # ---- prefill and end

    def prefill_chunk(self, step: int) -> int:
        """Compute the next chunk and keep what a save will want of it.  Returns its tokens."""
        start, cuts = self.kv.length, self.chunk_ends
        self._capture_rollback_point()
        longest = step - start % step if self.kv.grid else step
        end = find_chunk_end(start, len(self.request.prompt) - 1, longest, cuts)
        if self._prefill_batch is None:
            # Built empty and handed the cache in batched form: mlx-lm would copy every row into a new batch.
            self._prefill_batch = PromptProcessingBatch(
                self.served.model, [self.request.id], [], tokens=[self.kv.tokens], prefill_step_size=UNBOUNDED
            )
            self._prefill_batch.prompt_cache = self.kv.layers
        self._prefill_batch.prompt([self.request.prompt[start:end]])
        self.kv.release_chunk()
        self.kv.capture_window()
        if end in cuts:
            self.kv.capture_checkpoint()
        return end - start

    def _capture_rollback_point(self) -> None:
        """About to leave the grid for good."""
        if self.needs_rollback_point and self.kv.length == self.kv.grid_end:
            self.kv.capture_rollback_point()

    def make_result(self, finish: str, *, boot: str, generation: int, resident: str, error: str) -> GenerationResult:
        """How it ended; `resident` is what is kept of it, if anything."""
        kv, prompt = self.kv, len(self.request.prompt)
        return GenerationResult(
            boot=boot,
            generation=generation,
            request_id=self.request.id,
            finish=finish,
            resident=resident,
            generated=pack_tokens(kv.tokens[prompt:]) if resident else b"",
            prefilled_until=kv.length if resident else 0,
            checkpoints=sorted(kv.checkpoints) if resident else [],
            positions=kv.positions() if resident else [],
            timings=self.timings,
            error=error,
            first=self.first_logits,
        )

    def record_first_logits(self, logprobs: mx.array) -> None:
        """Its first token was chosen from this row [vocabulary]; processors may have made it of the model's own."""
        own, self._logprobs_capture.logprobs = self._logprobs_capture.logprobs, None
        self.first_logits = make_first_logits(logprobs if own is None else own)

    def make_decode_batch(self) -> DecodeBatch:
        """A decode batch of this sequence alone; computes its first step."""
        self._capture_rollback_point()
        params, self._prefill_batch = self.request.params, None
        sampler = make_sampler(params, self.sampler_fault)
        eos = self.served.tokenizer.eos_token_ids
        processors = make_processors(params, len(self.request.prompt), self.sampler_fault, eos)
        if self.request.matcher is not None:  # last: nothing that comes after may allow what it does not
            processors.append(self.sampler_fault.guard_processor(self.request.matcher))
        if processors:
            processors.insert(0, self._logprobs_capture)
        return DecodeBatch(
            self.request.matcher,
            self.served.model,
            [self.request.id],
            mx.array(self.request.prompt[-1:]),
            self.kv.layers,
            [self.kv.tokens],
            [sampler],
            greedy_sampler,
            [processors],
            [StopSequences()],
            [UNBOUNDED],
        )


def find_chunk_end(start: int, end: int, step: int, chunk_ends: Iterable[int]) -> int:
    """Where the chunk that begins at `start` ends: after `step` tokens, at the next of `cuts`, or at `end`."""
    wanted = (position for position in chunk_ends if position > start)
    return min(end, start + step, next(wanted, end))
