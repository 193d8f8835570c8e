"""What the pair is at: GET /warmline/status."""

import asyncio
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import LOADING, Resident, Status, Vitals
from warmline_common.protocol.vitals import take_vitals
from warmline_proxy.admin.routes import Paths
from warmline_proxy.http.bodies import json_answer
from warmline_proxy.index.index import Index
from warmline_proxy.pipeline.save_health import Persistence
from warmline_proxy.request.admission import Admission
from warmline_proxy.request.registry import Lives
from warmline_proxy.request.request import Life
from warmline_proxy.store.rows import Totals
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

ASK_TIMEOUT_S = 5.0  # whoever looks wants to know soon that the backend is stuck


class LiveRequest(msgspec.Struct, kw_only=True):
    """A request on its way."""

    id: str
    endpoint: str
    client_model: str
    client_session: str  # what its client calls its conversation
    phase: str  # "arriving", "waiting", "restoring", "prefilling", "answering", "ending", "settling"
    source: str  # "" until it is planned; else as in RequestRecord
    age_s: float
    queue_s: float
    restore_s: float
    ttft_s: float  # 0.0 until its first token
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int  # prompt tokens that have rows, reused ones included
    spoken: int  # pieces of its answer so far, about one a token
    choices: int = 0  # that have begun, each a request of its own; 0 where it is one itself


class ProxyStatus(msgspec.Struct, kw_only=True):
    """The answer."""

    at: float  # Unix seconds
    uptime_s: float
    running: int
    queued: int
    settling: int  # answered, but not yet on disk
    residents: list[Resident]
    totals: Totals
    disk_budget_bytes: int
    reuse: str  # the setting
    live: list[LiveRequest]  # oldest first
    lives: int  # requests on their way: answered and saved ones no longer are
    connections: int
    backend_kills: int  # of wedged backends, since the start
    vitals: Vitals
    backend: str = ""  # why the backend could not be asked; "" where it could
    loading: bool = False  # the model
    engine: Status | None = None  # what the backend last said of itself
    persistence: str = "ok"  # or why what is computed can't be saved
    unsaved: int = 0  # residents that are in memory alone
    host: str = ""  # what is listened on, whoever said so
    needs_key: bool = False  # of clients


class StatusPath:
    """Its one handler; the state that it tells is others'."""

    def __init__(
        self,
        *,
        index: Index,
        upstream: Upstream,
        watchdog: Watchdog,
        knowledge: Knowledge,
        admission: Admission,
        lives: Lives,
        persistence: Persistence,
        connections: Callable[[], int],
        reuse: str,
        host: str,
        needs_key: Callable[[], bool],
    ) -> None:
        self._index = index
        self._upstream = upstream
        self._watchdog = watchdog
        self._knowledge = knowledge
        self._admission = admission
        self._lives = lives
        self._persistence = persistence
        self._connections = connections
        self._reuse = reuse
        self._host, self._needs_key = host, needs_key
        self._began = time.monotonic()

    @property
    def paths(self) -> Paths:
        return {("GET", "/warmline/status"): self.status}

    async def status(self, _: web.Request) -> web.Response:
        residents, engine, backend = [], None, ""
        try:
            if self._watchdog.is_up:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    residents = (await self._upstream.residents(ids=False)).residents
                    engine = await self._knowledge.status()
            else:
                backend = self._watchdog.why_down
        except UpstreamError as error:
            backend = str(error)
        except TimeoutError:
            backend = f"the backend has not answered for {ASK_TIMEOUT_S:g} s"
        answer = ProxyStatus(
            at=time.time(),
            uptime_s=time.monotonic() - self._began,
            running=self._admission.running,
            queued=self._admission.queued,
            settling=self._lives.settling,
            residents=residents,
            totals=await asyncio.to_thread(self._index.totals),
            disk_budget_bytes=self._index.budget_bytes,
            reuse=self._reuse,
            live=[live_request(life) for life in self._lives],
            lives=len(self._lives),
            connections=self._connections(),
            backend_kills=self._watchdog.kills,
            vitals=take_vitals(),
            backend=backend,
            loading=LOADING in (backend, engine.failure if engine else ""),
            engine=engine,
            persistence=self._persistence.state,
            unsaved=len(self._knowledge.mirror.not_durable()),
            host=self._host,
            needs_key=self._needs_key(),
        )
        return json_answer(answer)


def live_request(life: Life) -> LiveRequest:
    trace = life.trace
    return LiveRequest(
        id=trace.id,
        endpoint=trace.endpoint,
        client_model=trace.client_model,
        client_session=trace.session_hint,
        phase=_phase(life),
        source=trace.plan.source if trace.plan else "",
        age_s=trace.elapsed_s(),
        queue_s=trace.queue_s,
        restore_s=trace.restore_s,
        ttft_s=trace.ttft_s,
        prompt_tokens=trace.prompt_tokens,
        reused_tokens=trace.plan.reuse if trace.plan else 0,
        prefilled_tokens=life.prefilled,
        spoken=life.spoken,
        choices=len(life.parts),
    )


def _phase(life: Life) -> str:
    if life.answered.is_set():
        return "settling" if life.let_go.is_set() else "ending"
    return life.stage
