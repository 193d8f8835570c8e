"""POST /warmline/purge: removes conversations from disk and from memory, and keeps running requests from saving them.
KV that is in memory alone and outside the purge stays there until it is saved; while the disk is full, that is all KV.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from math import inf

from aiohttp import web

from warmline_common.protocol.messages import SegmentRef
from warmline_common.protocol.tokens import BLOCK_TOKENS, namespace
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.auth.key_store import KeyNotFoundError
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.retention import purge as purging
from warmline_proxy.retention.truncate import Truncator
from warmline_proxy.store.rows import PurgeReply, PurgeRequest
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.client import UpstreamError
from warmline_proxy.upstream.resident_view import ResidentEntry

log = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 60.0  # for a restore that reads a purged file
RELEASE_INTERVAL_S = 0.1
NOTIFY_INTERVAL_S = 5.0  # between notifications of the backend


@dataclass(frozen=True)
class PurgeEvents:
    """Other components' parts in a purge."""

    pause: Callable[[], AbstractAsyncContextManager[None]]  # entered before any removal, left after the last
    on_removed: Sequence[Callable[[], None]]  # called once segments are out of the index, before the notification


@dataclass(eq=False)
class PurgeRoutes:
    """Purge handler, with the notification of the backend."""

    index: Index
    owner_resolver: OwnerResolver
    models: ServedModels
    registry: RequestRegistry
    events: PurgeEvents
    background: BackgroundTasks
    body_reader: BodyReader
    _notify_task: asyncio.Task[None] | None = field(default=None, init=False)
    _notified_backends: set[Backend] = field(default_factory=set, init=False)  # of the last purge; the others are not

    async def purge(self, request: web.Request) -> web.Response:
        """Purge, and answer when disk and memory are clean.  Other residents are restored from disk on demand."""
        purge_request = await self.body_reader.read_message(request, PurgeRequest, "purge")
        try:
            purging.check_purge_request(purge_request)
        except ValueError as error:
            raise bad_request(f"Not a purge: {error}") from error
        resolved = await self._resolve_roots(purge_request)
        if purge_request.dry_run:
            return json_response(await asyncio.to_thread(purging.preview_purge, self.index, resolved))
        # Shielded: a disconnect must not cancel the purge.
        reply = await asyncio.shield(self.background.spawn(self._run_purge(purge_request), "purge"))
        await self._wait_until_deleted()
        return json_response(reply)

    async def _resolve_roots(self, purge_request: PurgeRequest) -> PurgeRequest:
        """Replace the key by its roots, also of running requests.  Raises ClientError 400 for an unknown key."""
        if not purge_request.key:
            return purge_request
        running_roots = {request.root: request.prompt.fingerprint for request in self.registry if request.prompt}
        running_roots.pop(b"", None)
        fingerprints = await asyncio.to_thread(self.index.response_fingerprints)
        try:
            labels = await self.owner_resolver.resolve_owners(running_roots, fingerprints)
            return purging.resolve_key(purge_request, labels)
        except KeyNotFoundError as error:
            raise bad_request(str(error), param="key") from error

    async def _run_purge(self, purge_request: PurgeRequest) -> PurgeReply:
        """Purge while saving is paused; memory is cleared once rows are removed, even if the disk fails.

        Affected requests are marked, and purged residents excluded from reuse, before the backend is notified.
        """
        async with self.events.pause():
            purge_request = await self._resolve_roots(purge_request)
            reply, affected, resident_ids = await self._prepare_and_remove(purge_request)
            for request in [*affected, *self._find_arriving_requests(purging.parse_roots(purge_request))]:
                request.purged = True
            for view in (backend.state.resident_view for backend in self.models.backends):
                for resident in (resident_ids & view.ids()).union(view.durable_ids()):
                    view.exclude(resident)
            try:
                await asyncio.to_thread(purging.remove_sampled_turns, self.index, _list_sampled_turns(affected))
                keys = [each.stored_response for each in affected if each.stored_response]
                reply.responses += await asyncio.to_thread(purging.remove_responses, self.index, keys)
                reply = await asyncio.to_thread(purging.erase_purged_files, self.index, reply)
            finally:
                await self._clear_memory()
        return reply

    def _find_arriving_requests(self, roots: Set[bytes]) -> list[Request]:
        """Requests without a prompt yet, of a purged namespace: their key may have been removed."""
        arriving = [request for request in self.registry if not request.root]
        fingerprints = self.models.fingerprints
        return [
            request
            for request in arriving
            if any(namespace(each, request.client.tenant) in roots for each in fingerprints)
        ]

    async def _prepare_and_remove(self, purge_request: PurgeRequest) -> "RemovalResult":
        """Rewrite truncated files first, which is slow; only then list the running requests and remove rows."""
        truncator = Truncator(self.index)
        try:
            while True:
                await asyncio.to_thread(purging.prepare_purge, self.index, purge_request, truncator)
                requests, unsaved = list(self.registry), self._list_unsaved_residents(purge_request)
                removal = asyncio.to_thread(remove_prepared, self.index, purge_request, truncator, requests, unsaved)
                if (found := await removal) is not None:
                    return found
        finally:
            await asyncio.to_thread(truncator.close)

    def _list_unsaved_residents(self, purge_request: PurgeRequest) -> list["UnsavedResident"]:
        """Residents of all models that are in memory alone."""
        return [
            UnsavedResident(name, entry, purge_request.everything or purge_request.model == backend.state.model != "")
            for backend in self.models.backends
            for name, entry in backend.state.resident_view.non_durable_entries()
        ]

    async def _clear_memory(self) -> None:
        """Drop all residents that are on disk; they are read again on demand."""
        for on_removed in self.events.on_removed:
            on_removed()
        self._notified_backends.clear()
        try:
            await self._notify_backends()
        except UpstreamError as error:
            log.warning("the backend may still hold purged KV in memory; it is notified again: %s", error)
            if self._notify_task is None or self._notify_task.done():
                self._notify_task = self.background.spawn(self._retry_notify_backend(), "purge notice")

    async def _notify_backends(self) -> None:
        """Have all backends with a process drop the residents; none without one has any.  Raises UpstreamError."""
        backends = [backend for backend in self.models.usable_backends if backend not in self._notified_backends]
        results = await asyncio.gather(*map(self._notify_backend, backends), return_exceptions=True)
        if not backends:
            await self._clear_notice()
        if failure := next((result for result in results if isinstance(result, BaseException)), None):
            raise failure

    async def _clear_notice(self) -> None:
        """Clear the notice once all backends with a process are notified."""
        if self.models.are_processes_known and self._notified_backends.issuperset(self.models.usable_backends):
            self._notified_backends.clear()
            try:
                await asyncio.to_thread(self.index.clear_purge_notice)
            except IndexStoreError as error:
                log.warning("the next start clears the backends' memory once more: %s", error)

    async def _notify_backend(self, backend: Backend) -> None:
        """Have a backend drop residents that are neither unsaved nor running requests'.  Raises UpstreamError."""
        resident_view = backend.state.resident_view
        unsaved_ids = [resident for resident, _ in resident_view.non_durable_entries()]
        own = (request for request in self.registry if request.assigned_backend is backend)
        running = (request for request in own if request.is_cacheable and request.sent)
        running_ids = [request.log.id for request in running if not request.log.generation_result]
        for resident in resident_view.ids() - set(unsaved_ids):
            resident_view.exclude(resident)
        await backend.upstream.purge_memory([*unsaved_ids, *running_ids])
        self._notified_backends.add(backend)
        await self._clear_notice()

    def close(self) -> None:
        """Stop notifying the backend: the next proxy does."""
        if self._notify_task:
            self._notify_task.cancel()

    async def _retry_notify_backend(self) -> None:
        while await self._has_purge_notice():
            await asyncio.sleep(NOTIFY_INTERVAL_S)
            with suppress(UpstreamError):
                await self._notify_backends()

    async def deliver_purge_notice(self, backend: Backend) -> None:
        """Notify a backend of a purge that was interrupted after its disk removal, before its residents are adopted.
        All residents of an earlier proxy are dropped: their conversations are unknown.  Raises UpstreamError.
        """
        if backend not in self._notified_backends and await self._has_purge_notice():
            await self._notify_backend(backend)

    async def _has_purge_notice(self) -> bool:
        """False if the index fails."""
        try:
            return await asyncio.to_thread(self.index.has_purge_notice)
        except IndexStoreError as error:
            log.warning("the index can't say whether the backend was notified of all purges: %s", error)
            return False

    async def _wait_until_deleted(self) -> None:
        """Wait for files that a restore still reads; they are deleted when it ends."""
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while (await asyncio.to_thread(self.index.totals)).bytes_doomed and time.monotonic() < deadline:
            await asyncio.sleep(RELEASE_INTERVAL_S)
            await asyncio.to_thread(self.index.sweep)


@dataclass(frozen=True)
class UnsavedResident:
    """A resident in memory alone; `is_purged_model`: all of its model is purged."""

    id: str
    entry: ResidentEntry
    is_purged_model: bool


RemovalResult = tuple[PurgeReply, list[Request], set[str]]


def remove_prepared(
    index: Index,
    purge_request: PurgeRequest,
    truncator: Truncator,
    requests: Sequence[Request],
    unsaved_residents: Sequence["UnsavedResident"],
) -> RemovalResult | None:
    """Remove rows, on a thread: the reply, the requests that lose KV or belong to it, and ids of such residents.

    None, without effect, if the purge must be prepared again.
    """
    paths = [_find_request_path(index, request) for request in requests]
    unsaved_paths = {each.id: _find_path_beyond_head(index, each.entry) for each in unsaved_residents}
    if (reply := purging.remove_purged_rows(index, purge_request, truncator)) is None:
        return None
    roots = purging.parse_roots(purge_request)
    removed_from = dict.fromkeys(reply.segments, 0) | {cut.segment: cut.until for cut in reply.cuts}

    def is_affected(path: Sequence[SegmentRef]) -> bool:
        return any(link.upto > removed_from.get(link.id, inf) for link in path)

    affected = [
        request
        for request, path in zip(requests, paths, strict=True)
        if purge_request.everything
        or (purge_request.model and request.model == purge_request.model)
        or request.root in roots
        or is_affected(path)
    ]
    resident_ids = {
        each.id
        for each in unsaved_residents
        if each.is_purged_model or each.entry.root in roots or is_affected(unsaved_paths[each.id])
    }
    results = (request.log.generation_result for request in affected)
    return reply, affected, resident_ids | {result.resident for result in results if result}


def _list_sampled_turns(requests: Sequence[Request]) -> list[tuple[bytes, str]]:
    """(namespace, first call id) of the turns that these requests have sampled: perhaps not in the index yet."""
    turns = [(each.root, each.log.generation_result.turn) for each in requests if each.log.generation_result]
    return [(root, turn.calls[0]) for root, turn in turns if turn and turn.calls]


def _find_request_path(index: Index, request: Request) -> list[SegmentRef]:
    if request.prompt is None or not request.root:
        return []
    head_end = next(iter(request.prompt.boundaries), 0)
    return _find_path_beyond_head(index, ResidentEntry(request.root, request.prompt.tokens, head_end=head_end))


def _find_path_beyond_head(index: Index, held: ResidentEntry) -> list[SegmentRef]:
    """Segments that hold the tokens after the head: system texts and tools are common to many conversations."""
    chain = index.match_prefix(held.root, held.tokens, len(held)).chain
    return [link for link in chain if link.upto > (held.head_end or BLOCK_TOKENS)]
