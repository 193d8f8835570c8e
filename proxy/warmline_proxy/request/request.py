"""State of one request, from its arrival until its tail is on disk.  Event loop thread."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from warmline_common.protocol.messages import GenerationResult, KvLayout, PromptReply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.api.base import ApiCall
from warmline_proxy.auth.principals import ANONYMOUS, Client
from warmline_proxy.errors import ClientError
from warmline_proxy.estimate.costs import EngineLoad, PrefillLeft
from warmline_proxy.models.admission import Ticket
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.gate import GateWait
from warmline_proxy.planner import PromptShape, RunningRequest, has_fixed_positions
from warmline_proxy.request.deadlines import CancelScope, Clock, RequestTimeouts
from warmline_proxy.request.title import make_title
from warmline_proxy.request_log import RequestLog
from warmline_proxy.response.relay import ResponseSink
from warmline_proxy.upstream.generation_stream import GenerationListener, GenerationStream
from warmline_proxy.upstream.resident_view import ResidentEntry


class RequestStatus(StrEnum):
    """Stages of a request in their order; the values are `phase` in GET /warmline/status."""

    ARRIVING = "arriving"
    WAITING = "waiting"  # in the proxy's queue, or in the engine's
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    ANSWERING = "answering"  # the first token is out
    ENDING = "ending"  # the response is over, the engine may still be at work
    SAVING = "settling"


STAGES = tuple(RequestStatus)


@dataclass(eq=False)
class Request:
    """State of one request, filled in step by step by the pipeline; owned by the event loop."""

    log: RequestLog
    response: ResponseSink
    timeouts: RequestTimeouts
    clock: Clock = field(default_factory=Clock)
    cancel_scope: CancelScope = field(default_factory=CancelScope)
    client: Client = ANONYMOUS
    caller: str = ""  # admission is fair between callers
    user_agent: str = ""  # the client's header; unauthenticated
    is_background: bool = False  # nobody waits for it: it ends when another request arrives, and is not recorded
    is_admitted: bool = False  # the queue had room: it is recorded, unless its choices are
    ticket: Ticket | None = None  # a request of several choices has handed it to its first branch
    branches: list["Request"] = field(default_factory=list)  # one a choice, where several were asked for
    call: ApiCall | None = None
    has_title: bool = False  # titles are kept: setting `titles`
    assigned_backend: Backend | None = None  # of the model that the call names
    names_model: bool = True  # the call names a configured model, for which others may be unloaded
    model: str = ""  # the served model's name
    layout: KvLayout | None = None
    prompt: PromptReply | None = None
    root: bytes = b""  # namespace of fingerprint and tenant
    load: EngineLoad = EngineLoad()  # noqa: RUF009  frozen; when it was planned
    restore_task: asyncio.Task[object] | None = None
    sent: bool = False  # a generation was asked for: the backend may hold something
    is_dispatching: bool = False  # on its way to the backend, which has not answered
    started: bool = False  # the engine has begun with the generation
    prefilled_tokens: int = 0  # prompt tokens that have rows
    stored_tokens: int = 0  # of these, reused or saved already: need no saving while the request runs
    content_chunks: int = 0  # pieces of the answer so far, about one a token
    generation: GenerationStream | None = None
    listener: GenerationListener | None = None  # of the generation
    divergence_tokens: bytes = b""  # packed tokens of the resident that the prompt differs from, from there on
    divergence_task: asyncio.Task[None] | None = None  # analyzes the divergence for the log
    suspect: bool = False  # may have started from rows found wrong since: nothing computed is saved
    purged: bool = False  # the reused conversation was purged meanwhile: nothing computed is saved, on any try
    stored_response: tuple[str, str] | None = None  # owner and id, where it is stored (OpenAI's Responses)
    response_write: asyncio.Future[None] | None = None  # ends once that is written, or could not be
    is_response_deleted: bool = False  # the client has deleted the response before its end
    response_done: asyncio.Event = field(default_factory=asyncio.Event)  # the client has its answer, or has left
    release_task: asyncio.Task[None] | None = None  # makes the engine release the request
    is_detached: bool = False  # the client has left, the prefill goes on for its next try
    released: asyncio.Event = field(default_factory=asyncio.Event)  # the engine works on it no more, or never did
    saved: asyncio.Event = field(default_factory=asyncio.Event)  # on disk, or not going to be
    _status: RequestStatus = field(default=RequestStatus.ARRIVING, init=False)
    _stage_s: dict[RequestStatus, float] = field(default_factory=dict, init=False)  # seconds in each, until `_stage_at`
    _stage_at: float = field(default_factory=time.monotonic, init=False)  # time of the last change

    @cached_property
    def _title(self) -> str:
        assert self.call is not None
        return make_title(self.call.fields)

    @property
    def title(self) -> str:
        """Title of its conversation; "" where titles are not kept, or before its body is read."""
        return self._title if self.has_title and self.call else ""

    @property
    def model_wait(self) -> GateWait | None:
        """Its wait for the model to be loaded; None while it does not wait for that."""
        return self.assigned_backend.gate.waiting.get(self) if self.assigned_backend else None

    @property
    def status(self) -> RequestStatus:
        """Present stage; with several choices that of the furthest, until the response is over."""
        if self.branches and not self.response_done.is_set():
            furthest = max((branch.status for branch in self.branches), key=STAGES.index)
            return min(furthest, RequestStatus.ANSWERING, key=STAGES.index)
        return self._status

    def advance(self, status: RequestStatus) -> None:
        """Enter a stage.  Once the response is over only SAVING follows, when the engine has released the request."""
        self._stage_s, self._stage_at = self.measure_stages(), time.monotonic()
        if not self.response_done.is_set():
            self._status = status
        else:
            self._status = RequestStatus.SAVING if self.released.is_set() else RequestStatus.ENDING

    def measure_stages(self) -> dict[RequestStatus, float]:
        """Seconds in each stage so far, those of earlier dispatches included."""
        present_s = self._stage_s.get(self._status, 0.0) + time.monotonic() - self._stage_at
        return {**self._stage_s, self._status: present_s}

    def record_first_token(self) -> None:
        self.log.ttft_s = self.log.ttft_s or self.log.elapsed_s()
        self.advance(RequestStatus.ANSWERING)

    def mark_response_done(self) -> None:
        self.response_done.set()
        self.advance(RequestStatus.ENDING)

    def mark_released(self) -> None:
        """The engine no longer works on the request."""
        self.released.set()
        self.advance(self._status)

    def reset(self) -> None:
        """Prepare for another dispatch: what an earlier one left is dropped."""
        self.log.record_lost_dispatch()
        self.sent = self.is_dispatching = self.started = self.suspect = False
        self.prefilled_tokens = self.stored_tokens = self.content_chunks = 0
        self.generation = self.listener = self.restore_task = None
        self.released = asyncio.Event() if self.released.is_set() else self.released
        self.log.generation_result = self.log.divergence = None
        self.divergence_tokens, self.divergence_task = b"", None
        self.log.collapse, self.log.ttft_s = "", 0.0
        self.clock.reset()
        self.advance(RequestStatus.WAITING if self.prompt else RequestStatus.ARRIVING)

    @property
    def is_cacheable(self) -> bool:
        """True if computed rows may be stored, and reused by others."""
        return not (self.suspect or self.purged)

    def cancel(self, reason: ClientError) -> None:
        """End the request from outside, unless its answer is complete."""
        if not self.response.is_closed:
            self.cancel_scope.cancel(reason)

    @property
    def is_saving(self) -> bool:
        """Computed, but not yet on disk."""
        return self.response_done.is_set() or (self.generation is not None and self.generation.is_over)

    @property
    def is_releasing(self) -> bool:
        """The client has left, the engine may still be at work: the computed rows are not yet a resident."""
        return self.release_task is not None and not self.is_detached and not self.released.is_set()

    @property
    def is_computing(self) -> bool:
        """At the backend and not being ended."""
        if self.generation is None or self.generation.is_over or self.log.generation_result is not None:
            return False
        return self.is_detached or self.release_task is None

    @property
    def can_lead(self) -> bool:
        """True if others can share its prefill: it is at the backend, or on its way there."""
        return (self.is_computing or (self.is_dispatching and self.release_task is None)) and self.is_cacheable

    @property
    def loads_engine(self) -> bool:
        """True if it is computed, or will be: it is planned."""
        is_coming = self.generation is None and self.release_task is None and not self.response_done.is_set()
        return self.log.plan is not None and (self.is_computing or is_coming)

    def shares_backend(self, other: "Request") -> bool:
        return self.assigned_backend is other.assigned_backend

    def count_shared_tokens(self, other: "Request") -> int:
        """Leading tokens of this prompt that the other request has computed, or will."""
        if self.prompt is None or other.prompt is None or self.root != other.root or not self.shares_backend(other):
            return 0
        mine, theirs, result = self.prompt.tokens, other.prompt.tokens, other.log.generation_result
        common = count_common_tokens(mine, theirs)
        if result is None:
            return common
        if common * TOKEN_BYTES == len(theirs):
            common += count_common_tokens(mine[len(theirs) :], result.generated)
        return min(common, result.prefilled_until)

    def as_running(self, other: "Request") -> RunningRequest:
        """This request as a leader that the other could follow."""
        is_follower = self.log.plan is None or self.log.plan.leader_id != ""  # reuses none before its leader has them
        prefilled = max(self.prefilled_tokens, 0 if is_follower else self.stored_tokens)
        common_tokens, tokens = other.count_shared_tokens(self), self.prompt_shape().tokens
        is_dispatched = self.is_dispatching or self.generation is not None
        return RunningRequest(self.log.id, common_tokens, tokens, prefilled, self.started, is_dispatched)

    def describe_prefill_left(self) -> PrefillLeft:
        reuse = self.log.plan.reuse if self.log.plan else 0
        return PrefillLeft(self.log.id, max(self.prefilled_tokens, reuse), self.log.prompt_tokens - 1)

    def is_retried_by(self, other: "Request") -> bool:
        """True if the other is the same client's next try: same session and body, and a higher retry count."""
        if not (self.call and other.call and self.call.session_hint and self.call.retry_count < other.call.retry_count):
            return False
        mine = (self.call.session_hint, self.caller, self.root, self.call.fields)
        return mine == (other.call.session_hint, other.caller, other.root, other.call.fields)

    @property
    def backend(self) -> Backend:
        """Backend that serves the request, from the choice of its model on."""
        assert self.assigned_backend is not None
        return self.assigned_backend

    @property
    def rendered(self) -> PromptReply:
        """The prompt, from the rendering on."""
        assert self.prompt is not None
        return self.prompt

    def prompt_shape(self) -> PromptShape:
        prompt = self.rendered
        return PromptShape(len(prompt.tokens) // TOKEN_BYTES, prompt.boundaries, prompt.turn_end, prompt.messages)


def resident_after_restore(request: Request, position: int) -> ResidentEntry:
    """Resident that a restore to `position` gives."""
    positions = (position,) if request.layout is None or has_fixed_positions(request.layout) else ()
    return ResidentEntry(request.root, request.rendered.tokens[: position * TOKEN_BYTES], positions)


def resident_after_generation(request: Request, result: GenerationResult) -> ResidentEntry:
    """Resident that a generation leaves: `(prompt + generated)[:prefilled_until]`."""
    prompt = request.rendered
    tokens = (prompt.tokens + result.generated)[: result.prefilled_until * TOKEN_BYTES]
    tail = prompt.tokens[len(tokens) : prompt.turn_end * TOKEN_BYTES]
    head_end = next(iter(prompt.boundaries), 0)
    return ResidentEntry(request.root, tokens, result.positions, prompt.turn_end, tail, head_end=head_end)
