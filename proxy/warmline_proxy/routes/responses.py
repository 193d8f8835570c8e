"""Routes below /v1/responses.  Responses are not stored, so only those in progress can be named."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from warmline_common.process.redaction import quote_text
from warmline_proxy.api.registry import RESPONSES_PATH
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.auth.principals import Client
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.bodies import json_response, read_body
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.routes.middlewares import CLIENT, trim_path

RESPONSE_ID_PREFIX = "resp_"


@dataclass(eq=False)
class ResponsesRoutes:
    """POST input_tokens; DELETE {id} and POST {id}/cancel of a response in progress.  Event loop thread."""

    api: ResponsesApi
    config: ProxyConfig
    renderer: RemoteRenderer
    registry: RequestRegistry
    completion: Completion

    async def handle(self, http_request: web.Request) -> web.Response:
        """Handle a path below /v1/responses/.  Raises ClientError and UpstreamError."""
        path, client = trim_path(http_request).removeprefix(f"{RESPONSES_PATH}/"), http_request[CLIENT]
        name, _, rest = path.partition("/")
        if (http_request.method, path) == ("POST", "input_tokens"):
            return await self._count_tokens(http_request, client)
        if (http_request.method, path) == ("POST", "compact"):
            raise bad_request("Conversations are not compacted here.", status=404, code="not_found")
        if (http_request.method, rest) == ("POST", "cancel"):
            request = await self._cancel_response(name, client)
            return json_response(_render_cancelled(request))
        if (http_request.method, rest) == ("DELETE", ""):
            await self._cancel_response(name, client)
            return json_response({"id": name, "object": "response", "deleted": True})
        raise _response_not_found(name)

    async def _count_tokens(self, request: web.Request, client: Client) -> web.Response:
        body = await read_body(request, self.config.receive_timeout_s)
        tokens = await self.renderer.count_tokens(self.api.read_call(body, request.headers), client.tenant)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def _cancel_response(self, name: str, client: Client) -> Request:
        """Cancel a response and wait until the engine has released it.  Raises ClientError 404."""
        request = self.registry.find(name.removeprefix(RESPONSE_ID_PREFIX), client)
        if request is None or request.released.is_set():
            raise _response_not_found(name)
        await self.completion.cancel(request)
        return request


def _response_not_found(name: str) -> ClientError:
    message = f"Response {quote_text(name[:80])} is neither on its way nor stored: no responses are stored here."
    return bad_request(message, status=404, code="not_found")


def _render_cancelled(request: Request) -> dict[str, Any]:
    """Response object of a cancelled request, without output."""
    return {
        "id": f"{RESPONSE_ID_PREFIX}{request.log.id}",
        "object": "response",
        "created_at": int(request.log.arrived_at),
        "status": "cancelled",
        "model": request.log.client_model or request.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
        "error": None,
    }
