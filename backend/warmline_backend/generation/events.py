"""Events of a generation: started, prefill progress, tokens, ended.  Made on the engine thread, read on any."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmline_backend.output.events import Part
from warmline_common.protocol.messages import GenerationResult


@dataclass(frozen=True)
class StartedEvent:
    """The request has left the queue and computes."""


@dataclass(frozen=True)
class PrefillProgress:
    """`done` of `total` prompt tokens are computed."""

    done: int
    total: int


@dataclass(frozen=True)
class SampledLogprobs:
    """Log-probability of a sampled token, and of the likeliest ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first


@dataclass(frozen=True)
class TokenEvent:
    """A generated token.  Half characters, starts of stop words or markers, and incomplete calls are held back."""

    parts: Sequence[Part]  # may be empty
    token: int
    logprobs: SampledLogprobs | None = None
    is_reasoning: bool = False
    stop_word: str = ""  # the stop word that this token completes


@dataclass(frozen=True)
class HeldEvent:
    """A token that may be drawn again, and is held until it may not."""


@dataclass(frozen=True)
class EndedEvent:
    """The last event.  `result.finish` gives the reason, `result.error` the text for "error"."""

    result: GenerationResult
    reused_tokens: int  # prompt tokens that were not prefilled
    parts: Sequence[Part] = ()  # text that no later token can change, after that of the last token
    stop_reason: str = ""  # why an answer of a given form was cut, for the client


GenerationEvent = StartedEvent | PrefillProgress | TokenEvent | HeldEvent | EndedEvent
EventListener = Callable[[GenerationEvent], None]  # called on the engine thread; must not block
