"""GET /health and GET /ready."""

from dataclasses import dataclass

from aiohttp import web

from warmline_proxy.errors import RETRY_AFTER_S
from warmline_proxy.http.bodies import json_response
from warmline_proxy.pipeline.save_health import SaveHealth
from warmline_proxy.request.admission import AdmissionQueue
from warmline_proxy.upstream.backend_state import BackendState
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

READY_TIMEOUT_S = 1.0


@dataclass(eq=False)
class HealthRoutes:
    """Handlers without access checks."""

    upstream: Upstream
    watchdog: Watchdog
    backend_state: BackendState
    admission: AdmissionQueue
    save_health: SaveHealth

    async def get_ready(self, _: web.Request) -> web.Response:
        """200 if a request would be served now; else 503 with the reason."""
        if self.admission.closed_reason:
            return _build_not_ready_response(self.admission.closed_reason)
        try:
            await self.watchdog.wait_until_up(READY_TIMEOUT_S)
            await self.upstream.check_ready()
            status = await self.backend_state.status()
        except TimeoutError:
            return _build_not_ready_response(self.watchdog.down_reason)
        except UpstreamError as error:
            return _build_not_ready_response(str(error))
        return json_response({"ready": True, "model": status.model})

    async def get_health(self, _: web.Request) -> web.Response:
        """200 while the proxy serves, with the state of persistence."""
        return json_response({"status": "ok", "persistence": self.save_health.state})


def _build_not_ready_response(reason: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return json_response({"ready": False, "reason": reason}, status=503, headers=headers)
