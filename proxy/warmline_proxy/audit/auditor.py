"""Computes warm requests again, cold, when nobody needs the engine, and compares what their first tokens came from.

A few of all, by chance; those whose answers collapse, always and first; those that cachectl asks for, at once.  What
differs is taken out of use, unless two cold runs differ as well: then it is the machine that does not repeat itself.
"""

import asyncio
import logging
import random
import time
from collections import deque
from dataclasses import dataclass

from warmline_common.logging import request_context
from warmline_common.protocol.messages import FirstLogits, KvLayout
from warmline_proxy.audit.bisect import AuditMismatch
from warmline_proxy.audit.comparison import DIFFERS, Verdict, compare, judge, rank_tokens
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.config import ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import OK
from warmline_proxy.upstream.client import UpstreamError
from warmline_proxy.upstream.first_token_probe import FirstTokenProbe, ModelChangedError
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

ABANDONED, DROPPED, MODEL = "abandoned", "dropped", "model"
CHANCE, GUARD = "chance", "guard"  # why a request is audited

WAITING_MAX = 32
WAITING_BYTES_MAX = 32 << 20  # of tokens
TRIES_MAX = 3  # each is given up where others want the memory, or the backend is lost
IDLE_POLL_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 5.0  # for what is just being quarantined


@dataclass(frozen=True)
class AuditCase:
    """A warm request, and what its first token came from."""

    request_id: str
    root: bytes
    tokens: bytes  # its prompt's
    reuse: int  # of these
    first_logits: FirstLogits
    layout: KvLayout
    trigger: str  # CHANCE or GUARD
    started_at: float  # time.monotonic() by which it had
    collapse: str = ""  # what the guard saw


@dataclass(frozen=True)
class AuditResult:
    """What an audit came to."""

    outcome: str  # a Verdict's, ABANDONED or DROPPED
    verdict: Verdict | None = None


class Auditor:
    """Owned by the event loop; from `start` to `stop` it has one task."""

    def __init__(
        self,
        *,
        config: ProxyConfig,
        index: Index,
        recomputer: FirstTokenProbe,
        quarantine: Quarantine,
        admission: AdmissionQueue,
        registry: RequestRegistry,
        watchdog: Watchdog,
        metrics: ProxyMetrics,
        rng: random.Random,
    ) -> None:
        self._fraction, self._tolerance = config.audit_fraction, config.audit_tolerance
        self._index, self._recomputer, self._quarantine = index, recomputer, quarantine
        self._admission, self._registry, self._watchdog, self._metrics = admission, registry, watchdog, metrics
        self._rng = rng
        self._waiting: deque[AuditCase] = deque()
        self._has_waiting = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def consider_request(self, request: Request) -> None:
        """A request is on disk and recorded: is it to be audited?"""
        request_log, collapse = request.log, request.log.collapse
        if not (request_log.plan and request_log.plan.reuse):
            if collapse:  # nothing was reused, so nothing of ours is to blame
                self._index.record_audit(request_log.id, "", f"{MODEL}: {collapse}")
            return
        by_chance = request_log.outcome == OK and self._rng.random() < self._fraction
        if (collapse or by_chance) and (case := _make_case(request)):
            self._enqueue(case)

    def _enqueue(self, case: AuditCase) -> None:
        """The newest is dropped where too many wait; a collapsed answer goes before all that were chosen by chance."""
        if case.trigger == GUARD:
            self._waiting.insert(sum(each.trigger == GUARD for each in self._waiting), case)
        else:
            self._waiting.append(case)
        while len(self._waiting) > 1 and self._is_queue_full:
            self._record_result(self._waiting.pop(), AuditResult(DROPPED))
        self._metrics.audits_waiting.set(len(self._waiting))
        self._has_waiting.set()

    @property
    def _is_queue_full(self) -> bool:
        return len(self._waiting) > WAITING_MAX or sum(len(each.tokens) for each in self._waiting) > WAITING_BYTES_MAX

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="audits")

    async def stop(self) -> None:
        """Give up what is under way, and all that wait."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)

    def drop_waiting(self) -> None:
        """Those that wait are given up: what they would look at was purged."""
        for case in self._waiting:
            self._record_result(case, AuditResult(DROPPED))
        self._waiting.clear()
        self._has_waiting.clear()
        self._metrics.audits_waiting.set(0)

    async def _run(self) -> None:
        try:
            while True:
                await self._has_waiting.wait()
                await self._wait_until_idle()
                case = self._waiting.popleft()
                self._metrics.audits_waiting.set(len(self._waiting))
                if not self._waiting:
                    self._has_waiting.clear()
                with request_context(case.request_id):
                    await self._audit(case)
        finally:
            for given_up in self._waiting:
                self._record_result(given_up, AuditResult(ABANDONED))

    async def _audit(self, case: AuditCase) -> None:
        result = AuditResult(ABANDONED)
        try:
            if cold := await self._recompute(case):
                verdict = await self._judge_case(case, cold)
                result = AuditResult(verdict.outcome, verdict)
                if verdict.outcome == DIFFERS:
                    await self._quarantine_case(case, cold, verdict)
        except Exception:  # one audit's trouble must not end all others
            log.exception("the audit of request %s failed", case.request_id)
        finally:  # what is known where the proxy stops in the midst of it, too
            self._record_result(case, result)

    async def _judge_case(self, case: AuditCase, cold: FirstLogits) -> Verdict:
        verdict = compare(case.first_logits, cold, case.layout, self._tolerance)
        if verdict.agrees:
            return verdict
        again = await self._recompute(case, cut=case.reuse)  # where this can't be had, the first word counts
        return judge(case.first_logits, cold, again, case.layout, self._tolerance) if again else verdict

    async def _quarantine_case(self, case: AuditCase, cold: FirstLogits, verdict: Verdict) -> None:
        log.error(
            "AUDIT request=%s differs: %s; likeliest first token warm %d, cold %d; what is like it is not used now",
            case.request_id,
            format_verdict(verdict),
            next(iter(rank_tokens(case.first_logits)), -1),
            next(iter(rank_tokens(cold)), -1),
        )
        result = await self._quarantine.quarantine(
            AuditMismatch(case.root, case.tokens, case.reuse, cold, case.layout, verdict.tolerance, case.started_at)
        )
        log.error(
            "AUDIT request=%s: wrong from token %d on; %d files are quarantined",
            case.request_id,
            result.good_tokens,
            result.file_count,
        )

    async def _recompute(self, case: AuditCase, *, cut: int = 0) -> FirstLogits | None:
        """Computed cold, in a quiet moment; None where that could not be had."""
        for _ in range(TRIES_MAX):
            await self._wait_until_idle()
            try:
                if first := await self._recomputer.compute_cold(case.root, case.tokens, chunk_end=cut):
                    return first
            except ModelChangedError as error:
                log.info("the audit of request %s is given up: %s", case.request_id, error)
                return None
            except UpstreamError as error:
                log.info("the audit of request %s is tried again: %s", case.request_id, error)
        return None

    async def _wait_until_idle(self) -> None:
        """Until nobody runs or waits."""
        while True:
            if self._is_idle:
                return
            await asyncio.sleep(IDLE_POLL_INTERVAL_S)

    @property
    def _is_idle(self) -> bool:
        is_busy = (
            self._admission.running_count
            or self._admission.queued_count
            or any(life.is_computing for life in self._registry)
        )
        return self._watchdog.is_up and not is_busy

    def _record_result(self, case: AuditCase, result: AuditResult) -> None:
        agrees = result.verdict is not None and result.verdict.agrees
        outcome = MODEL if case.trigger == GUARD and agrees else result.outcome
        self._metrics.audits.labels(why=case.trigger, outcome=outcome).inc()
        guard = case.collapse
        if guard and agrees:
            guard = f"{MODEL}: {guard}"
        elif guard and result.outcome == DIFFERS:
            guard = f"cache: {guard}"
        audit = ABANDONED if result.outcome == DROPPED else result.outcome
        self._index.record_audit(case.request_id, audit, guard)
        if result.verdict and result.outcome != DIFFERS:  # that was told already
            level = logging.INFO if agrees else logging.ERROR
            log.log(level, "AUDIT request=%s %s: %s", case.request_id, outcome, format_verdict(result.verdict))


def format_verdict(verdict: Verdict) -> str:
    """For people."""
    if verdict.tolerance:
        return f"log-probabilities differ by {verdict.difference:.2e}, tolerance {verdict.tolerance:g}"
    return f"log-probabilities differ by {verdict.difference:.2e}, exact to the last bit is expected"


def _make_case(request: Request) -> AuditCase | None:
    """None where no token was computed, so that there is nothing to compare."""
    plan, settled, collapse = request.log.plan, request.log.generation_result, request.log.collapse
    if not (request.is_cacheable and plan and settled and settled.first and request.prompt and request.layout):
        return None
    return AuditCase(
        request_id=request.log.id,
        root=request.root,
        tokens=request.prompt.tokens,
        reuse=plan.reuse,
        first_logits=settled.first,
        layout=request.layout,
        trigger=GUARD if collapse else CHANCE,
        started_at=time.monotonic(),
        collapse=collapse,
    )
