"""Routes of the client APIs: generations, token counts, models, cancellation.  Event loop thread."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from warmline_common.process.redaction import quote_text
from warmline_proxy.api import openai
from warmline_proxy.api.anthropic import adapter as anthropic
from warmline_proxy.api.base import Api, ApiCall
from warmline_proxy.api.registry import MESSAGES, RESPONSES, RESPONSES_PATH
from warmline_proxy.auth.principals import Client
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.request.admission import identify_caller
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.routes.middlewares import CLIENT, RouteHandler, trim_path
from warmline_proxy.upstream.backend_state import BackendState

CANCEL_PATH = "/v1/requests/"
VERSION_HEADER = "anthropic-version"  # sent by all clients of Anthropic's API, whose models path is OpenAI's too
RESPONSE_ID_PREFIX = "resp_"
_ID_PREFIX = re.compile(rf"\A(chatcmpl-|cmpl-|msg_|{RESPONSE_ID_PREFIX})")  # before the request id in a response id


@dataclass(eq=False)
class ClientRoutes:
    """Handlers, which raise ClientError and UpstreamError.  Only generations take a place in the queue."""

    body_reader: BodyReader
    pipeline: Pipeline
    renderer: RemoteRenderer
    backend_state: BackendState
    registry: RequestRegistry
    completion: Completion

    def build_generation_handler(self, api: Api) -> RouteHandler:
        async def generate(request: web.Request) -> web.StreamResponse:
            return await self.pipeline.handle(request, api, request[CLIENT])

        return generate

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a Messages prompt."""
        return json_response({"input_tokens": await self._count_tokens(request, MESSAGES.read_count_call)})

    async def get_models(self, request: web.Request) -> web.Response:
        """List of the served model, or its entry under the path's name: slashes are part of it, any name is served."""
        name = trim_path(request).removeprefix(openai.MODELS_PATH).strip("/")
        is_anthropic = VERSION_HEADER in request.headers
        build_reply = anthropic.build_models_reply if is_anthropic else openai.build_models_reply
        return json_response(build_reply(name, await self.backend_state.status()))

    async def cancel_request(self, request: web.Request) -> web.Response:
        """Cancel a request by its own id or its response's id.  Other clients' requests are 404."""
        name = trim_path(request).removeprefix(CANCEL_PATH)
        found = await self._cancel(request[CLIENT], name, _ID_PREFIX.sub("", name))
        if found is None:
            raise bad_request(f'No request "{name[:80]}" is on its way.', status=404, code="unknown_request")
        return json_response({"id": found.log.id, "object": "request", "cancelled": True})

    async def handle_response(self, http_request: web.Request) -> web.Response:
        """Handle a path below /v1/responses/.  Responses are not stored, so only those in progress can be named."""
        path, client = trim_path(http_request).removeprefix(f"{RESPONSES_PATH}/"), http_request[CLIENT]
        if (http_request.method, path) == ("POST", "input_tokens"):
            tokens = await self._count_tokens(http_request, RESPONSES.read_call)
            return json_response({"object": "response.input_tokens", "input_tokens": tokens})
        if (http_request.method, path) == ("POST", "compact"):
            raise bad_request("Conversations are not compacted here.", status=404, code="not_found")
        name, _, rest = path.partition("/")
        is_deletion = (http_request.method, rest) == ("DELETE", "")
        is_cancellation = is_deletion or (http_request.method, rest) == ("POST", "cancel")
        request = await self._cancel(client, name.removeprefix(RESPONSE_ID_PREFIX)) if is_cancellation else None
        if request is None:
            message = (
                f"Response {quote_text(name[:80])} is neither on its way nor stored: no responses are stored here."
            )
            raise bad_request(message, status=404, code="not_found")
        deletion = {"id": name, "object": "response", "deleted": True}
        return json_response(deletion if is_deletion else _build_cancelled_response(request))

    async def _count_tokens(
        self, request: web.Request, read_call: Callable[[bytes, Mapping[str, str]], ApiCall]
    ) -> int:
        client = request[CLIENT]
        body = await self.body_reader.read(request, identify_caller(client, request.headers, request.remote))
        return await self.renderer.count_tokens(read_call(body, request.headers), client.tenant)

    async def _cancel(self, client: Client, *ids: str) -> Request | None:
        """Cancel the client's request of the first known id; None without one in progress.

        Returns when the engine has released it.
        """
        request = next(filter(None, (self.registry.find(each, client) for each in ids)), None)
        if request is None or request.released.is_set():
            return None
        await self.completion.cancel(request)
        return request


def _build_cancelled_response(request: Request) -> dict[str, object]:
    """Response object of a cancelled request, without output."""
    return {
        "id": f"{RESPONSE_ID_PREFIX}{request.log.id}",
        "object": "response",
        "created_at": int(request.log.arrived_at),
        "status": "cancelled",
        "model": request.log.client_model or request.model,
        "output": [],
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
        "error": None,
    }
