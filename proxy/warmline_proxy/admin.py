"""What the proxy says of itself: ready or not, its status, and what cachectl asks for."""

import asyncio
import logging
from collections.abc import Callable

import msgspec
from aiohttp import web

from warmline_proxy.admission import Admission
from warmline_proxy.bodies import json_answer, read_body
from warmline_proxy.errors import RETRY_AFTER_S, bad_request
from warmline_proxy.index import Index
from warmline_proxy.index_errors import MADE_ANEW, IndexFailure, failure
from warmline_proxy.index_probe import is_readable
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.lives import Lives
from warmline_proxy.metrics import CONTENT_TYPE, Metrics
from warmline_proxy.persistence import Persistence
from warmline_proxy.purge import purge
from warmline_proxy.repair import repair
from warmline_proxy.replay import Replayer
from warmline_proxy.rows import PurgeRequest, ReplayRequest, Totals
from warmline_proxy.turns import Turns
from warmline_proxy.upstream import Upstream, UpstreamError
from warmline_proxy.watchdog import Watchdog
from warmline_wire.messages import Resident, Vitals, decode
from warmline_wire.vitals import take_vitals

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 1.0


class ProxyStatus(msgspec.Struct, kw_only=True):
    """GET /warmline/status."""

    running: int
    queued: int
    settling: int  # answered, but not yet on disk
    residents: list[Resident]
    totals: Totals
    lives: int  # requests on their way: answered and saved ones no longer are
    connections: int
    backend_kills: int  # of wedged backends, since the start
    vitals: Vitals
    backend: str = ""  # why the backend could not be asked; "" where it could
    persistence: str = "ok"  # or why what is computed can't be saved
    unsaved: int = 0  # residents that are in memory alone


class Admin:
    """Handlers; the state that they tell is others'."""

    def __init__(
        self,
        *,
        index: Index,
        upstream: Upstream,
        watchdog: Watchdog,
        knowledge: Knowledge,
        admission: Admission,
        lives: Lives,
        metrics: Metrics,
        persistence: Persistence,
        turns: Turns,
        replayer: Replayer,
        receive_timeout_s: float,
        connections: Callable[[], int],
    ) -> None:
        self._index = index
        self._upstream = upstream
        self._watchdog = watchdog
        self._knowledge = knowledge
        self._admission = admission
        self._lives = lives
        self._metrics = metrics
        self._persistence = persistence
        self._turns = turns
        self._replayer = replayer
        self._receive_timeout_s = receive_timeout_s
        self._connections = connections

    async def ready(self) -> web.Response:
        """200 where a request would be served now; else 503 and why not."""
        if self._admission.closed:
            return _not_ready(self._admission.closed)
        try:
            await self._watchdog.up(LOOK_TIMEOUT_S)
            await self._upstream.ready()
            status = await self._knowledge.status()
        except TimeoutError:
            return _not_ready(self._watchdog.why_down)
        except UpstreamError as error:
            return _not_ready(str(error))
        return json_answer({"ready": True, "model": status.model})

    def health(self) -> web.Response:
        """200: we serve, also where nothing can be saved, and say so."""
        return json_answer({"status": "ok", "persistence": self._persistence.state})

    def metrics(self) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def status(self) -> web.Response:
        residents, backend = [], ""
        try:
            if self._watchdog.is_up:
                residents = (await self._upstream.residents(ids=False)).residents
            else:
                backend = self._watchdog.why_down
        except UpstreamError as error:
            backend = str(error)
        answer = ProxyStatus(
            running=self._admission.running,
            queued=self._admission.queued,
            settling=self._lives.settling,
            residents=residents,
            totals=await asyncio.to_thread(self._index.totals),
            lives=len(self._lives),
            connections=self._connections(),
            backend_kills=self._watchdog.kills,
            vitals=take_vitals(),
            backend=backend,
            persistence=self._persistence.state,
            unsaved=len(self._knowledge.mirror.not_durable()),
        )
        return json_answer(answer)

    async def purge(self, request: web.Request) -> web.Response:
        """What was purged from disk leaves memory too; residents that were not meant are restored when needed."""
        try:
            wanted = decode(await read_body(request, self._receive_timeout_s), PurgeRequest)
            reply = await asyncio.to_thread(purge, self._index, wanted)
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"Not a purge: {error}") from error
        if not wanted.dry_run:
            self._turns.forget()
            await self._forget_residents()
        return json_answer(reply)

    async def repair(self) -> web.Response:
        """Saves and restores go on meanwhile; what they have under way is left alone."""
        if not await asyncio.to_thread(is_readable, self._index.home.index):
            raise IndexFailure(f"it has pages that end the process which reads them; {MADE_ANEW}")
        try:
            reply = await asyncio.to_thread(repair, self._index, deep=True, saving=True)
        except OSError as error:
            raise failure("can't be repaired", error) from error
        for each in reply.did:
            log.warning("repair: %s %s: %s", each.what, each.id, each.detail)
        return json_answer(reply)

    async def replay(self, request: web.Request) -> web.Response:
        """Answers when all is computed, however long that takes; a caller that leaves ends it."""
        try:
            wanted = decode(await read_body(request, self._receive_timeout_s), ReplayRequest)
            reply = await self._replayer.replay(wanted)
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"Not a replay: {error}") from error
        return json_answer(reply)

    async def _forget_residents(self) -> None:
        for resident in self._knowledge.mirror.ids():
            self._knowledge.mirror.drop(resident)
            try:
                await self._upstream.drop_resident(resident)
            except UpstreamError as error:
                log.warning("resident %s was purged, but may still be in memory: %s", resident, error)


def _not_ready(reason: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return json_answer({"ready": False, "reason": reason}, status=503, headers=headers)
