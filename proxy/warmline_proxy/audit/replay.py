"""Replays conversations on demand: the first token from what is stored of them, and again cold, must agree."""

import asyncio
import logging
import time
from dataclasses import replace

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.messages import FirstLogits
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.audit.auditor import format_verdict
from warmline_proxy.audit.bisect import AuditMismatch
from warmline_proxy.audit.comparison import DIFFERS, compare, judge
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.planner import RequestPlan, plan_restore
from warmline_proxy.store.rows import ReplayReply, ReplayRequest, ReplayResult, SessionRow
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import RestoreFailedError, UpstreamStatusError
from warmline_proxy.upstream.first_token_probe import FirstTokenProbe, ModelChangedError

log = logging.getLogger(__name__)

REPLAY, DAMAGED, SKIPPED = "replay", "damaged", "skipped"


class SessionReplayer:
    """Raises UpstreamError and IndexFailure."""

    def __init__(
        self,
        index: Index,
        backend_state: BackendState,
        recomputer: FirstTokenProbe,
        quarantine: Quarantine,
        metrics: ProxyMetrics,
        tolerance: float,
    ) -> None:
        self._index, self._backend_state = index, backend_state
        self._recomputer, self._quarantine, self._metrics = recomputer, quarantine, metrics
        self._tolerance = tolerance
        self._lock = asyncio.Lock()

    async def replay(self, request: ReplayRequest) -> ReplayReply:
        """Raises ValueError where there is no such session."""
        rows = await asyncio.to_thread(self._index.sessions)
        if request.session:
            rows = [row for row in rows if row.id == request.session]
            if not rows:
                raise ValueError(f"no session {quote_text(request.session)}")
        replays = []
        async with self._lock:
            for row in rows[: max(1, request.count)]:
                replays.append(await self._replay_session(row))
        return ReplayReply(replays=replays)

    async def _replay_session(self, row: SessionRow) -> ReplayResult:
        try:
            replay = await self._compare_session(row)
        except (ModelChangedError, UpstreamStatusError) as error:  # of a prompt that is too long by now, for one
            replay = _skip_replay(row, str(error))
        self._metrics.audits.labels(why=REPLAY, outcome=replay.outcome).inc()
        return replay

    async def _compare_session(self, row: SessionRow) -> ReplayResult:
        started, layout = time.monotonic(), (await self._backend_state.status()).layout
        stored = (await asyncio.to_thread(self._index.path_tokens, row.leaf))[: row.tokens * TOKEN_BYTES]
        # One token is always left to compute: so that all that is stored is used, one more, whichever, comes after it.
        tokens = stored + stored[-TOKEN_BYTES:]
        count = len(tokens) // TOKEN_BYTES
        match = await asyncio.to_thread(self._index.match_prefix, row.root, stored, count - 1)
        plan = plan_restore(count, match, layout)
        if layout is None or plan is None:
            return _skip_replay(row, "nothing of it can be started from")
        # Cold first: it finds out whether this model is served at all.
        cold = await self._recomputer.compute_cold(row.root, tokens)
        if cold is None:
            return _skip_replay(row, "others needed the backend's memory")
        try:
            warm = await self._recomputer.compute_restored(row.root, tokens, plan)
        except RestoreFailedError as error:
            return await self._quarantine_damaged(row, plan, error)
        if warm is None:
            return _skip_replay(row, "others needed the backend's memory")
        case = AuditMismatch(row.root, tokens, plan.reuse, cold, layout, self._tolerance, started)
        return await self._judge_session(row, plan, warm, case)

    async def _judge_session(
        self, row: SessionRow, plan: RequestPlan, warm: FirstLogits, case: AuditMismatch
    ) -> ReplayResult:
        verdict, quarantined = compare(warm, case.cold, case.layout, self._tolerance), 0
        if not verdict.agrees and (
            again := await self._recomputer.compute_cold(case.root, case.tokens, chunk_end=case.reuse)
        ):
            verdict = judge(warm, case.cold, again, case.layout, self._tolerance)
        if not verdict.agrees:
            log.error("AUDIT session=%s %s: %s", row.id, verdict.outcome, format_verdict(verdict))
        if verdict.outcome == DIFFERS:
            result = await self._quarantine.quarantine(replace(case, tolerance=verdict.tolerance))
            quarantined = result.file_count
            log.error(
                "AUDIT session=%s: wrong from token %d on; %d files are quarantined",
                row.id,
                result.good_tokens,
                quarantined,
            )
        return ReplayResult(
            session=row.id,
            tokens=row.tokens,
            reused=plan.reuse,
            outcome=verdict.outcome,
            difference=verdict.difference,
            tolerance=verdict.tolerance,
            quarantined=quarantined,
        )

    async def _quarantine_damaged(self, row: SessionRow, plan: RequestPlan, error: RestoreFailedError) -> ReplayResult:
        """A file that can't be restored is taken out of use, as when a request meets it; not one that can't be read, as
        the fault may be the disk's, and pass.
        """
        reply, quarantined = error.reply, list[str]()
        if reply.reason != "io" and reply.bad in plan.file_ids:
            quarantined = await asyncio.to_thread(self._index.quarantine, reply.bad, reply.reason)
            self._metrics.quarantined.labels(reason=reply.reason).inc()
        detail = f"{reply.reason} in {reply.bad}: {reply.detail}"
        log.error("AUDIT session=%s damaged: %s", row.id, detail)
        return ReplayResult(
            session=row.id,
            tokens=row.tokens,
            reused=plan.reuse,
            outcome=DAMAGED,
            quarantined=len(quarantined),
            detail=detail,
        )


def _skip_replay(row: SessionRow, detail: str) -> ReplayResult:
    return ReplayResult(session=row.id, tokens=row.tokens, outcome=SKIPPED, detail=detail)
