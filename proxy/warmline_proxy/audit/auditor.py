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

from warmline_common.logging import about
from warmline_common.protocol.messages import FirstLogits, Layout
from warmline_proxy.audit.bisect import Contradiction
from warmline_proxy.audit.comparison import DIFFERS, Verdict, compare, judge, likeliest
from warmline_proxy.audit.quarantine import Condemner
from warmline_proxy.config import Config
from warmline_proxy.index.index import Index
from warmline_proxy.metrics import Metrics
from warmline_proxy.request.admission import Admission
from warmline_proxy.request.registry import Lives
from warmline_proxy.request.request import Life
from warmline_proxy.request_log import OK
from warmline_proxy.upstream.client import UpstreamError
from warmline_proxy.upstream.first_token_probe import OtherModel, Recomputer
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

ABANDONED, DROPPED, MODEL = "abandoned", "dropped", "model"
CHANCE, GUARD = "chance", "guard"  # why a request is audited

WAITING_MAX = 32
WAITING_BYTES_MAX = 32 << 20  # of tokens
TRIES_MAX = 3  # each is given up where others want the memory, or the backend is lost
LOOK_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 5.0  # for what is just being quarantined


@dataclass(frozen=True)
class Case:
    """A warm request, and what its first token came from."""

    request_id: str
    root: bytes
    tokens: bytes  # its prompt's
    reuse: int  # of these
    first: FirstLogits
    layout: Layout
    why: str  # CHANCE or GUARD
    started: float  # time.monotonic() by which it had
    collapse: str = ""  # what the guard saw


@dataclass(frozen=True)
class Finding:
    """What an audit came to."""

    outcome: str  # a Verdict's, ABANDONED or DROPPED
    verdict: Verdict | None = None


class Auditor:
    """Owned by the event loop; from `start` to `stop` it has one task."""

    def __init__(
        self,
        *,
        config: Config,
        index: Index,
        recomputer: Recomputer,
        condemner: Condemner,
        admission: Admission,
        lives: Lives,
        watchdog: Watchdog,
        metrics: Metrics,
        chance: random.Random,
    ) -> None:
        self._fraction, self._tolerance = config.audit_fraction, config.audit_tolerance
        self._index, self._recomputer, self._condemner = index, recomputer, condemner
        self._admission, self._lives, self._watchdog, self._metrics = admission, lives, watchdog, metrics
        self._chance = chance
        self._waiting: deque[Case] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def consider(self, life: Life) -> None:
        """A request is on disk and recorded: is it to be audited?"""
        trace, collapse = life.trace, life.trace.collapse
        if not (trace.plan and trace.plan.reuse):
            if collapse:  # nothing was reused, so nothing of ours is to blame
                self._index.note_audit(trace.id, "", f"{MODEL}: {collapse}")
            return
        by_chance = trace.outcome == OK and self._chance.random() < self._fraction
        if (collapse or by_chance) and (case := _case(life)):
            self._enqueue(case)

    def _enqueue(self, case: Case) -> None:
        """The newest is dropped where too many wait; a collapsed answer goes before all that were chosen by chance."""
        if case.why == GUARD:
            self._waiting.insert(sum(each.why == GUARD for each in self._waiting), case)
        else:
            self._waiting.append(case)
        while len(self._waiting) > 1 and self._too_many_wait:
            self._note(self._waiting.pop(), Finding(DROPPED))
        self._metrics.audits_waiting.set(len(self._waiting))
        self._arrived.set()

    @property
    def _too_many_wait(self) -> bool:
        return len(self._waiting) > WAITING_MAX or sum(len(each.tokens) for each in self._waiting) > WAITING_BYTES_MAX

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="audits")

    async def stop(self) -> None:
        """Give up what is under way, and all that wait."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)

    def forget(self) -> None:
        """Those that wait are given up: what they would look at was purged."""
        for case in self._waiting:
            self._note(case, Finding(DROPPED))
        self._waiting.clear()
        self._arrived.clear()
        self._metrics.audits_waiting.set(0)

    async def _run(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                await self._quiet()
                case = self._waiting.popleft()
                self._metrics.audits_waiting.set(len(self._waiting))
                if not self._waiting:
                    self._arrived.clear()
                with about(case.request_id):
                    await self._audit(case)
        finally:
            for given_up in self._waiting:
                self._note(given_up, Finding(ABANDONED))

    async def _audit(self, case: Case) -> None:
        finding = Finding(ABANDONED)
        try:
            if cold := await self._again(case):
                verdict = await self._verdict(case, cold)
                finding = Finding(verdict.outcome, verdict)
                if verdict.outcome == DIFFERS:
                    await self._condemn(case, cold, verdict)
        except Exception:  # one audit's trouble must not end all others
            log.exception("the audit of request %s failed", case.request_id)
        finally:  # what is known where the proxy stops in the midst of it, too
            self._note(case, finding)

    async def _verdict(self, case: Case, cold: FirstLogits) -> Verdict:
        verdict = compare(case.first, cold, case.layout, self._tolerance)
        if verdict.agrees:
            return verdict
        again = await self._again(case, cut=case.reuse)  # where this can't be had, the first word counts
        return judge(case.first, cold, again, case.layout, self._tolerance) if again else verdict

    async def _condemn(self, case: Case, cold: FirstLogits, verdict: Verdict) -> None:
        log.error(
            "AUDIT request=%s differs: %s; likeliest first token warm %d, cold %d; what is like it is not used now",
            case.request_id,
            told(verdict),
            next(iter(likeliest(case.first)), -1),
            next(iter(likeliest(cold)), -1),
        )
        condemned = await self._condemner.condemn(
            Contradiction(case.root, case.tokens, case.reuse, cold, case.layout, verdict.tolerance, case.started)
        )
        log.error(
            "AUDIT request=%s: wrong from token %d on; %d files are quarantined",
            case.request_id,
            condemned.good,
            condemned.files,
        )

    async def _again(self, case: Case, *, cut: int = 0) -> FirstLogits | None:
        """Computed cold, in a quiet moment; None where that could not be had."""
        for _ in range(TRIES_MAX):
            await self._quiet()
            try:
                if first := await self._recomputer.cold(case.root, case.tokens, cut=cut):
                    return first
            except OtherModel as error:
                log.info("the audit of request %s is given up: %s", case.request_id, error)
                return None
            except UpstreamError as error:
                log.info("the audit of request %s is tried again: %s", case.request_id, error)
        return None

    async def _quiet(self) -> None:
        """Until nobody runs or waits."""
        while True:
            if self._is_quiet:
                return
            await asyncio.sleep(LOOK_INTERVAL_S)

    @property
    def _is_quiet(self) -> bool:
        asked = self._admission.running or self._admission.queued or any(life.is_computing for life in self._lives)
        return self._watchdog.is_up and not asked

    def _note(self, case: Case, finding: Finding) -> None:
        agrees = finding.verdict is not None and finding.verdict.agrees
        outcome = MODEL if case.why == GUARD and agrees else finding.outcome
        self._metrics.audits.labels(why=case.why, outcome=outcome).inc()
        guard = case.collapse
        if guard and agrees:
            guard = f"{MODEL}: {guard}"
        elif guard and finding.outcome == DIFFERS:
            guard = f"cache: {guard}"
        audit = ABANDONED if finding.outcome == DROPPED else finding.outcome
        self._index.note_audit(case.request_id, audit, guard)
        if finding.verdict and finding.outcome != DIFFERS:  # that was told already
            level = logging.INFO if agrees else logging.ERROR
            log.log(level, "AUDIT request=%s %s: %s", case.request_id, outcome, told(finding.verdict))


def told(verdict: Verdict) -> str:
    """For people."""
    if verdict.tolerance:
        return f"log-probabilities differ by {verdict.difference:.2e}, tolerance {verdict.tolerance:g}"
    return f"log-probabilities differ by {verdict.difference:.2e}, exact to the last bit is expected"


def _case(life: Life) -> Case | None:
    """None where no token was computed, so that there is nothing to compare."""
    plan, settled, collapse = life.trace.plan, life.trace.settled, life.trace.collapse
    if not (life.is_kept and plan and settled and settled.first and life.prompt and life.layout):
        return None
    return Case(
        request_id=life.trace.id,
        root=life.root,
        tokens=life.prompt.tokens,
        reuse=plan.reuse,
        first=settled.first,
        layout=life.layout,
        why=GUARD if collapse else CHANCE,
        started=time.monotonic(),
        collapse=collapse,
    )
