"""The end of a request's life, in the background: save the new tail, record what happened.  Never fails a request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import msgspec

from warmline_common.protocol.messages import Layout, SaveReply, SaveRequest, Settled
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_proxy.explain.divergence import Partings
from warmline_proxy.index.index import Index, IndexFailure, NoRoom
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.metrics import Metrics
from warmline_proxy.pipeline.sampled_turns import Turns
from warmline_proxy.pipeline.save_health import FILES, INDEX, Persistence
from warmline_proxy.planner import prefill_seconds
from warmline_proxy.request.request import Life, held_after
from warmline_proxy.request_log import perf_fields, perf_line
from warmline_proxy.store.errors import NO_SPACE, code_of
from warmline_proxy.store.reserve import SPARE_BYTES
from warmline_proxy.store.rows import SavePlan, SessionUpdate
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Gone, NotStored, TimedOut, Upstream, UpstreamError
from warmline_proxy.upstream.resident_view import Held

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 60.0
SAVE_BYTES_PER_S_MIN = 2e6  # what the slowest disk that is of use writes
GIVE_UP_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 1.0  # how soon what could not be saved is thought of; how often it is tried, Persistence says

P = ParamSpec("P")
T = TypeVar("T")


class Settler:
    """Saves one tail at a time, in the order in which requests ended."""

    def __init__(
        self,
        index: Index,
        upstream: Upstream,
        knowledge: Knowledge,
        metrics: Metrics,
        persistence: Persistence,
        turns: Turns,
        partings: Partings,
        reuse: bool,
    ) -> None:
        self._index = index
        self._upstream = upstream
        self._knowledge = knowledge
        self._metrics = metrics
        self._persistence = persistence
        self._turns = turns
        self._partings = partings
        self._reuse = reuse
        self._one_at_a_time = asyncio.Lock()
        self._to_abort: list[SavePlan] = []  # given up, and still in an index that could not be written then
        self._behind = False  # something in memory could not be saved
        self._freed_in_vain = False

    async def settle(self, life: Life) -> None:
        """Returns when it is recorded; before that its tail is durable, or isn't going to be."""
        try:
            await self._settle(life)
            life.settled.set()  # who waits for what is saved is not to wait for what texts say
            await self._partings.known(life)
        finally:
            self._record(life)

    async def _settle(self, life: Life) -> None:
        settled = life.trace.settled
        try:
            if settled and settled.resident:
                async with self._one_at_a_time:
                    keeps = self._reuse and life.is_kept
                    await (self._keep(life, settled) if keeps else self._forget(settled))
            if settled:
                await self._keep_up(settled)
        except _SavingFails:
            pass  # it is saved once that works again
        except (UpstreamError, IndexFailure, OSError) as error:
            log.warning("what request %s has computed could not be saved: %s", life.trace.id, error)

    async def _keep_up(self, settled: Settled) -> None:
        """What the request pushed out is no longer in memory, and the rates may have been measured anew."""
        await self._knowledge.catch_up(settled)
        await self._knowledge.measure()

    async def _forget(self, settled: Settled) -> None:
        self._knowledge.mirror.shun(settled.resident)
        await self._upstream.drop_resident(settled.resident)

    async def save_part(self, life: Life, until: int) -> bool:
        """Save the first `until` tokens of a request that is still being computed; whether they are on disk now.

        What fails is saved at its end.
        """
        if not (life.is_kept and self._reuse and life.prompt and life.layout and life.layout.persistent):
            return False
        if life.trace.prompt_tokens * life.layout.row_bytes > self._index.budget_bytes:
            return False  # all of it never fits, and a part is not worth what it would push out
        unsaved = _Unsaved(
            source=SaveRequest(request_id="", running=life.trace.id),
            held=Held(life.root, life.prompt.tokens[: until * TOKEN_BYTES]),
            checkpoints=[at for at in (life.trace.plan.checkpoints if life.trace.plan else ()) if at <= until],
            model=life.model,
            layout=life.layout,
            session=SessionUpdate(turn_end=life.prompt.turn_end, client=life.trace.session_hint, requests=0),
        )
        try:
            async with self._one_at_a_time:
                if not life.is_kept:  # it was purged while this waited
                    return False
                whole = (await self._save(unsaved)).whole
        except _SavingFails:
            return False
        except (UpstreamError, IndexFailure, OSError) as error:
            log.warning("request %s: its first %d tokens could not be saved yet: %s", life.trace.id, until, error)
            return False
        if whole:
            log.info(
                "request %s: %d of %d tokens are computed and saved", life.trace.id, until, life.trace.prompt_tokens
            )
        return whole

    async def between_saves(self, work: Callable[[], T]) -> T:
        """Do something to the index on a thread, while nothing is being saved."""
        async with self.paused():
            return await _in_thread(work)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing is being saved meanwhile."""
        async with self._one_at_a_time:
            yield

    async def save_residents(self) -> None:
        """Save what is in memory and not known to be on disk: what an earlier proxy left, or a save that failed."""
        unsaved = self._knowledge.mirror.not_durable()
        if not self._reuse or not unsaved:
            return
        try:
            status = await self._knowledge.status()
            for resident, held in unsaved:
                if status.layout and status.layout.persistent:
                    await self._save_resident(_unsaved_resident(resident, held, status.model, status.layout))
        except _SavingFails:
            pass
        except (UpstreamError, IndexFailure, OSError) as error:
            log.warning("what is in memory could not all be saved: %s", error)

    async def _save_resident(self, unsaved: "_Unsaved") -> None:
        try:
            async with self._one_at_a_time:
                if self._knowledge.mirror.held(unsaved.source.resident):  # else it was purged, or dropped, meanwhile
                    await self._save(unsaved)
        except NoRoom as error:  # the next one may be smaller
            log.info("%s could not be saved: %s", unsaved.source.resident, error)

    async def _keep(self, life: Life, settled: Settled) -> None:
        trace, layout = life.trace, life.layout
        if not life.prompt or not layout or not layout.persistent:
            return
        unsaved = _Unsaved(
            source=SaveRequest(request_id="", resident=settled.resident),
            held=held_after(life, settled),
            checkpoints=settled.checkpoints,
            model=life.model,
            layout=layout,
            session=SessionUpdate(
                turn_end=life.prompt.turn_end,
                client=trace.session_hint,
                hit=bool(trace.plan and trace.plan.reuse >= BLOCK_TOKENS),  # fewer begin alike by chance
            ),
        )
        saved = await self._save(unsaved)
        trace.session, trace.saved_tokens = saved.session, saved.tokens
        if settled.turn and saved.session:
            self._turns.remember(life.root, life.model, settled.turn, saved.session)
            await _in_thread(self._index.flush)  # without it the next turn could not use all that was saved

    async def run(self) -> None:
        """Save what could not be saved, as soon as that works again.  Never returns."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            if self._index.read_only and self._persistence.may_try():
                await self._reopen()
            if self._behind:
                self._behind = False
                await self.save_residents()

    async def _reopen(self) -> None:
        """The home could not be written to, or put in order, at the start; perhaps it can be now."""
        try:
            async with self._one_at_a_time:
                if not await _in_thread(self._index.reopen):
                    return
                log.info("index: %s", await _in_thread(reconcile, self._index))
                await _in_thread(self._index.keep_spare)
        except (IndexFailure, OSError) as error:
            self._index.suspend(error)
            self._persistence.failed(INDEX, code_of(error), str(error))
        else:
            self._persistence.worked(INDEX)
            self._behind = True

    async def _save(self, unsaved: "_Unsaved") -> "_Saved":
        """However it ends, the resident is no longer leased then.  Raises NoRoom, or _SavingFails where saving does, or
        did just now.
        """
        try:
            return await self._tried(unsaved)
        except Gone:  # what is gone is this tail alone
            log.info("%s was gone before it was saved", unsaved.source.resident or unsaved.source.running)
            await self._expect_no_save(unsaved)
            return _Saved()
        except (_SavingFails, UpstreamError, IndexFailure, OSError):
            await self._expect_no_save(unsaved)
            raise

    async def _tried(self, unsaved: "_Unsaved") -> "_Saved":
        """What says that the disk fails is noted, and raises _SavingFails."""
        try:
            if self._persistence.may_try():
                return await self._save_now(unsaved)
        except NotStored as error:
            self._persistence.failed(FILES, error.code, str(error))
        except TimedOut as error:
            self._persistence.failed(FILES, "ETIMEDOUT", str(error))
        except NoRoom:
            raise
        except IndexFailure as error:
            self._persistence.failed(INDEX, error.code or "index", str(error))
            if error.code in NO_SPACE:
                with suppress(IndexFailure):  # it is so full that not even that can be written
                    await self._freed(SPARE_BYTES)  # for the next try
        self._behind = True
        raise _SavingFails

    async def _expect_no_save(self, unsaved: "_Unsaved") -> None:
        """Memory is not held for what won't be written: others may be waiting for it."""
        if resident := unsaved.source.resident:
            await self._upstream.order_residents([*self._knowledge.mirror.durable(), resident])

    async def _save_now(self, unsaved: "_Unsaved") -> "_Saved":
        """The index plans, the backend writes, one transaction makes it count."""
        resident, held = unsaved.source.resident, unsaved.held
        save = await self._begin(unsaved)
        if save is None:
            await self._now_durable(resident, leased=True)  # rows that are saved would have ended its lease
            session = await _in_thread(self._index.note_session, held.root, held.tokens, unsaved.session)
            self._persistence.worked(INDEX)
            return _Saved(session, 0, whole=True)
        committed = None
        try:
            reply = await self._write(save, unsaved.source)
            self._persistence.worked(FILES)
            self._freed_in_vain = False
            cost_s = await self._cost_s(save.matched, len(held))
            committed = await _in_thread(
                self._index.commit_save, save, reply, prefill_s=cost_s, session=unsaved.session
            )
            self._persistence.worked(INDEX)
            written = sum(file.bytes_written for file in (*reply.segments, *reply.checkpoints))
            self._metrics.saved(committed.tokens_saved, written)
        finally:
            if committed is None:  # whatever went wrong, also where the proxy is shutting down
                self._to_abort.append(save)
                await self._abort()
        if committed.why_not:
            log.info("not all of %s was kept: %s", resident or unsaved.source.running, committed.why_not)
        else:
            await self._now_durable(resident, leased=not save.segments)
        return _Saved(committed.session, committed.tokens_saved, whole=not committed.why_not)

    async def _cost_s(self, start: int, end: int) -> float:
        """What it took to compute tokens [start, end), by what the backend has just been measured to do."""
        with suppress(UpstreamError):
            await self._knowledge.measure()
        return prefill_seconds(start, end, self._knowledge.costs().prefill)

    async def _now_durable(self, resident: str, *, leased: bool = False) -> None:
        """What is on disk can be given up; said to the backend once its memory fills, or while it holds a lease."""
        if not resident:
            return
        self._knowledge.mirror.mark_durable(resident)
        if leased or self._knowledge.memory_is_filling():
            await self._upstream.order_residents(self._knowledge.mirror.durable())

    async def _abort(self) -> None:
        """Also what could not be aborted before."""
        while self._to_abort:
            await _in_thread(self._index.abort_save, self._to_abort[-1])
            self._to_abort.pop()

    async def _begin(self, unsaved: "_Unsaved") -> SavePlan | None:
        await self._abort()
        return await _in_thread(
            self._index.begin_save,
            unsaved.held.root,
            unsaved.model,
            unsaved.held.tokens,
            checkpoints=unsaved.checkpoints,
            layout=unsaved.layout,
            may_replace=not unsaved.layout.has_windows,  # rotating layers no longer have their parent's rows
        )

    async def _write(self, save: SavePlan, source: SaveRequest) -> SaveReply:
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
            except NotStored as error:
                if error.code not in NO_SPACE or not await self._freed(save.bytes_expected):
                    raise
                return await self._upstream.save(request, timeout_s)
        except TimedOut:  # a disk that hangs: others want to save, too, and it may be better by then
            await self._upstream.cancel(request.request_id, GIVE_UP_TIMEOUT_S)
            raise

    async def _freed(self, bytes_wanted: int) -> bool:
        """Others fill the disk, or the budget is larger than it: evict, but in vain only once."""
        if self._freed_in_vain:
            return False
        self._freed_in_vain = True  # until a save works
        freed = await _in_thread(self._index.free, bytes_wanted)
        log.warning("the disk is full; files evicted for what is to be saved: %d", len(freed))
        return bool(freed)

    def _record(self, life: Life) -> None:
        record = life.trace.record()
        hint = life.trace.session_hint
        log.info(perf_line(record, hint), extra={"fields": perf_fields(record, hint)})
        self._metrics.recorded(record, life.trace.status)
        try:
            self._index.record(record)
        except IndexFailure as error:
            log.warning("request %s was not recorded: %s", record.id, error)


class _SavingFails(Exception):
    """The disk does not take what is to be saved; told already."""


@dataclass(frozen=True)
class _Saved:
    session: str = ""
    tokens: int = 0
    whole: bool = False  # all that was wished for is on disk


@dataclass(frozen=True)
class _Unsaved:
    """Something of which a part may not be on disk: in a resident, or in a request that is being computed."""

    source: SaveRequest  # which of the two
    held: Held
    checkpoints: Sequence[int]
    model: str
    layout: Layout
    session: SessionUpdate


def _unsaved_resident(resident: str, held: Held, model: str, layout: Layout) -> _Unsaved:
    source = SaveRequest(request_id="", resident=resident)
    session = SessionUpdate(turn_end=held.turn_end, requests=0)
    return _Unsaved(source, held, held.positions, model, layout, session)


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Writing the index waits for the disk, so never on the loop; and what began there must end there."""
    return await asyncio.shield(asyncio.to_thread(call, *args, **kwargs))
