"""POST /warmline/purge: what goes from the disk leaves memory too, and what runs does not bring it back.

What is in memory alone, and was not meant, stays there until it is saved: while the disk is full, which may be why
somebody purges, that is all of it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from math import inf

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import SegmentRef, decode
from warmline_common.protocol.tokens import BLOCK_TOKENS, namespace
from warmline_proxy.admin.owners import Attribution
from warmline_proxy.admin.routes import Paths
from warmline_proxy.audit.auditor import Auditor
from warmline_proxy.audit.quarantine import Condemner
from warmline_proxy.auth.key_store import NoSuchKey
from warmline_proxy.errors import bad_request
from warmline_proxy.explain.divergence import Partings
from warmline_proxy.explain.prompt_head import Heads
from warmline_proxy.http.bodies import json_answer, read_body
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.pipeline.sampled_turns import Turns
from warmline_proxy.pipeline.saver import Settler
from warmline_proxy.request.registry import Lives
from warmline_proxy.request.request import Life
from warmline_proxy.retention.purge import by_roots, check, erase, prepare, preview, remove, remove_turns_of, roots_of
from warmline_proxy.retention.truncate import Cutter
from warmline_proxy.store.rows import PurgeReply, PurgeRequest
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Refused, Upstream, UpstreamError
from warmline_proxy.upstream.resident_view import Held

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 60.0  # of a restore that reads a file which was purged
RELEASE_INTERVAL_S = 0.1
LOADING = 503  # HTTP status of a backend that has no model yet, and nothing in memory
TELL_INTERVAL_S = 5.0  # between tries to tell the backend


class Purging:
    """Its one handler, and all that a purge reaches."""

    def __init__(
        self,
        *,
        index: Index,
        attribution: Attribution,
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
        self._attribution = attribution
        self._settler, self._turns, self._heads, self._partings = settler, turns, heads, partings
        self._auditor, self._condemner, self._background = auditor, condemner, background
        self._receive_timeout_s = receive_timeout_s
        self._telling: asyncio.Task[None] | None = None

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
        found = await self._found(wanted)
        if wanted.dry_run:
            return json_answer(await asyncio.to_thread(preview, self._index, found))
        # A caller that leaves meanwhile does not keep it from being finished.
        reply = await asyncio.shield(self._background.spawn(self._purge(wanted), "purge"))
        await self._until_deleted()
        return json_answer(reply)

    async def _found(self, wanted: PurgeRequest) -> PurgeRequest:
        """With roots for a key, also of what runs.  Raises ClientError 400 where nobody is called so."""
        if not wanted.key:
            return wanted
        running = {life.root for life in self._lives} - {b""}
        try:
            return by_roots(wanted, await self._attribution.whose(running))
        except NoSuchKey as error:
            raise bad_request(str(error), param="key") from error

    async def _purge(self, wanted: PurgeRequest) -> PurgeReply:
        """While nothing is being saved; who runs on what goes is marked before anything of it can be, and nobody starts
        from what is in memory of it, though the backend may be told late.

        Once rows are gone memory is emptied too, whatever the disk does.
        """
        with self._partings.paused():
            async with self._settler.paused():
                wanted = await self._found(wanted)
                reply, marked, residents = await self._removed(wanted)
                for life in [*marked, *self._arriving(roots_of(wanted))]:
                    life.purged = True
                for resident in residents.union(self._knowledge.mirror.durable()):
                    self._knowledge.mirror.shun(resident)
                try:
                    await asyncio.to_thread(remove_turns_of, self._index, _sampled(marked))
                    reply = await asyncio.to_thread(erase, self._index, reply)
                finally:
                    await self._forget()
        return reply

    def _arriving(self, roots: Set[bytes]) -> list[Life]:
        """Whose prompt is not known yet, and whose cache this is: its key may be one that is no more."""
        served = self._knowledge.fingerprint
        return [life for life in self._lives if not life.root and namespace(served, life.client.tenant) in roots]

    async def _removed(self, wanted: PurgeRequest) -> "Removed":
        """What takes long, writing what is left of files, is done before it is asked who runs."""
        cutter, mirror = Cutter(self._index), self._knowledge.mirror
        try:
            while True:
                await asyncio.to_thread(prepare, self._index, wanted, cutter)
                running, unsaved = list(self._lives), mirror.not_durable()
                whole = wanted.everything or wanted.model == self._knowledge.model != ""
                removing = asyncio.to_thread(remove_with, self._index, wanted, cutter, running, unsaved, whole)
                if (found := await removing) is not None:
                    return found
        finally:
            await asyncio.to_thread(cutter.close)

    async def _forget(self) -> None:
        """All but what is nowhere else: what is on disk is read again where it is needed."""
        self._turns.forget()
        self._heads.forget()
        self._auditor.forget()
        self._condemner.forget()
        try:
            await self._tell()
        except UpstreamError as error:
            log.warning("the backend may still hold in memory what was purged; it is told again: %s", error)
            if self._telling is None or self._telling.done():
                self._telling = self._background.spawn(self._tell_later(), "word of a purge")

    async def _tell(self) -> None:
        """All goes from memory but what is nowhere else, and what who runs is to leave there meanwhile.

        Raises UpstreamError.
        """
        mirror = self._knowledge.mirror
        keep = [resident for resident, _ in mirror.not_durable()]
        running = [life.trace.id for life in self._lives if life.is_kept and life.sent and not life.trace.settled]
        for resident in mirror.ids() - set(keep):
            mirror.shun(resident)
        await self._upstream.forget([*keep, *running])
        try:
            await asyncio.to_thread(self._index.note_told)
        except IndexFailure as error:
            log.warning("the next start has the backend forget what is in memory once more: %s", error)

    def close(self) -> None:
        """Tell the backend no more: the next proxy does."""
        if self._telling:
            self._telling.cancel()

    async def _tell_later(self) -> None:
        while await self._is_untold():
            await asyncio.sleep(TELL_INTERVAL_S)
            with suppress(UpstreamError):
                await self.tell_what_is_untold()

    async def tell_what_is_untold(self) -> None:
        """A purge was ended between what it removed from the disk and the backend's hearing of it: before anything that
        the backend has is taken over, it is told.  Raises UpstreamError.

        What an earlier proxy left goes, all of it: what is whose conversation's nobody knows any more.
        """
        if not await self._is_untold():
            return
        try:
            await self._tell()
        except Refused as error:
            if error.status != LOADING:
                raise

    async def _is_untold(self) -> bool:
        """False where the index can't say."""
        try:
            return await asyncio.to_thread(self._index.is_untold)
        except IndexFailure as error:
            log.warning("whether the backend has heard of all purges is not known: %s", error)
            return False

    async def _until_deleted(self) -> None:
        """What a restore was reading goes when that ends."""
        limit = time.monotonic() + RELEASE_TIMEOUT_S
        while (await asyncio.to_thread(self._index.totals)).bytes_doomed and time.monotonic() < limit:
            await asyncio.sleep(RELEASE_INTERVAL_S)
            await asyncio.to_thread(self._index.sweep)


Removed = tuple[PurgeReply, list[Life], set[str]]


def remove_with(
    index: Index,
    wanted: PurgeRequest,
    cutter: Cutter,
    running: Sequence[Life],
    unsaved: Sequence[tuple[str, Held]],
    whole: bool,
) -> Removed | None:
    """On a thread: remove it, and say which of these requests go on from what is gone, or belong to it; and which of
    these residents do (all where the `whole` of what is served goes).

    None, and nothing is done, where it must be prepared again.
    """
    paths = [_path(index, life) for life in running]
    held = {resident: _beyond_head(index, each) for resident, each in unsaved}
    if (reply := remove(index, wanted, cutter)) is None:
        return None
    roots = roots_of(wanted)
    gone = dict.fromkeys(reply.segments, 0) | {cut.segment: cut.until for cut in reply.cuts}

    def goes(path: Sequence[SegmentRef]) -> bool:
        return any(link.upto > gone.get(link.id, inf) for link in path)

    marked = [
        life
        for life, path in zip(running, paths, strict=True)
        if wanted.everything or (wanted.model and life.model == wanted.model) or life.root in roots or goes(path)
    ]
    residents = {resident for resident, each in unsaved if whole or each.root in roots or goes(held[resident])}
    return reply, marked, residents | {life.trace.settled.resident for life in marked if life.trace.settled}


def _sampled(marked: Sequence[Life]) -> list[tuple[bytes, str]]:
    """By namespace and first call, what they have sampled: maybe too late for the purge to see it in the index."""
    turns = [(life.root, life.trace.settled.turn) for life in marked if life.trace.settled]
    return [(root, turn.calls[0]) for root, turn in turns if turn and turn.calls]


def _path(index: Index, life: Life) -> list[SegmentRef]:
    if life.prompt is None or not life.root:
        return []
    return _beyond_head(index, Held(life.root, life.prompt.tokens, head=next(iter(life.prompt.boundaries), 0)))


def _beyond_head(index: Index, held: Held) -> list[SegmentRef]:
    """The segments that hold what it says after its head: system texts and tools are many conversations' alike."""
    chain = index.match(held.root, held.tokens, len(held)).chain
    return [link for link in chain if link.upto > (held.head or BLOCK_TOKENS)]
