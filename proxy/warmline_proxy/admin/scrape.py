"""What was counted, for Prometheus and whoever reads its formats."""

from aiohttp import web

from warmline_proxy.admin.metrics import Gauges
from warmline_proxy.metrics import Metrics


class Scraping:
    """The handler of GET /metrics; who may call it was checked before."""

    def __init__(self, metrics: Metrics, gauges: Gauges) -> None:
        self._metrics, self._gauges = metrics, gauges

    async def metrics(self, request: web.Request) -> web.Response:
        """As text, or as OpenMetrics where that is asked for."""
        await self._gauges.refresh()
        body, content_type = self._metrics.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
