"""What was counted, for Prometheus and whoever reads its formats."""

from aiohttp import web

from warmline_proxy.admin.metrics import GaugeCollector
from warmline_proxy.metrics import ProxyMetrics


class MetricsRoutes:
    """The handler of GET /metrics; who may call it was checked before."""

    def __init__(self, metrics: ProxyMetrics, gauges: GaugeCollector) -> None:
        self._metrics, self._gauges = metrics, gauges

    async def get_metrics(self, request: web.Request) -> web.Response:
        """As text, or as OpenMetrics where that is asked for."""
        await self._gauges.refresh()
        body, content_type = self._metrics.render_exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
