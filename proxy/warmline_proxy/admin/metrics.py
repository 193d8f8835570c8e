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
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.store.rows import Totals

log = logging.getLogger(__name__)

TOTALS_INTERVAL_S = 2.0


@dataclass(eq=False)
class MetricsRoutes(Collector):
    """GET /metrics, with gauges over other components' state; access was checked before.

    Stored totals are read on a thread, at intervals; omitted on failure.
    """

    metrics: ProxyMetrics
    index: Index
    models: ServedModels
    registry: RequestRegistry
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
        vitals, backends = read_process_stats(), self.models.backends
        boots, kills = (sum(getattr(each.watchdog, name) for each in backends) for name in ("boots", "kills"))
        views = [backend.state.resident_view for backend in backends]
        yield CounterMetricFamily("warmline_upstream_boots", "Backend processes seen.", boots)
        yield CounterMetricFamily("warmline_wedges", "Wedged backends that were killed.", kills)
        gauges = [
            ("requests_running", "Requests that have a place at the backend.", self.models.running_count),
            ("requests_queued", "Requests that wait for a place.", self.models.queued_count),
            ("requests_settling", "Requests that are computed, but not yet on disk.", self.registry.saving_count),
            ("connections", "Clients' connections.", self.count_connections()),
            ("upstream_up", "1 while the backend serves.", any(each.watchdog.is_up for each in backends)),
            ("residents", "KV in the backend's memory that is known of.", sum(map(len, views))),
            ("residents_unsaved", "Residents that are not on disk yet.", sum(each.non_durable_count for each in views)),
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
