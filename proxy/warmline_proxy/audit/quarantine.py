"""What was found wrong is never used again: on disk, in memory, and in the requests that have started from it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from warmline_common.protocol.tokens import TOKEN_BYTES, common_prefix
from warmline_proxy.audit.bisect import Blame, Contradiction
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.metrics import Metrics
from warmline_proxy.pipeline.saver import Settler
from warmline_proxy.request.registry import Lives
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.backend_state import Knowledge, Suspicion
from warmline_proxy.upstream.client import Upstream, UpstreamError

log = logging.getLogger(__name__)

SUSPECT = "suspect"
RETRY_INTERVAL_S = 5.0
REMEMBERED_MAX = 32


@dataclass(frozen=True)
class Condemned:
    good: int  # tokens of the prompt; what shares more than these is gone
    files: int


class Condemner:
    """First nothing that begins like the prompt is used; then `Blame` finds how much of it is good; the rest goes, with
    all that builds on it: what is lost is computed again, and what is wrong would be believed.
    """

    def __init__(
        self,
        index: Index,
        upstream: Upstream,
        knowledge: Knowledge,
        lives: Lives,
        settler: Settler,
        blame: Blame,
        metrics: Metrics,
        background: Background,
    ) -> None:
        self._index, self._upstream, self._knowledge, self._lives = index, upstream, knowledge, lives
        self._settler, self._blame, self._metrics, self._background = settler, blame, metrics, background
        self._past: deque[tuple[float, Suspicion]] = deque(maxlen=REMEMBERED_MAX)  # since when, time.monotonic()

    async def condemn(self, case: Contradiction) -> Condemned:
        """Returns when it is out of use for good, or, while the index can't be written, at least out of use.

        Where it is cancelled, what is not known to be good by then goes.  Who had started before the same was taken out
        changes nothing: what is stored there now was computed since.
        """
        if (earlier := self._explained_by(case)) is not None:
            return Condemned(earlier.good, 0)
        since, suspicion = time.monotonic(), self._knowledge.suspect(case.root, case.tokens)
        residents = self._knowledge.mirror.candidates(case.root, case.tokens)  # those to come are computed anew
        self._mark_who_has_started(case.root, case.tokens)
        try:
            await self._blame.narrow(case, suspicion)
        finally:
            self._past.append((since, suspicion))
            wrong = [each.resident for each in residents if each.common > suspicion.good]
            files = await asyncio.shield(self._background.spawn(self._take_out(suspicion, wrong), "quarantine"))
        return Condemned(suspicion.good, len(files))

    def forget(self) -> None:
        """What was found wrong and is out of use since long; each holds tokens."""
        self._past.clear()

    def _explained_by(self, case: Contradiction) -> Suspicion | None:
        return next(
            (
                each
                for since, each in self._past
                if case.started < since
                and each.root == case.root
                and common_prefix(each.tokens, case.tokens) > each.good
            ),
            None,
        )

    def _mark_who_has_started(self, root: bytes, tokens: bytes) -> None:
        for life in self._lives:
            warm = life.restoring or (life.trace.plan and life.trace.plan.reuse)
            if warm and life.prompt and life.root == root and common_prefix(life.prompt.tokens, tokens):
                life.suspect = True

    async def _take_out(self, suspicion: Suspicion, residents: Iterable[str]) -> list[str]:
        """The ids of the files."""
        for resident in residents:  # first: what is still there when the files go might be saved again
            self._knowledge.mirror.shun(resident)
            await self._drop(resident)
        try:
            return await self._quarantine(suspicion)
        except IndexFailure as error:
            log.error("what is suspect is not used, and can't be quarantined yet: %s", error)
            self._background.spawn(self._quarantine_later(suspicion), "quarantine")
            return []

    async def _quarantine(self, suspicion: Suspicion) -> list[str]:
        """Raises IndexFailure."""
        files = await asyncio.to_thread(self._set_aside, suspicion)
        files += await self._settler.between_saves(lambda: self._set_aside(suspicion))  # what was just being saved
        self._knowledge.cleared(suspicion)
        return files

    async def _quarantine_later(self, suspicion: Suspicion) -> None:
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            try:
                files = await self._quarantine(suspicion)
            except IndexFailure:
                continue
            log.warning("what was suspect is quarantined now: %d files", len(files))
            return

    def _set_aside(self, suspicion: Suspicion) -> list[str]:
        """On a thread: the first file with a token that is not good, and all that builds on it."""
        tokens = suspicion.tokens
        chain = self._index.match(suspicion.root, tokens, len(tokens) // TOKEN_BYTES).chain
        first = next((link for link in chain if link.upto > suspicion.good), None)
        if first is None:
            return []
        files = self._index.quarantine(first.id, SUSPECT)
        self._metrics.quarantined.labels(reason=SUSPECT).inc()
        return files

    async def _drop(self, resident: str) -> None:
        try:
            await self._upstream.drop_resident(resident)
        except UpstreamError as error:
            log.warning("resident %s is suspect and not used, but may still be in memory: %s", resident, error)
