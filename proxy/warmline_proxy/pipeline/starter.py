"""Steps 4 and 5 of a request's life: plan where it starts, and restore what the plan needs."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from warmline_common.protocol.messages import RestoreRequest
from warmline_proxy.explain.divergence import Partings
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.metrics import Metrics
from warmline_proxy.planner import RESTORED, Plan, Running, cold_plan, decide
from warmline_proxy.request.request import Life, held_at
from warmline_proxy.store.rows import Match
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Broken, RestoreFailed, Unreachable, Upstream, UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

UNREADABLE_MAX = 3  # times that a file can't be read before it is set aside: the fault may be the disk's, and pass
UNREADABLE_FILES_MAX = 1000  # that are counted
RESTORES_MAX = 8  # each that fails takes a damaged file out of the index
RESTORE_STALLS_MAX = 3  # times the stall limit: it may wait for memory, but a prefill would wait no longer
NOTHING = Match(tokens=0, chain=[], checkpoints=[], why="nothing stored")


@dataclass(frozen=True)
class _Restored:
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
        knowledge: Knowledge,
        watchdog: Watchdog,
        metrics: Metrics,
        partings: Partings,
        checkpoint_gap_max: int,
    ) -> None:
        self._upstream = upstream
        self._index = index
        self._knowledge = knowledge
        self._watchdog = watchdog
        self._metrics = metrics
        self._partings = partings
        self._checkpoint_gap_max = checkpoint_gap_max
        self._unreadable: Counter[str] = Counter()

    def reach(self, life: Life) -> int:
        """How many tokens a start would reuse by now."""
        return self._decide(life, (), NOTHING if life.prompt is None else self._match(life)).reuse

    def cold(self, life: Life, why: str) -> Plan:
        self._partings.forget(life)
        costs = self._knowledge.costs()
        return cold_plan(life.prompt_shape(), life.layout, why, self._checkpoint_gap_max, costs=costs)

    async def start(self, life: Life, running: Sequence[Running]) -> Plan:
        """A plan whose resident, where it has one, was there a moment ago.  Raises Unreachable, Broken."""
        misses: list[str] = []
        for _ in range(RESTORES_MAX):
            plan = self._plan(life, misses, running)
            if plan.source != RESTORED:
                self._note_use(plan)
                return plan
            restored = await self._restored(life, plan)
            self._metrics.restores.labels(outcome="ok" if restored.resident else "failed").inc()
            if restored.resident:
                self._note_use(plan)
                return replace(plan, resident=restored.resident)
            misses.append(restored.why_not)
            if not restored.plan_again:
                break
        return self._plan(life, misses, running, stored=False)

    def _note_use(self, plan: Plan) -> None:
        """What is used is kept, also where it was in memory: its chain is what a restart would need."""
        if plan.files:
            self._index.note_use(plan.files)

    async def _restored(self, life: Life, plan: Plan) -> _Restored:
        """As `_restore`, but given up where neither it nor the engine moves, and in any case after a while.

        Cancelled, it leaves the restore to `life.restoring`, for whoever ends the request to end it too.
        """
        restoring = life.restoring = asyncio.create_task(
            self._restore(life, plan, life.purged), name=f"restore {life.trace.id}"
        )
        restoring.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # where nobody is left to ask
        stall_s, began = life.limits.stall_s or None, time.monotonic()
        while not (await asyncio.wait({restoring}, timeout=stall_s))[0]:
            now = time.monotonic()
            if stall_s and (now - self._watchdog.moved_at > stall_s or now - began > RESTORE_STALLS_MAX * stall_s):
                await self._upstream.cancel(life.trace.id, self._watchdog.patience_s)
                return _Restored(why_not=f"restoring took more than {now - began:.0f} s")
        return restoring.result()

    def _plan(self, life: Life, misses: list[str], running: Sequence[Running], stored: bool = True) -> Plan:
        match = self._match(life) if stored else NOTHING
        plan = self._decide(life, running, match)
        self._partings.note(life, plan, match)
        return replace(plan, why_not_warmer="; ".join(filter(None, [*misses, plan.why_not_warmer])))

    def _decide(self, life: Life, running: Sequence[Running], match: Match) -> Plan:
        assert life.prompt is not None
        return decide(
            life.prompt_shape(),
            self._knowledge.candidates(life.root, life.prompt.tokens),
            match,
            life.layout,
            self._knowledge.costs(),
            running=running,
            checkpoint_gap_max=self._checkpoint_gap_max,
        )

    def _match(self, life: Life) -> Match:
        assert life.prompt is not None
        if (limit := life.prompt_shape().tokens - 1) < 1:
            return NOTHING
        trusted = min(limit, self._knowledge.trusted(life.root, life.prompt.tokens))
        try:
            match = self._index.match(life.root, life.prompt.tokens, trusted)
        except IndexFailure as error:
            log.error("the index can't be read: %s", error)
            return NOTHING
        if trusted == limit or match.tokens < trusted:
            return match
        return msgspec.structs.replace(match, why=f"what is stored after token {trusted} is suspect")

    async def _restore(self, life: Life, plan: Plan, purged: bool) -> _Restored:
        """`purged`: what it went on from was, before this was planned, which is none of that."""
        held = held_at(life, plan.reuse)
        request = RestoreRequest(
            request_id=life.trace.id,
            tokens=held.tokens,
            chain=list(plan.chain),
            checkpoint=plan.checkpoint,
            root=life.root,
        )
        began_s = life.trace.elapsed_s()
        self._index.lease(plan.files)
        try:
            reply = await self._upstream.restore(request)
            if life.suspect or life.purged != purged:  # what it was about to start from was so in the meantime
                why_not = "what was restored " + ("is suspect" if life.suspect else "was purged")
                life.suspect = False
                self._knowledge.mirror.shun(reply.resident)
                await self._upstream.drop_resident(reply.resident)
                return _Restored(why_not=why_not, plan_again=True)
        except RestoreFailed as error:
            return await self._set_aside(error, plan.files)
        except (Unreachable, Broken):  # the backend is lost, and the request is dispatched again
            raise
        except UpstreamError as error:
            level = logging.INFO if life.leaving else logging.WARNING  # else it was given up
            log.log(level, "request %s: restoring %d tokens failed: %s", life.trace.id, plan.reuse, error)
            return _Restored(why_not=f"restore failed: {error}")
        finally:
            self._index.release(plan.files)
            life.trace.restore_s += life.trace.elapsed_s() - began_s
        self._knowledge.mirror.add(reply.resident, held)
        return _Restored(resident=reply.resident)

    async def _set_aside(self, error: RestoreFailed, files: list[str]) -> _Restored:
        """Quarantine the file at fault, so that no later request meets it; one that can't be read, not at once."""
        refused = error.reply
        why_not = f"{refused.reason} in {refused.bad[:8] or 'the chain'}: {refused.detail}"
        log.warning("a restore was refused: %s", why_not)
        if refused.bad not in files or (refused.reason == "io" and not self._given_up(refused.bad)):
            return _Restored(why_not=why_not)
        try:
            await asyncio.to_thread(self._index.quarantine, refused.bad, refused.reason)
        except (IndexFailure, OSError) as failure:
            log.error("%s could not be quarantined: %s", refused.bad, failure)
            return _Restored(why_not=why_not)
        self._metrics.quarantined.labels(reason=refused.reason).inc()
        return _Restored(why_not=why_not, plan_again=True)

    def _given_up(self, file_id: str) -> bool:
        """Whether it could not be read often enough by now."""
        if len(self._unreadable) >= UNREADABLE_FILES_MAX:
            self._unreadable.clear()
        self._unreadable[file_id] += 1
        return self._unreadable[file_id] >= UNREADABLE_MAX
