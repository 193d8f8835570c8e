"""Audits: warm requests computed again, cold, while no request is on its way, and their first tokens' logits compared.

A random share of all requests; answers that collapse, always and first; sessions that cachectl names, at once.  Stored
tokens that differ are quarantined, unless two cold runs differ as well: then the machine does not repeat itself.

An audit begins in real quiet, after more time than the conversation's turns have been apart, and ends when a request
arrives; it is tried again in the next quiet, a few times.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

from warmline_common.logging import request_context
from warmline_common.protocol.messages import FirstLogits, KvLayout
from warmline_common.protocol.tokens import prefix_digest
from warmline_proxy.audit.bisect import AuditMismatch
from warmline_proxy.audit.comparison import DIFFERS, Verdict, compare, judge, rank_tokens
from warmline_proxy.audit.first_token_probe import FirstTokenProbe, ModelChangedError
from warmline_proxy.audit.quarantine import Quarantine
from warmline_proxy.audit.quiet import QuietEngine, TurnPauses, name_conversation
from warmline_proxy.config import ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import OK
from warmline_proxy.upstream.client import UpstreamError

log = logging.getLogger(__name__)

ABANDONED, DROPPED, MODEL = "abandoned", "dropped", "model"
CHANCE, GUARD = "chance", "guard"  # why a request is audited

WAITING_MAX = 32
WAITING_BYTES_MAX = 32 << 20  # of tokens
PROMPTS_MAX = 1024  # audited ones that are remembered
TRIES_MAX = 3  # a run is lost when a request arrives, or with the backend
SECOND_TRIES_MAX = 10  # of the second cold run: without it the first one decides
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
    conversation: str = ""
    collapse: str = ""  # the repetition guard's finding
    tries_left: int = TRIES_MAX

    def describe_guard(self, verdict: Verdict | None) -> str:
        """The guard's finding, with the side at fault where the audit has decided that."""
        if not self.collapse or verdict is None or not (verdict.agrees or verdict.outcome == DIFFERS):
            return self.collapse
        return f"{MODEL if verdict.agrees else 'cache'}: {self.collapse}"


@dataclass(kw_only=True, eq=False)
class Auditor:
    """Queue of audits and the task that runs them, from `start` to `stop`.  Event loop thread."""

    config: ProxyConfig
    index: Index
    probe: FirstTokenProbe
    quarantine: Quarantine
    engine: QuietEngine
    metrics: ProxyMetrics
    rng: random.Random
    _pauses: TurnPauses = field(init=False)
    _audited: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False)  # prompt digests: triggers
    _waiting: deque[AuditCase] = field(default_factory=deque, init=False)
    _has_waiting: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._pauses = TurnPauses(self.config.audit_quiet_s)

    def consider_request(self, request: Request) -> None:
        """Queue a saved and recorded request for an audit, if its answer collapsed or chance has chosen it."""
        request_log, collapse = request.log, request.log.collapse
        ended_at = request_log.arrived_monotonic + request_log.total_s
        self._pauses.record_turn(name_conversation(request), request_log.arrived_monotonic, ended_at)
        if not (request_log.plan and request_log.plan.reuse):
            if collapse:  # nothing was reused, so the cache is not at fault
                self.index.record_audit(request_log.id, "", f"{MODEL}: {collapse}")
            return
        by_chance = request_log.outcome == OK and self.rng.random() < self.config.audit_fraction
        if (collapse or by_chance) and (case := _make_case(request)) and self._remember_prompt(case):
            self._enqueue(case)

    def _remember_prompt(self, case: AuditCase) -> bool:
        """False for a prompt that was audited, or waits for it: no turn is audited twice, but for a later collapse."""
        digest = prefix_digest(case.root, case.tokens)
        if self._audited.get(digest) in (GUARD, case.trigger):
            return False
        self._audited[digest] = case.trigger
        if len(self._audited) > PROMPTS_MAX:
            self._audited.popitem(last=False)
        return True

    def _enqueue(self, case: AuditCase) -> None:
        """Add a case, collapsed answers before chosen requests; of too many the newest is dropped."""
        if case.trigger == GUARD:
            self._waiting.insert(sum(each.trigger == GUARD for each in self._waiting), case)
        else:
            self._waiting.append(case)
        while len(self._waiting) > 1 and self._is_queue_full:
            self._record_result(self._waiting.pop(), DROPPED)
        self._count_waiting()

    @property
    def _is_queue_full(self) -> bool:
        return len(self._waiting) > WAITING_MAX or sum(len(each.tokens) for each in self._waiting) > WAITING_BYTES_MAX

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="audits")

    async def stop(self) -> None:
        """Abandon the audit under way and all that wait."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)

    def drop_waiting(self) -> None:
        """Drop the waiting audits, whose tokens were purged, and all that is known of conversations."""
        self._audited.clear()
        self._pauses.clear()
        for case in self._waiting:
            self._record_result(case, DROPPED)
        self._waiting.clear()
        self._count_waiting()

    async def _run(self) -> None:
        try:
            while True:
                case = await self._take_next()
                with request_context(case.request_id):
                    await self._audit(case)
        finally:
            for case in self._waiting:
                self._record_result(case, ABANDONED)

    async def _take_next(self) -> AuditCase:
        """Wait for the first case whose conversation has been quiet for long enough."""
        while True:
            await self._has_waiting.wait()
            await self.engine.wait_for_quiet(lambda: min(map(self._required_quiet_s, self._waiting), default=0.0))
            so_far = self.engine.quiet_s or 0.0
            case = next((each for each in self._waiting if self._required_quiet_s(each) <= so_far), None)
            if case is not None:  # else they were purged
                self._waiting.remove(case)
                self._count_waiting()
                return case

    def _required_quiet_s(self, case: AuditCase) -> float:
        return self._pauses.required_quiet_s(case.conversation)

    def _count_waiting(self) -> None:
        if self._waiting:
            self._has_waiting.set()
        else:
            self._has_waiting.clear()

    async def _audit(self, case: AuditCase) -> None:
        verdict, is_postponed = None, False
        try:
            cold = await self._recompute(case)
            if cold:
                verdict = await self._judge_case(case, cold)
                if verdict.outcome == DIFFERS:
                    await self._quarantine_case(case, cold, verdict)
            is_postponed = cold is None and case.tries_left > 1
        except ModelChangedError as error:
            log.info("the audit of request %s is cancelled: %s", case.request_id, error)
        except Exception:  # a failed audit must not end the task of all others
            log.exception("the audit of request %s failed", case.request_id)
        finally:  # also where the proxy stops during the quarantine
            if is_postponed:
                self._enqueue(replace(case, tries_left=case.tries_left - 1))
            else:
                self._record_result(case, verdict.outcome if verdict else ABANDONED, verdict)

    async def _judge_case(self, case: AuditCase, cold: FirstLogits) -> Verdict:
        verdict = compare(case.first_logits, cold, case.layout, self.config.audit_tolerance)
        if verdict.agrees:
            return verdict
        again, tries_left = None, SECOND_TRIES_MAX
        while again is None and tries_left:
            again, tries_left = await self._recompute(case, chunk_end=case.reuse), tries_left - 1
        return judge(case.first_logits, cold, again, case.layout, self.config.audit_tolerance) if again else verdict

    async def _quarantine_case(self, case: AuditCase, cold: FirstLogits, verdict: Verdict) -> None:
        likeliest = [next(iter(rank_tokens(first)), -1) for first in (case.first_logits, cold)]
        message = "AUDIT request=%s differs: %s; likeliest first token warm %d, cold %d; equal prefixes are not used"
        log.error(message, case.request_id, verdict.describe_difference(), *likeliest)
        mismatch = AuditMismatch(
            *(case.root, case.tokens, case.reuse, cold, case.layout, verdict.tolerance, case.started_at),
            quiet_s=self._required_quiet_s(case),
        )
        await self.quarantine.quarantine(mismatch, f"request={case.request_id}")

    async def _recompute(self, case: AuditCase, *, chunk_end: int = 0) -> FirstLogits | None:
        """Logits of a cold run in quiet; None where it was lost.  Raises ModelChangedError."""
        run = self.probe.compute_cold(case.root, case.tokens, chunk_end=chunk_end)
        try:
            first = await self.engine.run(run, lambda: self._required_quiet_s(case))
        except UpstreamError as error:
            log.info("a cold run for the audit of request %s has failed: %s", case.request_id, error)
            return None
        if first is None:
            log.info("the audit of request %s has made way for another request", case.request_id)
        return first

    def _record_result(self, case: AuditCase, outcome: str, verdict: Verdict | None = None) -> None:
        agrees = verdict is not None and verdict.agrees
        label = MODEL if case.trigger == GUARD and agrees else outcome
        self.metrics.audits.labels(why=case.trigger, outcome=label).inc()
        audit = ABANDONED if outcome == DROPPED else outcome
        self.index.record_audit(case.request_id, audit, case.describe_guard(verdict))
        if verdict and outcome != DIFFERS:  # a difference is logged already
            level = logging.INFO if agrees else logging.ERROR
            log.log(level, "AUDIT request=%s %s: %s", case.request_id, label, verdict.describe_difference())


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
        conversation=name_conversation(request),
        collapse=collapse,
    )
