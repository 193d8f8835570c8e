"""One request as the engine runs it, and what it tells its listener.

waiting -> prefill (chunk after chunk) -> decode (in a group) -> settled
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from warmline_backend.kv import KV
from warmline_backend.model import ServedModel
from warmline_backend.params import GenerationParams
from warmline_backend.sampling import SamplerFault, make_processors, make_sampler
from warmline_backend.text import TextStream
from warmline_wire.messages import Settled, Timings

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
    """A token was generated.  `text` may be empty while half a character or the start of a stop word is held back."""

    text: str
    logprobs: TokenLogprobs | None = None


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
    resident: str = ""
    reuse: int = 0
    keep: bool = False  # copy the resident and leave it for others, rather than take it over
    kept: bool = True  # what it has computed becomes a resident
    checkpoints: tuple[int, ...] = ()  # ascending positions in the prompt at which to keep recurrent state


@dataclass(eq=False)
class Sequence:
    """A request with its KV.  Engine thread only."""

    request: Generation
    kv: KV
    served: ServedModel
    adopted: str = ""  # the resident whose KV this was
    retried: bool = False
    spoken: bool = False  # content has been sent: it can't be started over unnoticed
    chunks_passed_over: int = 0
    decoding_since: float = 0.0  # time.monotonic()
    generated: int = 0
    timings: Timings = field(default_factory=Timings)
    arrived: float = field(default_factory=time.monotonic)
    _prefill: PromptProcessingBatch | None = None

    def __post_init__(self) -> None:
        self.fault = SamplerFault()
        self.text = TextStream(self.served.tokenizer, self.request.params.stop)
        self.reused = self.kv.length
        self.answer_tokens_max = self.request.params.max_tokens  # or what the memory budget leaves

    @property
    def prefill_left(self) -> int:
        """Prompt tokens before the last one, which is the first decode step's."""
        return len(self.request.prompt) - 1 - self.kv.length

    def started(self) -> None:
        self.timings.queue_s = time.monotonic() - self.arrived

    def prefill_chunk(self, step: int) -> int:
        """Compute the next chunk and keep what a save will want of it.  Returns its tokens."""
        start = self.kv.length
        end = next_cut(start, len(self.request.prompt) - 1, step, self.request.checkpoints)
        if self._prefill is None:
            # Built empty and handed the cache in batched form: mlx-lm would copy every row into a new batch.
            self._prefill = PromptProcessingBatch(
                self.served.model, [self.request.id], [], tokens=[self.kv.tokens], prefill_step_size=UNBOUNDED
            )
            self._prefill.prompt_cache = self.kv.layers
        self._prefill.prompt([self.request.prompt[start:end]])
        self.kv.capture_window()
        if end in self.request.checkpoints:
            self.kv.capture_checkpoint()
        return end - start

    def decode_batch(self) -> "DecodeBatch":
        """A decode batch of this sequence alone; computes its first step."""
        params, self._prefill = self.request.params, None
        sampler = make_sampler(params, self.fault)
        processors = make_processors(params, len(self.request.prompt), self.fault)
        return DecodeBatch(
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
    """mlx-lm's batch, which here never finds an end by itself, so nothing is to be extracted when it would."""

    def extract_cache(self, idx: int) -> list[object]:
        return []


def next_cut(start: int, end: int, step: int, checkpoints: tuple[int, ...]) -> int:
    """Where the chunk that begins at `start` ends: after `step` tokens, at the next checkpoint, or at `end`."""
    wanted = (position for position in checkpoints if position > start)
    return min(end, start + step, next(wanted, end))
