"""Audits: warm requests computed again, cold, while the engine is idle, and their first tokens' logits compared.

A random share of all requests; answers that collapse, always and first; sessions that cachectl names, at once.  Stored
tokens that differ are quarantined, unless two cold runs differ as well: then the machine does not repeat itself.
"""

import asyncio
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field

from warmline_common.logging import request_context
from warmline_common.protocol.messages import FirstLogits, KvLayout
from warmline_proxy.audit.bisect import AuditMismatch
from warmline_proxy.audit.comparison import DIFFERS, Verdict, compare, judge, rank_tokens
from warmline_proxy.audit.first_token_probe import FirstTokenProbe, ModelChangedError
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.config import ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import OK
from warmline_proxy.upstream.client import UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

ABANDONED, DROPPED, MODEL = "abandoned", "dropped", "model"
CHANCE, GUARD = "chance", "guard"  # why a request is audited

WAITING_MAX = 32
WAITING_BYTES_MAX = 32 << 20  # of tokens
TRIES_MAX = 3  # a run is lost when others need the memory, or with the backend
IDLE_POLL_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 5.0  # for a quarantine under way


@dataclass(frozen=True)
class AuditCase:
    """A warm request and its first token's logits."""

    request_id: str
    root: bytes
    tokens: bytes  # of the prompt, packed
    reuse: int  # tokens of these that were reused
    first_logits: FirstLogits
    layout: KvLayout
    trigger: str  # CHANCE or GUARD
    started_at: float  # time.monotonic(), not before the request's start
    collapse: str = ""  # the repetition guard's finding

    def describe_guard(self, verdict: Verdict | None) -> str:
        """The guard's finding, with the side at fault where the audit has decided that."""
        if not self.collapse or verdict is None or not (verdict.agrees or verdict.outcome == DIFFERS):
            return self.collapse
        return f"{MODEL if verdict.agrees else 'cache'}: {self.collapse}"


@dataclass(frozen=True)
class IdleCheck:
    """Collaborators that say whether the engine has nothing to do."""

    admission: AdmissionQueue
    registry: RequestRegistry
    watchdog: Watchdog

    @property
    def is_idle(self) -> bool:
        is_busy = self.admission.running_count or self.admission.queued_count
        return self.watchdog.is_up and not (is_busy or any(request.is_computing for request in self.registry))


@dataclass(kw_only=True, eq=False)
class Auditor:
    """Queue of audits and the task that runs them, from `start` to `stop`.  Event loop thread."""

    config: ProxyConfig
    index: Index
    probe: FirstTokenProbe
    quarantine: Quarantine
    idle_check: IdleCheck
    metrics: ProxyMetrics
    rng: random.Random
    _waiting: deque[AuditCase] = field(default_factory=deque, init=False)
    _has_waiting: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def consider_request(self, request: Request) -> None:
        """Queue a saved and recorded request for an audit, if its answer collapsed or chance has chosen it."""
        request_log, collapse = request.log, request.log.collapse
        if not (request_log.plan and request_log.plan.reuse):
            if collapse:  # nothing was reused, so the cache is not at fault
                self.index.record_audit(request_log.id, "", f"{MODEL}: {collapse}")
            return
        by_chance = request_log.outcome == OK and self.rng.random() < self.config.audit_fraction
        if (collapse or by_chance) and (case := _make_case(request)):
            self._enqueue(case)

    def _enqueue(self, case: AuditCase) -> None:
        """Add a case, collapsed answers before chosen requests; of too many the newest is dropped."""
        if case.trigger == GUARD:
            self._waiting.insert(sum(each.trigger == GUARD for each in self._waiting), case)
        else:
            self._waiting.append(case)
        while len(self._waiting) > 1 and self._is_queue_full:
            self._record_result(self._waiting.pop(), DROPPED)
        self.metrics.audits_waiting.set(len(self._waiting))
        self._has_waiting.set()

    @property
    def _is_queue_full(self) -> bool:
        return len(self._waiting) > WAITING_MAX or sum(len(each.tokens) for each in self._waiting) > WAITING_BYTES_MAX

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="audits")

    async def stop(self) -> None:
        """Abandon the audit under way and all that wait."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)

    def drop_waiting(self) -> None:
        """Drop the waiting audits, whose tokens were purged."""
        for case in self._waiting:
            self._record_result(case, DROPPED)
        self._waiting.clear()
        self._has_waiting.clear()
        self.metrics.audits_waiting.set(0)

    async def _run(self) -> None:
        try:
            while True:
                await self._has_waiting.wait()
                await self._wait_until_idle()
                case = self._waiting.popleft()
                self.metrics.audits_waiting.set(len(self._waiting))
                if not self._waiting:
                    self._has_waiting.clear()
                with request_context(case.request_id):
                    await self._audit(case)
        finally:
            for case in self._waiting:
                self._record_result(case, ABANDONED)

    async def _audit(self, case: AuditCase) -> None:
        verdict = None
        try:
            if cold := await self._recompute(case):
                verdict = await self._judge_case(case, cold)
                if verdict.outcome == DIFFERS:
                    await self._quarantine_case(case, cold, verdict)
        except Exception:  # a failed audit must not end the task of all others
            log.exception("the audit of request %s failed", case.request_id)
        finally:  # also where the proxy stops during the quarantine
            self._record_result(case, verdict.outcome if verdict else ABANDONED, verdict)

    async def _judge_case(self, case: AuditCase, cold: FirstLogits) -> Verdict:
        verdict = compare(case.first_logits, cold, case.layout, self.config.audit_tolerance)
        if verdict.agrees:
            return verdict
        again = await self._recompute(case, chunk_end=case.reuse)  # without a second cold run the first one decides
        return judge(case.first_logits, cold, again, case.layout, self.config.audit_tolerance) if again else verdict

    async def _quarantine_case(self, case: AuditCase, cold: FirstLogits, verdict: Verdict) -> None:
        likeliest = [next(iter(rank_tokens(first)), -1) for first in (case.first_logits, cold)]
        message = "AUDIT request=%s differs: %s; likeliest first token warm %d, cold %d; equal prefixes are not used"
        log.error(message, case.request_id, verdict.describe(), *likeliest)
        mismatch = AuditMismatch(
            case.root, case.tokens, case.reuse, cold, case.layout, verdict.tolerance, case.started_at
        )
        await self.quarantine.quarantine(mismatch, f"request={case.request_id}")

    async def _recompute(self, case: AuditCase, *, chunk_end: int = 0) -> FirstLogits | None:
        """Logits of a cold run while the engine is idle; None where TRIES_MAX runs were lost or the model changed."""
        for _ in range(TRIES_MAX):
            await self._wait_until_idle()
            try:
                if first := await self.probe.compute_cold(case.root, case.tokens, chunk_end=chunk_end):
                    return first
            except ModelChangedError as error:
                log.info("the audit of request %s is cancelled: %s", case.request_id, error)
                return None
            except UpstreamError as error:
                log.info("the audit of request %s is tried again: %s", case.request_id, error)
        return None

    async def _wait_until_idle(self) -> None:
        while not self.idle_check.is_idle:  # noqa: ASYNC110  three owners of state, none of which has an event
            await asyncio.sleep(IDLE_POLL_INTERVAL_S)

    def _record_result(self, case: AuditCase, outcome: str, verdict: Verdict | None = None) -> None:
        agrees = verdict is not None and verdict.agrees
        label = MODEL if case.trigger == GUARD and agrees else outcome
        self.metrics.audits.labels(why=case.trigger, outcome=label).inc()
        audit = ABANDONED if outcome == DROPPED else outcome
        self.index.record_audit(case.request_id, audit, case.describe_guard(verdict))
        if verdict and outcome != DIFFERS:  # a difference is logged already
            level = logging.INFO if agrees else logging.ERROR
            log.log(level, "AUDIT request=%s %s: %s", case.request_id, label, verdict.describe())


def _make_case(request: Request) -> AuditCase | None:
    """Audit case of a request; None where no token was generated, so that there is nothing to compare."""
    plan, result, collapse = request.log.plan, request.log.generation_result, request.log.collapse
    if not (request.is_cacheable and plan and result and result.first and request.prompt and request.layout):
        return None
    return AuditCase(
        request_id=request.log.id,
        root=request.root,
        tokens=request.prompt.tokens,
        reuse=plan.reuse,
        first_logits=result.first,
        layout=request.layout,
        trigger=GUARD if collapse else CHANCE,
        started_at=time.monotonic(),
        collapse=collapse,
    )
