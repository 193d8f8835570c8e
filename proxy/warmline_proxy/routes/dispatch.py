"""The proxy's HTTP face: who may call what.  Paths are matched by hand, so that a trailing slash is no other path."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import aiohttp
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from warmline_common.process.redaction import shown_path
from warmline_proxy.admin.archives import Moving
from warmline_proxy.admin.explain import Explaining
from warmline_proxy.admin.health import Health
from warmline_proxy.admin.maintenance import Upkeep
from warmline_proxy.admin.metrics import Gauges
from warmline_proxy.admin.owners import Attribution
from warmline_proxy.admin.purge import Purging
from warmline_proxy.admin.routes import PREFIX, OwnerPaths
from warmline_proxy.admin.scrape import Scraping
from warmline_proxy.admin.status import StatusPath
from warmline_proxy.api.base import Api
from warmline_proxy.api.openai_models import MODELS_PATH, is_models_path, models_at
from warmline_proxy.api.registry import APIS, COUNT_PATH, MESSAGES, RESPONSES, RESPONSES_PATH, api_at
from warmline_proxy.audit.auditor import Auditor
from warmline_proxy.audit.bisect import Blame
from warmline_proxy.audit.quarantine import Condemner
from warmline_proxy.audit.replay import Replayer
from warmline_proxy.auth.authenticator import Doors
from warmline_proxy.auth.principals import Client, ClientKeys
from warmline_proxy.config import Config
from warmline_proxy.dashboard.browse import Browsing
from warmline_proxy.dashboard.inspect import Looking
from warmline_proxy.dashboard.pages import Pages, is_page, is_visit, to_the_page
from warmline_proxy.errors import ClientError, bad_request, from_upstream, index_failed, not_allowed
from warmline_proxy.explain.divergence import Partings
from warmline_proxy.explain.prompt_head import Heads
from warmline_proxy.http.bodies import BODY_BYTES_MAX, json_answer
from warmline_proxy.http.connections import CONNECTIONS
from warmline_proxy.http.cors import cors_headers
from warmline_proxy.http.request_id import marked, named
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.metrics import METRICS, Metrics
from warmline_proxy.pipeline.completion import Ending
from warmline_proxy.pipeline.deadline_monitor import Overseer
from warmline_proxy.pipeline.pipeline import HotPath
from warmline_proxy.pipeline.rendering import Renderer
from warmline_proxy.pipeline.sampled_turns import Turns
from warmline_proxy.pipeline.save_health import Persistence
from warmline_proxy.pipeline.saver import Settler
from warmline_proxy.pipeline.starter import Starter
from warmline_proxy.request.admission import Admission
from warmline_proxy.request.registry import Lives
from warmline_proxy.routes.anthropic import Anthropic, asks_for_models
from warmline_proxy.routes.responses import ResponsePaths
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.first_token_probe import Recomputer
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

CANCEL_PATH = "/v1/requests/"
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
END_TIMEOUT_S = 2.0  # for background work after the drain, or without one
LIVES = web.AppKey("lives", Lives)
DRAIN: web.AppKey[Callable[[], Awaitable[None]]] = web.AppKey("drain")


class Face:
    """Dispatches requests; holds no state of its own."""

    def __init__(
        self,
        *,
        doors: Doors,
        knowledge: Knowledge,
        hot_path: HotPath,
        lives: Lives,
        ending: Ending,
        health: Health,
        scraping: Scraping,
        owner_paths: OwnerPaths,
        pages: Pages,
        anthropic: Anthropic,
        response_paths: ResponsePaths,
    ) -> None:
        self._doors = doors
        self._knowledge = knowledge
        self._hot_path = hot_path
        self._lives = lives
        self._ending = ending
        self._health = health
        self._scraping = scraping
        self._owner_paths = owner_paths
        self._pages = pages
        self._anthropic = anthropic
        self._response_paths = response_paths

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Raises ClientError and UpstreamError."""
        self._doors.check_host(request)
        path = request.path.rstrip("/") or "/"
        if request.method in ("GET", "HEAD") and path == "/health":
            return self._health.health()
        if request.method in ("GET", "HEAD") and path == "/ready":
            return await self._health.ready()
        if request.method in ("GET", "HEAD") and path == "/metrics":
            self._doors.check_client_or_owner(request)
            return await self._scraping.metrics(request)
        if path.startswith(PREFIX):
            self._doors.check_owner(request)
            return await self._owner_paths.answer(request, path)
        if is_page(path):
            self._doors.check_owner(request, page=True)
            return self._pages.answer(request, path)
        if is_visit(request, path) and self._doors.may_see_pages(request):
            return to_the_page()
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": "GET, HEAD, POST, DELETE, OPTIONS"})
        client = self._doors.client(request)
        if api := APIS.get(path):
            return await self._generate(request, api, client)
        if path == COUNT_PATH:
            return await self._anthropic.count_tokens(request, client)
        if asks_for_models(request, path):
            return await self._anthropic.models(path)
        if path.startswith(f"{RESPONSES_PATH}/"):
            return await self._response_paths.answer(request, path.removeprefix(f"{RESPONSES_PATH}/"), client)
        if is_models_path(path):
            return await self._models(request, path)
        if path.startswith(CANCEL_PATH) and request.method == "DELETE":
            return await self._cancel(path.removeprefix(CANCEL_PATH), client)
        raise _unknown(request.path)

    async def _models(self, request: web.Request, path: str) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise not_allowed(request.method, "GET")
        return json_answer(models_at(path, await self._knowledge.status()))

    async def _generate(self, request: web.Request, api: Api, client: Client) -> web.StreamResponse:
        if request.method != "POST":
            raise not_allowed(request.method, "POST")
        return await self._hot_path.answer(request, api, client)

    async def _cancel(self, name: str, client: Client) -> web.StreamResponse:
        """Answers when the engine has let go.  `name`: the request's id, or the id of its answer, which ends in it.

        For others than its own client there is no such request.
        """
        life = self._lives.find(name, client) or self._lives.find(_bare(name), client)
        if life is None or life.let_go.is_set():
            raise bad_request(f'No request "{name[:80]}" is on its way.', status=404, code="unknown_request")
        await self._ending.cancel(life)
        return json_answer({"id": life.trace.id, "object": "request", "cancelled": True})


def _unknown(path: str) -> ClientError:
    """At once, whatever the backend does: clients probe for other servers' paths and wait for the answer."""
    served = [*APIS, COUNT_PATH, MODELS_PATH]
    message = f'Unknown path "{path[:200]}"; served are {", ".join(served)}.'
    if meant := [known for known in served if path.endswith(known.removeprefix("/v1"))]:
        message += f"  If {max(meant, key=len)} was meant: the base URL that the client was given doesn't lead there."
    elif path.strip("/") in ("", "v1"):  # typed into a browser
        message += "  The dashboard is at /admin."
    return bad_request(message, status=404, code="not_found")


def _bare(name: str) -> str:
    """An answer's id without what its API writes before the request's."""
    for prefix in ANSWER_PREFIXES:
        name = name.removeprefix(prefix)
    return name


@web.middleware
async def errors_as_answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One envelope for every refusal.  A client that has left gets none."""
    try:
        return await handler(request)
    except (ClientError, UpstreamError) as error:
        return _refusal(request, from_upstream(error))
    except IndexFailure as error:
        log.error("%s %s: %s", request.method, shown_path(request.path), error)
        return _refusal(request, index_failed(str(error)))
    except ConnectionResetError:
        return web.Response(status=499, reason="Client Closed Request")


async def expected(request: web.Request) -> None:
    """Before a handler: a client waits to be told to go on.  aiohttp's own one repeats what it can't write."""
    if request.version < aiohttp.HttpVersion11:
        return
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        error = bad_request("The header Expect must be 100-continue, or not there.", status=417)
        raise web.HTTPExpectationFailed(text=error.body.decode(), content_type="application/json")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer is out yet


def _refusal(request: web.Request, error: ClientError) -> web.Response:
    request.app[METRICS].refused(error)
    return error.response(api_at(request.path.rstrip("/")).refusal(error))


def for_browsers(allowed: Collection[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal's handler, for an answer's head that is about to be written: has pages of these origins read it."""

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(cors_headers(allowed, request.method, request.path, request.headers))

    return mark


def build(config: Config, secret: str, index: Index) -> web.Application:
    """The whole proxy, wired together.  The caller owns `index`."""
    background, metrics = Background(), Metrics()
    upstream = Upstream(config.backend_url, secret)
    watchdog = Watchdog(upstream, config.wedge_timeout_s, config.home.pid_file("backend"))
    keys = ClientKeys(config)
    knowledge = Knowledge(upstream)
    lives = Lives(knowledge)
    admission = Admission(config.running_count_max, config.queue_count_max, lives.retry_after_s)
    persistence = Persistence(metrics)
    persistence.watch(index)
    turns = Turns(index)
    renderer = Renderer(config, upstream, knowledge, turns)
    partings = Partings(upstream, index, knowledge.mirror, background)
    settler = Settler(index, upstream, knowledge, metrics, persistence, turns, partings, reuse=config.reuse != "off")
    recomputer = Recomputer(upstream, index, knowledge.mirror, lambda: keys.tenants)
    blame = Blame(index, recomputer)
    condemner = Condemner(index, upstream, knowledge, lives, settler, blame, metrics, background)
    auditor = Auditor(
        config=config,
        index=index,
        recomputer=recomputer,
        condemner=condemner,
        admission=admission,
        lives=lives,
        watchdog=watchdog,
        metrics=metrics,
        chance=random.Random(),
    )
    ending = Ending(lives, upstream, watchdog, settler, auditor, background, config.on_disconnect == "finish-prefill")
    overseer = Overseer(lives, watchdog, background, config.heartbeat_after_s)
    heads = Heads()
    hot_path = HotPath(
        config=config,
        lives=lives,
        upstream=upstream,
        watchdog=watchdog,
        knowledge=knowledge,
        renderer=renderer,
        admission=admission,
        starter=Starter(upstream, index, knowledge, watchdog, metrics, partings, config.partial_save_tokens),
        partings=partings,
        settler=settler,
        turns=turns,
        ending=ending,
        background=background,
        metrics=metrics,
        heads=heads,
    )
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[named, errors_as_answers])
    app.on_response_prepare.append(marked)
    app.on_response_prepare.append(for_browsers(config.allowed_origins))

    def connections() -> int:
        return app[CONNECTIONS].count if CONNECTIONS in app else 0

    gauges = Gauges(
        index=index,
        admission=admission,
        lives=lives,
        watchdog=watchdog,
        knowledge=knowledge,
        connections=connections,
    )
    metrics.add(gauges)
    index.on_evicted = metrics.evicted
    status = StatusPath(
        index=index,
        upstream=upstream,
        watchdog=watchdog,
        knowledge=knowledge,
        admission=admission,
        lives=lives,
        persistence=persistence,
        connections=connections,
        reuse=config.reuse,
        host=config.bind_host,
        needs_key=lambda: keys.required,
    )
    attribution = Attribution(index, keys, knowledge)
    purging = Purging(
        index=index,
        attribution=attribution,
        upstream=upstream,
        knowledge=knowledge,
        lives=lives,
        settler=settler,
        turns=turns,
        heads=heads,
        partings=partings,
        auditor=auditor,
        condemner=condemner,
        background=background,
        receive_timeout_s=config.receive_timeout_s,
    )
    knowledge.before_listing = purging.tell_what_is_untold
    replayer = Replayer(index, knowledge, recomputer, condemner, metrics, config.audit_tolerance)
    upkeep = Upkeep(index, replayer, config.receive_timeout_s)
    explaining = Explaining(index, upstream, knowledge, attribution, config.receive_timeout_s)
    looking = Looking(index)
    face = Face(
        doors=Doors(config, secret, keys, metrics),
        knowledge=knowledge,
        hot_path=hot_path,
        lives=lives,
        ending=ending,
        health=Health(upstream, watchdog, knowledge, admission, persistence),
        scraping=Scraping(metrics, gauges),
        owner_paths=OwnerPaths(
            status.paths,
            purging.paths,
            upkeep.paths,
            looking.paths,
            explaining.paths,
            attribution.paths,
            Browsing(index, attribution).paths,
            Moving(index, knowledge, config).paths,
        ),
        pages=Pages(),
        anthropic=Anthropic(MESSAGES, config, renderer, knowledge),
        response_paths=ResponsePaths(RESPONSES, config, renderer, lives, ending),
    )
    app.router.add_route("*", r"/{path:[\s\S]*}", face.handle, expect_handler=expected)

    async def adopt() -> None:
        """What an earlier proxy left in the backend's memory may be nowhere else."""
        await watchdog.up()
        await knowledge.status()
        await settler.save_residents()

    async def drain_all() -> None:
        admission.close("The proxy is being stopped.")
        await auditor.stop()
        await ending.drain(config.drain_timeout_s)

    async def live(_: web.Application) -> AsyncIterator[None]:
        watching = [asyncio.create_task(each.run()) for each in (watchdog, overseer, settler)]
        adopting = background.spawn(adopt(), "adoption of residents")
        auditor.start()
        yield
        adopting.cancel()
        purging.close()
        await auditor.stop()
        await background.drain(END_TIMEOUT_S)
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
        await upstream.close()

    app[LIVES], app[DRAIN], app[METRICS] = lives, drain_all, metrics
    app.cleanup_ctx.append(live)
    return app


async def drain(app: web.Application) -> None:
    """Let nobody in any more, let what runs come to its end or end it, and wait until it is on disk."""
    await app[DRAIN]()
