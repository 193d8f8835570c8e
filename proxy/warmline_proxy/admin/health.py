"""Whether requests would be served."""

from aiohttp import web

from warmline_proxy.errors import RETRY_AFTER_S
from warmline_proxy.http.bodies import json_answer
from warmline_proxy.pipeline.save_health import Persistence
from warmline_proxy.request.admission import Admission
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

LOOK_TIMEOUT_S = 1.0


class Health:
    """Handlers that everybody may call."""

    def __init__(
        self,
        upstream: Upstream,
        watchdog: Watchdog,
        knowledge: Knowledge,
        admission: Admission,
        persistence: Persistence,
    ) -> None:
        self._upstream = upstream
        self._watchdog = watchdog
        self._knowledge = knowledge
        self._admission = admission
        self._persistence = persistence

    async def ready(self) -> web.Response:
        """200 where a request would be served now; else 503 and why not."""
        if self._admission.closed:
            return _not_ready(self._admission.closed)
        try:
            await self._watchdog.up(LOOK_TIMEOUT_S)
            await self._upstream.ready()
            status = await self._knowledge.status()
        except TimeoutError:
            return _not_ready(self._watchdog.why_down)
        except UpstreamError as error:
            return _not_ready(str(error))
        return json_answer({"ready": True, "model": status.model})

    def health(self) -> web.Response:
        """200: we serve, also where nothing can be saved, and say so."""
        return json_answer({"status": "ok", "persistence": self._persistence.state})


def _not_ready(reason: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return json_answer({"ready": False, "reason": reason}, status=503, headers=headers)
