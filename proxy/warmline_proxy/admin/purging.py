"""POST /warmline/purge: what goes from the disk leaves memory too, and what runs does not bring it back."""

import asyncio
import logging
import time
from collections.abc import Sequence
from math import inf

import msgspec
from aiohttp import web

from warmline_proxy.admin.paths import Paths
from warmline_proxy.audit import Auditor
from warmline_proxy.background import Background
from warmline_proxy.bodies import json_answer, read_body
from warmline_proxy.condemn import Condemner
from warmline_proxy.errors import bad_request
from warmline_proxy.hygiene.heads import Heads
from warmline_proxy.index import Index
from warmline_proxy.index_cut import Cutter
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.life import Life
from warmline_proxy.lives import Lives
from warmline_proxy.partings import Partings
from warmline_proxy.purge import check, erase, prepare, preview, remove
from warmline_proxy.rows import PurgeReply, PurgeRequest
from warmline_proxy.settle import Settler
from warmline_proxy.turns import Turns
from warmline_proxy.upstream import Upstream, UpstreamError
from warmline_wire.keys import BLOCK_TOKENS, TOKEN_BYTES
from warmline_wire.messages import SegmentRef, decode

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 60.0  # of a restore that reads a file which was purged
RELEASE_INTERVAL_S = 0.1


class Purging:
    """Its one handler, and all that a purge reaches."""

    def __init__(
        self,
        *,
        index: Index,
        upstream: Upstream,
        knowledge: Knowledge,
        lives: Lives,
        settler: Settler,
        turns: Turns,
        heads: Heads,
        partings: Partings,
        auditor: Auditor,
        condemner: Condemner,
        background: Background,
        receive_timeout_s: float,
    ) -> None:
        self._index, self._upstream, self._knowledge, self._lives = index, upstream, knowledge, lives
        self._settler, self._turns, self._heads, self._partings = settler, turns, heads, partings
        self._auditor, self._condemner, self._background = auditor, condemner, background
        self._receive_timeout_s = receive_timeout_s

    @property
    def paths(self) -> Paths:
        return {("POST", "/warmline/purge"): self.purge}

    async def purge(self, request: web.Request) -> web.Response:
        """Answers when it is gone from disk and memory.  What was not meant is restored when it is needed."""
        try:
            wanted = decode(await read_body(request, self._receive_timeout_s), PurgeRequest)
            check(wanted)
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"Not a purge: {error}") from error
        if wanted.dry_run:
            return json_answer(await asyncio.to_thread(preview, self._index, wanted))
        # A caller that leaves meanwhile does not keep it from being finished.
        reply = await asyncio.shield(self._background.spawn(self._purge(wanted), "purge"))
        await self._until_deleted()
        return json_answer(reply)

    async def _purge(self, wanted: PurgeRequest) -> PurgeReply:
        """While nothing is being saved; who runs on what goes is marked before anything of it can be.

        Once rows are gone memory is emptied too, whatever the disk does.
        """
        with self._partings.paused():
            async with self._settler.paused():
                reply, marked = await self._removed(wanted)
                for life in marked:
                    life.purged = True
                try:
                    reply = await asyncio.to_thread(erase, self._index, reply)
                finally:
                    await self._forget()
        return reply

    async def _removed(self, wanted: PurgeRequest) -> tuple[PurgeReply, list[Life]]:
        """What takes long, writing what is left of files, is done before it is asked who runs."""
        cutter = Cutter(self._index)
        try:
            while True:
                await asyncio.to_thread(prepare, self._index, wanted, cutter)
                removing = asyncio.to_thread(remove_with, self._index, wanted, cutter, list(self._lives))
                if (found := await removing) is not None:
                    return found
        finally:
            await asyncio.to_thread(cutter.close)

    async def _forget(self) -> None:
        """All of it: what is left on disk is read again where it is needed."""
        self._turns.forget()
        self._heads.forget()
        self._auditor.forget()
        self._condemner.forget()
        for resident in self._knowledge.mirror.ids():
            self._knowledge.mirror.drop(resident)
        try:
            await self._upstream.forget()
        except UpstreamError as error:
            log.warning("the backend may still hold in memory what was purged: %s", error)

    async def _until_deleted(self) -> None:
        """What a restore was reading goes when that ends."""
        limit = time.monotonic() + RELEASE_TIMEOUT_S
        while (await asyncio.to_thread(self._index.totals)).bytes_doomed and time.monotonic() < limit:
            await asyncio.sleep(RELEASE_INTERVAL_S)
            await asyncio.to_thread(self._index.sweep)


def remove_with(
    index: Index, wanted: PurgeRequest, cutter: Cutter, running: Sequence[Life]
) -> tuple[PurgeReply, list[Life]] | None:
    """On a thread: remove it, and say which of these requests go on from what is gone, or belong to it.

    None, and nothing is done, where it must be prepared again.
    """
    paths = [_path(index, life) for life in running]
    if (reply := remove(index, wanted, cutter)) is None:
        return None
    gone = dict.fromkeys(reply.segments, 0) | {cut.segment: cut.until for cut in reply.cuts}
    marked = [
        life
        for life, path in zip(running, paths, strict=True)
        if wanted.everything
        or (wanted.model and life.model == wanted.model)
        or any(link.upto > gone.get(link.id, inf) for link in path)
    ]
    return reply, marked


def _path(index: Index, life: Life) -> list[SegmentRef]:
    """The segments that hold what it says after its head: system texts and tools are many conversations' alike."""
    if life.prompt is None or not life.root:
        return []
    tokens, head = life.prompt.tokens, next(iter(life.prompt.boundaries), BLOCK_TOKENS)
    chain = index.match(life.root, tokens, len(tokens) // TOKEN_BYTES).chain
    return [link for link in chain if link.upto > head]
