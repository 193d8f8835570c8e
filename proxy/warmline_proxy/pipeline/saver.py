"""The end of a request's life, in the background: save the new tail, record what happened.  Never fails a request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import msgspec

from warmline_common.protocol.messages import GenerationResult, KvLayout, SaveReply, SaveRequest
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.index.index import DiskBudgetError, Index, IndexStoreError
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.save_health import FILES, INDEX, SaveHealth
from warmline_proxy.planner import estimate_prefill_s
from warmline_proxy.request.request import Request, resident_after_generation
from warmline_proxy.request_log import build_perf_fields, format_perf_line
from warmline_proxy.store.errors import NO_SPACE_CODES, get_error_code
from warmline_proxy.store.reserve import RESERVE_BYTES
from warmline_proxy.store.rows import SavePlan, SessionUpdate
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import (
    InsufficientStorageError,
    Upstream,
    UpstreamError,
    UpstreamGoneError,
    UpstreamTimeoutError,
)
from warmline_proxy.upstream.resident_view import ResidentEntry

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 60.0
SAVE_BYTES_PER_S_MIN = 2e6  # what the slowest disk that is of use writes
CANCEL_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 1.0  # how soon what could not be saved is thought of; how often it is tried, Persistence says

P = ParamSpec("P")
T = TypeVar("T")


class Saver:
    """Saves one tail at a time, in the order in which requests ended."""

    def __init__(
        self,
        index: Index,
        upstream: Upstream,
        backend_state: BackendState,
        metrics: ProxyMetrics,
        save_health: SaveHealth,
        sampled_turns: SampledTurnCache,
        divergence_recorder: DivergenceRecorder,
        reuse: bool,
    ) -> None:
        self._index = index
        self._upstream = upstream
        self._backend_state = backend_state
        self._metrics = metrics
        self._save_health = save_health
        self._sampled_turns = sampled_turns
        self._divergence_recorder = divergence_recorder
        self._reuse = reuse
        self._save_lock = asyncio.Lock()
        self._saves_to_abort: list[SavePlan] = []  # given up, and still in an index that could not be written then
        self._has_unsaved = False  # something in memory could not be saved
        self._has_freed_disk = False

    async def save_request(self, request: Request) -> None:
        """Returns when it is recorded; before that its tail is durable, or isn't going to be."""
        try:
            await self._save_request(request)
            request.saved.set()  # who waits for what is saved is not to wait for what texts say
            await self._divergence_recorder.wait_for_analysis(request)
        finally:
            self._record_request(request)

    async def _save_request(self, request: Request) -> None:
        settled = request.log.generation_result
        try:
            if settled and settled.resident:
                async with self._save_lock:
                    can_save = self._reuse and request.is_cacheable
                    await (self._save_tail(request, settled) if can_save else self._drop_resident(settled))
            if settled:
                await self._refresh_backend_state(settled)
        except _SaveError:
            pass  # it is saved once that works again
        except (UpstreamError, IndexStoreError, OSError) as error:
            log.warning("what request %s has computed could not be saved: %s", request.log.id, error)

    async def _refresh_backend_state(self, settled: GenerationResult) -> None:
        """What the request pushed out is no longer in memory, and the rates may have been measured anew."""
        await self._backend_state.sync_residents(settled)
        await self._backend_state.refresh_rates()

    async def _drop_resident(self, settled: GenerationResult) -> None:
        self._backend_state.resident_view.exclude(settled.resident)
        await self._upstream.delete_resident(settled.resident)

    async def save_prefix(self, request: Request, until: int) -> bool:
        """Save the first `until` tokens of a request that is still being computed; whether they are on disk now.

        What fails is saved at its end.
        """
        if not (
            request.is_cacheable and self._reuse and request.prompt and request.layout and request.layout.persistent
        ):
            return False
        if request.log.prompt_tokens * request.layout.row_bytes > self._index.budget_bytes:
            return False  # all of it never fits, and a part is not worth what it would push out
        unsaved = _PendingSave(
            source=SaveRequest(request_id="", running=request.log.id),
            held=ResidentEntry(request.root, request.prompt.tokens[: until * TOKEN_BYTES]),
            checkpoints=[
                at for at in (request.log.plan.checkpoint_positions if request.log.plan else ()) if at <= until
            ],
            model=request.model,
            layout=request.layout,
            session=SessionUpdate(turn_end=request.prompt.turn_end, client=request.log.session_hint, requests=0),
        )
        try:
            async with self._save_lock:
                if not request.is_cacheable:  # it was purged while this waited
                    return False
                is_complete = (await self._save(unsaved)).is_complete
        except _SaveError:
            return False
        except (UpstreamError, IndexStoreError, OSError) as error:
            log.warning("request %s: its first %d tokens could not be saved yet: %s", request.log.id, until, error)
            return False
        if is_complete:
            log.info(
                "request %s: %d of %d tokens are computed and saved", request.log.id, until, request.log.prompt_tokens
            )
        return is_complete

    async def run_between_saves(self, work: Callable[[], T]) -> T:
        """Do something to the index on a thread, while nothing is being saved."""
        async with self.pause():
            return await _run_in_thread(work)

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Nothing is being saved meanwhile."""
        async with self._save_lock:
            yield

    async def save_residents(self) -> None:
        """Save what is in memory and not known to be on disk: what an earlier proxy left, or a save that failed."""
        unsaved = self._backend_state.resident_view.non_durable_entries()
        if not self._reuse or not unsaved:
            return
        try:
            status = await self._backend_state.status()
            for resident, held in unsaved:
                if status.layout and status.layout.persistent:
                    await self._save_resident(_pending_resident_save(resident, held, status.model, status.layout))
        except _SaveError:
            pass
        except (UpstreamError, IndexStoreError, OSError) as error:
            log.warning("what is in memory could not all be saved: %s", error)

    async def _save_resident(self, unsaved: "_PendingSave") -> None:
        try:
            async with self._save_lock:
                if self._backend_state.resident_view.get(
                    unsaved.source.resident
                ):  # else it was purged, or dropped, meanwhile
                    await self._save(unsaved)
        except DiskBudgetError as error:  # the next one may be smaller
            log.info("%s could not be saved: %s", unsaved.source.resident, error)

    async def _save_tail(self, request: Request, settled: GenerationResult) -> None:
        request_log, layout = request.log, request.layout
        if not request.prompt or not layout or not layout.persistent:
            return
        unsaved = _PendingSave(
            source=SaveRequest(request_id="", resident=settled.resident),
            held=resident_after_generation(request, settled),
            checkpoints=settled.checkpoints,
            model=request.model,
            layout=layout,
            session=SessionUpdate(
                turn_end=request.prompt.turn_end,
                client=request_log.session_hint,
                hit=bool(request_log.plan and request_log.plan.reuse >= BLOCK_TOKENS),  # fewer begin alike by chance
            ),
        )
        saved = await self._save(unsaved)
        request_log.session, request_log.saved_tokens = saved.session, saved.tokens
        if settled.turn and saved.session:
            self._sampled_turns.add(request.root, request.model, settled.turn, saved.session)
            await _run_in_thread(self._index.flush)  # without it the next turn could not use all that was saved

    async def run(self) -> None:
        """Save what could not be saved, as soon as that works again.  Never returns."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            if self._index.read_only and self._save_health.can_save():
                await self._reopen_index()
            if self._has_unsaved:
                self._has_unsaved = False
                await self.save_residents()

    async def _reopen_index(self) -> None:
        """The home could not be written to, or put in order, at the start; perhaps it can be now."""
        try:
            async with self._save_lock:
                if not await _run_in_thread(self._index.reopen):
                    return
                log.info("index: %s", await _run_in_thread(reconcile, self._index))
                await _run_in_thread(self._index.allocate_reserve)
        except (IndexStoreError, OSError) as error:
            self._index.set_read_only(error)
            self._save_health.record_failure(INDEX, get_error_code(error), str(error))
        else:
            self._save_health.record_success(INDEX)
            self._has_unsaved = True

    async def _save(self, unsaved: "_PendingSave") -> "_SaveResult":
        """However it ends, the resident is no longer leased then.  Raises NoRoom, or _SavingFails where saving does, or
        did just now.
        """
        try:
            return await self._try_save(unsaved)
        except UpstreamGoneError:  # what is gone is this tail alone
            log.info("%s was gone before it was saved", unsaved.source.resident or unsaved.source.running)
            await self._release_unsaved(unsaved)
            return _SaveResult()
        except (_SaveError, UpstreamError, IndexStoreError, OSError):
            await self._release_unsaved(unsaved)
            raise

    async def _try_save(self, unsaved: "_PendingSave") -> "_SaveResult":
        """What says that the disk fails is noted, and raises _SavingFails."""
        try:
            if self._save_health.can_save():
                return await self._save_now(unsaved)
        except InsufficientStorageError as error:
            self._save_health.record_failure(FILES, error.code, str(error))
        except UpstreamTimeoutError as error:
            self._save_health.record_failure(FILES, "ETIMEDOUT", str(error))
        except DiskBudgetError:
            raise
        except IndexStoreError as error:
            self._save_health.record_failure(INDEX, error.code or "index", str(error))
            if error.code in NO_SPACE_CODES:
                with suppress(IndexStoreError):  # it is so full that not even that can be written
                    await self._free_disk(RESERVE_BYTES)  # for the next try
        self._has_unsaved = True
        raise _SaveError

    async def _release_unsaved(self, unsaved: "_PendingSave") -> None:
        """Memory is not held for what won't be written: others may be waiting for it."""
        if resident := unsaved.source.resident:
            await self._upstream.order_residents([*self._backend_state.resident_view.durable_ids(), resident])

    async def _save_now(self, unsaved: "_PendingSave") -> "_SaveResult":
        """The index plans, the backend writes, one transaction makes it count."""
        resident, held = unsaved.source.resident, unsaved.held
        save = await self._begin_save(unsaved)
        if save is None:
            await self._mark_durable(resident, leased=True)  # rows that are saved would have ended its lease
            session = await _run_in_thread(self._index.record_session, held.root, held.tokens, unsaved.session)
            self._save_health.record_success(INDEX)
            return _SaveResult(session, 0, is_complete=True)
        committed = None
        try:
            reply = await self._write_files(save, unsaved.source)
            self._save_health.record_success(FILES)
            self._has_freed_disk = False
            cost_s = await self._prefill_cost_s(save.matched, len(held))
            committed = await _run_in_thread(
                self._index.commit_save, save, reply, prefill_s=cost_s, session=unsaved.session
            )
            self._save_health.record_success(INDEX)
            written = sum(file.bytes_written for file in (*reply.segments, *reply.checkpoints))
            self._metrics.record_save(committed.tokens_saved, written)
        finally:
            if committed is None:  # whatever went wrong, also where the proxy is shutting down
                self._saves_to_abort.append(save)
                await self._abort_saves()
        if committed.why_not:
            log.info("not all of %s was kept: %s", resident or unsaved.source.running, committed.why_not)
        else:
            await self._mark_durable(resident, leased=not save.segments)
        return _SaveResult(committed.session, committed.tokens_saved, is_complete=not committed.why_not)

    async def _prefill_cost_s(self, start: int, end: int) -> float:
        """What it took to compute tokens [start, end), by what the backend has just been measured to do."""
        with suppress(UpstreamError):
            await self._backend_state.refresh_rates()
        return estimate_prefill_s(start, end, self._backend_state.costs().prefill)

    async def _mark_durable(self, resident: str, *, leased: bool = False) -> None:
        """What is on disk can be given up; said to the backend once its memory fills, or while it holds a lease."""
        if not resident:
            return
        self._backend_state.resident_view.mark_durable(resident)
        if leased or self._backend_state.is_memory_filling():
            await self._upstream.order_residents(self._backend_state.resident_view.durable_ids())

    async def _abort_saves(self) -> None:
        """Also what could not be aborted before."""
        while self._saves_to_abort:
            await _run_in_thread(self._index.abort_save, self._saves_to_abort[-1])
            self._saves_to_abort.pop()

    async def _begin_save(self, unsaved: "_PendingSave") -> SavePlan | None:
        await self._abort_saves()
        return await _run_in_thread(
            self._index.begin_save,
            unsaved.held.root,
            unsaved.model,
            unsaved.held.tokens,
            checkpoints=unsaved.checkpoints,
            layout=unsaved.layout,
            may_replace=not unsaved.layout.has_windows,  # rotating layers no longer have their parent's rows
        )

    async def _write_files(self, save: SavePlan, source: SaveRequest) -> SaveReply:
        """Has the backend write the files.  Raises Gone where the rows are, or the resident is."""
        request = msgspec.structs.replace(
            source,
            request_id=f"save-{save.id}",
            segments=save.segments,
            checkpoints=save.checkpoints,
            root=save.root,
        )
        timeout_s = SAVE_TIMEOUT_S + save.bytes_expected / SAVE_BYTES_PER_S_MIN
        try:
            try:
                return await self._upstream.save(request, timeout_s)
            except InsufficientStorageError as error:
                if error.code not in NO_SPACE_CODES or not await self._free_disk(save.bytes_expected):
                    raise
                return await self._upstream.save(request, timeout_s)
        except UpstreamTimeoutError:  # a disk that hangs: others want to save, too, and it may be better by then
            await self._upstream.cancel(request.request_id, CANCEL_TIMEOUT_S)
            raise

    async def _free_disk(self, bytes_wanted: int) -> bool:
        """Others fill the disk, or the budget is larger than it: evict, but in vain only once."""
        if self._has_freed_disk:
            return False
        self._has_freed_disk = True  # until a save works
        freed = await _run_in_thread(self._index.free_bytes, bytes_wanted)
        log.warning("the disk is full; files evicted for what is to be saved: %d", len(freed))
        return bool(freed)

    def _record_request(self, request: Request) -> None:
        record = request.log.build_record()
        hint = request.log.session_hint
        log.info(format_perf_line(record, hint), extra={"fields": build_perf_fields(record, hint)})
        self._metrics.record_request(record, request.log.status)
        try:
            self._index.record_request(record)
        except IndexStoreError as error:
            log.warning("request %s was not recorded: %s", record.id, error)


class _SaveError(Exception):
    """The disk does not take what is to be saved; told already."""


@dataclass(frozen=True)
class _SaveResult:
    session: str = ""
    tokens: int = 0
    is_complete: bool = False  # all that was wished for is on disk


@dataclass(frozen=True)
class _PendingSave:
    """Something of which a part may not be on disk: in a resident, or in a request that is being computed."""

    source: SaveRequest  # which of the two
    held: ResidentEntry
    checkpoints: Sequence[int]
    model: str
    layout: KvLayout
    session: SessionUpdate


def _pending_resident_save(resident: str, held: ResidentEntry, model: str, layout: KvLayout) -> _PendingSave:
    source = SaveRequest(request_id="", resident=resident)
    session = SessionUpdate(turn_end=held.turn_end, requests=0)
    return _PendingSave(source, held, held.positions, model, layout, session)


async def _run_in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Writing the index waits for the disk, so never on the loop; and what began there must end there."""
    return await asyncio.shield(asyncio.to_thread(call, *args, **kwargs))
