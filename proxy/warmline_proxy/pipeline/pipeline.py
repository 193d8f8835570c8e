"""Life of a request in eight steps: `Pipeline.handle` and `Pipeline._dispatch`, read top to bottom.

The other methods are their steps; DESIGN.md beside this file says which module does what.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

from aiohttp import web

from warmline_common.logging import set_request_id
from warmline_common.protocol import waits
from warmline_common.protocol.messages import HEADER_CACHE, HEADER_REQUEST, HEADER_STABILIZED
from warmline_proxy.api.base import Api, ApiCall, ResponseStart
from warmline_proxy.auth.principals import Client
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError, service_unavailable
from warmline_proxy.http.bodies import BodyReader
from warmline_proxy.http.body_fields import strip_unprintable
from warmline_proxy.http.request_head import HeaderNotices
from warmline_proxy.http.request_id import check_request_id
from warmline_proxy.metrics import ProxyMetrics, find_cancel_source
from warmline_proxy.models.admission import identify_caller
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.generator import Generator
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.pipeline.response_store import ResponseStore
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.planner import RESIDENT, RequestPlan
from warmline_proxy.request.deadlines import RequestTimeouts
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import CANCELLED, RequestLog
from warmline_proxy.response.choices import ChoiceRequest, split_choices
from warmline_proxy.response.fanout import Branch, Fanout
from warmline_proxy.response.relay import Relay, ResponseWriter
from warmline_proxy.upstream import client as upstream
from warmline_proxy.upstream.generation_stream import GenerationStream

log = logging.getLogger(__name__)

PLANS_MAX = 16  # in one dispatch
FOLLOW_PLANS_MAX = 8  # of these; a follower plans again each time that its leader fails
GONE_STARTS_MAX = 2  # starts whose resident was gone; then cold
PREVIOUS_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class PipelineSteps:
    """Collaborators of the pipeline, in the order of its steps."""

    models: ServedModels
    body_reader: BodyReader
    renderer: RemoteRenderer
    starter: Starter
    generator: Generator
    completion: Completion
    responses: ResponseStore


@dataclass(frozen=True)
class Pipeline:
    """Answers generation requests.  Event loop thread."""

    config: ProxyConfig
    registry: RequestRegistry
    metrics: ProxyMetrics
    steps: PipelineSteps

    @cached_property
    def _header_notices(self) -> HeaderNotices:
        return HeaderNotices()

    @cached_property
    def timeouts(self) -> RequestTimeouts:
        """Timeouts of requests without headers of their own."""
        config = self.config
        return RequestTimeouts(
            config.connect_timeout_s, config.queue_timeout_s, config.stall_timeout_s, config.total_timeout_s
        )

    async def handle(self, http_request: web.Request, api: Api, client: Client) -> web.StreamResponse:
        """Answer one request.  Raises ClientError for its headers, later failures are written as the response."""
        request, response = self._create_request(http_request, api, client)
        async with self._request_scope(request):  # at its end: 7. release and save, 8. record
            body = await self._admit(http_request, request)  # 1. a bounded queue
            choices = await self._normalize(http_request, api, request, body)  # 2. any model name, null is absent
            if len(choices) == 1:
                await upstream.retry_dispatch(self._dispatch, request)  # 3. to 6., again where the backend is lost
            else:
                await self._fan_out(request, response, choices)  # 3. to 6. for each choice
        assert response.http_response is not None
        return response.http_response

    async def compute(self, request: Request) -> None:
        """Compute, save and record a request in the background, without a client.

        It is in the registry, with its call, its backend and a ticket.  A failure goes to its sink.
        """
        async with self._request_scope(request):
            await upstream.retry_dispatch(self._dispatch, request)

    async def _dispatch(self, request: Request) -> None:
        """Dispatch once.  Raises BACKEND_LOST_ERRORS or StepFailedError, no content sent, where the backend is lost."""
        try:
            request.cancel_scope.raise_if_cancelled()
            await self._reset(request)
            await self._connect(request)
            request.log.dispatches += 1
            gone_count, refused_leaders = 0, set[str]()
            for number in range(PLANS_MAX):
                with request.log.measure_wait(waits.PROMPT):
                    await self.steps.renderer.render_request(request)  # 3. the prompt's token ids
                await self._enter_model(request, request.rendered.kv_bytes)
                with request.log.measure_wait(waits.RELEASE):
                    await self.registry.cancel_superseded(request)
                await self._acquire_ticket(request)
                if not (why_cold := self._find_cold_reason(request, gone_count)):
                    with request.log.measure_wait(waits.RELEASE):
                        await self.registry.wait_for_releases(request)
                    with request.log.measure_wait(waits.SAVE):
                        await self.registry.wait_for_saves(request, self.steps.starter.count_reusable_tokens)
                can_follow = not why_cold and number < FOLLOW_PLANS_MAX
                with self.registry.track_start(request) if can_follow else nullcontext():
                    plan = await self._plan(request, why_cold, refused_leaders if can_follow else None)  # 4. and 5.
                if not (generation := await self.steps.generator.start(request, plan)):  # 6. prefill and decode
                    refused_leaders.add(plan.leader_id)
                    gone_count += plan.source == RESIDENT  # what was restored can be restored again
                    continue
                try:
                    return await self._relay(request, generation)
                except upstream.LeaderLostError:
                    await self._reset(request)
        except upstream.BACKEND_LOST_ERRORS:
            request.backend.watchdog.recheck()
            raise
        raise upstream.UpstreamError("its start was lost again and again")

    async def _plan(self, request: Request, why_cold: str, refused_leaders: set[str] | None) -> RequestPlan:
        """Plan and restore; again once a leader that is itself being planned was sent to the backend, or has left.

        `refused_leaders`: requests that are not to be followed; None: it follows none.
        """
        while True:
            running = [] if refused_leaders is None else self.registry.find_followable(request, refused_leaders)
            request.load = self.registry.describe_load(request)
            plan = await self.steps.starter.start(request, running, why_cold)
            if not (plan.leader_id and await self._wait_for_leader(request, plan.leader_id)):
                return plan

    async def _wait_for_leader(self, request: Request, leader_id: str) -> bool:
        """Wait until a leader is sent to the backend; False where it was already, or has left."""
        request.clock.mark_waiting()
        try:
            with request.log.measure_wait(waits.LEADER):
                return await self.registry.wait_for_start(leader_id)
        finally:
            request.clock.mark_idle()

    async def _relay(self, request: Request, generation: GenerationStream) -> None:
        encoder = request.response.open_encoder(self._describe_start(request))
        await Relay(request.response, generation, encoder, request.log, request.record_first_token).run()

    def _describe_start(self, request: Request) -> ResponseStart:
        request_log, store = request.log, partial(self.steps.responses.store, request)
        reuse = request_log.plan.reuse if request_log.plan else 0
        model = request.model or request_log.model
        return ResponseStart(request_log.id, model, request_log.prompt_tokens, reuse, store)

    @asynccontextmanager
    async def _request_scope(self, request: Request) -> AsyncIterator[None]:
        """Scope of all work on a request: cancelled by its CancelScope, failures written, completed in any case."""
        try:
            async with request.cancel_scope:
                yield
            request.log.record_success()
        except (ClientError, upstream.UpstreamError) as error:
            if request.cancel_scope.reason:
                self._record_cancel(request, find_cancel_source(request.cancel_scope.reason))
            request.log.record_failure(error)
            self.steps.completion.release(request)  # first: writing to a client that does not read takes a while
            await request.response.fail(upstream.translate_upstream_error(error))
        except (asyncio.CancelledError, ConnectionResetError):
            if not request.log.outcome:
                self._record_cancel(request, "client")
                request.log.outcome = CANCELLED
            raise
        finally:
            request.log.total_s = request.log.elapsed_s()
            self.steps.completion.complete(request)

    def _record_cancel(self, request: Request, source: str) -> None:
        if not (request.branches or request.is_background):  # else each branch records its own
            self.metrics.record_cancel(request.status, source)

    def _create_request(self, http_request: web.Request, api: Api, client: Client) -> tuple[Request, ResponseWriter]:
        """Raises ClientError for wrong headers."""
        client_request_id = http_request.headers.get(HEADER_REQUEST, "")
        request_log = RequestLog(api.name, check_request_id(http_request), client_request_id, client.name)
        response = ResponseWriter(
            http_request,
            api,
            get_headers=lambda: build_response_headers(request),
            describe_start=lambda: self._describe_start(request),
            send_timeout_s=self.config.send_timeout_s,
            on_error=self.metrics.record_error,
            wait_until_stored=lambda: self.steps.responses.wait_until_written(request),
        )
        timeouts = self.timeouts.override_by_headers(http_request.headers)
        self._header_notices.log_typos(http_request.headers)
        request = self.registry.add(
            Request(request_log, response, timeouts, client=client, has_title=self.config.keeps_titles)
        )
        set_request_id(request.log.id)
        return request, response

    async def _admit(self, http_request: web.Request, request: Request) -> bytes:
        """Body of the request.  The queue is asked first: a request that it refuses costs no memory."""
        request.user_agent = http_request.headers.get("User-Agent", "")
        request.caller = identify_caller(request.client, http_request.headers, http_request.remote)
        self.steps.models.check_room(request.caller)
        request.is_admitted = True
        with request.log.measure_wait(waits.BODY):
            return await self.steps.body_reader.read(http_request, request.caller)

    async def _normalize(
        self, http_request: web.Request, api: Api, request: Request, body: bytes
    ) -> list[ChoiceRequest]:
        call = await api.read_call(body, http_request.headers)
        request.call, counts = self.steps.renderer.stabilize(call)
        request.response.call = request.call
        request.log.stabilization = ", ".join(f"{rule}={count}" for rule, count in sorted(counts.items()))
        if counts:
            log.info("request %s: stabilized in the head of its prompt: %s", request.log.id, request.log.stabilization)
        request.log.client_model = strip_unprintable(call.client_model or "")
        request.log.session_hint = call.session_hint
        backend = request.assigned_backend = self.steps.models.choose(call.client_model)
        request.names_model = self.steps.models.names_model(call.client_model)
        request.log.model = backend.name
        request.ticket = backend.admission.issue_ticket(request.caller)
        return split_choices(api.endpoint, request.call.fields)

    async def _fan_out(self, request: Request, response: ResponseWriter, choices: Sequence[ChoiceRequest]) -> None:
        """Answer with several generations, each a request with a ticket and a record of its own."""
        assert request.call is not None
        await self.registry.cancel_superseded(request)
        await upstream.retry_dispatch(self._check_prompts, request, request.call, choices)
        fanout = Fanout(response, choices, request.log.id, self.config.running_count_max)

        async def compute(branch: Branch) -> None:
            branch_request = self._create_branch_request(request, branch)
            async with self._request_scope(branch_request):
                await upstream.retry_dispatch(self._dispatch, branch_request)

        await fanout.run(compute, lambda: request.cancel_scope.reason)

    async def _check_prompts(self, request: Request, call: ApiCall, choices: Sequence[ChoiceRequest]) -> None:
        """Render all of several prompts, so that a wrong one is refused before another is computed.

        The model is left then: each choice enters it by itself, and may wait until it is loaded again.
        """
        prompts = {choice.prompt_index: choice.fields for choice in choices}
        if len(prompts) > 1:
            try:
                await self._connect(request)
                for fields in prompts.values():
                    await self.steps.renderer.render_call(request, replace(call, fields=fields))
            finally:
                request.backend.gate.leave(request)

    def _create_branch_request(self, request: Request, branch: Branch) -> Request:
        """Request for one choice; the first takes over the ticket of the whole, the others get extra ones."""
        name, now = f"{request.log.id}.{branch.index}", time.monotonic()
        branch_log = replace(
            request.log, id=name, client_request_id="", arrived_at=time.time(), arrived_monotonic=now, waits={}
        )
        branch_request = Request(branch_log, branch, request.timeouts, client=request.client, caller=request.caller)
        branch_request.call, branch_request.assigned_backend = branch.call, request.backend
        branch_request.names_model, branch_request.has_title = request.names_model, request.has_title
        branch_request.user_agent = request.user_agent
        branch_request.is_admitted, request.is_admitted = True, False
        self.registry.add(branch_request)
        set_request_id(branch_log.id)
        first_ticket = request.branches[0].ticket if request.branches else None
        branch_request.ticket, request.ticket = first_ticket.issue_extra() if first_ticket else request.ticket, None
        request.branches.append(branch_request)
        branch.cancel = branch_request.cancel
        return branch_request

    async def _reset(self, request: Request) -> None:
        if request.generation:
            await request.generation.wait_ended(PREVIOUS_END_TIMEOUT_S)
        request.reset()

    async def _enter_model(self, request: Request, kv_bytes: int = 0) -> None:
        """Wait until the model is loaded, with so much memory for KV; from then on it stays loaded for the request."""
        gate = request.backend.gate
        if gate.try_enter(request, kv_bytes):
            return
        request.clock.mark_waiting()
        try:
            with request.log.measure_wait(waits.LOAD):
                await gate.enter(request, kv_bytes, may_swap=request.names_model)
        finally:
            request.clock.mark_idle()

    async def _connect(self, request: Request) -> None:
        """Wait for the model, and for a backend that starts or restarts: in all dispatches together to the limit."""
        watchdog, gate = request.backend.watchdog, request.backend.gate
        if not (gate.is_open or watchdog.is_up):  # unloaded under the request
            gate.leave(request)
        await self._enter_model(request)
        limit_s, began = request.timeouts.connect_s, time.monotonic()
        left_s = max(0.0, limit_s - request.clock.connecting_s) if limit_s else None
        try:
            with request.log.measure_wait(waits.BACKEND):
                await watchdog.wait_until_up(left_s)
        except TimeoutError:
            reason = watchdog.down_reason
            message = f"The backend can't serve now: {reason} (waited {limit_s:g} s).  Try again soon."
            raise service_unavailable(message) from None
        finally:
            request.clock.connecting_s += time.monotonic() - began

    async def _acquire_ticket(self, request: Request) -> None:
        assert request.ticket is not None
        request.clock.mark_waiting()
        try:
            with request.log.measure_wait(waits.PLACE):
                await request.ticket.acquire()
        finally:
            request.clock.mark_idle()

    def _find_cold_reason(self, request: Request, gone_count: int) -> str:
        """Reason to reuse nothing; "" where there is none."""
        assert request.call is not None
        if self.config.reuse == "off":
            return "reuse is off"
        if request.prompt and not request.prompt.tokens_max:
            return "nothing is to be computed"
        if not request.call.can_reuse:
            return "the client asked for no reuse"
        return "its start was gone, twice" if gone_count >= GONE_STARTS_MAX else ""


def build_response_headers(request: Request) -> dict[str, str]:
    """X-Warmline headers; with several choices, the cache header of the first."""
    plan = (request.branches[0] if request.branches else request).log.plan
    cache = {HEADER_CACHE: f"{plan.source} {plan.reuse}"} if plan else {}
    stabilized = {HEADER_STABILIZED: request.log.stabilization} if request.log.stabilization else {}
    return {HEADER_REQUEST: request.log.id, **cache, **stabilized}
