"""Events of a generation: started, prefill progress, tokens, ended.  Made on the engine thread, read on any."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmline_backend.output.events import Part, Text
from warmline_common.protocol.messages import GenerationResult


@dataclass(frozen=True)
class StartedEvent:
    """It has left the queue: from here on it computes."""


@dataclass(frozen=True)
class PrefillProgress:
    """A prefill chunk is done: `done` of `total` prompt tokens have rows."""

    done: int
    total: int


@dataclass(frozen=True)
class SampledLogprobs:
    token: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first


@dataclass(frozen=True)
class TokenEvent:
    """A token was generated.  `parts` may be empty: half a character, the start of a stop word or of a marker, and a
    call that is not complete are held back.
    """

    parts: Sequence[Part]
    token: int
    logprobs: SampledLogprobs | None = None
    is_reasoning: bool = False  # it belongs to the reasoning
    stop_word: str = ""  # that it has completed

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True)
class EndedEvent:
    """Nothing more comes.  `settled.finish` says why; on "error", `settled.error` does."""

    result: GenerationResult
    reused_tokens: int  # prompt tokens that were not prefilled


GenerationEvent = StartedEvent | PrefillProgress | TokenEvent | EndedEvent
EventListener = Callable[[GenerationEvent], None]  # called on the engine thread; must not block
