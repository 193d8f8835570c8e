"""One request between its arrival and its last byte on disk."""

from dataclasses import dataclass

from warmline_proxy.admission import Slot
from warmline_proxy.generation import Generation
from warmline_proxy.mirror import Held
from warmline_proxy.normalize import Call
from warmline_proxy.plan import Prompt
from warmline_proxy.trace import Trace
from warmline_wire.keys import TOKEN_BYTES
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

    @property
    def is_settling(self) -> bool:
        return self.answered or (self.generation is not None and self.generation.is_over)

    def prompt_shape(self) -> Prompt:
        assert self.prompt is not None
        return Prompt(len(self.prompt.tokens) // TOKEN_BYTES, self.prompt.boundaries, self.prompt.turn_end)


def held_at(life: Life, position: int) -> Held:
    """What a restore to `position` gives."""
    assert life.prompt is not None
    positions = () if _anywhere(life.layout) else (position,)
    return Held(life.root, life.prompt.tokens[: position * TOKEN_BYTES], positions)


def held_after(life: Life, settled: Settled) -> Held:
    """What a generation leaves: `(prompt + generated)[:prefilled_until]`.

    Its positions hold for sure; the backend's listing of residents may tell more of them later.
    """
    assert life.prompt is not None
    tokens = (life.prompt.tokens + settled.generated)[: settled.prefilled_until * TOKEN_BYTES]
    positions = () if _anywhere(life.layout) else tuple(sorted({*settled.checkpoints, settled.prefilled_until}))
    return Held(life.root, tokens, positions)


def _anywhere(layout: Layout | None) -> bool:
    return layout is not None and not layout.has_states and not layout.has_windows
