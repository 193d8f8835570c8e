"""The proxy's HTTP face: who may call what.  Paths are matched by hand, so that a trailing slash is no other path."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import aiohttp
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from warmline_common.process.redaction import redact_path
from warmline_proxy.admin.archives import ArchiveRoutes
from warmline_proxy.admin.explain import ExplainRoutes
from warmline_proxy.admin.health import HealthRoutes
from warmline_proxy.admin.maintenance import MaintenanceRoutes
from warmline_proxy.admin.metrics import GaugeCollector
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.admin.purge import PurgeRoutes
from warmline_proxy.admin.routes import ADMIN_PATH_PREFIX, AdminRouter
from warmline_proxy.admin.scrape import MetricsRoutes
from warmline_proxy.admin.status import StatusRoutes
from warmline_proxy.api.base import Api
from warmline_proxy.api.openai_models import MODELS_PATH, build_models_reply, is_models_path
from warmline_proxy.api.registry import APIS, COUNT_TOKENS_PATH, MESSAGES, RESPONSES, RESPONSES_PATH, find_api
from warmline_proxy.audit.auditor import Auditor, IdleCheck
from warmline_proxy.audit.bisect import Bisector
from warmline_proxy.audit.first_token_probe import FirstTokenProbe
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.audit.replay import SessionReplayer
from warmline_proxy.auth.authenticator import Authenticator
from warmline_proxy.auth.principals import Client, ClientKeys
from warmline_proxy.config import ProxyConfig
from warmline_proxy.dashboard.browse import BrowseRoutes
from warmline_proxy.dashboard.inspect import InspectRoutes
from warmline_proxy.dashboard.pages import DashboardPages, is_browser_visit, is_dashboard_path, redirect_to_dashboard
from warmline_proxy.errors import ClientError, bad_request, index_error, method_not_allowed, translate_upstream_error
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.explain.prompt_head import PromptHeadCache
from warmline_proxy.http.bodies import BODY_BYTES_MAX, json_response
from warmline_proxy.http.connections import CONNECTIONS
from warmline_proxy.http.cors import build_cors_headers
from warmline_proxy.http.request_id import request_id_middleware, set_request_id_headers
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import METRICS, ProxyMetrics
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.deadline_monitor import DeadlineMonitor
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.save_health import SaveHealth
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.routes.anthropic import AnthropicRoutes, is_models_request
from warmline_proxy.routes.responses import ResponsesRoutes
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

CANCEL_PATH = "/v1/requests/"
RESPONSE_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
CLEANUP_TIMEOUT_S = 2.0  # for background work after the drain, or without one
REQUEST_REGISTRY = web.AppKey("lives", RequestRegistry)
DRAIN: web.AppKey[Callable[[], Awaitable[None]]] = web.AppKey("drain")


class Dispatcher:
    """Dispatches requests; holds no state of its own."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        backend_state: BackendState,
        pipeline: Pipeline,
        registry: RequestRegistry,
        completion: Completion,
        health_routes: HealthRoutes,
        metrics_routes: MetricsRoutes,
        admin_router: AdminRouter,
        pages: DashboardPages,
        anthropic_routes: AnthropicRoutes,
        responses_routes: ResponsesRoutes,
    ) -> None:
        self._authenticator = authenticator
        self._backend_state = backend_state
        self._pipeline = pipeline
        self._registry = registry
        self._completion = completion
        self._health_routes = health_routes
        self._metrics_routes = metrics_routes
        self._admin_router = admin_router
        self._pages = pages
        self._anthropic_routes = anthropic_routes
        self._responses_routes = responses_routes

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises ClientError and UpstreamError."""
        self._authenticator.check_host(request)
        path = request.path.rstrip("/") or "/"
        if request.method in ("GET", "HEAD") and path == "/health":
            return self._health_routes.get_health()
        if request.method in ("GET", "HEAD") and path == "/ready":
            return await self._health_routes.get_ready()
        if request.method in ("GET", "HEAD") and path == "/metrics":
            self._authenticator.check_client_or_admin(request)
            return await self._metrics_routes.get_metrics(request)
        if path.startswith(ADMIN_PATH_PREFIX):
            self._authenticator.check_admin(request)
            return await self._admin_router.handle(request, path)
        if is_dashboard_path(path):
            self._authenticator.check_admin(request, is_page=True)
            return self._pages.serve_file(request, path)
        if is_browser_visit(request, path) and self._authenticator.can_see_pages(request):
            return redirect_to_dashboard()
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": "GET, HEAD, POST, DELETE, OPTIONS"})
        client = self._authenticator.authenticate_client(request)
        if api := APIS.get(path):
            return await self._generate(request, api, client)
        if path == COUNT_TOKENS_PATH:
            return await self._anthropic_routes.count_tokens(request, client)
        if is_models_request(request, path):
            return await self._anthropic_routes.get_models(path)
        if path.startswith(f"{RESPONSES_PATH}/"):
            return await self._responses_routes.handle(request, path.removeprefix(f"{RESPONSES_PATH}/"), client)
        if is_models_path(path):
            return await self._get_models(request, path)
        if path.startswith(CANCEL_PATH) and request.method == "DELETE":
            return await self._cancel_request(path.removeprefix(CANCEL_PATH), client)
        raise _path_not_found(request.path)

    async def _get_models(self, request: web.Request, path: str) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed(request.method, "GET")
        return json_response(build_models_reply(path, await self._backend_state.status()))

    async def _generate(self, request: web.Request, api: Api, client: Client) -> web.StreamResponse:
        if request.method != "POST":
            raise method_not_allowed(request.method, "POST")
        return await self._pipeline.handle(request, api, client)

    async def _cancel_request(self, name: str, client: Client) -> web.StreamResponse:
        """Answers when the engine has let go.  `name`: the request's id, or the id of its answer, which ends in it.

        For others than its own client there is no such request.
        """
        request = self._registry.find(name, client) or self._registry.find(_strip_id_prefix(name), client)
        if request is None or request.released.is_set():
            raise bad_request(f'No request "{name[:80]}" is on its way.', status=404, code="unknown_request")
        await self._completion.cancel(request)
        return json_response({"id": request.log.id, "object": "request", "cancelled": True})


def _path_not_found(path: str) -> ClientError:
    """At once, whatever the backend does: clients probe for other servers' paths and wait for the answer."""
    served_paths = [*APIS, COUNT_TOKENS_PATH, MODELS_PATH]
    message = f'Unknown path "{path[:200]}"; served are {", ".join(served_paths)}.'
    if meant := [known for known in served_paths if path.endswith(known.removeprefix("/v1"))]:
        message += f"  If {max(meant, key=len)} was meant: the base URL that the client was given doesn't lead there."
    elif path.strip("/") in ("", "v1"):  # typed into a browser
        message += "  The dashboard is at /admin."
    return bad_request(message, status=404, code="not_found")


def _strip_id_prefix(name: str) -> str:
    """An answer's id without what its API writes before the request's."""
    for prefix in RESPONSE_ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One envelope for every refusal.  A client that has left gets none."""
    try:
        return await handler(request)
    except (ClientError, UpstreamError) as error:
        return _build_error_response(request, translate_upstream_error(error))
    except IndexStoreError as error:
        log.error("%s %s: %s", request.method, redact_path(request.path), error)
        return _build_error_response(request, index_error(str(error)))
    except ConnectionResetError:
        return web.Response(status=499, reason="Client Closed Request")


async def handle_expect(request: web.Request) -> None:
    """Before a handler: a client waits to be told to go on.  aiohttp's own one repeats what it can't write."""
    if request.version < aiohttp.HttpVersion11:
        return
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        error = bad_request("The header Expect must be 100-continue, or not there.", status=417)
        raise web.HTTPExpectationFailed(text=error.body.decode(), content_type="application/json")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer is out yet


def _build_error_response(request: web.Request, error: ClientError) -> web.Response:
    request.app[METRICS].record_error(error)
    return error.build_response(find_api(request.path.rstrip("/")).encode_error(error))


def build_cors_handler(
    allowed_origins: Collection[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal's handler, for an answer's head that is about to be written: has pages of these origins read it."""

    async def set_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(build_cors_headers(allowed_origins, request.method, request.path, request.headers))

    return set_cors_headers


def build_app(config: ProxyConfig, secret: str, index: Index) -> web.Application:
    """The whole proxy, wired together.  The caller owns `index`."""
    background_tasks, metrics = BackgroundTasks(), ProxyMetrics()
    upstream = Upstream(config.backend_url, secret)
    watchdog = Watchdog(upstream, config.wedge_timeout_s, config.home.pid_file("backend"))
    keys = ClientKeys(config)
    backend_state = BackendState(upstream)
    registry = RequestRegistry(backend_state)
    admission = AdmissionQueue(config.running_count_max, config.queue_count_max, registry.estimate_retry_after_s)
    save_health = SaveHealth(metrics)
    save_health.watch_index(index)
    sampled_turns = SampledTurnCache(index)
    renderer = RemoteRenderer(config, upstream, backend_state, sampled_turns)
    divergence_recorder = DivergenceRecorder(upstream, index, backend_state.resident_view, background_tasks)
    saver = Saver(
        index,
        upstream,
        backend_state,
        metrics,
        save_health,
        sampled_turns,
        divergence_recorder,
        reuse=config.reuse != "off",
    )
    first_token_probe = FirstTokenProbe(upstream, index, backend_state.resident_view, lambda: keys.known_tenants)
    bisector = Bisector(index, first_token_probe)
    quarantine = Quarantine(index, upstream, backend_state, registry, saver, bisector, metrics, background_tasks)
    auditor = Auditor(
        config=config,
        index=index,
        probe=first_token_probe,
        quarantine=quarantine,
        idle_check=IdleCheck(admission, registry, watchdog),
        metrics=metrics,
        rng=random.Random(),
    )
    completion = Completion(
        registry, upstream, watchdog, saver, auditor, background_tasks, config.on_disconnect == "finish-prefill"
    )
    deadline_monitor = DeadlineMonitor(registry, watchdog, background_tasks, config.heartbeat_after_s)
    prompt_heads = PromptHeadCache()
    pipeline = Pipeline(
        config=config,
        registry=registry,
        upstream=upstream,
        watchdog=watchdog,
        backend_state=backend_state,
        renderer=renderer,
        admission=admission,
        starter=Starter(
            upstream, index, backend_state, watchdog, metrics, divergence_recorder, config.partial_save_tokens
        ),
        divergence_recorder=divergence_recorder,
        saver=saver,
        sampled_turns=sampled_turns,
        completion=completion,
        background=background_tasks,
        metrics=metrics,
        prompt_heads=prompt_heads,
    )
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[request_id_middleware, error_middleware])
    app.on_response_prepare.append(set_request_id_headers)
    app.on_response_prepare.append(build_cors_handler(config.allowed_origins))

    def count_connections() -> int:
        return app[CONNECTIONS].count if CONNECTIONS in app else 0

    gauges = GaugeCollector(
        index=index,
        admission=admission,
        registry=registry,
        watchdog=watchdog,
        backend_state=backend_state,
        count_connections=count_connections,
    )
    metrics.register(gauges)
    index.on_evicted = metrics.record_eviction
    status_routes = StatusRoutes(
        index=index,
        upstream=upstream,
        watchdog=watchdog,
        backend_state=backend_state,
        admission=admission,
        registry=registry,
        save_health=save_health,
        count_connections=count_connections,
        reuse=config.reuse,
        host=config.bind_host,
        needs_key=lambda: keys.is_required,
    )
    owner_resolver = OwnerResolver(index, keys, backend_state)
    purge_routes = PurgeRoutes(
        index=index,
        owner_resolver=owner_resolver,
        upstream=upstream,
        backend_state=backend_state,
        registry=registry,
        saver=saver,
        sampled_turns=sampled_turns,
        prompt_heads=prompt_heads,
        divergence_recorder=divergence_recorder,
        auditor=auditor,
        quarantine=quarantine,
        background=background_tasks,
        receive_timeout_s=config.receive_timeout_s,
    )
    backend_state.before_listing = purge_routes.deliver_purge_notice
    replayer = SessionReplayer(index, backend_state, first_token_probe, quarantine, metrics, config.audit_tolerance)
    maintenance_routes = MaintenanceRoutes(index, replayer, config.receive_timeout_s)
    explain_routes = ExplainRoutes(index, upstream, backend_state, owner_resolver, config.receive_timeout_s)
    inspect_routes = InspectRoutes(index)
    dispatcher = Dispatcher(
        authenticator=Authenticator(config, secret, keys, metrics),
        backend_state=backend_state,
        pipeline=pipeline,
        registry=registry,
        completion=completion,
        health_routes=HealthRoutes(upstream, watchdog, backend_state, admission, save_health),
        metrics_routes=MetricsRoutes(metrics, gauges),
        admin_router=AdminRouter(
            status_routes.routes,
            purge_routes.routes,
            maintenance_routes.routes,
            inspect_routes.routes,
            explain_routes.routes,
            owner_resolver.routes,
            BrowseRoutes(index, owner_resolver).routes,
            ArchiveRoutes(index, backend_state, config).routes,
        ),
        pages=DashboardPages(),
        anthropic_routes=AnthropicRoutes(MESSAGES, config, renderer, backend_state),
        responses_routes=ResponsesRoutes(RESPONSES, config, renderer, registry, completion),
    )
    app.router.add_route("*", r"/{path:[\s\S]*}", dispatcher.handle, expect_handler=handle_expect)

    async def adopt_residents() -> None:
        """What an earlier proxy left in the backend's memory may be nowhere else."""
        await watchdog.wait_until_up()
        await backend_state.status()
        await saver.save_residents()

    async def drain_all() -> None:
        admission.close("The proxy is being stopped.")
        await auditor.stop()
        await completion.drain(config.drain_timeout_s)

    async def run_background_tasks(_: web.Application) -> AsyncIterator[None]:
        monitor_tasks = [asyncio.create_task(each.run()) for each in (watchdog, deadline_monitor, saver)]
        adoption_task = background_tasks.spawn(adopt_residents(), "adoption of residents")
        auditor.start()
        yield
        adoption_task.cancel()
        purge_routes.close()
        await auditor.stop()
        await background_tasks.drain(CLEANUP_TIMEOUT_S)
        for task in monitor_tasks:
            task.cancel()
        await asyncio.wait(monitor_tasks)
        await upstream.close()

    app[REQUEST_REGISTRY], app[DRAIN], app[METRICS] = registry, drain_all, metrics
    app.cleanup_ctx.append(run_background_tasks)
    return app


async def drain(app: web.Application) -> None:
    """Let nobody in any more, let what runs come to its end or end it, and wait until it is on disk."""
    await app[DRAIN]()
