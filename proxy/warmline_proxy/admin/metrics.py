"""Gauges of the present state, read at each scrape, and GET /metrics.  Event loop thread."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from warmline_common.protocol.vitals import read_process_stats
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.store.rows import Totals
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

TOTALS_INTERVAL_S = 2.0


@dataclass(eq=False)
class MetricsRoutes(Collector):
    """GET /metrics, with gauges over other components' state; access was checked before.

    Stored totals are read on a thread, at intervals; omitted on failure.
    """

    metrics: ProxyMetrics
    index: Index
    admission: AdmissionQueue
    registry: RequestRegistry
    watchdog: Watchdog
    backend_state: BackendState
    count_connections: Callable[[], int]
    _totals: Totals | None = field(default=None, init=False)
    _totals_at: float = field(default=float("-inf"), init=False)  # time.monotonic()
    _refresh_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def get_metrics(self, request: web.Request) -> web.Response:
        """Metrics as text, or as OpenMetrics on request."""
        await self.refresh()
        body, content_type = self.metrics.render_exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def refresh(self) -> None:
        """Read the stored totals if the last read is old; concurrent scrapes share one read."""
        async with self._refresh_lock:
            if time.monotonic() - self._totals_at < TOTALS_INTERVAL_S:
                return
            try:
                self._totals = await asyncio.to_thread(self.index.totals)
            except IndexStoreError as error:
                log.warning("the metrics lack the stored totals: %s", error)
                self._totals = None
            self._totals_at = time.monotonic()

    def collect(self) -> Iterable[Metric]:
        vitals, watchdog, residents = read_process_stats(), self.watchdog, self.backend_state.resident_view
        yield CounterMetricFamily("warmline_upstream_boots", "Backend processes seen.", watchdog.boots)
        yield CounterMetricFamily("warmline_wedges", "Wedged backends that were killed.", watchdog.kills)
        gauges = [
            ("requests_running", "Requests that have a place at the backend.", self.admission.running_count),
            ("requests_queued", "Requests that wait for a place.", self.admission.queued_count),
            ("requests_settling", "Requests that are computed, but not yet on disk.", self.registry.saving_count),
            ("connections", "Clients' connections.", self.count_connections()),
            ("upstream_up", "1 while the backend serves.", watchdog.is_up),
            ("residents", "KV in the backend's memory that is known of.", len(residents)),
            ("residents_unsaved", "Residents that are not on disk yet.", residents.non_durable_count),
            ("disk_budget_bytes", "What the stored bytes of all kinds may come to.", self.index.budget_bytes),
            ("tasks", "Tasks of the event loop.", vitals.tasks),
            ("threads", "Threads of the process.", vitals.threads),
            ("descriptors", "Files and sockets that the process has open.", vitals.descriptors),
        ]
        if (totals := self._totals) is not None:
            gauges += [
                ("stored_tokens", "Tokens whose KV is on disk.", totals.tokens),
                ("stored_sessions", "Conversations on disk.", totals.sessions),
                ("stored_turns", "Sampled calls that are remembered.", totals.turns),
                ("stored_responses", "Responses of OpenAI's Responses that are stored.", totals.responses),
            ]
            size = GaugeMetricFamily("warmline_stored_bytes", "What counts against the disk budget.", labels=["kind"])
            count = GaugeMetricFamily("warmline_stored_files", "Files on disk.", labels=["kind"])
            for kind in ("segments", "checkpoints", "quarantined"):
                count.add_metric([kind], getattr(totals, kind))
            for kind in ("segments", "checkpoints", "quarantined", "writing", "doomed", "index"):
                size.add_metric([kind], getattr(totals, f"bytes_{kind}"))
            yield from (size, count)
        for name, documentation, value in gauges:
            yield GaugeMetricFamily(f"warmline_{name}", documentation, value)
