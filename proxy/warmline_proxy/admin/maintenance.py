"""Owner's maintenance of the store: pin, gc, repair, replay."""

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web

from warmline_proxy.audit.replay import SessionReplayer
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_response, read_message
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import PinLimitError, UnknownSessionError, pin_session
from warmline_proxy.store.crash_probe import is_readable
from warmline_proxy.store.errors import REBUILD_HINT, IndexStoreError, wrap_error
from warmline_proxy.store.rows import GcRequest, PinRequest, ReplayRequest

log = logging.getLogger(__name__)


@dataclass(eq=False)
class MaintenanceRoutes:
    """Handlers of maintenance commands; callers serialize them."""

    index: Index
    replayer: SessionReplayer
    receive_timeout_s: float

    async def pin(self, request: web.Request) -> web.Response:
        """Pin or unpin a session.  404 for an unknown one, 409 above the budget."""
        pin_request = await read_message(request, PinRequest, "pin", self.receive_timeout_s)
        try:
            return json_response(await asyncio.to_thread(pin_session, self.index, pin_request))
        except UnknownSessionError as error:
            raise bad_request(str(error), status=404, code="not_found") from error
        except PinLimitError as error:
            raise bad_request(str(error), status=409, code="too_much_pinned") from error
        except ValueError as error:
            raise bad_request(f"Not a pin: {error}") from error

    async def gc(self, request: web.Request) -> web.Response:
        """Collect garbage while saves and restores continue; their files are left alone."""
        gc_request = await read_message(request, GcRequest, "gc", self.receive_timeout_s)
        try:
            return json_response(await asyncio.to_thread(collect_garbage, self.index, gc_request, is_saving=True))
        except ValueError as error:
            raise bad_request(f"Not a gc: {error}") from error
        except OSError as error:
            raise wrap_error("can't be tidied", error) from error

    async def repair(self, _: web.Request) -> web.Response:
        """Check and repair all files while saves and restores continue; their files are left alone."""
        if not await asyncio.to_thread(is_readable, self.index.home.index):
            raise IndexStoreError(f"it has pages that end the process which reads them; {REBUILD_HINT}")
        try:
            reply = await asyncio.to_thread(repair, self.index, deep=True, is_saving=True)
        except OSError as error:
            raise wrap_error("can't be repaired", error) from error
        for each in reply.did:
            log.warning("repair: %s %s: %s", each.what, each.id, each.detail)
        return json_response(reply)

    async def replay(self, request: web.Request) -> web.Response:
        """Replay a session's turns and answer when all are computed; a disconnect cancels it."""
        replay_request = await read_message(request, ReplayRequest, "replay", self.receive_timeout_s)
        try:
            reply = await self.replayer.replay(replay_request)
        except ValueError as error:
            raise bad_request(f"Not a replay: {error}") from error
        return json_response(reply)
