"""A request's life, in eight steps: `HotPath.answer`, read top to bottom.  The other methods are its steps."""

import asyncio
import logging

from aiohttp import web

from warmline_proxy.admission import Admission
from warmline_proxy.background import Background
from warmline_proxy.bodies import read_body
from warmline_proxy.errors import ClientError, from_upstream
from warmline_proxy.generation import Generation
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.life import Life, held_after
from warmline_proxy.normalize import read_call
from warmline_proxy.plan import Plan, cold_plan
from warmline_proxy.relay import relay
from warmline_proxy.settle import Settler
from warmline_proxy.start import Starter
from warmline_proxy.trace import Trace
from warmline_proxy.upstream import Gone, Upstream, UpstreamError
from warmline_wire.keys import BLOCK_TOKENS, namespace
from warmline_wire.messages import HEADER_CACHE, HEADER_REQUEST, PromptRequest, Settled

log = logging.getLogger(__name__)

STARTS_MAX = 3  # a plan, a second one where the first one's resident was gone, and a cold one
WORTH_WAITING_TOKENS = BLOCK_TOKENS
SAVE_WAIT_S = 10.0
LAST_EVENT_TIMEOUT_S = 10.0  # between the engine's letting go and the end of the stream


class HotPath:
    """Answers generations.  Its state belongs to the event loop."""

    def __init__(
        self,
        *,
        upstream: Upstream,
        knowledge: Knowledge,
        admission: Admission,
        starter: Starter,
        settler: Settler,
        background: Background,
        tenant: str,
        reuse: bool,
    ) -> None:
        self._upstream = upstream
        self._knowledge = knowledge
        self._admission = admission
        self._starter = starter
        self._settler = settler
        self._background = background
        self._tenant = tenant
        self._reuse = reuse
        self._lives: set[Life] = set()

    @property
    def settling(self) -> int:
        """Requests whose client has its answer, but which are not yet on disk."""
        return sum(life.is_settling for life in self._lives)

    async def answer(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        life = Life(Trace(endpoint))
        self._lives.add(life)
        try:
            body = await self._admit(request, life)  # 1. a bounded queue
            self._normalize(request, life, body)  # 2. any model name, null is absent
            for attempt in range(STARTS_MAX):
                await self._render(life)  # 3. the prompt's token ids
                plan = await self._start(life, warm=attempt < STARTS_MAX - 1)  # 4. plan, 5. restore
                if await self._generate(life, plan):
                    break
            response = await self._relay(request, life)  # 6. bytes flow as they come
            life.trace.answered()
            return response
        except (ClientError, UpstreamError) as error:
            life.trace.failed(error)
            return from_upstream(error).response(headers_of(life))
        except (asyncio.CancelledError, ConnectionResetError):
            life.trace.left()
            raise
        finally:
            life.answered = True
            life.trace.total_s = life.trace.elapsed_s()
            self._background.spawn(self._finish(life), f"settling of {life.trace.id}")  # 7. settle, 8. record

    async def _admit(self, request: web.Request, life: Life) -> bytes:
        self._admission.check()  # before the body is read: a full queue should cost no memory
        body = await read_body(request)
        arrived_s = life.trace.elapsed_s()
        life.slot = await self._admission.enter()
        life.trace.queue_s = life.trace.elapsed_s() - arrived_s
        return body

    def _normalize(self, request: web.Request, life: Life, body: bytes) -> None:
        life.call = read_call(life.trace.endpoint, body, request.headers)
        life.trace.client_model = life.call.client_model or ""
        life.trace.session_hint = life.call.session_hint

    async def _render(self, life: Life) -> None:
        assert life.call is not None
        body = life.call.prompt_body((await self._knowledge.status()).model)
        life.prompt = await self._upstream.prompt(
            PromptRequest(request_id=life.trace.id, endpoint=life.call.endpoint, body=body)
        )
        await self._knowledge.catch_up(life.prompt)
        status = await self._knowledge.status()
        life.model, life.layout = status.model, status.layout
        life.root = namespace(life.prompt.fingerprint, self._tenant)
        life.trace.prompt_tokens = life.prompt_shape().tokens

    async def _start(self, life: Life, warm: bool) -> Plan:
        if not self._reuse:
            plan = cold_plan(life.prompt_shape(), life.layout, "reuse is off")
        elif not warm:
            plan = cold_plan(life.prompt_shape(), life.layout, "what it was to start from was gone, twice")
        else:
            await self._await_leavers(life)
            await self._await_savers(life)
            plan = await self._starter.start(life)
        life.trace.plan = plan
        return plan

    async def _await_leavers(self, life: Life) -> None:
        """Who gave up and asks again at once goes on from what the first try has computed: a step's time away."""
        leavers = [each for each in self._lives if each.is_leaving and life.shares(each) >= WORTH_WAITING_TOKENS]
        await asyncio.gather(*(leaver.let_go.wait() for leaver in leavers))

    async def _await_savers(self, life: Life) -> None:
        """What is just being saved can be restored in a moment, at positions at which its resident can't go on."""
        savers = {other: life.shares(other) for other in self._lives if other is not life and other.trace.settled}
        if not savers:
            return
        reach = self._starter.reach(life) + WORTH_WAITING_TOKENS
        waits = [asyncio.ensure_future(other.settled.wait()) for other, shared in savers.items() if shared >= reach]
        if waits:
            _, late = await asyncio.wait(waits, timeout=SAVE_WAIT_S)
            for wait in late:
                wait.cancel()

    async def _generate(self, life: Life, plan: Plan) -> bool:
        """False where what was planned on is gone from the backend's memory: to be planned again."""
        assert life.call is not None and life.prompt is not None
        request_id = life.trace.id
        if not plan.keep:
            self._knowledge.mirror.drop(plan.resident)
        life.sent = True
        try:
            stream = await self._upstream.generate(life.call.endpoint, request_id, life.prompt.prompt_id, plan)
        except Gone as error:
            log.info("request %s is planned again: %s", request_id, error)
            await self._knowledge.refresh()
            return False
        life.generation = Generation(stream, request_id, self._background, lambda settled: self._learn(life, settled))
        return True

    async def _relay(self, request: web.Request, life: Life) -> web.StreamResponse:
        assert life.call is not None
        if life.generation is None:
            raise UpstreamError("the backend lost what it was given, three times")
        return await relay(request, life.call, life.generation, life.trace, headers_of(life))

    def _learn(self, life: Life, settled: Settled) -> None:
        """The backend let go of the request; this is what it holds now.  Told twice where a cancel met the end."""
        if life.trace.settled is None:
            life.trace.settled = settled
            self._knowledge.mirror.add(settled.resident, held_after(life, settled))

    async def _finish(self, life: Life) -> None:
        try:
            await self._make_way(life)
            if life.slot:  # else it never came in, and a flood of refusals would push out what the records are for
                await self._settler.settle(life)
        finally:
            life.settled.set()
            self._lives.discard(life)

    async def _make_way(self, life: Life) -> None:
        """End what runs for it, and let the next one in."""
        try:
            await self._let_go(life)
        except UpstreamError as error:
            log.warning("request %s: what the backend made of it is unknown: %s", life.trace.id, error)
        finally:
            life.let_go.set()
            if life.slot:
                life.slot.release()

    async def _let_go(self, life: Life) -> None:
        """Cancel what the client no longer waits for.  Prefill that was done stays, so a retry goes on from there."""
        generation = life.generation
        is_over = not life.sent or (generation is not None and generation.is_over)
        try:
            if not is_over and (settled := await self._upstream.cancel(life.trace.id)):
                self._learn(life, settled)
        finally:
            if generation:
                await generation.end(LAST_EVENT_TIMEOUT_S)


def headers_of(life: Life) -> dict[str, str]:
    return {HEADER_REQUEST: life.trace.id, HEADER_CACHE: life.trace.cache_header()}
