"""One request as the engine runs it, and what it tells its listener.

waiting, or following -> prefill (chunk after chunk) -> decode (in a group) -> settled
"""

import time
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from warmline_backend.generation.first_logits import OwnRow, first_logits
from warmline_backend.generation.sampling import SamplerFault, make_processors, make_sampler
from warmline_backend.kv_cache.kv import KV
from warmline_backend.model.model import ServedModel
from warmline_backend.output.events import Part, Said
from warmline_backend.output.expected import Expected
from warmline_backend.output.parser import OutputStream
from warmline_backend.request.params import GenerationParams
from warmline_backend.structured_output.matcher import Guide
from warmline_common.protocol.messages import FirstLogits, Settled, Timings
from warmline_common.protocol.tokens import pack_tokens

# Between the places where a chunk ends only for a follower: each costs a state and a short chunk, and what lies between
# is soon computed again.
MEETINGS_APART_TOKENS = 64
UNBOUNDED = 1 << 30  # ends are the engine's to find, so mlx-lm's own limits are out of the way


# ---- what a listener hears


@dataclass(frozen=True)
class Started:
    """It has left the queue: from here on it computes."""


@dataclass(frozen=True)
class Progress:
    """A prefill chunk is done: `done` of `total` prompt tokens have rows."""

    done: int
    total: int


@dataclass(frozen=True)
class TokenLogprobs:
    token: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first


@dataclass(frozen=True)
class Piece:
    """A token was generated.  `parts` may be empty: half a character, the start of a stop word or of a marker, and a
    call that is not complete are held back.
    """

    parts: typing.Sequence[Part]
    token: int
    logprobs: TokenLogprobs | None = None
    reasons: bool = False  # it belongs to the reasoning
    stop_word: str = ""  # that it has completed

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(part.text for part in self.parts if isinstance(part, Said))


@dataclass(frozen=True)
class Ended:
    """Nothing more comes.  `settled.finish` says why; on "error", `settled.error` does."""

    settled: Settled
    reused: int  # prompt tokens that were not prefilled


Event = Started | Progress | Piece | Ended
Listener = Callable[[Event], None]  # called on the engine thread; must not block


@dataclass(frozen=True)
class Generation:
    """A request, checked: what the engine is asked to do."""

    id: str
    prompt: list[int]
    params: GenerationParams
    listener: Listener
    guide: Guide | None = None  # what its answer must be; of this run alone
    resident: str = ""
    follow: str = ""  # the request that computes the prompt's first `reuse` tokens; no resident then
    reuse: int = 0
    keep: bool = False  # copy the resident and leave it for others, rather than take it over
    kept: bool = True  # what it has computed becomes a resident
    root: bytes = b""  # namespace of fingerprint and tenant: it starts from nobody else's rows
    background: bool = False  # computed only while nobody else is; it makes way for whoever wants its memory
    checkpoints: tuple[int, ...] = ()  # ascending positions in the prompt at which to keep recurrent state
    expected: Expected = Expected()  # noqa: RUF009  frozen


@dataclass(eq=False)
class Sequence:
    """A request with its KV.  Engine thread only."""

    request: Generation
    kv: KV
    served: ServedModel
    adopted: str = ""  # the resident whose KV this was
    leader: "Sequence | None" = None  # whom it follows, while it waits
    meeting: int = 0  # how much of the leader's KV it starts from
    detached: bool = False  # nobody waits for its answer: it ends with its prefill
    chunks_passed_over: float = 0.0
    decoding_since: float = 0.0  # time.monotonic()
    generated: int = 0
    timings: Timings = field(default_factory=Timings)
    first: FirstLogits | None = None  # what its first token was chosen from
    arrived: float = field(default_factory=time.monotonic)
    _prefill: PromptProcessingBatch | None = None

    def __post_init__(self) -> None:
        self._set_grid_end()
        self.fault = SamplerFault()
        params = self.request.params
        self.text = OutputStream(self.served.tokenizer, params.stop, self.request.expected, params.min_tokens)
        self.reused = self.kv.length
        self._own_row = OwnRow()
        self._meetings: set[int] = set()  # where a chunk ends only for those who follow, and no longer than they do
        self.answer_tokens_max = params.max_tokens  # or what the memory budget leaves

    def _set_grid_end(self) -> None:
        """Where its last full chunk ends; what comes after that is not kept in exact mode."""
        self.kv.grid_end = self.kv.on_grid(len(self.request.prompt) - 1)

    @property
    def prefill_left(self) -> int:
        """Prompt tokens before the last one, which is the first decode step's."""
        return len(self.request.prompt) - 1 - self.kv.length

    @property
    def left_to_keep(self) -> int:
        """Of these, those that can be kept: in exact mode not those after its last full chunk."""
        return self.kv.grid_end - self.kv.length

    @property
    def tokens_max(self) -> int:
        """How long prompt and answer can become."""
        return len(self.request.prompt) + self.answer_tokens_max

    @property
    def tokens_known(self) -> list[int]:
        """What it computes: its prompt, and the answer so far."""
        return max(self.request.prompt, self.kv.tokens, key=len)

    def ends_at(self, token: int) -> bool:
        """Whether the model ends its answer here, or has nothing left to say in the form that was asked for."""
        if token in self.request.params.stop_token_ids:
            return True
        if token not in self.served.tokenizer.eos_token_ids:
            return False
        guide = self.request.guide
        return not self.request.params.ignore_eos or (guide is not None and guide.complete)

    def started(self) -> None:
        self.timings.queue_s = time.monotonic() - self.arrived

    @property
    def cuts(self) -> list[int]:
        """Where a chunk ends and a state is kept, ascending; in exact mode all are on the grid, where chunks end."""
        last = [self.kv.grid_end] if self.keeps_place else []
        return sorted({*self.request.checkpoints, *self._meetings, *last})

    @property
    def keeps_place(self) -> bool:
        """It will come back to where its last full chunk ends, for that is what is kept of it."""
        return bool(self.request.kept and self.kv.grid and self.kv.grid_end)

    @property
    def states_to_come(self) -> int:
        """How many states are still to be kept on the way to the answer."""
        return sum(self.kv.length < cut < len(self.request.prompt) for cut in self.cuts)

    # ---- leading and following

    def start_from_leader(self) -> None:
        """Take a copy of the leader's first `meeting` tokens, or as many as can be had."""
        assert self.leader
        held = self.leader.kv
        self.kv = held.branch(held.deepest_place(self.meeting), apart=True)
        for meeting in self.leader._meetings.difference(self.request.checkpoints):
            self.kv.checkpoints.pop(meeting, None)
        self._set_grid_end()
        self.reused = self.kv.length

    def meeting_for(self, wanted: int) -> int:
        """Where a follower of the first `wanted` tokens is to be given its copy; 0 where it can't be, or not any more.

        Where the model can't be copied just anywhere, a chunk will end there.
        """
        kv = self.kv
        if kv.length >= wanted:
            return kv.deepest_place(wanted)
        if kv.grid:
            meeting = kv.on_grid(min(wanted, kv.grid_end))  # a chunk ends there anyway
        elif wanted < len(self.request.prompt) - 1 and (kv.layout.has_states or kv.layout.window):
            meeting = self._apart_from_others(wanted)
        else:
            meeting = wanted
        if not (kv.layout.has_states or kv.layout.window):
            return meeting
        if meeting > kv.length and meeting not in self.cuts:
            self._meetings.add(meeting)
        return meeting

    def _apart_from_others(self, wanted: int) -> int:
        """The last place up to `wanted` that is a cut, or far enough from all cuts to become one."""
        kv, prompt = self.kv, len(self.request.prompt)
        cuts = [cut for cut in self.cuts if kv.length < cut < prompt - 1 or kv.can_continue_at(cut)]
        before = max((cut for cut in cuts if cut <= wanted), default=0)
        after = min((cut for cut in cuts if cut > wanted), default=prompt + MEETINGS_APART_TOKENS)
        free = min(wanted, after - MEETINGS_APART_TOKENS)
        return before if before and free - before < MEETINGS_APART_TOKENS else max(free, kv.length)

    def forget_meeting(self, position: int) -> None:
        """Nobody is to be given a copy there any more: its state goes, unless this request wants it too."""
        if position in self._meetings:
            self._meetings.remove(position)
            self.kv.checkpoints.pop(position, None)

    # ---- prefill and end

    def prefill_chunk(self, step: int) -> int:
        """Compute the next chunk and keep what a save will want of it.  Returns its tokens."""
        start, cuts = self.kv.length, self.cuts
        self._keep_place()
        longest = step - start % step if self.kv.grid else step
        end = next_cut(start, len(self.request.prompt) - 1, longest, cuts)
        if self._prefill is None:
            # Built empty and handed the cache in batched form: mlx-lm would copy every row into a new batch.
            self._prefill = PromptProcessingBatch(
                self.served.model, [self.request.id], [], tokens=[self.kv.tokens], prefill_step_size=UNBOUNDED
            )
            self._prefill.prompt_cache = self.kv.layers
        self._prefill.prompt([self.request.prompt[start:end]])
        self.kv.let_go_of_chunk()
        self.kv.capture_window()
        if end in cuts:
            self.kv.capture_checkpoint()
        return end - start

    def _keep_place(self) -> None:
        """About to leave the grid for good."""
        if self.keeps_place and self.kv.length == self.kv.grid_end:
            self.kv.keep_place()

    def settled(self, finish: str, *, boot: str, generation: int, resident: str, error: str) -> Settled:
        """How it ended; `resident` is what is kept of it, if anything."""
        kv, prompt = self.kv, len(self.request.prompt)
        return Settled(
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
            first=self.first,
        )

    def note_first(self, logprobs: mx.array) -> None:
        """Its first token was chosen from this row [vocabulary]; processors may have made it of the model's own."""
        own, self._own_row.row = self._own_row.row, None
        self.first = first_logits(logprobs if own is None else own)

    def decode_batch(self) -> "DecodeBatch":
        """A decode batch of this sequence alone; computes its first step."""
        self._keep_place()
        params, self._prefill = self.request.params, None
        sampler = make_sampler(params, self.fault)
        eos = self.served.tokenizer.eos_token_ids
        processors = make_processors(params, len(self.request.prompt), self.fault, eos)
        if self.request.guide is not None:  # last: nothing that comes after may allow what it does not
            processors.append(self.fault.processor(self.request.guide))
        if processors:
            processors.insert(0, self._own_row)
        return DecodeBatch(
            self.request.guide,
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


class DecodeBatch(GenerationBatch):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's batch, which here never finds an end by itself, so nothing is to be extracted when it would.

    It tells its guides what was sampled last.  They could ask the context that processors are given, but that is
    computed behind the forward pass, and they are to be done before it is.
    """

    def __init__(self, guide: Guide | None, model: object, uids: list[str], *rest: object) -> None:
        self._guides = {uid: guide for uid in uids if guide is not None}
        super().__init__(model, uids, *rest)

    def extend(self, batch: "DecodeBatch") -> None:
        self._guides |= batch._guides
        super().extend(batch)

    def _step(self) -> tuple[list[int], list[mx.array]]:
        for row, uid in enumerate(self.uids) if self._guides else ():
            if (guide := self._guides.get(uid)) is not None:
                guide.follows(self._next_tokens, row)
        return super()._step()  # type: ignore[no-any-return]

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._guides = {uid: guide for uid, guide in self._guides.items() if uid in self.uids}

    def extract_cache(self, idx: int) -> list[object]:
        return []


def next_cut(start: int, end: int, step: int, cuts: Iterable[int]) -> int:
    """Where the chunk that begins at `start` ends: after `step` tokens, at the next of `cuts`, or at `end`."""
    wanted = (position for position in cuts if position > start)
    return min(end, start + step, next(wanted, end))
