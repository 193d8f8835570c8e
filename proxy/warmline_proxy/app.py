"""Wiring of the proxy: components, routes, background tasks.  Event loop thread."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from warmline_common.protocol.tokens import namespace
from warmline_proxy.admin.explain import ExplainRoutes
from warmline_proxy.admin.maintenance import MaintenanceRoutes
from warmline_proxy.admin.metrics import MetricsRoutes
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.admin.purge import PurgeEvents, PurgeRoutes
from warmline_proxy.admin.status import ServerInfo, StatusRoutes
from warmline_proxy.api.openai import MODELS_PATH
from warmline_proxy.api.registry import APIS, COUNT_TOKENS_PATH, RESPONSES_PATH
from warmline_proxy.audit.auditor import Auditor
from warmline_proxy.audit.bisect import Bisector
from warmline_proxy.audit.first_token_probe import FirstTokenProbe
from warmline_proxy.audit.quarantine import Quarantine
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
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.routes import middlewares
from warmline_proxy.routes.clients import CANCEL_PATH, ClientRoutes
from warmline_proxy.routes.middlewares import RouteTable
from warmline_proxy.routes.responses import ResponseRoutes
from warmline_proxy.store.rows import RequestRecord
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

HISTORY_MAX = 200  # requests whose durations are learned again after a start
CLEANUP_TIMEOUT_S = 2.0  # of background tasks
REQUEST_REGISTRY = web.AppKey("request_registry", RequestRegistry)


class Components:
    """All parts of one proxy, built once; the caller owns `index`."""

    def __init__(self, config: ProxyConfig, secret: str, index: Index) -> None:
        self.config, self.index, self.keys = config, index, ClientKeys(config)
        background, metrics = BackgroundTasks(), ProxyMetrics()
        upstream = Upstream(config.backend_url, secret)
        watchdog = Watchdog(upstream, config.wedge_timeout_s, config.home.pid_file("backend"))
        state = BackendState(upstream, DurationEstimator(self._list_history))
        registry = RequestRegistry(state)
        self.background, self.metrics, self.upstream, self.watchdog = background, metrics, upstream, watchdog
        self.backend_state, self.registry, self.save_health = state, registry, SaveHealth(metrics)
        running_max, queued_max = config.running_count_max, config.queue_count_max
        self.admission = AdmissionQueue(running_max, queued_max, registry.estimate_retry_after_s)
        self.save_health.watch_index(index)
        self.body_reader = BodyReader(BodyBudget(config.body_budget_bytes), config.receive_timeout_s)
        turns, resident_view = SampledTurnCache(index), state.resident_view
        divergences = DivergenceRecorder(upstream, index, resident_view, background)
        self.sampled_turns, self.divergence_recorder, self.prompt_heads = turns, divergences, PromptHeadCache()
        self.renderer = RemoteRenderer(config, upstream, state, turns)
        is_reusing, finishes_prefill = config.reuse != "off", config.on_disconnect == "finish-prefill"
        self.saver = Saver(index, upstream, state, metrics, self.save_health, turns, divergences, reuse=is_reusing)
        self._build_audits()
        self.responses = ResponseStore(index, registry, self.body_reader)
        on_completed = (self.responses.record_session, self.auditor.consider_request)
        self.completion = Completion(
            registry, upstream, watchdog, self.saver, on_completed, background, finishes_prefill
        )
        self.deadline_monitor = DeadlineMonitor(
            lambda: registry.unsettled, watchdog, background, config.heartbeat_after_s
        )

    def _list_history(self, fingerprint: str) -> list[RequestRecord]:
        """Records of the last requests to a model, the oldest first; none where the index can't be read."""
        roots = {namespace(fingerprint, tenant) for tenant in {"", *self.keys.known_tenants}}
        try:
            return [record for record in reversed(self.index.requests(HISTORY_MAX)) if record.root in roots]
        except IndexStoreError as error:
            log.warning("durations of earlier requests can't be read: %s", error)
            return []

    def _build_audits(self) -> None:
        index, upstream, state, metrics = self.index, self.upstream, self.backend_state, self.metrics
        probe = FirstTokenProbe(upstream, index, state.resident_view, lambda: self.keys.known_tenants)
        engine, registry = QuietEngine(self.registry, self.watchdog), self.registry
        bisector = Bisector(index, probe, engine)
        quarantine = Quarantine(index, upstream, state, registry, self.saver, bisector, metrics, self.background)
        self.first_token_probe, self.quarantine = probe, quarantine
        self.auditor = Auditor(
            config=self.config,
            index=index,
            probe=probe,
            quarantine=quarantine,
            engine=engine,
            metrics=metrics,
            rng=random.Random(),
        )

    def build_pipeline(self) -> Pipeline:
        config, upstream, state, metrics = self.config, self.upstream, self.backend_state, self.metrics
        watchdog, heads, divergences = self.watchdog, self.prompt_heads, self.divergence_recorder
        starter = Starter(config, upstream, self.index, state, watchdog, metrics, heads, divergences)
        saver, turns, background = self.saver, self.sampled_turns, self.background
        generator = Generator(config, upstream, state, saver, turns, heads, divergences, background)
        steps = PipelineSteps(
            self.admission, self.body_reader, self.renderer, starter, generator, self.completion, self.responses
        )
        return Pipeline(config, self.registry, watchdog, metrics, steps)

    def build_purge_events(self) -> PurgeEvents:
        @asynccontextmanager
        async def pause() -> AsyncIterator[None]:
            with self.divergence_recorder.pause():
                async with self.saver.pause():
                    yield

        clear_turns, clear_heads = self.sampled_turns.clear, self.prompt_heads.clear
        on_removed = (clear_turns, clear_heads, self.quarantine.clear_history, self.auditor.drop_waiting)
        return PurgeEvents(pause, on_removed)

    async def adopt_residents(self) -> None:
        """Save the residents of an earlier proxy: they may be stored nowhere else."""
        await self.watchdog.wait_until_up()
        await self.backend_state.status()
        await self.saver.save_residents()

    async def drain(self) -> None:
        """Refuse new requests, let running ones end or end them, and wait until all is saved."""
        self.admission.close("The proxy is being stopped.")
        await self.auditor.stop()
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
    owner_resolver = OwnerResolver(index, parts.keys, parts.backend_state)
    upstream, state, registry, events = parts.upstream, parts.backend_state, parts.registry, parts.build_purge_events()
    reader, watchdog, admission = parts.body_reader, parts.watchdog, parts.admission
    purge_routes = PurgeRoutes(index, owner_resolver, upstream, state, registry, events, parts.background, reader)
    state.before_listing = purge_routes.deliver_purge_notice
    status = StatusRoutes(index, upstream, watchdog, state, admission, registry, parts.save_health, server)
    admin_table = _build_admin_table(parts, owner_resolver, purge_routes, status)
    app[middlewares.ADMIN_PATHS] = [path for _, path in admin_table]
    for table in (admin_table, _build_service_table(parts, status), _build_client_table(parts)):
        middlewares.add_routes(app, table)
    app.cleanup_ctx.append(lambda _: _run_background_tasks(parts, purge_routes))
    return app


def _build_client_table(parts: Components) -> RouteTable:
    """Routes of the client APIs."""
    state, registry, completion = parts.backend_state, parts.registry, parts.completion
    pipeline = parts.build_pipeline()
    clients = ClientRoutes(parts.body_reader, pipeline, parts.renderer, state, registry, completion)
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
        ("DELETE", f"{CANCEL_PATH}{{name:.+}}"): clients.cancel_request,
    }


def _build_service_table(parts: Components, status: StatusRoutes) -> RouteTable:
    """Routes of health checks, metrics and the dashboard's files."""
    state, registry, count_connections = parts.backend_state, parts.registry, status.server.count_connections
    admission, watchdog, pages = parts.admission, parts.watchdog, DashboardPages()
    metrics = MetricsRoutes(parts.metrics, parts.index, admission, registry, watchdog, state, count_connections)
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
    parts: Components, owner_resolver: OwnerResolver, purge_routes: PurgeRoutes, status: StatusRoutes
) -> RouteTable:
    """Routes of the admin API."""
    index, config, state = parts.index, parts.config, parts.backend_state
    probe, quarantine = parts.first_token_probe, parts.quarantine
    tolerance, quiet_s = config.audit_tolerance, config.audit_quiet_s
    replayer = SessionReplayer(index, state, probe, quarantine, parts.metrics, tolerance, quiet_s)
    explain = ExplainRoutes(index, parts.upstream, state, owner_resolver, parts.body_reader)
    maintenance = MaintenanceRoutes(index, state, replayer, config, parts.body_reader)
    browse = BrowseRoutes(index, owner_resolver)
    table = {
        ("GET", "/warmline/status"): status.get_status,
        ("POST", "/warmline/purge"): purge_routes.purge,
        ("POST", "/warmline/pin"): maintenance.pin,
        ("POST", "/warmline/gc"): maintenance.gc,
        ("POST", "/warmline/repair"): maintenance.repair,
        ("POST", "/warmline/replay"): maintenance.replay,
        ("POST", "/warmline/import"): maintenance.import_archive,
        ("GET", "/warmline/explain"): explain.get_explanation,
        ("POST", "/warmline/texts"): explain.get_texts,
        ("GET", "/warmline/whose"): owner_resolver.get_owners,
        ("GET", "/warmline/requests"): browse.get_requests,
        ("GET", "/warmline/activity"): browse.get_activity,
        ("GET", "/warmline/sessions"): browse.get_sessions,
        ("GET", "/warmline/tree"): browse.get_tree,
        ("GET", "/warmline/path"): browse.get_path,
    }
    return {place: middlewares.disable_caching(handler) for place, handler in table.items()}


async def _run_background_tasks(parts: Components, purge_routes: PurgeRoutes) -> AsyncIterator[None]:
    runners = (parts.watchdog, parts.deadline_monitor, parts.saver)
    monitor_tasks = [asyncio.create_task(each.run()) for each in runners]
    adoption_task = parts.background.spawn(parts.adopt_residents(), "adoption of residents")
    parts.auditor.start()
    yield
    adoption_task.cancel()
    purge_routes.close()
    await parts.auditor.stop()
    await parts.background.drain(CLEANUP_TIMEOUT_S)
    for task in monitor_tasks:
        task.cancel()
    await asyncio.wait(monitor_tasks)
    await parts.upstream.close()
