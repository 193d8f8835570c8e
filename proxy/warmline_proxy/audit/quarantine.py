"""Quarantine of wrong stored tokens: on disk, in the backend's memory, and in the requests that started from them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class Quarantine:
    """Removal of a suspect prefix from use.  Event loop thread.

    First no request may start from such a prefix; then the Bisector finds how many of its tokens are right; segments
    and residents beyond these are removed with their descendants: they can be computed again.
    """

    index: Index
    upstream: Upstream
    backend_state: BackendState
    registry: RequestRegistry
    saver: Saver
    bisector: Bisector
    metrics: ProxyMetrics
    background: BackgroundTasks
    # (time.monotonic() when found, prefix)
    _past_suspicions: deque[tuple[float, SuspectPrefix]] = field(
        default_factory=lambda: deque(maxlen=PAST_SUSPICIONS_MAX), init=False
    )

    async def quarantine(self, case: AuditMismatch, name: str) -> int:
        """Take the wrong tokens of a mismatch out of use, log that under `name`, and return the number of files.

        Returns once the files are quarantined or, while the index can't be written, once no request may use them.
        Cancelled, it quarantines everything that is not known to be right by then.  A case that had started before an
        earlier quarantine of the same prefix removes nothing: the tokens stored there now were computed later.
        """
        newer = (suspicion for found_at, suspicion in self._past_suspicions if case.started_at < found_at)
        suspicion = next((each for each in newer if each.matches(case.root, case.tokens)), None)
        count = 0
        if suspicion is None:
            suspicion = self.backend_state.add_suspect(case.root, case.tokens)
            count = await self._quarantine(case, suspicion)
        log.error("AUDIT %s: wrong from token %d on; %d files are quarantined", name, suspicion.trusted_tokens, count)
        return count

    async def _quarantine(self, case: AuditMismatch, suspicion: SuspectPrefix) -> int:
        """Find the trusted tokens and remove the others from use; number of quarantined files."""
        found_at = time.monotonic()
        # Later residents are computed anew.
        residents = self.backend_state.resident_view.count_shared_tokens(case.root, case.tokens)
        self._mark_suspect_requests(case.root, case.tokens)
        try:
            await self.bisector.narrow_suspicion(case, suspicion)
        finally:
            self._past_suspicions.append((found_at, suspicion))
            wrong = [name for name, common in residents.items() if common > suspicion.trusted_tokens]
            removal = self.background.spawn(self._remove_from_use(suspicion, wrong), "quarantine")
            count: int = await asyncio.shield(removal)
        return count

    def clear_history(self) -> None:
        """Remove the tokens of past suspicions from memory, for a purge."""
        self._past_suspicions.clear()

    def _mark_suspect_requests(self, root: bytes, tokens: bytes) -> None:
        for request in self.registry:
            is_warm = request.restore_task or (request.log.plan and request.log.plan.reuse)
            if is_warm and request.prompt and request.root == root:
                request.suspect |= count_common_tokens(request.prompt.tokens, tokens) > 0

    async def _remove_from_use(self, suspicion: SuspectPrefix, residents: Iterable[str]) -> int:
        """Drop the residents and quarantine the files; number of the files."""
        for resident in residents:  # first: a resident might be saved again after its files were removed
            self.backend_state.resident_view.exclude(resident)
            try:
                await self.upstream.delete_resident(resident)
            except UpstreamError as error:
                log.warning("resident %s is suspect and not used, but may still be in memory: %s", resident, error)
        try:
            return await self._quarantine_stored(suspicion)
        except IndexStoreError as error:
            log.error("suspect files are not used, and can't be quarantined yet: %s", error)
            self.background.spawn(self._retry_quarantine(suspicion), "quarantine")
            return 0

    async def _quarantine_stored(self, suspicion: SuspectPrefix) -> int:
        """Quarantine files, including those of a save under way; number of them.  Raises IndexStoreError."""
        count = await asyncio.to_thread(self._quarantine_segments, suspicion)
        count += await self.saver.run_between_saves(lambda: self._quarantine_segments(suspicion))
        self.backend_state.remove_suspect(suspicion)
        return count

    async def _retry_quarantine(self, suspicion: SuspectPrefix) -> None:
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            with suppress(IndexStoreError):
                count = await self._quarantine_stored(suspicion)
                log.warning("suspect files are quarantined now: %d files", count)
                return

    def _quarantine_segments(self, suspicion: SuspectPrefix) -> int:
        """Quarantine the first segment with an untrusted token and its descendants.  On a worker thread."""
        tokens = suspicion.tokens
        chain = self.index.match_prefix(suspicion.root, tokens, len(tokens) // TOKEN_BYTES).chain
        first = next((link for link in chain if link.upto > suspicion.trusted_tokens), None)
        if first is None:
            return 0
        files = self.index.quarantine(first.id, SUSPECT)
        self.metrics.quarantined.labels(reason=SUSPECT).inc()
        return len(files)
