"""Routes of the client APIs: generations, token counts, models, cancellation.  Event loop thread."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from warmline_proxy.api import openai
from warmline_proxy.api.anthropic import adapter as anthropic
from warmline_proxy.api.base import Api, ApiCall
from warmline_proxy.api.registry import MESSAGES
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.responses.history import RESPONSE_PREFIX
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.request.admission import identify_caller
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.routes.middlewares import CLIENT, RouteHandler, trim_path
from warmline_proxy.upstream.backend_state import BackendState

CANCEL_PATH = "/v1/requests/"
VERSION_HEADER = "anthropic-version"  # sent by all clients of Anthropic's API, whose models path is OpenAI's too
_ID_PREFIX = re.compile(rf"\A(chatcmpl-|cmpl-|msg_|{RESPONSE_PREFIX})")  # before the request id in a response id


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
        ids = (name, _ID_PREFIX.sub("", name))
        found = next(filter(None, (self.registry.find(each, request[CLIENT]) for each in ids)), None)
        if found is None or found.released.is_set():
            raise bad_request(f'No request "{name[:80]}" is on its way.', status=404, code="unknown_request")
        await self.completion.cancel(found)
        return json_response({"id": found.log.id, "object": "request", "cancelled": True})

    async def count_response_tokens(self, request: web.Request, api: ResponsesApi) -> int:
        """Count the tokens of a prompt of OpenAI's Responses."""
        return await self._count_tokens(request, api.read_call)

    async def _count_tokens(
        self, request: web.Request, read_call: Callable[[bytes, Mapping[str, str]], Awaitable[ApiCall]]
    ) -> int:
        client = request[CLIENT]
        body = await self.body_reader.read(request, identify_caller(client, request.headers, request.remote))
        return await self.renderer.count_tokens(await read_call(body, request.headers), client.tenant)
