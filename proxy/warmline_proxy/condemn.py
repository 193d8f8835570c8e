"""What was found wrong is never used again: on disk, in memory, and in the requests that have started from it."""

import asyncio
import logging
from contextlib import suppress

from warmline_proxy.background import Background
from warmline_proxy.index import Index, IndexFailure
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.lives import Lives
from warmline_proxy.metrics import Metrics
from warmline_proxy.settle import Settler
from warmline_proxy.upstream import Upstream, UpstreamError
from warmline_wire.keys import TOKEN_BYTES, common_prefix

log = logging.getLogger(__name__)

SUSPECT = "suspect"
RETRY_INTERVAL_S = 5.0


class Condemner:
    """Which of several files is at fault can't be told from an answer, so all that lie along its prompt go, with all
    that build on them: what is lost is computed again, and what is wrong would be believed.
    """

    def __init__(
        self,
        index: Index,
        upstream: Upstream,
        knowledge: Knowledge,
        lives: Lives,
        settler: Settler,
        metrics: Metrics,
        background: Background,
    ) -> None:
        self._index, self._upstream, self._knowledge = index, upstream, knowledge
        self._lives, self._settler, self._metrics, self._background = lives, settler, metrics, background

    async def condemn(self, root: bytes, tokens: bytes) -> list[str]:
        """Take everything that shares a token with this prompt out of use; the ids of the files.

        While the index can't be written, nothing of it is used all the same, and it is tried again.
        """
        self._knowledge.bar(root, tokens)
        dropped, files = self._forget(root, tokens), list[str]()
        try:
            files = await self._quarantine(root, tokens)
        except IndexFailure as error:
            log.error("what is suspect is not used, and can't be quarantined yet: %s", error)
            self._background.spawn(self._quarantine_later(root, tokens), "quarantine")
        await self._drop({*dropped, *self._forget(root, tokens)})  # those of who started meanwhile, too
        return files

    async def _quarantine(self, root: bytes, tokens: bytes) -> list[str]:
        """Raises IndexFailure."""
        files = await asyncio.to_thread(self._set_aside, root, tokens)
        files += await self._settler.between_saves(lambda: self._set_aside(root, tokens))  # what was just being saved
        self._knowledge.unbar(root, tokens)
        return files

    async def _quarantine_later(self, root: bytes, tokens: bytes) -> None:
        while self._knowledge.bars(root, tokens):
            await asyncio.sleep(RETRY_INTERVAL_S)
            with suppress(IndexFailure):
                files = await self._quarantine(root, tokens)
                log.warning("what was suspect is quarantined now: %d files", len(files))

    def _forget(self, root: bytes, tokens: bytes) -> list[str]:
        """Nothing of it is planned on, or kept, from now on.  The residents."""
        for life in self._lives:
            if life.prompt and life.root == root and common_prefix(life.prompt.tokens, tokens):
                life.suspect = life.suspect or not (life.trace.plan and life.trace.plan.reuse == 0)
        mirror = self._knowledge.mirror
        residents = [candidate.resident for candidate in mirror.candidates(root, tokens)]
        for resident in residents:
            mirror.drop(resident)
        return residents

    def _set_aside(self, root: bytes, tokens: bytes) -> list[str]:
        """On a thread."""
        chain = self._index.match(root, tokens, len(tokens) // TOKEN_BYTES).chain
        if not chain:
            return []
        self._metrics.quarantined.labels(reason=SUSPECT).inc()
        return self._index.quarantine(chain[0].id, SUSPECT)

    async def _drop(self, residents: set[str]) -> None:
        for resident in residents:
            try:
                await self._upstream.drop_resident(resident)
            except UpstreamError as error:  # the mirror has forgotten it: nobody is going to ask for it
                log.warning("resident %s is suspect, but may still be in memory: %s", resident, error)
