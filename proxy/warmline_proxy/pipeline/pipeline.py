"""A request's life, in eight steps: `HotPath.answer`, read top to bottom.  The other methods are its steps."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from warmline_common.logging import set_request_id
from warmline_common.protocol.messages import HEADER_CACHE, HEADER_REQUEST, HEADER_STABILIZED, PromptReply
from warmline_common.protocol.tokens import BLOCK_TOKENS, namespace
from warmline_proxy.api.base import Api, ApiCall, ResponseStart
from warmline_proxy.auth.principals import Client
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError, request_cancelled, service_unavailable, translate_upstream_error
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.explain.prompt_head import PromptHeadCache, extract_head
from warmline_proxy.http.bodies import read_body
from warmline_proxy.http.body_fields import strip_unprintable
from warmline_proxy.http.request_id import check_request_id
from warmline_proxy.metrics import ProxyMetrics, find_cancel_source
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.progress import ProgressListener
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.planner import COLD, RequestPlan, RunningRequest, align_to_grid
from warmline_proxy.request.admission import AdmissionQueue, identify_caller
from warmline_proxy.request.deadlines import RequestTimeouts
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import RequestLog
from warmline_proxy.response.choices import ChoiceRequest, split_choices
from warmline_proxy.response.fanout import Branch, Fanout
from warmline_proxy.response.relay import ResponseWriter, relay_response
from warmline_proxy.response.repetition import RepetitionDetector
from warmline_proxy.tasks import BackgroundTasks, wait_for_events
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import (
    LeaderLostError,
    Upstream,
    UpstreamConnectionError,
    UpstreamError,
    UpstreamGoneError,
    UpstreamUnreachableError,
    retry_dispatch,
)
from warmline_proxy.upstream.generation_stream import GenerationStream
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

PLANS_MAX = 16  # in one dispatch
FOLLOW_PLANS_MAX = 8  # of these; whoever follows plans again each time that its leader leaves
GONE_STARTS_MAX = 2  # times that what was planned on is gone; then cold
WAIT_SHARED_TOKENS_MIN = BLOCK_TOKENS
SAVE_WAIT_S = 10.0
PREVIOUS_END_TIMEOUT_S = 10.0


class Pipeline:
    """Answers generations.  Its state belongs to the event loop."""

    def __init__(
        self,
        *,
        config: ProxyConfig,
        registry: RequestRegistry,
        upstream: Upstream,
        watchdog: Watchdog,
        backend_state: BackendState,
        renderer: RemoteRenderer,
        admission: AdmissionQueue,
        starter: Starter,
        divergence_recorder: DivergenceRecorder,
        saver: Saver,
        sampled_turns: SampledTurnCache,
        completion: Completion,
        background: BackgroundTasks,
        metrics: ProxyMetrics,
        prompt_heads: PromptHeadCache,
    ) -> None:
        self._config = config
        self._timeouts = RequestTimeouts(
            config.connect_timeout_s, config.queue_timeout_s, config.stall_timeout_s, config.total_timeout_s
        )
        self._registry = registry
        self._upstream = upstream
        self._watchdog = watchdog
        self._backend_state = backend_state
        self._renderer = renderer
        self._admission = admission
        self._starter = starter
        self._divergence_recorder = divergence_recorder
        self._saver = saver
        self._sampled_turns = sampled_turns
        self._completion = completion
        self._background = background
        self._metrics = metrics
        self._prompt_heads = prompt_heads

    async def handle(self, http_request: web.Request, api: Api, client: Client) -> web.StreamResponse:
        request, response = self._create_request(http_request, api, client)
        async with self._request_scope(request):
            body = await self._admit(http_request, request)  # 1. a bounded queue
            choices = self._normalize(http_request, api, request, body)  # 2. any model name, null is absent
            if len(choices) == 1:
                await retry_dispatch()(self._dispatch, request)  # 3. to 6., again where the backend is lost
            else:
                await self._fan_out(request, response, choices)  # the same for each of them
        assert response.http_response is not None
        return response.http_response

    @asynccontextmanager
    async def _request_scope(self, request: Request) -> AsyncIterator[None]:
        """Around all that is done for it: its alarm ends that, its failure is told, and in any case it is settled."""
        try:
            async with request.cancel_scope:
                yield
            request.log.record_success()
        except (ClientError, UpstreamError) as error:
            if request.cancel_scope.reason:
                self._record_cancel(request, find_cancel_source(request.cancel_scope.reason))
            request.log.record_failure(error)
            self._completion.release(request)  # first: a client that reads nothing hears nothing, for a while
            await request.response.fail(translate_upstream_error(error))
        except (asyncio.CancelledError, ConnectionResetError):
            if not request.log.outcome:
                self._record_cancel(request, "client")
            request.log.record_disconnect()
            raise
        finally:
            request.log.total_s = request.log.elapsed_s()
            self._completion.complete(request)  # 7. settle, 8. record

    def _record_cancel(self, request: Request, cause: str) -> None:
        """Somebody or something has ended it; of several choices, each has its own end."""
        if not request.branches:
            self._metrics.record_cancel(request.stage, cause)

    def _create_request(self, http_request: web.Request, api: Api, client: Client) -> tuple[Request, ResponseWriter]:
        """Raises ClientError where its headers are wrong."""
        given_id = http_request.headers.get(HEADER_REQUEST)
        request_log = RequestLog(api.name, check_request_id(http_request), given_id or "", client.name)
        response = ResponseWriter(
            http_request,
            api,
            lambda: build_response_headers(request),
            self._config.send_timeout_s,
            self._metrics.record_error,
        )
        request = self._registry.add(
            Request(request_log, response, self._timeouts.override_by_headers(http_request.headers), client=client)
        )
        set_request_id(request.log.id)
        return request, response

    async def _admit(self, http_request: web.Request, request: Request) -> bytes:
        """The place is asked for before the body is read: a full queue should cost no memory."""
        request.caller = identify_caller(request.client, http_request.headers, http_request.remote)
        request.ticket = self._admission.issue_ticket(request.caller)
        return await read_body(http_request, self._config.receive_timeout_s)

    def _normalize(self, http_request: web.Request, api: Api, request: Request, body: bytes) -> list[ChoiceRequest]:
        request.call = request.response.call = api.read_call(body, http_request.headers)
        self._stabilize(request, request.call)
        request.log.client_model = strip_unprintable(request.call.client_model or "")
        request.log.session_hint = request.call.session_hint
        return split_choices(api.endpoint, request.call.fields)

    def _stabilize(self, request: Request, call: ApiCall) -> None:
        """Rules that somebody asked for; what they did is told to everybody."""
        request.call, counts = self._renderer.stabilize(call)
        request.response.call = request.call
        request.log.stabilization = ", ".join(f"{rule}={count}" for rule, count in sorted(counts.items()))
        if counts:
            log.info("request %s: evened out at the top of its prompt: %s", request.log.id, request.log.stabilization)

    async def _fan_out(self, request: Request, response: ResponseWriter, choices: Sequence[ChoiceRequest]) -> None:
        """One answer of several generations, each with a life, a place and a record of its own."""
        assert request.call is not None
        await self._cancel_superseded(request)
        await retry_dispatch()(self._check_prompts, request, choices)
        fanout = Fanout(response, request.call, choices, request.log.id, self._config.running_count_max)

        async def compute(branch: Branch) -> None:
            branch_request = self._create_branch_request(request, branch)
            async with self._request_scope(branch_request):
                await retry_dispatch()(self._dispatch, branch_request)

        await fanout.run(compute, lambda: request.cancel_scope.reason)

    async def _check_prompts(self, request: Request, choices: Sequence[ChoiceRequest]) -> None:
        """Where there are several prompts: what is wrong with any of them is refused before one is computed."""
        prompts = {choice.prompt_index: choice.fields for choice in choices}
        if len(prompts) < 2 or request.call is None:
            return
        await self._connect(request)
        for fields in prompts.values():
            await self._render_prompt(request, replace(request.call, fields=fields))

    def _create_branch_request(self, request: Request, branch: Branch) -> Request:
        """A life for one of its choices; the first has its place."""
        request_log = replace(
            request.log,
            id=f"{request.log.id}.{branch.index}",
            client_request_id="",
            arrived_at=time.time(),
            arrived_monotonic=time.monotonic(),
        )
        branch_request = self._registry.add(
            Request(
                request_log, branch, request.timeouts, client=request.client, caller=request.caller, call=branch.call
            )
        )
        set_request_id(branch_request.log.id)
        first_ticket = request.branches[0].ticket if request.branches else None
        branch_request.ticket, request.ticket = first_ticket.issue_extra() if first_ticket else request.ticket, None
        request.branches.append(branch_request)
        branch.cancel = branch_request.cancel
        return branch_request

    async def _dispatch(self, request: Request) -> None:
        """One try.  Raises Unreachable, Broken or Discarded, with no content sent, where the backend was lost."""
        try:
            request.cancel_scope.raise_if_cancelled()
            await self._reset(request)
            await self._connect(request)
            request.log.dispatches += 1
            gone_count, refused_leaders = 0, set[str]()  # residents that were, and requests that can't be followed
            for number in range(PLANS_MAX):
                await self._render(request)  # 3. the prompt's token ids; what is wrong with it is refused here
                await self._cancel_superseded(request)
                await self._acquire_ticket(request)
                running = self._registry.find_followable(request, refused_leaders) if number < FOLLOW_PLANS_MAX else []
                plan = await self._start(request, running, warm=gone_count < GONE_STARTS_MAX)  # 4. plan, 5. restore
                if not await self._generate(request, plan):
                    refused_leaders.add(plan.leader_id)
                    gone_count += not plan.leader_id
                    continue
                assert request.generation is not None
                try:
                    # 6. bytes flow as they come
                    return await relay_response(
                        request.response, request.generation, _make_response_start(request, plan), request.log
                    )
                except LeaderLostError:
                    await self._reset(request)
        except (UpstreamUnreachableError, UpstreamConnectionError):
            self._watchdog.recheck()
            raise
        raise UpstreamError("what it was to start from was lost again and again")

    async def _connect(self, request: Request) -> None:
        """Wait for a backend that starts, or is started again; in all dispatches together no longer than the limit."""
        limit_s, began = request.timeouts.connect_s, time.monotonic()
        try:
            await self._watchdog.wait_until_up(max(0.0, limit_s - request.clock.connecting_s) if limit_s else None)
        except TimeoutError:
            message = (
                f"The backend can't serve now: {self._watchdog.down_reason} (waited {limit_s:g} s).  Try again soon."
            )
            raise service_unavailable(message) from None
        finally:
            request.clock.connecting_s += time.monotonic() - began

    async def _reset(self, request: Request) -> None:
        if request.generation:
            await request.generation.wait_ended(PREVIOUS_END_TIMEOUT_S)
        request.reset()

    async def _render(self, request: Request) -> None:
        assert request.call is not None
        request.prompt = await self._render_prompt(request, request.call)
        await self._backend_state.sync_residents(request.prompt)
        status = await self._backend_state.status()
        request.model, request.layout = status.model, status.layout
        self._check_reuse_mode(request)
        request.root = request.log.root = namespace(request.prompt.fingerprint, request.client.tenant)
        request.log.prompt_tokens = request.prompt_shape().tokens

    async def _render_prompt(self, request: Request, call: ApiCall) -> PromptReply:
        return await self._renderer.render(
            call, request.client.tenant, request.log.id, request.timeouts.stall_s or None
        )

    def _check_reuse_mode(self, request: Request) -> None:
        """Each process is told its mode on its own."""
        if self._config.reuse == "exact" and request.layout and not request.layout.grid:
            message = "The proxy runs with reuse = exact and its backend does not: start both with the same."
            raise service_unavailable(message, "mode_mismatch")

    async def _acquire_ticket(self, request: Request) -> None:
        assert request.ticket is not None
        began_s = request.log.elapsed_s()
        request.clock.mark_waiting()
        try:
            await request.ticket.acquire()
        finally:
            request.clock.mark_idle()
            request.log.queue_s += request.log.elapsed_s() - began_s

    async def _start(self, request: Request, running: Sequence[RunningRequest], warm: bool) -> RequestPlan:
        if self._config.reuse == "off":
            plan = replace(self._starter.plan_cold(request, "reuse is off"), checkpoint_positions=())
        elif request.prompt and not request.prompt.tokens_max:
            plan = RequestPlan(COLD, 0, "nothing is to be computed")
        elif request.call and not request.call.can_reuse:
            plan = self._starter.plan_cold(request, "the client asked for no reuse")
        elif not warm:
            plan = self._starter.plan_cold(request, "what it was to start from was gone, twice")
        else:
            await self._wait_for_releases(request)
            await self._wait_for_saves(request)
            plan = await self._starter.start(request, running)
        request.log.plan = plan = self._add_cause(request, plan)
        log.debug("%s", format_plan(plan, request.log.prompt_tokens))
        return plan

    def _add_cause(self, request: Request, plan: RequestPlan) -> RequestPlan:
        """Where a prompt parts from all others in its head, what of that its client changes for nothing."""
        assert request.call is not None and request.prompt is not None
        if plan.diverges_at is None or plan.diverges_at >= next(iter(request.prompt.boundaries), 0):
            return plan
        cause = self._prompt_heads.explain_change(request.root, extract_head(request.call.fields))
        return replace(plan, why_not_warmer=f"{plan.why_not_warmer}: {cause}") if cause else plan

    async def _cancel_superseded(self, request: Request) -> None:
        """Its client has given up an earlier try whose connection is not known to be dead yet.

        Where several could be meant, they may be several samples of one prompt: none is ended.
        """
        earlier = [each for each in self._registry if each.release_task is None and each.is_retried_by(request)]
        if len(earlier) == 1:
            earlier[0].cancel(
                request_cancelled(
                    "The client has sent this request again; this try is given up.", cancel_source="superseded"
                )
            )
            await earlier[0].released.wait()

    async def _wait_for_releases(self, request: Request) -> None:
        """Who gave up and asks again at once goes on from what the first try has computed: a step's time away."""
        releasing = [
            each
            for each in self._registry
            if each.is_releasing and request.count_shared_tokens(each) >= WAIT_SHARED_TOKENS_MIN
        ]
        await asyncio.gather(*(leaver.released.wait() for leaver in releasing))

    async def _wait_for_saves(self, request: Request) -> None:
        """What is just being saved can be restored in a moment, at positions at which its resident can't go on."""
        saving = {
            other: request.count_shared_tokens(other)
            for other in self._registry
            if other is not request and other.log.generation_result
        }
        if not saving:
            return
        reusable_tokens, grid = (
            self._starter.count_reusable_tokens(request) + WAIT_SHARED_TOKENS_MIN,
            request.layout.grid if request.layout else 0,
        )
        saved_events = (
            other.saved for other, shared in saving.items() if align_to_grid(shared, grid) >= reusable_tokens
        )
        await wait_for_events(saved_events, SAVE_WAIT_S)

    async def _generate(self, request: Request, plan: RequestPlan) -> bool:
        """False where what was planned on is gone from the backend's memory: to be planned again."""
        assert request.call is not None and request.prompt is not None
        request_id = request.log.id
        if not plan.copy_resident:
            self._backend_state.resident_view.remove(plan.resident)
        request.sent, request.stored_tokens = True, plan.reuse
        request.listener = ProgressListener(
            request,
            self._backend_state,
            self._saver,
            self._sampled_turns,
            self._background,
            self._config.partial_save_tokens,
            RepetitionDetector() if self._config.garbage_guard == "observe" else None,
        )
        request.clock.mark_waiting()
        try:
            stream = await self._upstream.generate(
                request.call.api.endpoint, request_id, request.prompt.prompt_id, plan, root=request.root
            )
        except UpstreamGoneError as error:
            log.info("request %s is planned again: %s", request_id, error)
            await self._backend_state.refresh()
            return False
        request.generation = GenerationStream(stream, request_id, self._background, request.listener)
        self._prompt_heads.add(
            request.root, extract_head(request.call.fields)
        )  # now that the engine has something to do
        self._divergence_recorder.start_analysis(request)
        return True


def format_plan(plan: RequestPlan, prompt_tokens: int) -> str:
    """A plan in numbers, for the log."""
    how = (
        f"resident {plan.resident}{' kept' * plan.copy_resident}"
        if plan.resident
        else f"follows {plan.leader_id or 'nobody'}"
    )
    files = (
        f"{len(plan.chain)} segments, checkpoints at {', '.join(map(str, plan.checkpoint_positions)) or 'no position'}"
    )
    return f"planned: {plan.source} {plan.reuse} of {prompt_tokens} tokens, {how}, {files}; {plan.why_not_warmer}"


def _make_response_start(request: Request, plan: RequestPlan) -> ResponseStart:
    return ResponseStart(request.log.id, request.model, request.log.prompt_tokens, plan.reuse)


def build_response_headers(request: Request) -> dict[str, str]:
    """Of several choices, the first one's start is told."""
    request_log, start_log = request.log, request.branches[0].log if request.branches else request.log
    cache = {HEADER_CACHE: start_log.format_cache_header()} if start_log.plan else {}
    stabilized = {HEADER_STABILIZED: request_log.stabilization} if request_log.stabilization else {}
    return {HEADER_REQUEST: request_log.id, **cache, **stabilized}
