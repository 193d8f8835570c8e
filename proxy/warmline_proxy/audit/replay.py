"""Replays conversations on demand: the first token from what is stored of them, and again cold, must agree."""

import asyncio
import logging
import time
from dataclasses import replace

from warmline_common.process.redaction import quoted
from warmline_common.protocol.messages import FirstLogits
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.audit.auditor import told
from warmline_proxy.audit.bisect import Contradiction
from warmline_proxy.audit.comparison import DIFFERS, compare, judge
from warmline_proxy.audit.quarantine import Condemner
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import Metrics
from warmline_proxy.planner import Plan, restored_plan
from warmline_proxy.store.rows import Replay, ReplayReply, ReplayRequest, SessionRow
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Refused, RestoreFailed
from warmline_proxy.upstream.first_token_probe import OtherModel, Recomputer

log = logging.getLogger(__name__)

REPLAY, DAMAGED, SKIPPED = "replay", "damaged", "skipped"


class Replayer:
    """Raises UpstreamError and IndexFailure."""

    def __init__(
        self,
        index: Index,
        knowledge: Knowledge,
        recomputer: Recomputer,
        condemner: Condemner,
        metrics: Metrics,
        tolerance: float,
    ) -> None:
        self._index, self._knowledge = index, knowledge
        self._recomputer, self._condemner, self._metrics = recomputer, condemner, metrics
        self._tolerance = tolerance
        self._one_at_a_time = asyncio.Lock()

    async def replay(self, request: ReplayRequest) -> ReplayReply:
        """Raises ValueError where there is no such session."""
        rows = await asyncio.to_thread(self._index.sessions)
        if request.session:
            rows = [row for row in rows if row.id == request.session]
            if not rows:
                raise ValueError(f"no session {quoted(request.session)}")
        replays = []
        async with self._one_at_a_time:
            for row in rows[: max(1, request.count)]:
                replays.append(await self._replay(row))
        return ReplayReply(replays=replays)

    async def _replay(self, row: SessionRow) -> Replay:
        try:
            replay = await self._compared(row)
        except (OtherModel, Refused) as error:  # of a prompt that is too long by now, for one
            replay = _skipped(row, str(error))
        self._metrics.audits.labels(why=REPLAY, outcome=replay.outcome).inc()
        return replay

    async def _compared(self, row: SessionRow) -> Replay:
        started, layout = time.monotonic(), (await self._knowledge.status()).layout
        stored = (await asyncio.to_thread(self._index.stored_tokens, row.leaf))[: row.tokens * TOKEN_BYTES]
        # One token is always left to compute: so that all that is stored is used, one more, whichever, comes after it.
        tokens = stored + stored[-TOKEN_BYTES:]
        count = len(tokens) // TOKEN_BYTES
        match = await asyncio.to_thread(self._index.match, row.root, stored, count - 1)
        plan = restored_plan(count, match, layout)
        if layout is None or plan is None:
            return _skipped(row, "nothing of it can be started from")
        # Cold first: it finds out whether this model is served at all.
        cold = await self._recomputer.cold(row.root, tokens)
        if cold is None:
            return _skipped(row, "others needed the backend's memory")
        try:
            warm = await self._recomputer.restored(row.root, tokens, plan)
        except RestoreFailed as error:
            return await self._set_aside(row, plan, error)
        if warm is None:
            return _skipped(row, "others needed the backend's memory")
        case = Contradiction(row.root, tokens, plan.reuse, cold, layout, self._tolerance, started)
        return await self._judged(row, plan, warm, case)

    async def _judged(self, row: SessionRow, plan: Plan, warm: FirstLogits, case: Contradiction) -> Replay:
        verdict, quarantined = compare(warm, case.cold, case.layout, self._tolerance), 0
        if not verdict.agrees and (again := await self._recomputer.cold(case.root, case.tokens, cut=case.reuse)):
            verdict = judge(warm, case.cold, again, case.layout, self._tolerance)
        if not verdict.agrees:
            log.error("AUDIT session=%s %s: %s", row.id, verdict.outcome, told(verdict))
        if verdict.outcome == DIFFERS:
            condemned = await self._condemner.condemn(replace(case, tolerance=verdict.tolerance))
            quarantined = condemned.files
            log.error(
                "AUDIT session=%s: wrong from token %d on; %d files are quarantined",
                row.id,
                condemned.good,
                quarantined,
            )
        return Replay(
            session=row.id,
            tokens=row.tokens,
            reused=plan.reuse,
            outcome=verdict.outcome,
            difference=verdict.difference,
            tolerance=verdict.tolerance,
            quarantined=quarantined,
        )

    async def _set_aside(self, row: SessionRow, plan: Plan, error: RestoreFailed) -> Replay:
        """A file that can't be restored is taken out of use, as when a request meets it; not one that can't be read, as
        the fault may be the disk's, and pass.
        """
        refused, aside = error.reply, list[str]()
        if refused.reason != "io" and refused.bad in plan.files:
            aside = await asyncio.to_thread(self._index.quarantine, refused.bad, refused.reason)
            self._metrics.quarantined.labels(reason=refused.reason).inc()
        detail = f"{refused.reason} in {refused.bad}: {refused.detail}"
        log.error("AUDIT session=%s damaged: %s", row.id, detail)
        return Replay(
            session=row.id,
            tokens=row.tokens,
            reused=plan.reuse,
            outcome=DAMAGED,
            quarantined=len(aside),
            detail=detail,
        )


def _skipped(row: SessionRow, detail: str) -> Replay:
    return Replay(session=row.id, tokens=row.tokens, outcome=SKIPPED, detail=detail)
