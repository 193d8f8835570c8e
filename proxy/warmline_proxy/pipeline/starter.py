"""Steps 4 and 5: plan where a request starts, and restore the segments that the plan needs.  Event loop thread."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from warmline_common.protocol.messages import RestoreRequest
from warmline_proxy.config import ProxyConfig
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.explain.prompt_head import PromptHeadCache, extract_head
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.planner import (
    COLD,
    RESTORED,
    RequestPlan,
    ResidentCandidate,
    RunningRequest,
    plan_cold,
    plan_request,
)
from warmline_proxy.request.request import Request, RequestStatus, resident_after_restore
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.upstream.client import BACKEND_LOST_ERRORS, RestoreFailedError, UpstreamError

log = logging.getLogger(__name__)

UNREADABLE_MAX = 3  # failed reads of a file before its quarantine: the fault may be the disk's, and pass
UNREADABLE_FILES_MAX = 1000  # counted at once
RESTORES_MAX = 8  # each that fails takes a damaged file out of the index
RESTORE_STALLS_MAX = 3  # times the stall limit: it may wait for memory, but a prefill would wait no longer
EMPTY_MATCH = PrefixMatch(tokens=0, chain=[], checkpoints=[], end_reason="nothing stored")


@dataclass(frozen=True)
class _RestoreResult:
    """A resident, or why there is none and whether planning again can find another way."""

    resident: str = ""
    why_not: str = ""
    plan_again: bool = False


@dataclass(eq=False)
class Starter:
    """Finds the warmest start that works.  A restore that fails is a shorter or a cold start, never an error."""

    config: ProxyConfig
    index: Index
    metrics: ProxyMetrics
    prompt_heads: PromptHeadCache
    divergence_recorder: DivergenceRecorder
    _read_failures: Counter[str] = field(default_factory=Counter, init=False)  # by file id
    # What was found last, and for what: a request that looks whether to wait for a save needs it again for its plan.
    _last_candidates: tuple[object, list[ResidentCandidate]] = field(default=(None, []), init=False)
    _last_match: tuple[object, PrefixMatch] = field(default=(None, EMPTY_MATCH), init=False)

    def count_reusable_tokens(self, request: Request) -> int:
        """Tokens that a start would reuse by now."""
        return self._decide(request, (), EMPTY_MATCH if request.prompt is None else self._find_match(request)).reuse

    async def start(self, request: Request, running: Sequence[RunningRequest], why_cold: str) -> RequestPlan:
        """Plan into the request's log and restore; `why_cold`: reason to reuse nothing.  Raises BACKEND_LOST_ERRORS."""
        assert request.call is not None
        plan = self._plan_cold(request, why_cold) if why_cold else await self._start_warm(request, running)
        self._last_candidates, self._last_match = (None, []), (None, EMPTY_MATCH)  # needed no more
        in_head = plan.diverges_at is not None and plan.diverges_at < next(iter(request.rendered.boundaries), 0)
        if in_head and (cause := self.prompt_heads.explain_change(request.root, extract_head(request.call.fields))):
            plan = replace(plan, why_not_warmer=f"{plan.why_not_warmer}: {cause}")
        request.log.plan = plan
        log.debug("%s", format_plan(plan, request.log.prompt_tokens))
        return plan

    def _plan_cold(self, request: Request, why: str) -> RequestPlan:
        self.divergence_recorder.clear(request)
        if not request.rendered.tokens_max:  # nothing is computed
            return RequestPlan(COLD, 0, why)
        gap_max = self.config.partial_save_tokens
        costs, shape = request.backend.state.costs(), request.prompt_shape()
        plan = plan_cold(shape, request.layout, costs, why, load=request.load, checkpoint_gap_max=gap_max)
        return replace(plan, checkpoint_positions=()) if self.config.reuse == "off" else plan

    async def _start_warm(self, request: Request, running: Sequence[RunningRequest]) -> RequestPlan:
        misses: list[str] = []
        for _ in range(RESTORES_MAX):
            plan = self._plan(request, misses, running)
            if plan.source != RESTORED:
                return plan
            restored = await self._restore_with_timeout(request, plan)
            self.metrics.restores.labels(outcome="ok" if restored.resident else "failed").inc()
            if restored.resident:
                self.index.record_use(plan.file_ids)
                return replace(plan, resident=restored.resident)
            misses.append(restored.why_not)
            if not restored.plan_again:
                break
        return self._plan(request, misses, running, stored=False)

    async def _restore_with_timeout(self, request: Request, plan: RequestPlan) -> _RestoreResult:
        """As `_restore`, but ended where neither restore nor engine makes progress, and in any case after a while.

        Cancelled, it leaves `request.restore_task` running, for Completion to end.
        """
        request.advance(RequestStatus.RESTORING)
        restore_task = request.restore_task = asyncio.create_task(
            self._restore(request, plan, request.purged), name=f"restore {request.log.id}"
        )
        restore_task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved in any case
        stall_s, began = request.timeouts.stall_s or None, time.monotonic()
        while not (await asyncio.wait({restore_task}, timeout=stall_s))[0]:
            now = time.monotonic()
            if stall_s and (
                now - request.backend.watchdog.last_step_at > stall_s or now - began > RESTORE_STALLS_MAX * stall_s
            ):
                await request.backend.cancel(request.log.id)
                return _RestoreResult(why_not=f"restoring took more than {now - began:.0f} s")
        return restore_task.result()

    def _plan(
        self, request: Request, misses: list[str], running: Sequence[RunningRequest], stored: bool = True
    ) -> RequestPlan:
        match = self._find_match(request) if stored else EMPTY_MATCH
        plan = self._decide(request, running, match)
        self.divergence_recorder.record(request, plan, match)
        return replace(plan, why_not_warmer="; ".join(filter(None, [*misses, plan.why_not_warmer])))

    def _decide(self, request: Request, running: Sequence[RunningRequest], match: PrefixMatch) -> RequestPlan:
        prompt, layout, costs = request.prompt_shape(), request.layout, request.backend.state.costs()
        residents = self._find_candidates(request)
        gap_max = self.config.partial_save_tokens
        load = request.load
        return plan_request(
            prompt, residents, match, layout, costs, running=running, load=load, checkpoint_gap_max=gap_max
        )

    def _find_candidates(self, request: Request) -> list[ResidentCandidate]:
        """Candidates as last found for this prompt, unless residents have changed since."""
        key = (request, request.prompt, request.backend.state.change_count)
        if self._last_candidates[0] != key:
            self._last_candidates = key, request.backend.state.candidates(request.root, request.rendered.tokens)
        return self._last_candidates[1]

    def _find_match(self, request: Request) -> PrefixMatch:
        """Match as last found for this prompt, unless what is stored has changed since."""
        key = (request, request.prompt, request.backend.state.change_count, self.index.change_count)
        if self._last_match[0] != key:
            self._last_match = key, self._match(request)
        return self._last_match[1]

    def _match(self, request: Request) -> PrefixMatch:
        if (limit := request.prompt_shape().tokens - 1) < 1:
            return EMPTY_MATCH
        tokens = request.rendered.tokens
        trusted = min(limit, request.backend.state.count_trusted_tokens(request.root, tokens))
        try:
            match = self.index.match_prefix(request.root, tokens, trusted)
        except IndexStoreError as error:
            log.error("the index can't be read: %s", error)
            return EMPTY_MATCH
        if trusted == limit or match.tokens < trusted:
            return match
        return msgspec.structs.replace(match, end_reason=f"what is stored after token {trusted} is suspect")

    async def _restore(self, request: Request, plan: RequestPlan, purged: bool) -> _RestoreResult:
        """`purged`: the request's mark when this was planned; a purge since then invalidates the restore."""
        entry = resident_after_restore(request, plan.reuse)
        restore_request = RestoreRequest(
            request_id=request.log.id,
            tokens=entry.tokens,
            chain=list(plan.chain),
            checkpoint=plan.checkpoint,
            root=request.root,
            prompt_tokens=request.prompt_shape().tokens,
        )
        began_s, waited_s = request.log.elapsed_s(), 0.0
        self.index.lease(plan.file_ids)
        try:
            reply = await request.backend.upstream.restore(restore_request)
            request.log.add_waits(reply.waits)
            waited_s = sum(reply.waits.values())
            if request.suspect or request.purged != purged:  # marked while the restore ran
                why_not = "what was restored " + ("is suspect" if request.suspect else "was purged")
                request.suspect = False
                request.backend.state.resident_view.exclude(reply.resident)
                await request.backend.upstream.delete_resident(reply.resident)
                return _RestoreResult(why_not=why_not, plan_again=True)
        except RestoreFailedError as error:
            return await self._quarantine_file(error, plan.file_ids)
        except BACKEND_LOST_ERRORS:  # the backend is lost: dispatched again
            raise
        except UpstreamError as error:
            level = logging.INFO if request.release_task else logging.WARNING  # INFO: its request was cancelled
            log.log(level, "request %s: restoring %d tokens failed: %s", request.log.id, plan.reuse, error)
            return _RestoreResult(why_not=f"restore failed: {error}")
        finally:
            self.index.release(plan.file_ids)
            request.log.restore_s += max(0.0, request.log.elapsed_s() - began_s - waited_s)
        if request.release_task:  # else the request takes it over at once, and no other may before that
            request.backend.state.resident_view.add(reply.resident, entry)
        return _RestoreResult(resident=reply.resident)

    async def _quarantine_file(self, error: RestoreFailedError, files: list[str]) -> _RestoreResult:
        """Quarantine the file at fault; an unreadable one only after UNREADABLE_MAX reads."""
        reply = error.reply
        why_not = f"{reply.reason} in {reply.bad[:8] or 'the chain'}: {reply.detail}"
        log.warning("a restore was refused: %s", why_not)
        if reply.bad not in files or (reply.reason == "io" and not self._has_exhausted_reads(reply.bad)):
            return _RestoreResult(why_not=why_not)
        try:
            await asyncio.to_thread(self.index.quarantine, reply.bad, reply.reason)
        except (IndexStoreError, OSError) as failure:
            log.error("%s could not be quarantined: %s", reply.bad, failure)
            return _RestoreResult(why_not=why_not)
        self.metrics.quarantined.labels(reason=reply.reason).inc()
        return _RestoreResult(why_not=why_not, plan_again=True)

    def _has_exhausted_reads(self, file_id: str) -> bool:
        """Count a failed read; True at UNREADABLE_MAX."""
        if len(self._read_failures) >= UNREADABLE_FILES_MAX:
            self._read_failures.clear()
        self._read_failures[file_id] += 1
        return self._read_failures[file_id] >= UNREADABLE_MAX


def format_plan(plan: RequestPlan, prompt_tokens: int) -> str:
    """A plan in numbers, for the log."""
    how = f"follows {plan.leader_id or 'no request'}"
    if plan.resident:
        how = f"resident {plan.resident}{' kept' * plan.copy_resident}"
    positions = ", ".join(map(str, plan.checkpoint_positions)) or "no position"
    files = f"{len(plan.chain)} segments, checkpoints at {positions}"
    return f"planned: {plan.source} {plan.reuse} of {prompt_tokens} tokens, {how}, {files}; {plan.why_not_warmer}"
