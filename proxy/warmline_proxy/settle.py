"""The end of a request's life, in the background: save the new tail, record what happened.  Never fails a request."""

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from warmline_proxy.index import Index, IndexFailure
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.life import Life, held_after
from warmline_proxy.mirror import Held
from warmline_proxy.plan import prefill_seconds
from warmline_proxy.rows import SavePlan, SessionUpdate
from warmline_proxy.trace import perf_line
from warmline_proxy.upstream import Gone, Upstream, UpstreamError
from warmline_wire.messages import Layout, SaveReply, SaveRequest, Settled

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Settler:
    """Saves one tail at a time, in the order in which requests ended."""

    def __init__(self, index: Index, upstream: Upstream, knowledge: Knowledge, reuse: bool) -> None:
        self._index = index
        self._upstream = upstream
        self._knowledge = knowledge
        self._reuse = reuse
        self._one_at_a_time = asyncio.Lock()

    async def settle(self, life: Life) -> None:
        """Returns when the request's tail is durable, or isn't going to be."""
        settled = life.trace.settled
        try:
            if settled and settled.resident:
                async with self._one_at_a_time:
                    await (self._keep(life, settled) if self._reuse else self._forget(settled))
            if settled:
                await self._keep_up(settled)
        except (UpstreamError, IndexFailure, OSError) as error:
            log.warning("request %s is answered, but settling it failed: %s", life.trace.id, error)
        finally:
            self._record(life)

    async def _keep_up(self, settled: Settled) -> None:
        """What the request pushed out is no longer in memory, and the rates may have been measured anew."""
        await self._knowledge.catch_up(settled)
        await self._knowledge.measure()

    async def _forget(self, settled: Settled) -> None:
        self._knowledge.mirror.drop(settled.resident)
        await self._upstream.drop_resident(settled.resident)

    async def _keep(self, life: Life, settled: Settled) -> None:
        trace, layout = life.trace, life.layout
        if not life.prompt or not layout or not layout.persistent:
            return
        held = held_after(life, settled)
        session = SessionUpdate(
            turn_end=life.prompt.turn_end,
            client=trace.session_hint,
            hit=bool(trace.plan and trace.plan.reuse),
        )
        save = await self._begin(life, held, settled, layout)
        if save is None:
            await self._now_durable(settled.resident)
            trace.session = await _in_thread(self._index.note_session, life.root, held.tokens, session)
            return
        committed = None
        try:
            if (reply := await self._write(save, settled)) is None:
                return
            cost_s = prefill_seconds(save.matched, len(held), self._knowledge.costs().prefill)
            committed = await _in_thread(self._index.commit_save, save, reply, prefill_s=cost_s, session=session)
        finally:
            if committed is None:  # whatever went wrong, also where the proxy is shutting down
                await _in_thread(self._index.abort_save, save)
        trace.session, trace.saved_tokens = committed.session, committed.tokens_saved
        if committed.why_not:
            log.info("request %s: not all of its tail was kept: %s", trace.id, committed.why_not)
        else:
            await self._now_durable(settled.resident)

    async def _now_durable(self, resident: str) -> None:
        """What is on disk can be given up; said to the backend once its memory fills."""
        self._knowledge.mirror.mark_durable(resident)
        if self._knowledge.memory_is_filling():
            await self._upstream.order_residents(self._knowledge.mirror.durable())

    async def _begin(self, life: Life, held: Held, settled: Settled, layout: Layout) -> SavePlan | None:
        return await _in_thread(
            self._index.begin_save,
            life.root,
            life.model,
            held.tokens,
            checkpoints=settled.checkpoints,
            layout=layout,
            may_replace=not layout.has_windows,  # rotating layers no longer have their parent's rows
        )

    async def _write(self, save: SavePlan, settled: Settled) -> SaveReply | None:
        """Has the backend write the files; None where the resident is gone, which loses nothing but this tail."""
        request = SaveRequest(
            request_id=f"save-{save.id}",
            resident=settled.resident,
            segments=save.segments,
            checkpoints=save.checkpoints,
        )
        try:
            return await self._upstream.save(request)
        except Gone:
            log.info("resident %s was gone before it was saved", settled.resident)
            return None

    def _record(self, life: Life) -> None:
        record = life.trace.record()
        log.info(perf_line(record, life.trace.session_hint))
        try:
            self._index.record(record)
        except IndexFailure as error:
            log.warning("request %s was not recorded: %s", record.id, error)


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Writing the index waits for the disk, so never on the loop; and what began there must end there."""
    return await asyncio.shield(asyncio.to_thread(call, *args, **kwargs))
