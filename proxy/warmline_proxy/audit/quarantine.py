"""What was found wrong is never used again: on disk, in memory, and in the requests that have started from it."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.audit.bisect import AuditMismatch, Bisector
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.backend_state import BackendState, SuspectPrefix
from warmline_proxy.upstream.client import Upstream, UpstreamError

log = logging.getLogger(__name__)

SUSPECT = "suspect"
RETRY_INTERVAL_S = 5.0
PAST_SUSPICIONS_MAX = 32


@dataclass(frozen=True)
class QuarantineResult:
    good_tokens: int  # tokens of the prompt; what shares more than these is gone
    file_count: int


class Quarantine:
    """First nothing that begins like the prompt is used; then `Blame` finds how much of it is good; the rest goes, with
    all that builds on it: what is lost is computed again, and what is wrong would be believed.
    """

    def __init__(
        self,
        index: Index,
        upstream: Upstream,
        backend_state: BackendState,
        registry: RequestRegistry,
        saver: Saver,
        bisector: Bisector,
        metrics: ProxyMetrics,
        background: BackgroundTasks,
    ) -> None:
        self._index, self._upstream, self._backend_state, self._registry = index, upstream, backend_state, registry
        self._saver, self._bisector, self._metrics, self._background = saver, bisector, metrics, background
        self._past_suspicions: deque[tuple[float, SuspectPrefix]] = deque(
            maxlen=PAST_SUSPICIONS_MAX
        )  # since when, time.monotonic()

    async def quarantine(self, case: AuditMismatch) -> QuarantineResult:
        """Returns when it is out of use for good, or, while the index can't be written, at least out of use.

        Where it is cancelled, what is not known to be good by then goes.  Who had started before the same was taken out
        changes nothing: what is stored there now was computed since.
        """
        if (earlier := self._find_earlier_suspicion(case)) is not None:
            return QuarantineResult(earlier.trusted_tokens, 0)
        found_at, suspicion = time.monotonic(), self._backend_state.add_suspect(case.root, case.tokens)
        residents = self._backend_state.resident_view.candidates(
            case.root, case.tokens
        )  # those to come are computed anew
        self._mark_suspect_requests(case.root, case.tokens)
        try:
            await self._bisector.narrow_suspicion(case, suspicion)
        finally:
            self._past_suspicions.append((found_at, suspicion))
            wrong_residents = [each.resident for each in residents if each.common_tokens > suspicion.trusted_tokens]
            files = await asyncio.shield(
                self._background.spawn(self._remove_from_use(suspicion, wrong_residents), "quarantine")
            )
        return QuarantineResult(suspicion.trusted_tokens, len(files))

    def clear_history(self) -> None:
        """What was found wrong and is out of use since long; each holds tokens."""
        self._past_suspicions.clear()

    def _find_earlier_suspicion(self, case: AuditMismatch) -> SuspectPrefix | None:
        return next(
            (
                each
                for since, each in self._past_suspicions
                if case.started_at < since
                and each.root == case.root
                and count_common_tokens(each.tokens, case.tokens) > each.trusted_tokens
            ),
            None,
        )

    def _mark_suspect_requests(self, root: bytes, tokens: bytes) -> None:
        for life in self._registry:
            is_warm = life.restore_task or (life.log.plan and life.log.plan.reuse)
            if is_warm and life.prompt and life.root == root and count_common_tokens(life.prompt.tokens, tokens):
                life.suspect = True

    async def _remove_from_use(self, suspicion: SuspectPrefix, residents: Iterable[str]) -> list[str]:
        """The ids of the files."""
        for resident in residents:  # first: what is still there when the files go might be saved again
            self._backend_state.resident_view.exclude(resident)
            await self._drop_resident(resident)
        try:
            return await self._quarantine_stored(suspicion)
        except IndexStoreError as error:
            log.error("what is suspect is not used, and can't be quarantined yet: %s", error)
            self._background.spawn(self._retry_quarantine(suspicion), "quarantine")
            return []

    async def _quarantine_stored(self, suspicion: SuspectPrefix) -> list[str]:
        """Raises IndexFailure."""
        files = await asyncio.to_thread(self._quarantine_segments, suspicion)
        files += await self._saver.run_between_saves(
            lambda: self._quarantine_segments(suspicion)
        )  # what was just being saved
        self._backend_state.remove_suspect(suspicion)
        return files

    async def _retry_quarantine(self, suspicion: SuspectPrefix) -> None:
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            try:
                files = await self._quarantine_stored(suspicion)
            except IndexStoreError:
                continue
            log.warning("what was suspect is quarantined now: %d files", len(files))
            return

    def _quarantine_segments(self, suspicion: SuspectPrefix) -> list[str]:
        """On a thread: the first file with a token that is not good, and all that builds on it."""
        tokens = suspicion.tokens
        chain = self._index.match_prefix(suspicion.root, tokens, len(tokens) // TOKEN_BYTES).chain
        first = next((link for link in chain if link.upto > suspicion.trusted_tokens), None)
        if first is None:
            return []
        files = self._index.quarantine(first.id, SUSPECT)
        self._metrics.quarantined.labels(reason=SUSPECT).inc()
        return files

    async def _drop_resident(self, resident: str) -> None:
        try:
            await self._upstream.delete_resident(resident)
        except UpstreamError as error:
            log.warning("resident %s is suspect and not used, but may still be in memory: %s", resident, error)
