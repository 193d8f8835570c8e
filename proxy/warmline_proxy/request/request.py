"""One request between its arrival and its last byte on disk."""

import asyncio
from dataclasses import dataclass, field

from warmline_common.protocol.messages import Layout, PromptReply, Settled
from warmline_common.protocol.tokens import TOKEN_BYTES, common_prefix
from warmline_proxy.api.base import Call
from warmline_proxy.auth.principals import EVERYBODY, Client
from warmline_proxy.errors import ClientError
from warmline_proxy.planner import Prompt, Running
from warmline_proxy.request.admission import Ticket
from warmline_proxy.request.deadlines import Alarm, Clock, Limits
from warmline_proxy.request_log import Trace
from warmline_proxy.response.relay import Sink
from warmline_proxy.upstream.generation_stream import Generation, Listener
from warmline_proxy.upstream.resident_view import Held

STAGES = ("arriving", "waiting", "restoring", "prefilling", "answering")


@dataclass(eq=False)
class Life:
    """Filled in step by step by the hot path; owned by the event loop."""

    trace: Trace
    answer: Sink
    limits: Limits
    clock: Clock = field(default_factory=Clock)
    alarm: Alarm = field(default_factory=Alarm)
    client: Client = EVERYBODY  # whose it is
    caller: str = ""  # whom it counts for
    ticket: Ticket | None = None  # its place; a request of several choices has given it to the first of them
    parts: list["Life"] = field(default_factory=list)  # its choices that have begun, where it has several
    call: Call | None = None
    model: str = ""  # the served model's name
    layout: Layout | None = None
    prompt: PromptReply | None = None
    root: bytes = b""  # namespace of fingerprint and tenant
    restoring: asyncio.Task[object] | None = None
    sent: bool = False  # a generation was asked for: the backend may hold something
    started: bool = False  # the engine has begun with it
    prefilled: int = 0  # prompt tokens that have rows
    stored: int = 0  # of these, what needs no saving while it runs: reused, or saved on the way
    spoken: int = 0  # pieces of its answer so far, about one a token
    generation: Generation | None = None
    hearing: Listener | None = None  # of the generation
    parted_from: bytes = b""  # packed tokens of the resident that its prompt differs from, from there on
    looking: asyncio.Task[None] | None = None  # into its trace's parting
    suspect: bool = False  # it may have started from what was found wrong since: nothing of it is kept
    purged: bool = False  # what it goes on from was purged while it ran: nothing of it is kept, on any try
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the client has its answer, or has left
    leaving: asyncio.Task[None] | None = None  # has the engine let go; nothing more is wanted of it
    alone: bool = False  # its client has left, its prefill goes on to be ready for the next try
    let_go: asyncio.Event = field(default_factory=asyncio.Event)  # the engine works on it no more, or never did
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # on disk, or not going to be

    def renew(self) -> None:
        """Before a try: whatever an earlier one made is gone."""
        self.sent = self.started = False
        self.prefilled = self.stored = self.spoken = 0
        self.generation = self.hearing = self.restoring = None
        self.let_go = asyncio.Event() if self.let_go.is_set() else self.let_go
        self.suspect = False
        self.trace.settled = self.trace.parting = None
        self.parted_from, self.looking = b"", None
        self.trace.collapse = ""
        self.trace.ttft_s = 0.0
        self.clock.rests()

    @property
    def is_kept(self) -> bool:
        """Whether what it computes may be used by others, and stored."""
        return not (self.suspect or self.purged)

    def ring(self, reason: ClientError) -> None:
        """End it from outside, unless its answer is complete."""
        if not self.answer.ended:
            self.alarm.ring(reason)

    @property
    def stage(self) -> str:
        """How far it has come, before its end: one of STAGES."""
        if self.parts:  # as far as the furthest of its choices
            return max((part.stage for part in self.parts), key=STAGES.index)
        if self.trace.ttft_s:
            return "answering"
        if self.generation is not None:
            return "prefilling" if self.started else "waiting"
        if self.restoring is not None:
            return "restoring"
        return "waiting" if self.prompt is not None else "arriving"

    @property
    def is_settling(self) -> bool:
        """Computed, but not yet on disk."""
        return self.answered.is_set() or (self.generation is not None and self.generation.is_over)

    @property
    def is_leaving(self) -> bool:
        """The client is gone, the engine may still be at work; what it has computed is not yet a resident."""
        return self.leaving is not None and not self.alone and not self.let_go.is_set()

    @property
    def is_computing(self) -> bool:
        """At the backend, and wanted there: what it computes can be shared."""
        there = self.generation is not None and not self.generation.is_over and self.trace.settled is None
        return there and (self.alone or self.leaving is None)

    def shares(self, other: "Life") -> int:
        """How many leading tokens of this prompt the other request has computed, or is to compute."""
        if self.prompt is None or other.prompt is None or self.root != other.root:
            return 0
        theirs = other.prompt.tokens if (settled := other.trace.settled) is None else held_after(other, settled).tokens
        return common_prefix(self.prompt.tokens, theirs)

    def as_running(self, other: "Life") -> Running:
        """This request as one that the other could follow."""
        return Running(
            request_id=self.trace.id,
            common=other.shares(self),
            tokens=self.prompt_shape().tokens,
            prefilled=max(self.prefilled, self._started_with),
            started=self.started,
        )

    @property
    def _started_with(self) -> int:
        """What it had when it was sent; a follower has nothing before its leader has come so far."""
        return self.stored if self.trace.plan and not self.trace.plan.follow else 0

    def is_retried_by(self, other: "Life") -> bool:
        """The other is the same client's next try: what it says is its session, and its count, leave no doubt."""
        if not (self.call and other.call):
            return False
        return (
            bool(self.call.session_hint)
            and (self.call.session_hint, self.caller) == (other.call.session_hint, other.caller)
            and self.call.retry_count < other.call.retry_count
            and (self.root, self.call.fields) == (other.root, other.call.fields)
        )

    def prompt_shape(self) -> Prompt:
        assert self.prompt is not None
        tokens = len(self.prompt.tokens) // TOKEN_BYTES
        return Prompt(tokens, self.prompt.boundaries, self.prompt.turn_end, self.prompt.messages)


def held_at(life: Life, position: int) -> Held:
    """What a restore to `position` gives."""
    assert life.prompt is not None
    positions = () if _anywhere(life.layout) else (position,)
    return Held(life.root, life.prompt.tokens[: position * TOKEN_BYTES], positions)


def held_after(life: Life, settled: Settled) -> Held:
    """What a generation leaves: `(prompt + generated)[:prefilled_until]`."""
    assert life.prompt is not None
    tokens = (life.prompt.tokens + settled.generated)[: settled.prefilled_until * TOKEN_BYTES]
    turn_end = life.prompt.turn_end
    beyond = life.prompt.tokens[len(tokens) : turn_end * TOKEN_BYTES]
    head = next(iter(life.prompt.boundaries), 0)
    return Held(life.root, tokens, settled.positions, turn_end=turn_end, beyond=beyond, head=head)


def _anywhere(layout: Layout | None) -> bool:
    return layout is not None and not layout.has_states and not layout.has_windows
