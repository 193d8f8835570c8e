"""A request's life, in eight steps: `HotPath.answer`, read top to bottom.  The other methods are its steps."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from warmline_common.logging import name_request
from warmline_common.protocol.messages import HEADER_CACHE, HEADER_REQUEST, HEADER_STABILIZED, PromptReply
from warmline_common.protocol.tokens import BLOCK_TOKENS, namespace
from warmline_proxy.api.base import Api, Begun, Call
from warmline_proxy.auth.principals import Client
from warmline_proxy.config import Config
from warmline_proxy.errors import ClientError, cancelled, from_upstream, unavailable
from warmline_proxy.explain.divergence import Partings
from warmline_proxy.explain.prompt_head import Heads, head_of
from warmline_proxy.http.bodies import read_body
from warmline_proxy.http.body_fields import printable
from warmline_proxy.http.request_id import checked_id_of
from warmline_proxy.metrics import Metrics, ended_by
from warmline_proxy.pipeline.completion import Ending
from warmline_proxy.pipeline.progress import Hearing
from warmline_proxy.pipeline.rendering import Renderer
from warmline_proxy.pipeline.sampled_turns import Turns
from warmline_proxy.pipeline.saver import Settler
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.planner import COLD, Plan, Running, on_grid
from warmline_proxy.request.admission import Admission, caller_of
from warmline_proxy.request.deadlines import Limits
from warmline_proxy.request.registry import Lives
from warmline_proxy.request.request import Life
from warmline_proxy.request_log import Trace
from warmline_proxy.response.choices import Choice, split
from warmline_proxy.response.fanout import Chorus, Part
from warmline_proxy.response.relay import Answer, relay
from warmline_proxy.response.repetition import Guard
from warmline_proxy.tasks import Background, wait_for_events
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Broken, Gone, Leaderless, Unreachable, Upstream, UpstreamError, dispatching
from warmline_proxy.upstream.generation_stream import Generation
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

PLANS_MAX = 16  # in one dispatch
FOLLOWS_MAX = 8  # of these; whoever follows plans again each time that its leader leaves
GONE_MAX = 2  # times that what was planned on is gone; then cold
WORTH_WAITING_TOKENS = BLOCK_TOKENS
SAVE_WAIT_S = 10.0
PREVIOUS_END_TIMEOUT_S = 10.0


class HotPath:
    """Answers generations.  Its state belongs to the event loop."""

    def __init__(
        self,
        *,
        config: Config,
        lives: Lives,
        upstream: Upstream,
        watchdog: Watchdog,
        knowledge: Knowledge,
        renderer: Renderer,
        admission: Admission,
        starter: Starter,
        partings: Partings,
        settler: Settler,
        turns: Turns,
        ending: Ending,
        background: Background,
        metrics: Metrics,
        heads: Heads,
    ) -> None:
        self._config = config
        self._limits = Limits(
            config.connect_timeout_s, config.queue_timeout_s, config.stall_timeout_s, config.total_timeout_s
        )
        self._lives = lives
        self._upstream = upstream
        self._watchdog = watchdog
        self._knowledge = knowledge
        self._renderer = renderer
        self._admission = admission
        self._starter = starter
        self._partings = partings
        self._settler = settler
        self._turns = turns
        self._ending = ending
        self._background = background
        self._metrics = metrics
        self._heads = heads

    async def answer(self, request: web.Request, api: Api, client: Client) -> web.StreamResponse:
        life, answer = self._begin(request, api, client)
        async with self._living(life):
            body = await self._admit(request, life)  # 1. a bounded queue
            choices = self._normalize(request, api, life, body)  # 2. any model name, null is absent
            if len(choices) == 1:
                await dispatching()(self._dispatch, life)  # 3. to 6., again where the backend is lost
            else:
                await self._sing(life, answer, choices)  # the same for each of them
        assert answer.response is not None
        return answer.response

    @asynccontextmanager
    async def _living(self, life: Life) -> AsyncIterator[None]:
        """Around all that is done for it: its alarm ends that, its failure is told, and in any case it is settled."""
        try:
            async with life.alarm:
                yield
            life.trace.answered()
        except (ClientError, UpstreamError) as error:
            if life.alarm.reason:
                self._note_end(life, ended_by(life.alarm.reason))
            life.trace.failed(error)
            self._ending.let_go(life)  # first: a client that reads nothing hears nothing, for a while
            await life.answer.fail(from_upstream(error))
        except (asyncio.CancelledError, ConnectionResetError):
            if not life.trace.outcome:
                self._note_end(life, "client")
            life.trace.left()
            raise
        finally:
            life.trace.total_s = life.trace.elapsed_s()
            self._ending.begin(life)  # 7. settle, 8. record

    def _note_end(self, life: Life, by: str) -> None:
        """Somebody or something has ended it; of several choices, each has its own end."""
        if not life.parts:
            self._metrics.cancelled(life.stage, by)

    def _begin(self, request: web.Request, api: Api, client: Client) -> tuple[Life, Answer]:
        """Raises ClientError where its headers are wrong."""
        given_id = request.headers.get(HEADER_REQUEST)
        trace = Trace(api.name, checked_id_of(request), given_id or "", client.name)
        answer = Answer(request, api, lambda: headers_of(life), self._config.send_timeout_s, self._metrics.refused)
        life = self._lives.add(Life(trace, answer, self._limits.overridden(request.headers), client=client))
        name_request(life.trace.id)
        return life, answer

    async def _admit(self, request: web.Request, life: Life) -> bytes:
        """The place is asked for before the body is read: a full queue should cost no memory."""
        life.caller = caller_of(life.client, request.headers, request.remote)
        life.ticket = self._admission.ticket(life.caller)
        return await read_body(request, self._config.receive_timeout_s)

    def _normalize(self, request: web.Request, api: Api, life: Life, body: bytes) -> list[Choice]:
        life.call = life.answer.call = api.read(body, request.headers)
        self._stabilize(life, life.call)
        life.trace.client_model = printable(life.call.client_model or "")
        life.trace.session_hint = life.call.session_hint
        return split(api.endpoint, life.call.fields)

    def _stabilize(self, life: Life, call: Call) -> None:
        """Rules that somebody asked for; what they did is told to everybody."""
        life.call, counts = self._renderer.stabilize(call)
        life.answer.call = life.call
        life.trace.stabilized = ", ".join(f"{rule}={count}" for rule, count in sorted(counts.items()))
        if counts:
            log.info("request %s: evened out at the top of its prompt: %s", life.trace.id, life.trace.stabilized)

    async def _sing(self, life: Life, answer: Answer, choices: Sequence[Choice]) -> None:
        """One answer of several generations, each with a life, a place and a record of its own."""
        assert life.call is not None
        await self._supersede(life)
        await dispatching()(self._check, life, choices)
        chorus = Chorus(answer, life.call, choices, life.trace.id, self._config.running_count_max)

        async def compute(part: Part) -> None:
            one = self._join(life, part)
            async with self._living(one):
                await dispatching()(self._dispatch, one)

        await chorus.sing(compute, lambda: life.alarm.reason)

    async def _check(self, life: Life, choices: Sequence[Choice]) -> None:
        """Where there are several prompts: what is wrong with any of them is refused before one is computed."""
        prompts = {choice.prompt: choice.fields for choice in choices}
        if len(prompts) < 2 or life.call is None:
            return
        await self._connect(life)
        for fields in prompts.values():
            await self._ask_prompt(life, replace(life.call, fields=fields))

    def _join(self, life: Life, part: Part) -> Life:
        """A life for one of its choices; the first has its place."""
        trace = replace(
            life.trace, id=f"{life.trace.id}.{part.index}", given_id="", at=time.time(), began=time.monotonic()
        )
        one = self._lives.add(Life(trace, part, life.limits, client=life.client, caller=life.caller, call=part.call))
        name_request(one.trace.id)
        first = life.parts[0].ticket if life.parts else None
        one.ticket, life.ticket = first.another() if first else life.ticket, None
        life.parts.append(one)
        part.ring = one.ring
        return one

    async def _dispatch(self, life: Life) -> None:
        """One try.  Raises Unreachable, Broken or Discarded, with no content sent, where the backend was lost."""
        try:
            life.alarm.check()
            await self._renew(life)
            await self._connect(life)
            life.trace.dispatches += 1
            gone, refused = 0, set[str]()  # residents that were, and requests that can't be followed
            for number in range(PLANS_MAX):
                await self._render(life)  # 3. the prompt's token ids; what is wrong with it is refused here
                await self._supersede(life)
                await self._take_turn(life)
                running = self._lives.to_follow(life, refused) if number < FOLLOWS_MAX else []
                plan = await self._start(life, running, warm=gone < GONE_MAX)  # 4. plan, 5. restore
                if not await self._generate(life, plan):
                    refused.add(plan.follow)
                    gone += not plan.follow
                    continue
                assert life.generation is not None
                try:
                    # 6. bytes flow as they come
                    return await relay(life.answer, life.generation, _begun(life, plan), life.trace)
                except Leaderless:
                    await self._renew(life)
        except (Unreachable, Broken):
            self._watchdog.doubt()
            raise
        raise UpstreamError("what it was to start from was lost again and again")

    async def _connect(self, life: Life) -> None:
        """Wait for a backend that starts, or is started again; in all dispatches together no longer than the limit."""
        limit_s, began = life.limits.connect_s, time.monotonic()
        try:
            await self._watchdog.up(max(0.0, limit_s - life.clock.connecting_s) if limit_s else None)
        except TimeoutError:
            message = f"The backend can't serve now: {self._watchdog.why_down} (waited {limit_s:g} s).  Try again soon."
            raise unavailable(message) from None
        finally:
            life.clock.connecting_s += time.monotonic() - began

    async def _renew(self, life: Life) -> None:
        if life.generation:
            await life.generation.end(PREVIOUS_END_TIMEOUT_S)
        life.renew()

    async def _render(self, life: Life) -> None:
        assert life.call is not None
        life.prompt = await self._ask_prompt(life, life.call)
        await self._knowledge.catch_up(life.prompt)
        status = await self._knowledge.status()
        life.model, life.layout = status.model, status.layout
        self._check_mode(life)
        life.root = life.trace.root = namespace(life.prompt.fingerprint, life.client.tenant)
        life.trace.prompt_tokens = life.prompt_shape().tokens

    async def _ask_prompt(self, life: Life, call: Call) -> PromptReply:
        return await self._renderer.render(call, life.client.tenant, life.trace.id, life.limits.stall_s or None)

    def _check_mode(self, life: Life) -> None:
        """Each process is told its mode on its own."""
        if self._config.reuse == "exact" and life.layout and not life.layout.grid:
            message = "The proxy runs with reuse = exact and its backend does not: start both with the same."
            raise unavailable(message, "mode_mismatch")

    async def _take_turn(self, life: Life) -> None:
        assert life.ticket is not None
        began_s = life.trace.elapsed_s()
        life.clock.waits()
        try:
            await life.ticket.turn()
        finally:
            life.clock.rests()
            life.trace.queue_s += life.trace.elapsed_s() - began_s

    async def _start(self, life: Life, running: Sequence[Running], warm: bool) -> Plan:
        if self._config.reuse == "off":
            plan = replace(self._starter.cold(life, "reuse is off"), checkpoints=())
        elif life.prompt and not life.prompt.tokens_max:
            plan = Plan(COLD, 0, "nothing is to be computed")
        elif life.call and not life.call.reuse:
            plan = self._starter.cold(life, "the client asked for no reuse")
        elif not warm:
            plan = self._starter.cold(life, "what it was to start from was gone, twice")
        else:
            await self._await_leavers(life)
            await self._await_savers(life)
            plan = await self._starter.start(life, running)
        life.trace.plan = plan = self._with_cause(life, plan)
        log.debug("%s", told(plan, life.trace.prompt_tokens))
        return plan

    def _with_cause(self, life: Life, plan: Plan) -> Plan:
        """Where a prompt parts from all others in its head, what of that its client changes for nothing."""
        assert life.call is not None and life.prompt is not None
        if plan.parts_at is None or plan.parts_at >= next(iter(life.prompt.boundaries), 0):
            return plan
        cause = self._heads.why_new(life.root, head_of(life.call.fields))
        return replace(plan, why_not_warmer=f"{plan.why_not_warmer}: {cause}") if cause else plan

    async def _supersede(self, life: Life) -> None:
        """Its client has given up an earlier try whose connection is not known to be dead yet.

        Where several could be meant, they may be several samples of one prompt: none is ended.
        """
        earlier = [each for each in self._lives if each.leaving is None and each.is_retried_by(life)]
        if len(earlier) == 1:
            earlier[0].ring(cancelled("The client has sent this request again; this try is given up.", by="superseded"))
            await earlier[0].let_go.wait()

    async def _await_leavers(self, life: Life) -> None:
        """Who gave up and asks again at once goes on from what the first try has computed: a step's time away."""
        leavers = [each for each in self._lives if each.is_leaving and life.shares(each) >= WORTH_WAITING_TOKENS]
        await asyncio.gather(*(leaver.let_go.wait() for leaver in leavers))

    async def _await_savers(self, life: Life) -> None:
        """What is just being saved can be restored in a moment, at positions at which its resident can't go on."""
        savers = {other: life.shares(other) for other in self._lives if other is not life and other.trace.settled}
        if not savers:
            return
        reach, grid = self._starter.reach(life) + WORTH_WAITING_TOKENS, life.layout.grid if life.layout else 0
        worth_it = (other.settled for other, shared in savers.items() if on_grid(shared, grid) >= reach)
        await wait_for_events(worth_it, SAVE_WAIT_S)

    async def _generate(self, life: Life, plan: Plan) -> bool:
        """False where what was planned on is gone from the backend's memory: to be planned again."""
        assert life.call is not None and life.prompt is not None
        request_id = life.trace.id
        if not plan.keep:
            self._knowledge.mirror.drop(plan.resident)
        life.sent, life.stored = True, plan.reuse
        life.hearing = Hearing(
            life,
            self._knowledge,
            self._settler,
            self._turns,
            self._background,
            self._config.partial_save_tokens,
            Guard() if self._config.garbage_guard == "observe" else None,
        )
        life.clock.waits()
        try:
            stream = await self._upstream.generate(
                life.call.api.endpoint, request_id, life.prompt.prompt_id, plan, root=life.root
            )
        except Gone as error:
            log.info("request %s is planned again: %s", request_id, error)
            await self._knowledge.refresh()
            return False
        life.generation = Generation(stream, request_id, self._background, life.hearing)
        self._heads.add(life.root, head_of(life.call.fields))  # now that the engine has something to do
        self._partings.look_into(life)
        return True


def told(plan: Plan, prompt_tokens: int) -> str:
    """A plan in numbers, for the log."""
    how = f"resident {plan.resident}{' kept' * plan.keep}" if plan.resident else f"follows {plan.follow or 'nobody'}"
    files = f"{len(plan.chain)} segments, checkpoints at {', '.join(map(str, plan.checkpoints)) or 'no position'}"
    return f"planned: {plan.source} {plan.reuse} of {prompt_tokens} tokens, {how}, {files}; {plan.why_not_warmer}"


def _begun(life: Life, plan: Plan) -> Begun:
    return Begun(life.trace.id, life.model, life.trace.prompt_tokens, plan.reuse)


def headers_of(life: Life) -> dict[str, str]:
    """Of several choices, the first one's start is told."""
    trace, started = life.trace, life.parts[0].trace if life.parts else life.trace
    cache = {HEADER_CACHE: started.cache_header()} if started.plan else {}
    stabilized = {HEADER_STABILIZED: trace.stabilized} if trace.stabilized else {}
    return {HEADER_REQUEST: trace.id, **cache, **stabilized}
