"""What the owner has done to what is stored: pin, gc, repair, replay.  Purges have a module of their own."""

import asyncio
import logging

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import decode
from warmline_proxy.admin.routes import Paths
from warmline_proxy.audit.replay import Replayer
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_answer, read_body
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.retention.gc import collect
from warmline_proxy.retention.pin import NotStored, TooMuchPinned, pin
from warmline_proxy.store.crash_probe import is_readable
from warmline_proxy.store.errors import MADE_ANEW, IndexFailure, failure
from warmline_proxy.store.rows import GcRequest, PinRequest, ReplayRequest

log = logging.getLogger(__name__)


class Upkeep:
    """Handlers for what cachectl and the dashboard ask to be done; one at a time is up to who asks."""

    def __init__(self, index: Index, replayer: Replayer, receive_timeout_s: float) -> None:
        self._index, self._replayer, self._receive_timeout_s = index, replayer, receive_timeout_s

    @property
    def paths(self) -> Paths:
        return {
            ("POST", "/warmline/pin"): self.pin,
            ("POST", "/warmline/gc"): self.gc,
            ("POST", "/warmline/repair"): self.repair,
            ("POST", "/warmline/replay"): self.replay,
        }

    async def pin(self, request: web.Request) -> web.Response:
        """404 where no such conversation is stored; 409 where the budget has no room for it."""
        try:
            wanted = decode(await read_body(request, self._receive_timeout_s), PinRequest)
            return json_answer(await asyncio.to_thread(pin, self._index, wanted))
        except NotStored as error:
            raise bad_request(str(error), status=404, code="not_found") from error
        except TooMuchPinned as error:
            raise bad_request(str(error), status=409, code="too_much_pinned") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"Not a pin: {error}") from error

    async def gc(self, request: web.Request) -> web.Response:
        """Saves and restores go on meanwhile; what they have under way is left alone."""
        try:
            wanted = decode(await read_body(request, self._receive_timeout_s), GcRequest)
            return json_answer(await asyncio.to_thread(collect, self._index, wanted, saving=True))
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"Not a gc: {error}") from error
        except OSError as error:
            raise failure("can't be tidied", error) from error

    async def repair(self, _: web.Request) -> web.Response:
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
