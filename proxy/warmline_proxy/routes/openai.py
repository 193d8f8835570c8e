"""Routes of OpenAI's API: generations of all APIs, models, cancellation.  Event loop thread."""

from dataclasses import dataclass

from aiohttp import web

from warmline_proxy.admin.routes import RouteHandler
from warmline_proxy.api.base import Api
from warmline_proxy.api.openai import build_models_reply
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_response
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.routes.middlewares import CLIENT, trim_path
from warmline_proxy.upstream.backend_state import BackendState

RESPONSE_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
CANCEL_PATH = "/v1/requests/"


@dataclass(eq=False)
class OpenAIRoutes:
    """Handlers of OpenAI's paths."""

    pipeline: Pipeline
    backend_state: BackendState
    registry: RequestRegistry
    completion: Completion

    def build_generation_handler(self, api: Api) -> RouteHandler:
        """Handler of one API's path."""

        async def generate(request: web.Request) -> web.StreamResponse:
            return await self.pipeline.handle(request, api, request[CLIENT])

        return generate

    async def get_models(self, request: web.Request) -> web.StreamResponse:
        return json_response(build_models_reply(trim_path(request), await self.backend_state.status()))

    async def cancel_request(self, request: web.Request) -> web.StreamResponse:
        """Cancel a request by its own id or its response's id; answer when the engine has released it.

        Other clients' requests are 404.
        """
        name, client = trim_path(request).removeprefix(CANCEL_PATH), request[CLIENT]
        found = self.registry.find(name, client) or self.registry.find(_strip_id_prefix(name), client)
        if found is None or found.released.is_set():
            raise bad_request(f'No request "{name[:80]}" is on its way.', status=404, code="unknown_request")
        await self.completion.cancel(found)
        return json_response({"id": found.log.id, "object": "request", "cancelled": True})


def _strip_id_prefix(name: str) -> str:
    """Request id within a response id."""
    for prefix in RESPONSE_ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name
