"""What is so at this moment, read when somebody scrapes.  Event loop."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from warmline_common.protocol.vitals import take_vitals
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.request.admission import Admission
from warmline_proxy.request.registry import Lives
from warmline_proxy.store.rows import Totals
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

TOTALS_INTERVAL_S = 2.0


class Gauges(Collector):
    """Reads others' state.  What is stored is read on a thread, once in a while, and missing where it can't be."""

    def __init__(
        self,
        *,
        index: Index,
        admission: Admission,
        lives: Lives,
        watchdog: Watchdog,
        knowledge: Knowledge,
        connections: Callable[[], int],
    ) -> None:
        self._index = index
        self._admission = admission
        self._lives = lives
        self._watchdog = watchdog
        self._knowledge = knowledge
        self._connections = connections
        self._totals: Totals | None = None
        self._totals_at = float("-inf")  # time.monotonic()
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Read what is stored, unless that was done a moment ago; of several who ask at once, one does."""
        async with self._reading:
            if time.monotonic() - self._totals_at < TOTALS_INTERVAL_S:
                return
            try:
                self._totals = await asyncio.to_thread(self._index.totals)
            except IndexFailure as error:
                log.warning("what is stored can't be told to who scrapes: %s", error)
                self._totals = None
            self._totals_at = time.monotonic()

    def collect(self) -> Iterable[Metric]:
        yield from self._under_way()
        yield from self._upstream()
        yield from self._stored()
        vitals = take_vitals()
        yield _gauge("tasks", "Tasks of the event loop.", vitals.tasks)
        yield _gauge("threads", "Threads of the process.", vitals.threads)
        yield _gauge("descriptors", "Files and sockets that the process has open.", vitals.descriptors)

    def _under_way(self) -> Iterable[Metric]:
        yield _gauge("requests_running", "Requests that have a place at the backend.", self._admission.running)
        yield _gauge("requests_queued", "Requests that wait for a place.", self._admission.queued)
        yield _gauge("requests_settling", "Requests that are computed, but not yet on disk.", self._lives.settling)
        yield _gauge("connections", "Clients' connections.", self._connections())

    def _upstream(self) -> Iterable[Metric]:
        yield _gauge("upstream_up", "1 while the backend serves.", self._watchdog.is_up)
        yield _counter("upstream_boots", "Backend processes that were heard of.", self._watchdog.boots)
        yield _counter("wedges", "Wedged backends that were killed.", self._watchdog.kills)
        mirror = self._knowledge.mirror
        yield _gauge("residents", "KV in the backend's memory that is known of.", len(mirror.ids()))
        yield _gauge("residents_unsaved", "Of these, what is nowhere else.", len(mirror.not_durable()))

    def _stored(self) -> Iterable[Metric]:
        yield _gauge("disk_budget_bytes", "What the stored bytes of all kinds may come to.", self._index.budget_bytes)
        if (totals := self._totals) is None:
            return
        yield _gauges(
            "stored_bytes",
            "What counts against the disk budget.",
            {
                "segments": totals.bytes_segments,
                "checkpoints": totals.bytes_checkpoints,
                "quarantined": totals.bytes_quarantined,
                "writing": totals.bytes_writing,
                "doomed": totals.bytes_doomed,
                "index": totals.bytes_index,
            },
        )
        yield _gauges(
            "stored_files",
            "Files on disk.",
            {"segments": totals.segments, "checkpoints": totals.checkpoints, "quarantined": totals.quarantined},
        )
        yield _gauge("stored_tokens", "Tokens whose KV is on disk.", totals.tokens)
        yield _gauge("stored_sessions", "Conversations on disk.", totals.sessions)
        yield _gauge("stored_turns", "Sampled calls that are remembered.", totals.turns)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"warmline_{name}", about, value=value)


def _gauges(name: str, about: str, by_kind: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"warmline_{name}", about, labels=["kind"])
    for kind, value in by_kind.items():
        family.add_metric([kind], value)
    return family


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"warmline_{name}", about, value=value)
