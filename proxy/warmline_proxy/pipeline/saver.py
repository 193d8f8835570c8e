"""Steps 7 and 8 in the background: save a request's new tail, record the request.  Never fails a request.

Event loop thread; the index is written on worker threads, one save at a time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec

from warmline_common.protocol.messages import GenerationResult, KvLayout, SaveReply, SaveRequest
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.index.index import DiskBudgetError, Index, IndexStoreError
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.save_health import FILES, INDEX, SaveHealth
from warmline_proxy.request.request import Request, resident_after_generation
from warmline_proxy.request_log import build_perf_fields, format_perf_line
from warmline_proxy.store.errors import NO_SPACE_CODES, get_error_code
from warmline_proxy.store.reserve import RESERVE_BYTES
from warmline_proxy.store.rows import SavePlan, SessionUpdate
from warmline_proxy.upstream import client
from warmline_proxy.upstream.resident_view import ResidentEntry

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 60.0  # for the disk: the backend does not count what a save waits for the engine
SAVE_BYTES_PER_S_MIN = 2e6  # of the slowest usable disk
RETRY_INTERVAL_S = 1.0  # between looks for failed saves; SaveHealth limits the tries
LEASE_INTERVAL_S = 0.25  # between calls that end leases, while the backend has memory to spare

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Saver:
    """Saves one tail at a time, in the order of the requests' ends."""

    index: Index
    models: ServedModels
    metrics: ProxyMetrics
    save_health: SaveHealth
    sampled_turns: SampledTurnCache
    divergence_recorder: DivergenceRecorder
    reuse: bool
    _save_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _saves_to_abort: list[SavePlan] = field(default_factory=list, init=False)  # failed, and still in the index
    _has_unsaved: bool = field(default=False, init=False)  # some resident could not be saved
    _has_freed_disk: bool = field(default=False, init=False)
    _leased_backends: set[Backend] = field(default_factory=set, init=False)  # with leases for saves that were not made

    async def save_request(self, request: Request) -> None:
        """Save the tail, then record the request; sets `request.saved` in between."""
        self._record_durations(request)  # at once, for the estimates of those that come meanwhile
        try:
            await self._save_request(request)
            request.saved.set()  # before the analysis, which other requests need not wait for
            await self.divergence_recorder.wait_for_analysis(request)
        finally:
            self._record_request(request)

    async def _save_request(self, request: Request) -> None:
        if not (result := request.log.generation_result):
            return
        with _log_failures("what request %s has computed could not be saved: %s", request.log.id):
            if result.resident:
                async with self._save_lock:
                    if self.reuse and request.is_cacheable:
                        await self._save_tail(request, result)
                    else:
                        request.backend.state.resident_view.exclude(result.resident)
                        await request.backend.upstream.delete_resident(result.resident)
            await request.backend.state.sync_residents(result)  # residents were evicted, and rates measured meanwhile
            await request.backend.state.refresh_rates()

    async def save_prefix(self, request: Request, until: int) -> bool:
        """Save the first `until` tokens of a running request; True once they are on disk, else the end saves them."""
        layout, prompt = request.layout, request.prompt
        if not (request.is_cacheable and self.reuse and prompt and layout and layout.persistent):
            return False
        if request.log.prompt_tokens * layout.row_bytes > self.index.budget_bytes:
            return False  # the whole prompt never fits, and a part is not worth the evictions
        positions = request.log.plan.checkpoint_positions if request.log.plan else ()
        checkpoints = [at for at in positions if at <= until]
        source = SaveRequest(request_id="", running=request.log.id)
        entry = ResidentEntry(request.root, prompt.tokens[: until * TOKEN_BYTES])
        session = _describe_session(request, prompt.turn_end, requests=0)
        unsaved = _PendingSave(request.backend, source, entry, checkpoints, request.model, layout, session)
        is_complete = False
        with _log_failures("request %s: its first %d tokens could not be saved yet: %s", request.log.id, until):
            async with self._save_lock:
                if request.is_cacheable:  # else purged while this waited
                    is_complete = (await self._save(unsaved)).is_complete
        if is_complete:
            total = request.log.prompt_tokens
            log.info("request %s: %d of %d tokens are computed and saved", request.log.id, until, total)
        return is_complete

    async def run_between_saves(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread while nothing is being saved."""
        async with self._save_lock:
            return await _run_in_thread(work)

    def pause(self) -> asyncio.Lock:
        """Scope in which nothing is saved."""
        return self._save_lock

    async def save_all_residents(self) -> None:
        """Save the residents of all models."""
        for backend in self.models.usable_backends:
            await self.save_residents(backend)

    async def save_residents(self, backend: Backend) -> None:
        """Save residents not known to be on disk: an earlier proxy's, or of a save that failed.

        Leases of those on disk end: a backend that stops waits for saves as long as there are leases.
        """
        if self.reuse and (unsaved := backend.state.resident_view.non_durable_entries()):
            await self._save_entries(backend, unsaved)
        if backend in self._leased_backends:
            await self._end_leases_of(backend)

    async def _save_entries(self, backend: Backend, unsaved: Sequence[tuple[str, ResidentEntry]]) -> None:
        resident_view = backend.state.resident_view
        with _log_failures("not all KV in memory could be saved: %s"):
            status = await backend.state.status()
            if not (layout := status.layout) or not layout.persistent:
                return
            for resident, entry in unsaved:
                source = SaveRequest(request_id="", resident=resident)
                session = SessionUpdate(turn_end=entry.turn_end, requests=0)
                pending = _PendingSave(backend, source, entry, entry.positions, status.model, layout, session)
                try:
                    async with self._save_lock:
                        if resident_view.get(resident):  # else purged or evicted meanwhile
                            await self._save(pending)
                except DiskBudgetError as error:  # the next one may be smaller
                    log.info("%s could not be saved: %s", resident, error)

    async def _save_tail(self, request: Request, result: GenerationResult) -> None:
        request_log, layout = request.log, request.layout
        if not request.prompt or not layout or not layout.persistent:
            return
        is_hit = request_log.plan is not None and request_log.plan.reuse >= BLOCK_TOKENS  # less may match by chance
        source, entry = SaveRequest(request_id="", resident=result.resident), resident_after_generation(request, result)
        session = _describe_session(request, request.prompt.turn_end, hit=is_hit)
        pending = _PendingSave(request.backend, source, entry, result.checkpoints, request.model, layout, session)
        saved = await self._save(pending)
        request_log.session, request_log.saved_tokens = saved.session, saved.tokens
        if result.turn and saved.session:
            self.sampled_turns.add(request.root, request.model, result.turn, saved.session)
            await _run_in_thread(self.index.flush)  # else the next turn could not use all of the saved rows

    async def run(self) -> None:
        """Retry failed saves as soon as saving works again, and end leases.  Never returns."""
        await asyncio.gather(self._retry_failed_saves(), self._end_leases())

    async def _end_leases(self) -> None:
        """End leases of residents that are on disk already, many with one call."""
        while True:
            await asyncio.sleep(LEASE_INTERVAL_S)
            # Leases end with the process that has granted them.
            self._leased_backends = {backend for backend in self._leased_backends if backend.is_usable}
            for backend in list(self._leased_backends):
                await self._end_leases_of(backend)

    async def _end_leases_of(self, backend: Backend) -> None:
        with _log_failures("residents that are on disk could not be made evictable yet: %s"):
            await backend.state.order_durable_residents()
            self._leased_backends.discard(backend)

    async def _retry_failed_saves(self) -> None:
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            if self.index.read_only and self.save_health.can_save():
                await self._reopen_index()
            if self._has_unsaved:
                self._has_unsaved = False
                await self.save_all_residents()

    async def _reopen_index(self) -> None:
        """Reopen an index whose home could not be written to, or reconciled, at the start."""
        try:
            async with self._save_lock:
                if not await _run_in_thread(self.index.reopen):
                    return
                log.info("index %s", await _run_in_thread(reconcile, self.index))
                await _run_in_thread(self.index.allocate_reserve)
        except (IndexStoreError, OSError) as error:
            self.index.set_read_only(error)
            self.save_health.record_failure(INDEX, get_error_code(error), str(error))
        else:
            self.save_health.record_success(INDEX)
            self._has_unsaved = True

    async def _save(self, unsaved: "_PendingSave") -> "_SaveResult":
        """Save, and end the resident's lease in any case.  Raises DiskBudgetError, or _SaveError where saving fails."""
        resident = unsaved.source.resident
        try:
            return await self._try_save(unsaved)
        except (_SaveError, client.UpstreamError, IndexStoreError, OSError) as error:
            if resident:  # evictable although it is not saved: other requests may be waiting for its memory
                await unsaved.backend.state.order_durable_residents(resident)
            if not isinstance(error, client.UpstreamGoneError):
                raise
            log.info("%s was gone before it was saved", resident or unsaved.source.running)  # only this tail is lost
            return _SaveResult()

    async def _try_save(self, unsaved: "_PendingSave") -> "_SaveResult":
        """Save unless that has just failed.  Disk failures are recorded in SaveHealth.  Raises _SaveError for them."""
        try:
            if self.save_health.can_save():
                return await self._save_now(unsaved)
        except client.InsufficientStorageError as error:
            self.save_health.record_failure(FILES, error.code, str(error))
        except DiskBudgetError:
            raise
        except IndexStoreError as error:
            self.save_health.record_failure(INDEX, error.code or "index", str(error))
            if error.code in NO_SPACE_CODES:
                with suppress(IndexStoreError):  # so full that not even evictions can be written
                    await self._free_disk(RESERVE_BYTES)  # for the next try
        self._has_unsaved = True
        raise _SaveError

    async def _save_now(self, unsaved: "_PendingSave") -> "_SaveResult":
        """The index plans, the backend writes files, one transaction commits them."""
        backend, resident, entry = unsaved.backend, unsaved.source.resident, unsaved.entry
        await self._abort_saves()
        intent = SaveIntent(
            root=entry.root,
            model=unsaved.model,
            tokens=entry.tokens,
            checkpoints=unsaved.checkpoints,
            layout=unsaved.layout,
            may_replace=not unsaved.layout.has_windows,  # rotating layers have lost their parent's rows
        )
        save, session = await _run_in_thread(self.index.begin_turn_save, intent, unsaved.session)
        if save is None:
            await self._mark_durable(backend, resident, leased=True)  # no save of rows has ended its lease
            self.save_health.record_success(INDEX)
            return _SaveResult(session, 0, is_complete=True)
        committed = None
        try:
            reply = await self._write_files(backend, save, unsaved.source)
            self.save_health.record_success(FILES)
            self._has_freed_disk = False
            with suppress(client.UpstreamError):  # then the cost is by earlier rates
                await backend.state.refresh_rates()
            cost_s = backend.state.costs().estimate_prefill_s(save.matched, len(entry))
            commit = partial(self.index.commit_save, prefill_s=cost_s, session=unsaved.session)
            committed = await _run_in_thread(commit, save, reply)
            self.save_health.record_success(INDEX)
            written = sum(file.bytes_written for file in (*reply.segments, *reply.checkpoints))
            self.metrics.record_save(committed.tokens_saved, written)
        finally:
            if committed is None:  # after any failure, also a cancel at a shutdown
                self._saves_to_abort.append(save)
                await self._abort_saves()
        if committed.why_not:
            log.info("not all of %s was kept: %s", resident or unsaved.source.running, committed.why_not)
        else:
            await self._mark_durable(backend, resident, leased=not save.segments)
        return _SaveResult(committed.session, committed.tokens_saved, is_complete=not committed.why_not)

    async def _mark_durable(self, backend: Backend, resident: str, *, leased: bool = False) -> None:
        """Mark a resident as evictable; the backend is notified once its memory fills, or soon where it is leased."""
        if not resident:
            return
        backend.state.resident_view.mark_durable(resident)
        if backend.state.is_memory_filling():
            await backend.state.order_durable_residents()
        elif leased:
            self._leased_backends.add(backend)

    async def _abort_saves(self) -> None:
        """Abort failed saves, earlier ones too."""
        while self._saves_to_abort:
            await _run_in_thread(self.index.abort_save, self._saves_to_abort[-1])
            self._saves_to_abort.pop()

    async def _write_files(self, backend: Backend, save: SavePlan, source: SaveRequest) -> SaveReply:
        """Have the backend write the files.  Raises UpstreamGoneError where rows or resident are gone."""
        files = {"segments": save.segments, "checkpoints": save.checkpoints}
        timeout_s = WRITE_TIMEOUT_S + save.bytes_expected / SAVE_BYTES_PER_S_MIN
        used = (await _run_in_thread(self.index.totals)).bytes_used
        save_request = msgspec.structs.replace(
            source,
            request_id=f"save-{save.id}",
            root=save.root,
            write_timeout_s=timeout_s,
            disk_used_share=used / max(1, self.index.budget_bytes),
            **files,
        )
        try:
            return await backend.upstream.save(save_request)
        except client.InsufficientStorageError as error:
            if error.code not in NO_SPACE_CODES or not await self._free_disk(save.bytes_expected):
                raise
            return await backend.upstream.save(save_request)

    async def _free_disk(self, bytes_wanted: int) -> bool:
        """Evict files where the disk is full though the budget is not; only once until a save succeeds."""
        if self._has_freed_disk:
            return False
        self._has_freed_disk = True  # until a save works
        freed = await _run_in_thread(self.index.free_bytes, bytes_wanted)
        log.warning("the disk is full; files evicted to make space for saves: %d", len(freed))
        return bool(freed)

    def _record_durations(self, request: Request) -> None:
        if result := request.log.generation_result:
            estimator = request.backend.state.estimator
            estimator.record_chunks(result.timings.chunks)
            if not request.is_background:  # which has waited for none, and for all
                estimator.record_request(request.log.build_record())

    def _record_request(self, request: Request) -> None:
        record = request.log.build_record()
        hint = request.log.session_hint
        log.info(format_perf_line(record, hint), extra={"fields": partial(build_perf_fields, record, hint)})
        if request.is_background:  # among the records it would look like a client's request that was not warm
            self.metrics.record_prewarm(record)
            return
        self.metrics.record_request(record, request.log.status)
        try:
            self.index.record_request(record)
        except IndexStoreError as error:
            log.warning("request %s was not recorded: %s", record.id, error)


class _SaveError(Exception):
    """The disk fails; recorded in SaveHealth."""


@dataclass(frozen=True)
class _SaveResult:
    session: str = ""
    tokens: int = 0
    is_complete: bool = False  # all requested tokens are on disk


@dataclass(frozen=True)
class _PendingSave:
    """Tokens to save, of a resident or of a running request."""

    backend: Backend
    source: SaveRequest  # the resident or the running request
    entry: ResidentEntry
    checkpoints: Sequence[int]
    model: str
    layout: KvLayout
    session: SessionUpdate


def _describe_session(request: Request, turn_end: int, *, hit: bool = False, requests: int = 1) -> SessionUpdate:
    client = request.log.session_hint
    return SessionUpdate(turn_end=turn_end, client=client, title=request.title, hit=hit, requests=requests)


@contextmanager
def _log_failures(message: str, *values: object) -> Iterator[None]:
    """Scope of saves: failures are logged, the error last in the message, except those that SaveHealth has recorded."""
    try:
        yield
    except _SaveError:
        pass
    except (client.UpstreamError, IndexStoreError, OSError) as error:
        log.warning(message, *values, error)


async def _run_in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that waits for the disk off the loop.  A cancel does not interrupt it."""
    return await asyncio.shield(asyncio.to_thread(call, *args, **kwargs))
