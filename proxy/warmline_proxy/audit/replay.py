"""Replays of stored sessions on demand: the first token after a restore must agree with a cold run's."""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.messages import FirstLogits, RestoreRefusal
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.audit.audits import BackendAudits, ModelAudits
from warmline_proxy.audit.bisect import AuditMismatch
from warmline_proxy.audit.comparison import DIFFERS, compare, judge
from warmline_proxy.audit.first_token_probe import ModelChangedError
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.planner import RequestPlan, plan_restore
from warmline_proxy.store.rows import ReplayReply, ReplayRequest, ReplayResult, SessionRow
from warmline_proxy.upstream.client import RestoreFailedError, UpstreamStatusError

log = logging.getLogger(__name__)

REPLAY, DAMAGED, SKIPPED = "replay", "damaged", "skipped"


@dataclass(eq=False)
class SessionReplayer:
    """Replayer of sessions, one at a time.  Raises UpstreamError and IndexStoreError; event loop thread."""

    index: Index
    audits: ModelAudits
    metrics: ProxyMetrics
    tolerance: float
    quiet_s: float  # before each run of a bisection
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def replay(self, request: ReplayRequest) -> ReplayReply:
        """Replay the named session, or the last `count`.  Raises ValueError where there is no such session."""
        rows = await asyncio.to_thread(self.index.sessions)
        if request.session:
            rows = [row for row in rows if row.id == request.session]
            if not rows:
                raise ValueError(f"no session {quote_text(request.session)}")
        async with self._lock:
            return ReplayReply(replays=[await self._replay_session(row) for row in rows[: max(1, request.count)]])

    async def _replay_session(self, row: SessionRow) -> ReplayResult:
        result = ReplayResult(session=row.id, tokens=row.tokens, outcome=SKIPPED)
        try:
            await self._compare_session(row, result)
        except (ModelChangedError, UpstreamStatusError) as error:
            result.detail = str(error)
        self.metrics.audits.labels(why=REPLAY, outcome=result.outcome).inc()
        return result

    async def _compare_session(self, row: SessionRow, result: ReplayResult) -> None:
        audits, started = self.audits.find_by_session(row), time.monotonic()
        if not audits.backend.gate.is_open:
            result.detail = f"its model is not loaded: `warmline models load {audits.backend.name}`"
            return
        probe, layout = audits.probe, (await audits.backend.state.status()).layout
        stored = (await asyncio.to_thread(self.index.path_tokens, row.leaf))[: row.tokens * TOKEN_BYTES]
        tokens = stored + stored[-TOKEN_BYTES:]  # any further token to compute, so that all stored tokens are used
        count = len(tokens) // TOKEN_BYTES
        match = await asyncio.to_thread(self.index.match_prefix, row.root, stored, count - 1)
        plan = plan_restore(count, match, layout)
        if layout is None or plan is None:
            result.detail = "nothing of it can be started from"
            return
        # The cold run is first: it checks that this model is served at all.
        cold = await probe.compute_cold(row.root, tokens)
        try:
            warm = await probe.compute_restored(row.root, tokens, plan) if cold else None
        except RestoreFailedError as error:
            result.reused = plan.reuse
            return await self._quarantine_damaged(plan, error.reply, result)
        if cold is None or warm is None:
            result.detail = "others needed the backend's memory"
            return
        case = AuditMismatch(row.root, tokens, plan.reuse, cold, layout, self.tolerance, started, self.quiet_s)
        await self._judge_session(audits, warm, case, result)

    async def _judge_session(
        self, audits: BackendAudits, warm: FirstLogits, case: AuditMismatch, result: ReplayResult
    ) -> None:
        verdict = compare(warm, case.cold, case.layout, self.tolerance)
        if not verdict.agrees:
            again = await audits.probe.compute_cold(case.root, case.tokens, chunk_end=case.reuse)
            verdict = judge(warm, case.cold, again, case.layout, self.tolerance) if again else verdict
        if not verdict.agrees:
            log.error("AUDIT session=%s %s: %s", result.session, verdict.outcome, verdict.describe_difference())
        if verdict.outcome == DIFFERS:
            mismatch = replace(case, tolerance=verdict.tolerance)
            result.quarantined = await audits.quarantine.quarantine(mismatch, f"session={result.session}")
        result.outcome, result.reused = verdict.outcome, case.reuse
        result.difference, result.tolerance = verdict.difference, verdict.tolerance

    async def _quarantine_damaged(self, plan: RequestPlan, reply: RestoreRefusal, result: ReplayResult) -> None:
        """Quarantine a file that can't be restored, as for a request; an unreadable file stays: disk faults pass."""
        if reply.reason != "io" and reply.bad in plan.file_ids:
            files = await asyncio.to_thread(self.index.quarantine, reply.bad, reply.reason)
            result.quarantined = len(files)
            self.metrics.quarantined.labels(reason=reply.reason).inc()
        result.outcome, result.detail = DAMAGED, f"{reply.reason} in {reply.bad}: {reply.detail}"
        log.error("AUDIT session=%s damaged: %s", result.session, result.detail)
