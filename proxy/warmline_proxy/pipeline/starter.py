"""Steps 4 and 5 of a request's life: plan where it starts, and restore what the plan needs."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from warmline_common.protocol.messages import RestoreRequest
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.planner import RESTORED, RequestPlan, RunningRequest, plan_cold, plan_request
from warmline_proxy.request.request import Request, resident_after_restore
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import (
    RestoreFailedError,
    Upstream,
    UpstreamConnectionError,
    UpstreamError,
    UpstreamUnreachableError,
)
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

UNREADABLE_MAX = 3  # times that a file can't be read before it is set aside: the fault may be the disk's, and pass
UNREADABLE_FILES_MAX = 1000  # that are counted
RESTORES_MAX = 8  # each that fails takes a damaged file out of the index
RESTORE_STALLS_MAX = 3  # times the stall limit: it may wait for memory, but a prefill would wait no longer
EMPTY_MATCH = PrefixMatch(tokens=0, chain=[], checkpoints=[], end_reason="nothing stored")


@dataclass(frozen=True)
class _RestoreResult:
    """A resident, or why there is none and whether planning again can find another way."""

    resident: str = ""
    why_not: str = ""
    plan_again: bool = False


class Starter:
    """Finds the warmest start that works.  A restore that fails is a shorter or a cold start, never an error."""

    def __init__(
        self,
        upstream: Upstream,
        index: Index,
        backend_state: BackendState,
        watchdog: Watchdog,
        metrics: ProxyMetrics,
        divergence_recorder: DivergenceRecorder,
        checkpoint_gap_max: int,
    ) -> None:
        self._upstream = upstream
        self._index = index
        self._backend_state = backend_state
        self._watchdog = watchdog
        self._metrics = metrics
        self._divergence_recorder = divergence_recorder
        self._checkpoint_gap_max = checkpoint_gap_max
        self._read_failures: Counter[str] = Counter()

    def count_reusable_tokens(self, request: Request) -> int:
        """How many tokens a start would reuse by now."""
        return self._decide(request, (), EMPTY_MATCH if request.prompt is None else self._match(request)).reuse

    def plan_cold(self, request: Request, why: str) -> RequestPlan:
        self._divergence_recorder.clear(request)
        costs = self._backend_state.costs()
        return plan_cold(request.prompt_shape(), request.layout, why, self._checkpoint_gap_max, costs=costs)

    async def start(self, request: Request, running: Sequence[RunningRequest]) -> RequestPlan:
        """A plan whose resident, where it has one, was there a moment ago.  Raises Unreachable, Broken."""
        misses: list[str] = []
        for _ in range(RESTORES_MAX):
            plan = self._plan(request, misses, running)
            if plan.source != RESTORED:
                self._record_use(plan)
                return plan
            restored = await self._restore_with_timeout(request, plan)
            self._metrics.restores.labels(outcome="ok" if restored.resident else "failed").inc()
            if restored.resident:
                self._record_use(plan)
                return replace(plan, resident=restored.resident)
            misses.append(restored.why_not)
            if not restored.plan_again:
                break
        return self._plan(request, misses, running, stored=False)

    def _record_use(self, plan: RequestPlan) -> None:
        """What is used is kept, also where it was in memory: its chain is what a restart would need."""
        if plan.file_ids:
            self._index.record_use(plan.file_ids)

    async def _restore_with_timeout(self, request: Request, plan: RequestPlan) -> _RestoreResult:
        """As `_restore`, but given up where neither it nor the engine moves, and in any case after a while.

        Cancelled, it leaves the restore to `life.restoring`, for whoever ends the request to end it too.
        """
        restore_task = request.restore_task = asyncio.create_task(
            self._restore(request, plan, request.purged), name=f"restore {request.log.id}"
        )
        restore_task.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # where nobody is left to ask
        stall_s, began = request.timeouts.stall_s or None, time.monotonic()
        while not (await asyncio.wait({restore_task}, timeout=stall_s))[0]:
            now = time.monotonic()
            if stall_s and (now - self._watchdog.last_step_at > stall_s or now - began > RESTORE_STALLS_MAX * stall_s):
                await self._upstream.cancel(request.log.id, self._watchdog.cancel_timeout_s)
                return _RestoreResult(why_not=f"restoring took more than {now - began:.0f} s")
        return restore_task.result()

    def _plan(
        self, request: Request, misses: list[str], running: Sequence[RunningRequest], stored: bool = True
    ) -> RequestPlan:
        match = self._match(request) if stored else EMPTY_MATCH
        plan = self._decide(request, running, match)
        self._divergence_recorder.record(request, plan, match)
        return replace(plan, why_not_warmer="; ".join(filter(None, [*misses, plan.why_not_warmer])))

    def _decide(self, request: Request, running: Sequence[RunningRequest], match: PrefixMatch) -> RequestPlan:
        assert request.prompt is not None
        return plan_request(
            request.prompt_shape(),
            self._backend_state.candidates(request.root, request.prompt.tokens),
            match,
            request.layout,
            self._backend_state.costs(),
            running=running,
            checkpoint_gap_max=self._checkpoint_gap_max,
        )

    def _match(self, request: Request) -> PrefixMatch:
        assert request.prompt is not None
        if (limit := request.prompt_shape().tokens - 1) < 1:
            return EMPTY_MATCH
        trusted = min(limit, self._backend_state.count_trusted_tokens(request.root, request.prompt.tokens))
        try:
            match = self._index.match_prefix(request.root, request.prompt.tokens, trusted)
        except IndexStoreError as error:
            log.error("the index can't be read: %s", error)
            return EMPTY_MATCH
        if trusted == limit or match.tokens < trusted:
            return match
        return msgspec.structs.replace(match, end_reason=f"what is stored after token {trusted} is suspect")

    async def _restore(self, request: Request, plan: RequestPlan, purged: bool) -> _RestoreResult:
        """`purged`: what it went on from was, before this was planned, which is none of that."""
        held = resident_after_restore(request, plan.reuse)
        restore_request = RestoreRequest(
            request_id=request.log.id,
            tokens=held.tokens,
            chain=list(plan.chain),
            checkpoint=plan.checkpoint,
            root=request.root,
        )
        began_s = request.log.elapsed_s()
        self._index.lease(plan.file_ids)
        try:
            reply = await self._upstream.restore(restore_request)
            if request.suspect or request.purged != purged:  # what it was about to start from was so in the meantime
                why_not = "what was restored " + ("is suspect" if request.suspect else "was purged")
                request.suspect = False
                self._backend_state.resident_view.exclude(reply.resident)
                await self._upstream.delete_resident(reply.resident)
                return _RestoreResult(why_not=why_not, plan_again=True)
        except RestoreFailedError as error:
            return await self._quarantine_file(error, plan.file_ids)
        except (
            UpstreamUnreachableError,
            UpstreamConnectionError,
        ):  # the backend is lost, and the request is dispatched again
            raise
        except UpstreamError as error:
            level = logging.INFO if request.release_task else logging.WARNING  # else it was given up
            log.log(level, "request %s: restoring %d tokens failed: %s", request.log.id, plan.reuse, error)
            return _RestoreResult(why_not=f"restore failed: {error}")
        finally:
            self._index.release(plan.file_ids)
            request.log.restore_s += request.log.elapsed_s() - began_s
        self._backend_state.resident_view.add(reply.resident, held)
        return _RestoreResult(resident=reply.resident)

    async def _quarantine_file(self, error: RestoreFailedError, files: list[str]) -> _RestoreResult:
        """Quarantine the file at fault, so that no later request meets it; one that can't be read, not at once."""
        reply = error.reply
        why_not = f"{reply.reason} in {reply.bad[:8] or 'the chain'}: {reply.detail}"
        log.warning("a restore was refused: %s", why_not)
        if reply.bad not in files or (reply.reason == "io" and not self._has_exhausted_reads(reply.bad)):
            return _RestoreResult(why_not=why_not)
        try:
            await asyncio.to_thread(self._index.quarantine, reply.bad, reply.reason)
        except (IndexStoreError, OSError) as failure:
            log.error("%s could not be quarantined: %s", reply.bad, failure)
            return _RestoreResult(why_not=why_not)
        self._metrics.quarantined.labels(reason=reply.reason).inc()
        return _RestoreResult(why_not=why_not, plan_again=True)

    def _has_exhausted_reads(self, file_id: str) -> bool:
        """Whether it could not be read often enough by now."""
        if len(self._read_failures) >= UNREADABLE_FILES_MAX:
            self._read_failures.clear()
        self._read_failures[file_id] += 1
        return self._read_failures[file_id] >= UNREADABLE_MAX
