"""Wiring of the proxy: components, routes, background tasks.  Event loop thread."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial

from aiohttp import web

from warmline_common.protocol.tokens import namespace
from warmline_common.settings.models import ModelConfig
from warmline_proxy.admin.explain import ExplainRoutes
from warmline_proxy.admin.maintenance import MaintenanceRoutes
from warmline_proxy.admin.metrics import MetricsRoutes
from warmline_proxy.admin.models import ModelRoutes
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.admin.prewarm import PrewarmRoutes
from warmline_proxy.admin.purge import PurgeEvents, PurgeRoutes
from warmline_proxy.admin.request_status import RequestStateRoutes
from warmline_proxy.admin.status import ServerInfo, StatusRoutes
from warmline_proxy.api.openai import MODELS_PATH
from warmline_proxy.api.registry import APIS, COUNT_TOKENS_PATH, RESPONSES_PATH
from warmline_proxy.audit.audits import AuditServices, ModelAudits, build_audits
from warmline_proxy.audit.quiet import QuietEngine
from warmline_proxy.audit.replay import SessionReplayer
from warmline_proxy.auth.authenticator import Authenticator
from warmline_proxy.auth.principals import ClientKeys
from warmline_proxy.config import ProxyConfig
from warmline_proxy.dashboard.browse import BrowseRoutes
from warmline_proxy.dashboard.pages import DASHBOARD_PATH, DashboardPages
from warmline_proxy.estimate.estimator import DurationEstimator
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.explain.prompt_head import PromptHeadCache
from warmline_proxy.http.bodies import BODY_BYTES_MAX, BodyReader
from warmline_proxy.http.body_budget import BodyBudget
from warmline_proxy.http.connections import CONNECTIONS
from warmline_proxy.http.request_id import request_id_middleware, set_request_id_headers
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import METRICS, ProxyMetrics
from warmline_proxy.models.admission import AdmissionQueue
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.models.gate import ModelGate
from warmline_proxy.models.switcher import ModelSwitcher
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.deadline_monitor import DeadlineMonitor
from warmline_proxy.pipeline.generator import Generator
from warmline_proxy.pipeline.pipeline import Pipeline, PipelineSteps
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.pipeline.response_store import ResponseStore
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.save_health import SaveHealth
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.prewarm.computation import PromptComputer
from warmline_proxy.prewarm.heads import HeadStore
from warmline_proxy.prewarm.prewarmer import Prewarmer
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.routes import middlewares
from warmline_proxy.routes.clients import REQUESTS_PATH, ClientRoutes
from warmline_proxy.routes.middlewares import RouteTable
from warmline_proxy.routes.responses import ResponseRoutes
from warmline_proxy.store.rows import RequestRecord
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.keeper_client import KeeperClient
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

HISTORY_MAX = 200  # requests whose durations are learned again after a start
CLEANUP_TIMEOUT_S = 2.0  # of background tasks
REQUEST_REGISTRY = web.AppKey("request_registry", RequestRegistry)


class Components:
    """All parts of one proxy, built once; the caller owns `index`."""

    def __init__(self, config: ProxyConfig, secret: str, index: Index) -> None:
        self.config, self.index, self.keys = config, index, ClientKeys(config)
        background, metrics, registry = BackgroundTasks(), ProxyMetrics(), RequestRegistry()
        self.background, self.metrics, self.registry, self.save_health = (
            background,
            metrics,
            registry,
            SaveHealth(metrics),
        )
        self.switcher: ModelSwitcher | None = None
        self.models = self._build_models(secret)
        self.save_health.watch_index(index)
        self.body_reader = BodyReader(BodyBudget(config.body_budget_bytes), config.receive_timeout_s)
        turns, divergences = SampledTurnCache(index), DivergenceRecorder(index, background)
        self.sampled_turns, self.divergence_recorder, self.prompt_heads = turns, divergences, PromptHeadCache()
        self.renderer = RemoteRenderer(config, turns)
        is_reusing, finishes_prefill = config.reuse != "off", config.on_disconnect == "finish-prefill"
        self.saver = Saver(index, self.models, metrics, self.save_health, turns, divergences, reuse=is_reusing)
        self.switcher = self._build_switcher(secret)
        self._work_lock = asyncio.Lock()  # of work in quiet: audits, prewarming
        self.audits = self._build_audits()
        metrics.audits_waiting.set_function(self.audits.count_waiting)
        self.responses = ResponseStore(index, registry, self.body_reader)
        on_completed = [self.responses.record_session, self.audits.consider_request]
        self.completion = Completion(registry, self.saver, on_completed, background, finishes_prefill)
        self.prewarmer = self._build_prewarmer()
        on_completed.append(self.prewarmer.consider_request)
        self.deadline_monitor = DeadlineMonitor(lambda: registry.unsettled, background, config.heartbeat_after_s)

    def _build_models(self, secret: str) -> ServedModels:
        """The only backend, at the configured URL; or one a model, whose URLs the keeper tells."""
        if not (models := self.config.model_configs):
            return ServedModels([self._build_backend(Upstream(self.config.backend_url, secret), ModelGate())])
        count_max = self.config.running_count_max + self.config.queue_count_max
        gates = [ModelGate(is_open=False, waiting_count_max=count_max, on_change=self._wake_switcher) for _ in models]
        backends = [
            self._build_backend(Upstream("", secret), gate, model) for gate, model in zip(gates, models, strict=True)
        ]
        return ServedModels(backends, has_keeper=True)

    def _wake_switcher(self) -> None:
        if self.switcher is not None:
            self.switcher.wake()

    def _build_switcher(self, secret: str) -> ModelSwitcher | None:
        """Switcher of several models; None for one."""
        if not self.models.has_keeper:
            return None
        keeper = KeeperClient(self.config.backend_url, secret)
        return ModelSwitcher(
            models=self.models,
            keeper=keeper,
            stay_s=self.config.model_stay_s,
            connect_timeout_s=self.config.connect_timeout_s,
            save_residents=self.save_before_unload,
            metrics=self.metrics,
            background=self.background,
        )

    def _build_backend(self, upstream: Upstream, gate: ModelGate, model: ModelConfig | None = None) -> Backend:
        config, home = self.config, replace(self.config.home, instance=model.instance if model else "")
        watchdog = Watchdog(upstream, config.wedge_timeout_s, home)
        state = BackendState(upstream, DurationEstimator(self._list_history))

        def estimate_retry_after_s() -> int:
            return self.registry.estimate_retry_after_s(backend)

        admission = AdmissionQueue(config.running_count_max, config.queue_count_max, estimate_retry_after_s)
        backend = Backend(upstream, watchdog, state, admission, gate, model)
        return backend

    def _list_history(self, fingerprint: str) -> list[RequestRecord]:
        """Records of the last requests to a model, the oldest first; none where the index can't be read."""
        roots = {namespace(fingerprint, tenant) for tenant in self._list_tenants()}
        try:
            return [record for record in reversed(self.index.requests(HISTORY_MAX)) if record.root in roots]
        except IndexStoreError as error:
            log.warning("durations of earlier requests can't be read: %s", error)
            return []

    def _list_tenants(self) -> set[str]:
        return {"", *self.keys.known_tenants}

    def _build_audits(self) -> ModelAudits:
        services = AuditServices(
            config=self.config,
            index=self.index,
            registry=self.registry,
            saver=self.saver,
            metrics=self.metrics,
            background=self.background,
            tenants=lambda: self.keys.known_tenants,
            work_lock=self._work_lock,
        )
        audits = [build_audits(backend, services) for backend in self.models.backends]
        return ModelAudits(self.models, audits, self._list_tenants)

    def _build_prewarmer(self) -> Prewarmer:
        def build_engine(backend: Backend) -> QuietEngine:
            return QuietEngine(self.registry, backend.watchdog, work_lock=self._work_lock)

        return Prewarmer(
            config=self.config,
            models=self.models,
            keys=self.keys,
            engines={backend: build_engine(backend) for backend in self.models.backends},
            computer=PromptComputer(self.index, self.pipeline),
            heads=HeadStore(self.config.home, self.background),
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        config, heads, divergences = self.config, self.prompt_heads, self.divergence_recorder
        starter = Starter(config, self.index, self.metrics, heads, divergences)
        generator = Generator(config, self.saver, self.sampled_turns, heads, divergences, self.background)
        steps = PipelineSteps(
            self.models, self.body_reader, self.renderer, starter, generator, self.completion, self.responses
        )
        return Pipeline(config, self.registry, self.metrics, steps)

    def build_purge_events(self) -> PurgeEvents:
        @asynccontextmanager
        async def pause() -> AsyncIterator[None]:
            with self.divergence_recorder.pause():
                async with self.saver.pause():
                    yield

        on_removed = (
            self.sampled_turns.clear,
            self.prompt_heads.clear,
            self.audits.clear,
            self.prewarmer.heads.clear,
        )
        return PurgeEvents(pause, on_removed)

    async def adopt_residents(self, backend: Backend) -> None:
        """Save the residents of an earlier proxy: they may be stored nowhere else."""
        await backend.watchdog.wait_until_up()
        await backend.state.status()
        await self.saver.save_residents(backend)

    async def save_before_unload(self, backend: Backend) -> None:
        """Save what is in memory alone; also what an earlier proxy left there, which nobody may have listed yet."""
        try:
            await backend.state.wait_for_predecessor_releases()
        except UpstreamError as error:
            log.warning("KV in memory of %s can't be listed before it is unloaded: %s", backend.name, error)
        await self.saver.save_residents(backend)

    async def drain(self) -> None:
        """Refuse new requests, let running ones end or end them, and wait until all is saved."""
        self.models.close("The proxy is being stopped.")
        await self.prewarmer.stop()
        await self.audits.stop()
        await self.completion.drain(self.config.drain_timeout_s)


COMPONENTS = web.AppKey("components", Components)


def build_app(config: ProxyConfig, secret: str, index: Index) -> web.Application:
    """The whole proxy, wired together.  The caller owns `index`."""
    parts = Components(config, secret, index)
    access = middlewares.build_access_middleware(Authenticator(config, secret, parts.keys, parts.metrics))
    stack = [request_id_middleware, middlewares.error_middleware, access]
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=stack)
    app.on_response_prepare.append(set_request_id_headers)
    app.on_response_prepare.append(middlewares.build_cors_handler(config.allowed_origins))
    app[COMPONENTS], app[REQUEST_REGISTRY], app[METRICS] = parts, parts.registry, parts.metrics

    def count_connections() -> int:
        return app[CONNECTIONS].count if CONNECTIONS in app else 0

    server = ServerInfo(config.reuse, config.bind_host, count_connections, lambda: parts.keys.is_required)
    models, registry, events = parts.models, parts.registry, parts.build_purge_events()
    owner_resolver = OwnerResolver(index, parts.keys, models)
    background, reader = parts.background, parts.body_reader
    purge_routes = PurgeRoutes(index, owner_resolver, models, registry, events, background, reader)
    for backend in models.backends:
        backend.state.before_listing = partial(purge_routes.deliver_purge_notice, backend)
    status = StatusRoutes(index, models, parts.switcher, registry, parts.save_health, server)
    states = RequestStateRoutes(index, models, registry)
    admin_table = _build_admin_table(parts, owner_resolver, purge_routes, status, states)
    app[middlewares.ADMIN_PATHS] = list(dict.fromkeys(path.replace("{name:.+}", "NAME") for _, path in admin_table))
    for table in (admin_table, _build_service_table(parts, status), _build_client_table(parts, states)):
        middlewares.add_routes(app, table)
    app.cleanup_ctx.append(lambda _: _run_background_tasks(parts, purge_routes))
    return app


def _build_client_table(parts: Components, states: RequestStateRoutes) -> RouteTable:
    """Routes of the client APIs."""
    pipeline, completion = parts.pipeline, parts.completion
    clients = ClientRoutes(parts.body_reader, pipeline, parts.renderer, parts.models, completion, states)
    responses = ResponseRoutes(pipeline, completion, parts.responses, clients.count_response_tokens)
    return {
        **{
            ("POST", path): clients.build_generation_handler(api)
            for path, api in APIS.items()
            if path != RESPONSES_PATH
        },
        ("POST", COUNT_TOKENS_PATH): clients.count_tokens,
        ("POST", RESPONSES_PATH): responses.create,
        ("POST", f"{RESPONSES_PATH}/input_tokens"): responses.count_input_tokens,
        ("POST", f"{RESPONSES_PATH}/compact"): responses.compact,
        ("GET", f"{RESPONSES_PATH}/{{id}}"): responses.get_response,
        ("DELETE", f"{RESPONSES_PATH}/{{id}}"): responses.delete_response,
        ("GET", f"{RESPONSES_PATH}/{{id}}/input_items"): responses.list_input_items,
        ("POST", f"{RESPONSES_PATH}/{{id}}/cancel"): responses.cancel_response,
        ("GET", MODELS_PATH): clients.get_models,
        ("GET", f"{MODELS_PATH}/{{name:.+}}"): clients.get_models,
        ("GET", f"{REQUESTS_PATH}{{name:.+}}"): middlewares.disable_caching(clients.get_request),
        ("DELETE", f"{REQUESTS_PATH}{{name:.+}}"): clients.cancel_request,
    }


def _build_service_table(parts: Components, status: StatusRoutes) -> RouteTable:
    """Routes of health checks, metrics and the dashboard's files."""
    count_connections, pages = status.server.count_connections, DashboardPages()
    metrics = MetricsRoutes(parts.metrics, parts.index, parts.models, parts.registry, count_connections)
    parts.metrics.register(metrics)
    parts.index.on_evicted = parts.metrics.record_eviction
    return {
        ("GET", "/health"): status.get_health,
        ("GET", "/ready"): status.get_ready,
        ("GET", middlewares.METRICS_PATH): metrics.get_metrics,
        ("*", DASHBOARD_PATH): pages.serve_file,
        ("*", f"{DASHBOARD_PATH}/{{file:.+}}"): pages.serve_file,
    }


def _build_admin_table(
    parts: Components,
    owner_resolver: OwnerResolver,
    purge_routes: PurgeRoutes,
    status: StatusRoutes,
    states: RequestStateRoutes,
) -> RouteTable:
    """Routes of the admin API."""
    index, config, models = parts.index, parts.config, parts.models
    tolerance, quiet_s = config.audit_tolerance, config.audit_quiet_s
    replayer = SessionReplayer(index, parts.audits, parts.metrics, tolerance, quiet_s)
    explain = ExplainRoutes(index, models, owner_resolver, parts.body_reader)
    maintenance = MaintenanceRoutes(index, models, replayer, config, parts.body_reader)
    browse = BrowseRoutes(index, owner_resolver)
    model_routes = ModelRoutes(models, parts.switcher, parts.body_reader, parts.background)
    prewarm = PrewarmRoutes(parts.prewarmer, parts.body_reader)
    table = {
        ("GET", "/warmline/status"): status.get_status,
        ("GET", "/warmline/models"): model_routes.get_models,
        ("POST", "/warmline/models/{name:.+}/load"): model_routes.load,
        ("POST", "/warmline/models/{name:.+}/unload"): model_routes.unload,
        ("POST", "/warmline/models/{name:.+}/pin"): model_routes.pin,
        ("POST", "/warmline/purge"): purge_routes.purge,
        ("POST", "/warmline/pin"): maintenance.pin,
        ("POST", "/warmline/gc"): maintenance.gc,
        ("GET", "/warmline/prewarm"): prewarm.get_entries,
        ("POST", "/warmline/prewarm"): prewarm.add_entry,
        ("POST", "/warmline/repair"): maintenance.repair,
        ("POST", "/warmline/replay"): maintenance.replay,
        ("POST", "/warmline/import"): maintenance.import_archive,
        ("GET", "/warmline/explain"): explain.get_explanation,
        ("POST", "/warmline/texts"): explain.get_texts,
        ("GET", "/warmline/whose"): owner_resolver.get_owners,
        ("GET", "/warmline/requests"): browse.get_requests,
        ("GET", "/warmline/requests/{name:.+}"): states.get_request,
        ("GET", "/warmline/activity"): browse.get_activity,
        ("GET", "/warmline/sessions"): browse.get_sessions,
        ("GET", "/warmline/tree"): browse.get_tree,
        ("GET", "/warmline/path"): browse.get_path,
    }
    return {place: middlewares.disable_caching(handler) for place, handler in table.items()}


async def _run_background_tasks(parts: Components, purge_routes: PurgeRoutes) -> AsyncIterator[None]:
    backends = parts.models.backends
    watchdog_runs = [backend.watchdog.run() for backend in backends]
    switcher_runs = [parts.switcher.run()] if parts.switcher else []
    monitor_runs = (*watchdog_runs, *switcher_runs, parts.deadline_monitor.run(), parts.saver.run())
    monitor_tasks = [asyncio.create_task(run) for run in monitor_runs]
    adoption_tasks = [
        parts.background.spawn(parts.adopt_residents(backend), f"adoption of residents {backend.name}".rstrip())
        for backend in backends
    ]
    parts.audits.start()
    parts.prewarmer.start()
    yield
    for task in adoption_tasks:
        task.cancel()
    purge_routes.close()
    await parts.prewarmer.stop()
    await parts.audits.stop()
    await parts.background.drain(CLEANUP_TIMEOUT_S)
    for task in monitor_tasks:
        task.cancel()
    await asyncio.wait(monitor_tasks)
    for backend in backends:
        await backend.upstream.close()
    if parts.switcher:
        await parts.switcher.keeper.close()
