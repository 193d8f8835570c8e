"""One request between its arrival and its last byte on disk."""

import asyncio
from dataclasses import dataclass, field

from warmline_common.protocol.messages import GenerationResult, KvLayout, PromptReply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.api.base import ApiCall
from warmline_proxy.auth.principals import ANONYMOUS, Client
from warmline_proxy.errors import ClientError
from warmline_proxy.planner import PromptShape, RunningRequest
from warmline_proxy.request.admission import Ticket
from warmline_proxy.request.deadlines import CancelScope, Clock, RequestTimeouts
from warmline_proxy.request_log import RequestLog
from warmline_proxy.response.relay import ResponseSink
from warmline_proxy.upstream.generation_stream import GenerationListener, GenerationStream
from warmline_proxy.upstream.resident_view import ResidentEntry

STAGES = ("arriving", "waiting", "restoring", "prefilling", "answering")


@dataclass(eq=False)
class Request:
    """Filled in step by step by the hot path; owned by the event loop."""

    log: RequestLog
    response: ResponseSink
    timeouts: RequestTimeouts
    clock: Clock = field(default_factory=Clock)
    cancel_scope: CancelScope = field(default_factory=CancelScope)
    client: Client = ANONYMOUS  # whose it is
    caller: str = ""  # whom it counts for
    ticket: Ticket | None = None  # its place; a request of several choices has given it to the first of them
    branches: list["Request"] = field(default_factory=list)  # its choices that have begun, where it has several
    call: ApiCall | None = None
    model: str = ""  # the served model's name
    layout: KvLayout | None = None
    prompt: PromptReply | None = None
    root: bytes = b""  # namespace of fingerprint and tenant
    restore_task: asyncio.Task[object] | None = None
    sent: bool = False  # a generation was asked for: the backend may hold something
    started: bool = False  # the engine has begun with it
    prefilled_tokens: int = 0  # prompt tokens that have rows
    stored_tokens: int = 0  # of these, what needs no saving while it runs: reused, or saved on the way
    content_chunks: int = 0  # pieces of its answer so far, about one a token
    generation: GenerationStream | None = None
    listener: GenerationListener | None = None  # of the generation
    divergence_tokens: bytes = b""  # packed tokens of the resident that its prompt differs from, from there on
    divergence_task: asyncio.Task[None] | None = None  # into its trace's parting
    suspect: bool = False  # it may have started from what was found wrong since: nothing of it is kept
    purged: bool = False  # what it goes on from was purged while it ran: nothing of it is kept, on any try
    response_done: asyncio.Event = field(default_factory=asyncio.Event)  # the client has its answer, or has left
    release_task: asyncio.Task[None] | None = None  # has the engine let go; nothing more is wanted of it
    is_detached: bool = False  # its client has left, its prefill goes on to be ready for the next try
    released: asyncio.Event = field(default_factory=asyncio.Event)  # the engine works on it no more, or never did
    saved: asyncio.Event = field(default_factory=asyncio.Event)  # on disk, or not going to be

    def reset(self) -> None:
        """Before a try: whatever an earlier one made is gone."""
        self.sent = self.started = False
        self.prefilled_tokens = self.stored_tokens = self.content_chunks = 0
        self.generation = self.listener = self.restore_task = None
        self.released = asyncio.Event() if self.released.is_set() else self.released
        self.suspect = False
        self.log.generation_result = self.log.divergence = None
        self.divergence_tokens, self.divergence_task = b"", None
        self.log.collapse = ""
        self.log.ttft_s = 0.0
        self.clock.mark_idle()

    @property
    def is_cacheable(self) -> bool:
        """Whether what it computes may be used by others, and stored."""
        return not (self.suspect or self.purged)

    def cancel(self, reason: ClientError) -> None:
        """End it from outside, unless its answer is complete."""
        if not self.response.is_closed:
            self.cancel_scope.cancel(reason)

    @property
    def stage(self) -> str:
        """How far it has come, before its end: one of STAGES."""
        if self.branches:  # as far as the furthest of its choices
            return max((part.stage for part in self.branches), key=STAGES.index)
        if self.log.ttft_s:
            return "answering"
        if self.generation is not None:
            return "prefilling" if self.started else "waiting"
        if self.restore_task is not None:
            return "restoring"
        return "waiting" if self.prompt is not None else "arriving"

    @property
    def is_saving(self) -> bool:
        """Computed, but not yet on disk."""
        return self.response_done.is_set() or (self.generation is not None and self.generation.is_over)

    @property
    def is_releasing(self) -> bool:
        """The client is gone, the engine may still be at work; what it has computed is not yet a resident."""
        return self.release_task is not None and not self.is_detached and not self.released.is_set()

    @property
    def is_computing(self) -> bool:
        """At the backend, and wanted there: what it computes can be shared."""
        is_at_backend = (
            self.generation is not None and not self.generation.is_over and self.log.generation_result is None
        )
        return is_at_backend and (self.is_detached or self.release_task is None)

    def count_shared_tokens(self, other: "Request") -> int:
        """How many leading tokens of this prompt the other request has computed, or is to compute."""
        if self.prompt is None or other.prompt is None or self.root != other.root:
            return 0
        other_tokens = (
            other.prompt.tokens
            if (settled := other.log.generation_result) is None
            else resident_after_generation(other, settled).tokens
        )
        return count_common_tokens(self.prompt.tokens, other_tokens)

    def as_running(self, other: "Request") -> RunningRequest:
        """This request as one that the other could follow."""
        return RunningRequest(
            request_id=self.log.id,
            common_tokens=other.count_shared_tokens(self),
            tokens=self.prompt_shape().tokens,
            prefilled=max(self.prefilled_tokens, self._initial_tokens),
            started=self.started,
        )

    @property
    def _initial_tokens(self) -> int:
        """What it had when it was sent; a follower has nothing before its leader has come so far."""
        return self.stored_tokens if self.log.plan and not self.log.plan.leader_id else 0

    def is_retried_by(self, other: "Request") -> bool:
        """The other is the same client's next try: what it says is its session, and its count, leave no doubt."""
        if not (self.call and other.call):
            return False
        return (
            bool(self.call.session_hint)
            and (self.call.session_hint, self.caller) == (other.call.session_hint, other.caller)
            and self.call.retry_count < other.call.retry_count
            and (self.root, self.call.fields) == (other.root, other.call.fields)
        )

    def prompt_shape(self) -> PromptShape:
        assert self.prompt is not None
        tokens = len(self.prompt.tokens) // TOKEN_BYTES
        return PromptShape(tokens, self.prompt.boundaries, self.prompt.turn_end, self.prompt.messages)


def resident_after_restore(request: Request, position: int) -> ResidentEntry:
    """What a restore to `position` gives."""
    assert request.prompt is not None
    positions = () if _is_restorable_anywhere(request.layout) else (position,)
    return ResidentEntry(request.root, request.prompt.tokens[: position * TOKEN_BYTES], positions)


def resident_after_generation(request: Request, settled: GenerationResult) -> ResidentEntry:
    """What a generation leaves: `(prompt + generated)[:prefilled_until]`."""
    assert request.prompt is not None
    tokens = (request.prompt.tokens + settled.generated)[: settled.prefilled_until * TOKEN_BYTES]
    turn_end = request.prompt.turn_end
    beyond = request.prompt.tokens[len(tokens) : turn_end * TOKEN_BYTES]
    head = next(iter(request.prompt.boundaries), 0)
    return ResidentEntry(request.root, tokens, settled.positions, turn_end=turn_end, turn_tail=beyond, head_end=head)


def _is_restorable_anywhere(layout: KvLayout | None) -> bool:
    return layout is not None and not layout.has_states and not layout.has_windows
