"""GET /warmline/status, /health and /ready: state of the proxy and the backend."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import LOADING, BackendStatus, ProcessStats, Resident
from warmline_common.protocol.vitals import read_process_stats
from warmline_proxy.admin.models import ServedModelReport, build_models_report
from warmline_proxy.errors import RETRY_AFTER_S, ClientError, decode_error_body
from warmline_proxy.http.bodies import json_response
from warmline_proxy.index.index import Index
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.models.switcher import ModelSwitcher
from warmline_proxy.pipeline.save_health import SaveHealth
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request, RequestStatus
from warmline_proxy.store.rows import Totals
from warmline_proxy.upstream.client import UpstreamError

BACKEND_TIMEOUT_S = 5.0  # a stuck backend must not delay the status
READY_TIMEOUT_S = 1.0
LOG_FIELDS = ("id", "endpoint", "client_model", "queue_s", "restore_s", "ttft_s", "prompt_tokens")


class LiveRequest(msgspec.Struct, kw_only=True):
    """A request in progress."""

    id: str
    endpoint: str
    client_model: str
    client_session: str  # the client's name of the conversation
    title: str = ""  # of the conversation
    phase: str  # "loading": it waits for its model; "prewarming": it is computed ahead; else a RequestStatus
    source: str  # as in RequestRecord; "" until planned
    age_s: float
    queue_s: float
    restore_s: float
    ttft_s: float  # 0.0 until the first token
    expected_ttft_s: float = 0.0  # as planned; 0.0 until then
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int  # prompt tokens with KV, reused ones included
    spoken: int  # chunks of the answer, about one per token
    choices: int = 0  # started requests of further choices


class ProxyStatus(msgspec.Struct, kw_only=True):
    """Reply of GET /warmline/status."""

    at: float  # Unix seconds
    uptime_s: float
    running: int
    queued: int
    settling: int  # answered, but not yet on disk
    residents: list[Resident]
    totals: Totals
    disk_budget_bytes: int
    reuse: str  # setting
    live: list[LiveRequest]  # oldest first
    lives: int  # requests in progress, until saved
    connections: int
    backend_kills: int  # since the start
    vitals: ProcessStats
    backend: str = ""  # failure of the query; "" on success
    loading: bool = False  # True while the model loads
    engine: BackendStatus | None = None  # the backend's last status
    persistence: str = "ok"  # or the reason why saving fails
    unsaved: int = 0  # residents without files
    host: str = ""  # bound address
    needs_key: bool = False  # clients must present a key
    models: list[ServedModelReport] = []  # all of several; none where one is served


@dataclass(frozen=True)
class ServerInfo:
    """Facts about the listening proxy."""

    reuse: str
    host: str
    count_connections: Callable[[], int]
    needs_key: Callable[[], bool]


@dataclass(eq=False)
class StatusRoutes:
    """Handlers of the proxy's status, health and readiness."""

    index: Index
    models: ServedModels
    switcher: ModelSwitcher | None  # None: one model
    registry: RequestRegistry
    save_health: SaveHealth
    server: ServerInfo
    _started_monotonic: float = field(default_factory=time.monotonic, init=False)

    async def get_ready(self, _: web.Request) -> web.Response:
        """200 if a request would be served now, by any model where there are several; else 503 with the reason."""
        if not (reason := self.models.closed_reason):
            backend = self.models.find_ready_backend()
            try:
                if self.switcher and not backend.watchdog.is_up:
                    return json_response({"ready": True, "model": self.switcher.find_loadable_backend().name})
                await backend.watchdog.wait_until_up(READY_TIMEOUT_S)
                await backend.upstream.check_ready()
                return json_response({"ready": True, "model": (await backend.state.status()).model})
            except TimeoutError:
                reason = backend.watchdog.down_reason
            except UpstreamError as error:
                reason = str(error)
            except ClientError as error:
                reason = decode_error_body(error).message
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return json_response({"ready": False, "reason": reason}, status=503, headers=headers)

    def _is_idle(self) -> bool:
        """True where no model is loaded, and one is as soon as a request comes."""
        if self.switcher is None or self.models.find_ready_backend().watchdog.is_up:
            return False
        with suppress(ClientError):
            self.switcher.find_loadable_backend()
            return True
        return False

    async def get_health(self, _: web.Request) -> web.Response:
        """200 while the proxy serves, with the state of persistence."""
        return json_response({"status": "ok", "persistence": self.save_health.state})

    async def get_status(self, _: web.Request) -> web.Response:
        reports = dict(zip(self.models.backends, await asyncio.gather(*map(_ask, self.models.backends)), strict=True))
        shown = reports[self.models.find_ready_backend()]
        reply = ProxyStatus(
            at=time.time(),
            uptime_s=time.monotonic() - self._started_monotonic,
            running=self.models.running_count,
            queued=self.models.queued_count,
            settling=self.registry.saving_count,
            residents=[resident for report in reports.values() for resident in report.residents],
            totals=await asyncio.to_thread(self.index.totals),
            disk_budget_bytes=self.index.budget_bytes,
            reuse=self.server.reuse,
            live=[build_live_request(request) for request in self.registry],
            lives=len(self.registry),
            connections=self.server.count_connections(),
            backend_kills=sum(backend.watchdog.kills for backend in self.models.backends),
            vitals=read_process_stats(),
            backend="" if self._is_idle() else shown.failure,
            loading=LOADING in (shown.failure, shown.engine.failure if shown.engine else ""),
            engine=shown.engine,
            persistence=self.save_health.state,
            unsaved=sum(backend.state.resident_view.non_durable_count for backend in self.models.backends),
            host=self.server.host,
            needs_key=self.server.needs_key(),
            models=build_models_report(self.models, self.switcher).models if self.switcher else [],
        )
        return json_response(reply)


@dataclass(frozen=True)
class _BackendReport:
    """State of a backend; `failure` is "" where it has answered."""

    residents: list[Resident] = field(default_factory=list)
    engine: BackendStatus | None = None
    failure: str = ""


async def _ask(backend: Backend) -> _BackendReport:
    if not backend.watchdog.is_up:
        return _BackendReport(failure=backend.watchdog.down_reason)
    try:
        async with asyncio.timeout(BACKEND_TIMEOUT_S):
            residents = (await backend.upstream.list_residents()).residents
            return _BackendReport(residents, await backend.state.status())
    except UpstreamError as error:
        return _BackendReport(failure=str(error))
    except TimeoutError:
        return _BackendReport(failure=f"the backend has not answered for {BACKEND_TIMEOUT_S:g} s")


def _describe_phase(request: Request) -> str:
    if request.model_wait:
        return "loading"
    is_computed = request.status in (RequestStatus.WAITING, RequestStatus.RESTORING, RequestStatus.PREFILLING)
    return "prewarming" if request.is_background and is_computed else request.status


def build_live_request(request: Request) -> LiveRequest:
    request_log = request.log
    return LiveRequest(
        **{name: getattr(request_log, name) for name in LOG_FIELDS},
        client_session=request_log.session_hint,
        title=request.title,
        phase=_describe_phase(request),
        source=request_log.plan.source if request_log.plan else "",
        expected_ttft_s=request_log.plan.expected_ttft_s if request_log.plan else 0.0,
        age_s=request_log.elapsed_s(),
        reused_tokens=request_log.plan.reuse if request_log.plan else 0,
        prefilled_tokens=request.prefilled_tokens,
        spoken=request.content_chunks,
        choices=len(request.branches),
    )
