"""One request between its arrival and its last byte on disk."""

import asyncio
from dataclasses import dataclass, field

from warmline_proxy.admission import Slot
from warmline_proxy.generation import Generation
from warmline_proxy.mirror import Held
from warmline_proxy.normalize import Call
from warmline_proxy.plan import Prompt
from warmline_proxy.trace import CANCELLED, Trace
from warmline_wire.keys import TOKEN_BYTES, common_prefix
from warmline_wire.messages import Layout, PromptReply, Settled


@dataclass(eq=False)
class Life:
    """Filled in step by step by the hot path; owned by the event loop."""

    trace: Trace
    call: Call | None = None
    slot: Slot | None = None
    model: str = ""  # the served model's name
    layout: Layout | None = None
    prompt: PromptReply | None = None
    root: bytes = b""  # namespace of fingerprint and tenant
    sent: bool = False  # a generation was asked for: the backend may hold something
    generation: Generation | None = None
    answered: bool = False  # the client has its answer, or has left
    let_go: asyncio.Event = field(default_factory=asyncio.Event)  # the engine works on it no more, or never did
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # on disk, or not going to be

    @property
    def is_settling(self) -> bool:
        return self.answered or (self.generation is not None and self.generation.is_over)

    @property
    def is_leaving(self) -> bool:
        """The client is gone, the engine may still be at work; what it has computed is not yet a resident."""
        return self.trace.outcome == CANCELLED and not self.let_go.is_set()

    def shares(self, other: "Life") -> int:
        """How many leading tokens of this prompt the other request has computed, or is to compute."""
        if self.prompt is None or other.prompt is None or self.root != other.root:
            return 0
        theirs = other.prompt.tokens if (settled := other.trace.settled) is None else held_after(other, settled).tokens
        return common_prefix(self.prompt.tokens, theirs)

    def prompt_shape(self) -> Prompt:
        assert self.prompt is not None
        return Prompt(len(self.prompt.tokens) // TOKEN_BYTES, self.prompt.boundaries, self.prompt.turn_end)


def held_at(life: Life, position: int) -> Held:
    """What a restore to `position` gives."""
    assert life.prompt is not None
    positions = () if _anywhere(life.layout) else (position,)
    return Held(life.root, life.prompt.tokens[: position * TOKEN_BYTES], positions)


def held_after(life: Life, settled: Settled) -> Held:
    """What a generation leaves: `(prompt + generated)[:prefilled_until]`."""
    assert life.prompt is not None
    tokens = (life.prompt.tokens + settled.generated)[: settled.prefilled_until * TOKEN_BYTES]
    return Held(life.root, tokens, settled.positions, turn_end=min(life.prompt.turn_end, len(tokens) // TOKEN_BYTES))


def _anywhere(layout: Layout | None) -> bool:
    return layout is not None and not layout.has_states and not layout.has_windows
