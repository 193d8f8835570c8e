"""What the proxy says of itself: ready or not, its status, and the purge that cachectl asks for."""

import asyncio
import logging

import msgspec
from aiohttp import web

from warmline_proxy.admission import Admission
from warmline_proxy.bodies import read_body
from warmline_proxy.errors import RETRY_AFTER_S, bad_request
from warmline_proxy.hotpath import HotPath
from warmline_proxy.index import Index
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.purge import purge
from warmline_proxy.rows import PurgeRequest, Totals
from warmline_proxy.upstream import Upstream, UpstreamError
from warmline_wire.messages import Resident, decode, encode

log = logging.getLogger(__name__)


class ProxyStatus(msgspec.Struct, kw_only=True):
    """GET /warmline/status."""

    running: int
    queued: int
    settling: int  # answered, but not yet on disk
    residents: list[Resident]
    totals: Totals
    backend: str = ""  # why the backend could not be asked; "" where it could


class Admin:
    """Handlers; the state that they tell is others'."""

    def __init__(
        self, index: Index, upstream: Upstream, knowledge: Knowledge, admission: Admission, hot_path: HotPath
    ) -> None:
        self._index = index
        self._upstream = upstream
        self._knowledge = knowledge
        self._admission = admission
        self._hot_path = hot_path

    async def ready(self) -> web.Response:
        """200 where a request would be served now."""
        try:
            status = await self._upstream.status(patient=False)
        except UpstreamError as error:
            return _not_ready(str(error))
        if not status.ready:
            return _not_ready(status.failure or "the backend is starting")
        return web.json_response({"ready": True, "model": status.model})

    async def status(self) -> web.Response:
        residents, backend = [], ""
        try:
            residents = (await self._upstream.residents(ids=False, patient=False)).residents
        except UpstreamError as error:
            backend = str(error)
        answer = ProxyStatus(
            running=self._admission.running,
            queued=self._admission.queued,
            settling=self._hot_path.settling,
            residents=residents,
            totals=await asyncio.to_thread(self._index.totals),
            backend=backend,
        )
        return web.Response(body=encode(answer), content_type="application/json")

    async def purge(self, request: web.Request) -> web.Response:
        """What was purged from disk leaves memory too; residents that were not meant are restored when needed."""
        try:
            wanted = decode(await read_body(request), PurgeRequest)
            reply = await asyncio.to_thread(purge, self._index, wanted)
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"Not a purge: {error}") from error
        if not wanted.dry_run:
            await self._forget_residents()
        return web.Response(body=encode(reply), content_type="application/json")

    async def _forget_residents(self) -> None:
        for resident in self._knowledge.mirror.ids():
            self._knowledge.mirror.drop(resident)
            try:
                await self._upstream.drop_resident(resident)
            except UpstreamError as error:
                log.warning("resident %s was purged, but may still be in memory: %s", resident, error)


def _not_ready(reason: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return web.json_response({"ready": False, "reason": reason}, status=503, headers=headers)
