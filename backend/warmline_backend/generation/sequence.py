"""Requests and their sequences: a prompt, its KV, and the state of its generation.

Stages: waiting or following -> prefill (chunk after chunk) -> decode (in a group) -> ended.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import greedy_sampler

from warmline_backend.generation import sampling
from warmline_backend.generation.answer import Answer
from warmline_backend.generation.chunks import LayerwiseChunk, find_chunk_end
from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.events import EventListener
from warmline_backend.generation.sampling import (
    LogitsProcessor,
    LogprobsCapture,
    Sampler,
    SamplerFault,
    SeededSampler,
)
from warmline_backend.kv_cache.batch_prefill import prefill_batch
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.residents import Adoption
from warmline_backend.model.model import ServedModel
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.drafter import Drafter
from warmline_backend.speculation.speculation import Speculation
from warmline_backend.structured_output.matcher import Matcher
from warmline_common.protocol.messages import FirstLogits, GenerationResult, Timings
from warmline_common.protocol.tokens import TokenArray, pack_tokens
from warmline_common.protocol.waits import STEP, TURNS

# Distance of chunk ends that only followers need: each costs a state and a short chunk, while the tokens between two
# are soon computed again.
FORK_DISTANCE_TOKENS_MIN = 64
UNBOUNDED = 1 << 30  # disables mlx-lm's own limits: the scheduler finds ends
REWIND_DISTANCE_TOKENS = 64  # between two rewind points: each costs a state, and the tokens after it are soon computed


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Start, residents and priority of a generation."""

    resident_id: str = ""
    leader_id: str = ""  # request that computes the prompt's first `reuse_tokens` tokens; excludes a resident
    reuse_tokens: int = 0
    copy_resident: bool = False  # copy the resident rather than take it over
    leaves_resident: bool = True  # its KV becomes a resident
    root: bytes = b""  # namespace of fingerprint and tenant: rows of other roots are never reused
    background: bool = False  # computed only on an idle engine; its memory is taken first
    checkpoints: tuple[int, ...] = ()  # ascending positions in the prompt at which to keep recurrent state


@dataclass(frozen=True)
class GenerationRequest(GenerationOptions):
    """A validated request to the engine."""

    id: str
    prompt: TokenArray
    params: GenerationParams
    listener: EventListener
    matcher: Matcher | None = None  # grammar of the answer, with the state of this run
    expected_output: ExpectedOutput = ExpectedOutput()  # noqa: RUF009  frozen
    prediction: TokenArray = field(default_factory=TokenArray)  # tokens that the client expects as the answer
    accepted_at: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Sequence:
    """A running request with its KV.  Engine thread only."""

    request: GenerationRequest
    kv: KV
    served: ServedModel
    speculation: Speculation | None = None  # None: each step computes one token
    adoption: Adoption | None = None  # of the resident that it took over
    leader: "Sequence | None" = None  # while it waits as a follower
    fork_position: int = 0  # tokens of the leader's KV that it starts from
    detached: bool = False  # its client has left: it ends with its prefill
    chunks_skipped: float = 0.0
    wait_reason: str = STEP  # what it waits for until it is started
    waiting_bytes: int = 0  # of the KV that it holds while it waits for its start
    started_at: float = 0.0  # time.monotonic(); 0.0 while it waits
    decode_started_at: float = 0.0  # time.monotonic()
    answer: Answer = field(default_factory=Answer)
    redraw_position: int | None = None  # answer tokens to go back to, as soon as the present step is over
    timings: Timings = field(default_factory=Timings)
    first_logits: FirstLogits | None = None  # distribution of its first token
    arrival_time: float = field(default_factory=time.monotonic)
    layerwise_chunk: LayerwiseChunk | None = None  # a background request's, until all of it is computed
    chunk_tokens_max: int = UNBOUNDED  # of this prompt's chunks, once memory has run out
    has_short_chunks: bool = False  # shorter than the step, to fit the memory
    needs_eviction: bool = False  # its chunks can't be shorter, and memory has run out
    prefills_alone: bool = False  # not in a batch with others, after one that failed
    error_code: str = ""  # of the error that ends it; "" for a code by its end

    def __post_init__(self) -> None:
        self._set_grid_end()
        self.sampler_fault = SamplerFault()
        params = self.request.params
        expected = self.request.expected_output
        self.output_parser = OutputParser(self.served.tokenizer, params.stop, expected, params.min_tokens)
        self.reused_tokens = self.kv.length
        self._logprobs_capture = LogprobsCapture()
        self._waiting_since = self.request.accepted_at
        self._fork_positions: set[int] = set()  # chunk ends that only present followers need
        self.answer_tokens_max = params.max_tokens  # or fewer, by the memory budget
        self.inputs = self.request.prompt  # tokens to compute before the next one is drawn: all but the last in prefill
        self.drafter: Drafter | None = None  # made when decoding begins, as are the next two
        self._sampler: Sampler | None = None
        self._processors: list[LogitsProcessor] = []

    def _set_grid_end(self) -> None:
        """Set the end of the last full chunk; later rows are not kept in exact mode."""
        self.kv.grid_end = self.kv.floor_to_grid(len(self.request.prompt) - 1)

    @property
    def prefill_tokens_left(self) -> int:
        """Input tokens before the last one, which the first decode step computes."""
        return len(self.inputs) - 1 - self.kv.length

    @property
    def savable_tokens_left(self) -> int:
        """Prefill tokens left that can be kept: in exact mode those up to the last full chunk."""
        return self.kv.grid_end - self.kv.length

    @property
    def tokens_max(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.request.prompt) + self.answer_tokens_max

    @property
    def all_tokens(self) -> TokenArray:
        """Tokens that it computes: the prompt, and the answer as far as it is sent."""
        return max(self.request.prompt, self.kv.tokens[: self.sent_length], key=len)

    @property
    def sent_length(self) -> int:
        """Tokens of the prompt, and of the answer as far as it is sent: later ones may be drawn again."""
        return len(self.request.prompt) + self.answer.sent_count

    def is_end(self, token: int) -> bool:
        """True where the model ends its answer with `token`; a complete grammar ends it even with ignore_eos."""
        if token in self.request.params.stop_token_ids:
            return True
        if token not in self.served.tokenizer.eos_token_ids:
            return False
        matcher = self.request.matcher
        return not self.request.params.ignore_eos or (matcher is not None and matcher.is_complete)

    def mark_waiting(self, reason: str) -> None:
        """From now on it waits for that; the time up to now belongs to the reason before."""
        self._record_wait()
        self.wait_reason = reason

    def mark_started(self) -> None:
        self._record_wait()
        self.started_at = self._waiting_since
        self.timings.waits[TURNS] = 0.0

    def record_turn(self, seconds: float) -> None:
        """Count the seconds of another request's chunk or decode step as a wait in its prefill, from its start on.

        The step has just ended; a follower may have started within it.
        """
        self.timings.waits[TURNS] += min(seconds, time.monotonic() - self.started_at)

    def _record_wait(self) -> None:
        now, waits = time.monotonic(), self.timings.waits
        if not self.started_at:
            waits[self.wait_reason] = waits.get(self.wait_reason, 0.0) + now - self._waiting_since
        self._waiting_since = now

    @property
    def chunk_ends(self) -> list[int]:
        """Ascending positions where a chunk ends and a state is kept; in exact mode all are on the grid."""
        last = [self.kv.grid_end] if self.needs_rollback_point else []
        return sorted({*self.request.checkpoints, *self._fork_positions, *last})

    @property
    def needs_rollback_point(self) -> bool:
        """True where the sequence will go back to the end of its last full chunk, as in exact mode."""
        return bool(self.request.leaves_resident and self.kv.grid and self.kv.grid_end)

    @property
    def pending_checkpoint_count(self) -> int:
        """States still to be kept before the answer."""
        return sum(self.kv.length < end < len(self.request.prompt) for end in self.chunk_ends)

    # ---- leading and following

    def fork_from_leader(self) -> None:
        """Copy the leader's first `fork_position` tokens, or as many as can be had."""
        assert self.leader
        source = self.leader.kv
        self.kv = source.fork(source.find_continue_position(self.fork_position), detached=True)
        for fork_position in self.leader._fork_positions.difference(self.request.checkpoints):
            self.kv.checkpoints.pop(fork_position, None)
        self._set_grid_end()
        self.reused_tokens = self.kv.length

    def choose_fork_position(self, position: int) -> int:
        """Choose where a follower of the first `position` tokens gets its copy; 0 where that is impossible.

        Where the model can't be copied anywhere, a chunk will end there.
        """
        kv = self.kv
        if kv.length >= position:
            return kv.find_continue_position(position)
        if kv.grid:
            fork_position = kv.floor_to_grid(min(position, kv.grid_end))  # a chunk ends there anyway
        elif position < len(self.request.prompt) - 1 and (kv.layout.has_states or kv.layout.window):
            fork_position = self._space_fork_position(position)
        else:
            fork_position = position
        if not (kv.layout.has_states or kv.layout.window):
            return fork_position
        if fork_position > kv.length and fork_position not in self.chunk_ends:
            self._fork_positions.add(fork_position)
        return fork_position

    def _space_fork_position(self, position: int) -> int:
        """The last place up to `position` that is a chunk end, or far enough from all to become one."""
        kv, prompt = self.kv, len(self.request.prompt)
        ends = [end for end in self.chunk_ends if kv.length < end < prompt - 1 or kv.can_continue_at(end)]
        before = max((end for end in ends if end <= position), default=0)
        after = min((end for end in ends if end > position), default=prompt + FORK_DISTANCE_TOKENS_MIN)
        free = min(position, after - FORK_DISTANCE_TOKENS_MIN)
        return before if before and free - before < FORK_DISTANCE_TOKENS_MIN else max(free, kv.length)

    def remove_fork_position(self, position: int) -> None:
        """Drop the state at a position without followers, unless this request wants it too."""
        if position in self._fork_positions:
            self._fork_positions.remove(position)
            self.kv.checkpoints.pop(position, None)

    def can_take_over(self, leader: "Sequence") -> bool:
        """True where this follower can go on with the very KV of its leader: it shares all that is computed of it."""
        kv = leader.kv
        is_shared = not leader.decode_started_at and kv.length <= self.request.reuse_tokens
        return is_shared and kv.find_continue_position(kv.length) == kv.length

    def take_over(self, leader: "Sequence") -> None:
        """Go on with the KV of an ended leader, and keep the states that it was to keep."""
        reuse_tokens, request = self.request.reuse_tokens, leader.request
        shared = [position for position in request.checkpoints if position <= reuse_tokens]
        self.request = replace(self.request, checkpoints=tuple(sorted({*shared, *self.request.checkpoints})))
        self.kv, self.adoption = leader.kv, leader.adoption
        self._fork_positions = {position for position in leader._fork_positions if position <= reuse_tokens}
        self._set_grid_end()
        self.reused_tokens = self.kv.length

    def keep_fork_positions(self, positions: Iterable[int]) -> None:
        """Drop the states at all fork positions but these."""
        for position in self._fork_positions.difference(positions):
            self.remove_fork_position(position)

    # ---- prefill and end

    def prefill_chunk(self, step: int) -> int:
        """Compute the next chunk and keep its rows and state for a save.  Returns its tokens.

        Raises OutOfMemoryError where memory ran out and nothing has changed.
        """
        tokens = self._begin_chunk(step)
        self.kv.prefill(self.served.model, tokens)
        self.complete_chunk()
        return len(tokens)

    def begin_layerwise_chunk(self, step: int) -> LayerwiseChunk:
        """Begin the next chunk as one that is computed layer by layer; nothing changes before its end."""
        tokens = self._begin_chunk(step)
        return LayerwiseChunk(len(tokens), self._compute_layers(tokens))

    def _compute_layers(self, tokens: list[int]) -> Iterator[None]:
        yield from self.kv.prefill_by_layers(self.served.model, tokens)
        self.complete_chunk()

    def _begin_chunk(self, step: int) -> list[int]:
        """Tokens of the next chunk, of at most `step`."""
        start, end = self.kv.length, self.find_next_chunk_end(step)
        self._capture_rollback_point()
        return list(self.inputs[start:end])

    def complete_chunk(self) -> None:
        """Keep the rows and the state of a computed chunk for a save."""
        self.kv.capture_window()
        if self.kv.length in self.chunk_ends:
            self.kv.capture_checkpoint()
        self.needs_eviction = False

    def find_next_chunk_end(self, step: int) -> int:
        """End of the chunk that `prefill_chunk(step)` computes."""
        start = self.kv.length
        longest = step - start % step if self.kv.grid else step
        return find_chunk_end(start, len(self.inputs) - 1, longest, self.chunk_ends)

    def _capture_rollback_point(self) -> None:
        """Keep the state at the end of the grid, before decoding leaves it."""
        if self.needs_rollback_point and self.kv.length == self.kv.grid_end:
            self.kv.capture_rollback_point()

    def make_result(self, finish: str, *, boot: str, generation: int, resident: str, error: str) -> GenerationResult:
        """Make the result; `resident` is the id of the resident that it left, or ""."""
        kv, prompt = self.kv, len(self.request.prompt)
        self._record_wait()
        self.timings.no_drafts = self._explain_no_drafts()
        if self.request.prediction and self.drafter is not None:
            agreed = self.drafter.count_predicted(kv.tokens)
            self.timings.predicted = min(agreed, len(self.request.prediction))  # the answer may repeat a part
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
            error_code=self.error_code,
            first=self.first_logits,
        )

    def record_first_logits(self, logprobs: mx.array) -> None:
        """Record the distribution of the first token: the row [vocabulary], or the one before processors changed it."""
        own, self._logprobs_capture.logprobs = self._logprobs_capture.logprobs, None
        self.first_logits = sampling.make_first_logits(logprobs if own is None else own)

    def prepare_decoding(self) -> tuple[Sampler, list[LogitsProcessor]]:
        """Make its sampler and processors, and keep what saves and rewinds need of the KV before its first step."""
        self.complete_chunk()  # of a batch
        self._capture_rollback_point()
        if self._sampler is None:
            self._sampler, self._processors = self._make_sampling()
            self.drafter = self._make_drafter()
            if self.can_redraw:
                self.kv.capture_rewind_point()
        return self._sampler, self._processors

    def _make_sampling(self) -> tuple[Sampler, list[LogitsProcessor]]:
        params = self.request.params
        eos = self.served.tokenizer.eos_token_ids
        processors = sampling.make_processors(params, len(self.request.prompt), self.sampler_fault, eos)
        if self.request.matcher is not None:  # last: no later processor may allow a forbidden token
            processors.append(self.sampler_fault.guard_processor(self.request.matcher))
        if processors:
            processors.insert(0, self._logprobs_capture)
        return sampling.make_sampler(params, self.sampler_fault), processors

    def _make_drafter(self) -> Drafter | None:
        if self.speculation is None or self.kv.layout.problem:
            return None
        request = self.request
        ends = {*request.params.stop_token_ids, *self.served.tokenizer.eos_token_ids}
        return self.speculation.make_drafter(request.prompt, request.prediction, request.matcher, ends)

    def _explain_no_drafts(self) -> str:
        """Reason why no token of the answer was drafted; "" where one was."""
        if self.timings.drafts or not self.timings.decoded:
            return ""
        if self.kv.layout.problem:
            return "this model's cache can't take tokens back"
        if self.drafter is None:
            return "speculation is off"
        if self.timings.shared_passes * 2 > self.timings.passes:
            return "it was decoded in one batch with others"
        if self.served.draft is not None:
            return "nothing repeated, and the draft model was not worth the time"
        return "nothing repeated that was worth the time"

    # ---- redraws

    @property
    def can_redraw(self) -> bool:
        """True where tokens of the answer may be drawn again."""
        matcher = self.request.matcher
        return matcher is not None and matcher.has_check and not self.kv.layout.problem

    def count_sound_tokens(self) -> int:
        """Tokens of the answer that may be sent."""
        matcher, count = self.request.matcher, self.answer.token_count
        return count if matcher is None else matcher.count_sound(count)

    def keep_rewind_point(self) -> None:
        """Keep a rewind point from time to time, where all tokens so far are sent, in place of the one before."""
        if not self.can_redraw:
            return
        self.kv.release_rewind_points(self.sent_length - 1)
        last = max((point.position for point in self.kv.rewind_points), default=0)
        is_settled = self.answer.sent_count == self.answer.token_count
        if is_settled and len(self.kv.rewind_points) < 2 and self.kv.length >= last + REWIND_DISTANCE_TOKENS:
            self.kv.capture_rewind_point()

    def rewind(self, count: int) -> None:
        """Go back to the first `count` tokens of the answer, out of its batch; those not computed are `inputs`."""
        assert self.request.matcher is not None
        held = self.kv.tokens[: len(self.request.prompt) + count]
        self.answer.rewind(count)
        self.request.matcher.rewind(count)
        self.kv.rewind(len(held) - 1)
        if isinstance(self._sampler, SeededSampler):
            self._sampler.position = count
        if self.drafter is not None:
            self.drafter.rewind(len(held))
        self.inputs, self.redraw_position = held, None

    def drop_held_tokens(self) -> None:
        """Cut the KV to the tokens that were sent, out of its batch."""
        if self.answer.token_count and not self.kv.layout.problem:
            self.kv.rewind(self.sent_length)
            self.kv.rewind_points = []


def make_decode_batch(sequences: list[Sequence]) -> DecodeBatch:
    """Make a decode batch of all sequences of a KV batch, in its order; computes its first step."""
    samplers, processors = zip(*(sequence.prepare_decoding() for sequence in sequences), strict=True)
    sequences[0].kv.prepare_decoding()  # its layers are those of all
    return DecodeBatch(
        [sequence.request.matcher for sequence in sequences],
        sequences[0].kv.layout,
        sequences[0].served.model,
        [sequence.request.id for sequence in sequences],
        mx.array([sequence.inputs[-1] for sequence in sequences]),
        sequences[0].kv.layers,
        [sequence.kv.tokens.ids for sequence in sequences],  # to append to
        list(samplers),
        greedy_sampler,
        list(processors),
        [StopSequences() for _ in sequences],
        [UNBOUNDED for _ in sequences],
    )


def prefill_last_chunks(sequences: list[Sequence]) -> None:
    """Compute the last chunks of several sequences in one forward pass; they share a batch then.

    Where an exception is raised, nothing has changed.
    """
    chunks = [list(sequence.inputs[sequence.kv.length : -1]) for sequence in sequences]
    prefill_batch(sequences[0].served.model, [sequence.kv for sequence in sequences], chunks)
