"""Wiring of the proxy: components, routes, background tasks.  Event loop thread."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from warmline_proxy.admin.archives import ArchiveRoutes
from warmline_proxy.admin.explain import ExplainRoutes
from warmline_proxy.admin.health import HealthRoutes
from warmline_proxy.admin.maintenance import MaintenanceRoutes
from warmline_proxy.admin.metrics import MetricsRoutes
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.admin.purge import PurgeRoutes
from warmline_proxy.admin.routes import ADMIN_PATHS, RouteTable, disable_caching
from warmline_proxy.admin.status import ServerInfo, StatusRoutes
from warmline_proxy.api.openai import MODELS_PATH
from warmline_proxy.api.registry import APIS, COUNT_TOKENS_PATH, MESSAGES, RESPONSES, RESPONSES_PATH
from warmline_proxy.audit.auditor import Auditor, IdleCheck
from warmline_proxy.audit.bisect import Bisector
from warmline_proxy.audit.first_token_probe import FirstTokenProbe
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.audit.replay import SessionReplayer
from warmline_proxy.auth.authenticator import Authenticator
from warmline_proxy.auth.principals import ClientKeys
from warmline_proxy.config import ProxyConfig
from warmline_proxy.dashboard.browse import BrowseRoutes
from warmline_proxy.dashboard.pages import DASHBOARD_PATH, DashboardPages
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.explain.prompt_head import PromptHeadCache
from warmline_proxy.http.bodies import BODY_BYTES_MAX
from warmline_proxy.http.connections import CONNECTIONS
from warmline_proxy.http.request_id import request_id_middleware, set_request_id_headers
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import METRICS, ProxyMetrics
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.deadline_monitor import DeadlineMonitor
from warmline_proxy.pipeline.generator import Generator
from warmline_proxy.pipeline.pipeline import Pipeline, PipelineSteps
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.save_health import SaveHealth
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.retention.events import PurgeEvents
from warmline_proxy.routes import middlewares
from warmline_proxy.routes.anthropic import AnthropicRoutes, is_anthropic_request
from warmline_proxy.routes.openai import CANCEL_PATH, OpenAIRoutes
from warmline_proxy.routes.responses import ResponsesRoutes
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.watchdog import Watchdog

CLEANUP_TIMEOUT_S = 2.0  # of background tasks
REQUEST_REGISTRY = web.AppKey("request_registry", RequestRegistry)


class Components:
    """All parts of one proxy, built once; the caller owns `index`."""

    def __init__(self, config: ProxyConfig, secret: str, index: Index) -> None:
        self.config, self.index, self.keys = config, index, ClientKeys(config)
        background, metrics = BackgroundTasks(), ProxyMetrics()
        upstream = Upstream(config.backend_url, secret)
        watchdog = Watchdog(upstream, config.wedge_timeout_s, config.home.pid_file("backend"))
        state = BackendState(upstream)
        registry = RequestRegistry(state)
        self.background, self.metrics, self.upstream, self.watchdog = background, metrics, upstream, watchdog
        self.backend_state, self.registry, self.save_health = state, registry, SaveHealth(metrics)
        self.admission = AdmissionQueue(
            config.running_count_max, config.queue_count_max, registry.estimate_retry_after_s
        )
        self.save_health.watch_index(index)
        turns, divergences = (
            SampledTurnCache(index),
            DivergenceRecorder(upstream, index, state.resident_view, background),
        )
        self.sampled_turns, self.divergence_recorder, self.prompt_heads = turns, divergences, PromptHeadCache()
        self.renderer = RemoteRenderer(config, upstream, state, turns)
        is_reusing, finishes_prefill = config.reuse != "off", config.on_disconnect == "finish-prefill"
        self.saver = Saver(index, upstream, state, metrics, self.save_health, turns, divergences, reuse=is_reusing)
        self._build_audits()
        on_settled = self.auditor.consider_request
        self.completion = Completion(registry, upstream, watchdog, self.saver, on_settled, background, finishes_prefill)
        self.deadline_monitor = DeadlineMonitor(registry, watchdog, background, config.heartbeat_after_s)

    def _build_audits(self) -> None:
        index, upstream, state, metrics = self.index, self.upstream, self.backend_state, self.metrics
        probe = FirstTokenProbe(upstream, index, state.resident_view, lambda: self.keys.known_tenants)
        bisector, registry = Bisector(index, probe), self.registry
        quarantine = Quarantine(index, upstream, state, registry, self.saver, bisector, metrics, self.background)
        self.first_token_probe, self.quarantine = probe, quarantine
        self.auditor = Auditor(
            config=self.config,
            index=index,
            probe=probe,
            quarantine=quarantine,
            idle_check=IdleCheck(self.admission, registry, self.watchdog),
            metrics=metrics,
            rng=random.Random(),
        )

    def build_pipeline(self) -> Pipeline:
        config, upstream, state, metrics = self.config, self.upstream, self.backend_state, self.metrics
        watchdog, heads, divergences = self.watchdog, self.prompt_heads, self.divergence_recorder
        starter = Starter(config, upstream, self.index, state, watchdog, metrics, heads, divergences)
        saver, turns, background = self.saver, self.sampled_turns, self.background
        generator = Generator(config, upstream, state, saver, turns, heads, divergences, background)
        steps = PipelineSteps(self.admission, self.renderer, starter, generator, self.completion)
        return Pipeline(config, self.registry, watchdog, metrics, steps)

    def build_purge_events(self) -> PurgeEvents:
        events = PurgeEvents()
        events.add_pause(self.divergence_recorder.pause)
        events.add_pause(self.saver.pause)
        for clear in (self.sampled_turns.clear, self.prompt_heads.clear, self.quarantine.clear_history):
            events.subscribe(clear)
        events.subscribe(self.auditor.drop_waiting)
        return events

    async def adopt_residents(self) -> None:
        """Save the residents of an earlier proxy: they may be stored nowhere else."""
        await self.watchdog.wait_until_up()
        await self.backend_state.status()
        await self.saver.save_residents()

    async def drain(self) -> None:
        self.admission.close("The proxy is being stopped.")
        await self.auditor.stop()
        await self.completion.drain(self.config.drain_timeout_s)


COMPONENTS = web.AppKey("components", Components)


def build_app(config: ProxyConfig, secret: str, index: Index) -> web.Application:
    """The whole proxy, wired together.  The caller owns `index`."""
    parts = Components(config, secret, index)
    authenticator = Authenticator(config, secret, parts.keys, parts.metrics)
    access_middleware = middlewares.build_access_middleware(authenticator)
    stack = [request_id_middleware, middlewares.error_middleware, access_middleware]
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=stack)
    app.on_response_prepare.append(set_request_id_headers)
    app.on_response_prepare.append(middlewares.build_cors_handler(config.allowed_origins))
    app[COMPONENTS], app[REQUEST_REGISTRY], app[METRICS] = parts, parts.registry, parts.metrics

    def count_connections() -> int:
        return app[CONNECTIONS].count if CONNECTIONS in app else 0

    server = ServerInfo(config.reuse, config.bind_host, count_connections, lambda: parts.keys.is_required)
    owner_resolver = OwnerResolver(index, parts.keys, parts.backend_state)
    upstream, state, registry, events = parts.upstream, parts.backend_state, parts.registry, parts.build_purge_events()
    timeout_s = config.receive_timeout_s
    purge_routes = PurgeRoutes(index, owner_resolver, upstream, state, registry, events, parts.background, timeout_s)
    state.before_listing = purge_routes.deliver_purge_notice
    admin_table = _build_admin_table(parts, owner_resolver, purge_routes, server)
    app[ADMIN_PATHS] = [path for _, path in admin_table]
    middlewares.add_routes(app, admin_table)
    middlewares.add_routes(app, _build_service_table(parts, count_connections))
    middlewares.add_routes(app, _build_client_table(parts))
    app.cleanup_ctx.append(lambda _: _run_background_tasks(parts, purge_routes))
    return app


def _build_client_table(parts: Components) -> RouteTable:
    """Routes of the client APIs."""
    openai = OpenAIRoutes(parts.build_pipeline(), parts.backend_state, parts.registry, parts.completion)
    anthropic = AnthropicRoutes(MESSAGES, parts.config, parts.renderer, parts.backend_state)
    responses = ResponsesRoutes(RESPONSES, parts.config, parts.renderer, parts.registry, parts.completion)

    async def get_models(request: web.Request) -> web.StreamResponse:
        return await (anthropic if is_anthropic_request(request) else openai).get_models(request)

    return {
        **{("POST", path): openai.build_generation_handler(api) for path, api in APIS.items()},
        ("POST", COUNT_TOKENS_PATH): anthropic.count_tokens,
        ("*", f"{RESPONSES_PATH}/{{path:.+}}"): responses.handle,
        ("GET", MODELS_PATH): get_models,
        ("GET", f"{MODELS_PATH}/{{name:.+}}"): get_models,
        ("DELETE", f"{CANCEL_PATH}{{name:.+}}"): openai.cancel_request,
    }


def _build_service_table(parts: Components, count_connections: Callable[[], int]) -> RouteTable:
    """Routes of health checks, metrics and the dashboard's files."""
    admission, state, registry, watchdog = parts.admission, parts.backend_state, parts.registry, parts.watchdog
    health = HealthRoutes(parts.upstream, watchdog, state, admission, parts.save_health)
    metrics = MetricsRoutes(parts.metrics, parts.index, admission, registry, watchdog, state, count_connections)
    parts.metrics.register(metrics)
    parts.index.on_evicted = parts.metrics.record_eviction
    pages = DashboardPages()
    return {
        ("GET", "/health"): health.get_health,
        ("GET", "/ready"): health.get_ready,
        ("GET", middlewares.METRICS_PATH): metrics.get_metrics,
        ("*", DASHBOARD_PATH): pages.serve_file,
        ("*", f"{DASHBOARD_PATH}/{{file:.+}}"): pages.serve_file,
    }


def _build_admin_table(
    parts: Components, owner_resolver: OwnerResolver, purge_routes: PurgeRoutes, server: ServerInfo
) -> RouteTable:
    """Routes of the admin API."""
    index, config, upstream, state = parts.index, parts.config, parts.upstream, parts.backend_state
    probe, quarantine, registry = parts.first_token_probe, parts.quarantine, parts.registry
    replayer = SessionReplayer(index, state, probe, quarantine, parts.metrics, config.audit_tolerance)
    admission, health = parts.admission, parts.save_health
    status = StatusRoutes(index, upstream, parts.watchdog, state, admission, registry, health, server)
    explain = ExplainRoutes(index, upstream, state, owner_resolver, config.receive_timeout_s)
    maintenance = MaintenanceRoutes(index, replayer, config.receive_timeout_s)
    browse = BrowseRoutes(index, owner_resolver)
    table = {
        ("GET", "/warmline/status"): status.get_status,
        ("POST", "/warmline/purge"): purge_routes.purge,
        ("POST", "/warmline/pin"): maintenance.pin,
        ("POST", "/warmline/gc"): maintenance.gc,
        ("POST", "/warmline/repair"): maintenance.repair,
        ("POST", "/warmline/replay"): maintenance.replay,
        ("POST", "/warmline/import"): ArchiveRoutes(index, state, config).import_archive,
        ("GET", "/warmline/explain"): explain.get_explanation,
        ("POST", "/warmline/texts"): explain.get_texts,
        ("GET", "/warmline/whose"): owner_resolver.get_owners,
        ("GET", "/warmline/requests"): browse.get_requests,
        ("GET", "/warmline/activity"): browse.get_activity,
        ("GET", "/warmline/sessions"): browse.get_sessions,
        ("GET", "/warmline/tree"): browse.get_tree,
        ("GET", "/warmline/path"): browse.get_path,
    }
    return disable_caching(table)


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


async def drain(app: web.Application) -> None:
    """Refuse new requests, let running ones end or end them, and wait until all is saved."""
    await app[COMPONENTS].drain()
