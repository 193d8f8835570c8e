"""Routes of the client APIs: generations, token counts, models, cancellation.  Event loop thread."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from warmline_common.process.redaction import quote_text
from warmline_proxy.admin.request_status import RequestStateRoutes
from warmline_proxy.api import openai
from warmline_proxy.api.anthropic import adapter as anthropic
from warmline_proxy.api.base import Api, ApiCall
from warmline_proxy.api.models import ServedModelInfo, make_model_info
from warmline_proxy.api.registry import MESSAGES
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.errors import bad_request, service_unavailable
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.models.admission import identify_caller
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.request.deadlines import RequestTimeouts
from warmline_proxy.routes.middlewares import CLIENT, RouteHandler, trim_path

REQUESTS_PATH = "/v1/requests/"
VERSION_HEADER = "anthropic-version"  # sent by all clients of Anthropic's API, whose models path is OpenAI's too


@dataclass(eq=False)
class ClientRoutes:
    """Handlers, which raise ClientError and UpstreamError.  Only generations take a place in the queue."""

    body_reader: BodyReader
    pipeline: Pipeline
    renderer: RemoteRenderer
    models: ServedModels
    completion: Completion
    states: RequestStateRoutes

    def build_generation_handler(self, api: Api) -> RouteHandler:
        async def generate(request: web.Request) -> web.StreamResponse:
            return await self.pipeline.handle(request, api, request[CLIENT])

        return generate

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a Messages prompt."""
        return json_response({"input_tokens": await self._count_tokens(request, MESSAGES.read_count_call)})

    async def get_models(self, request: web.Request) -> web.Response:
        """List of the served models, or the entry of the path's name: slashes are part of it.

        One model has an entry under any name, since it answers to any; of several, configured names alone have one.
        """
        name = trim_path(request).removeprefix(openai.MODELS_PATH).strip("/")
        if name and not self.models.names_model(name):
            names = ", ".join(backend.name for backend in self.models.backends)
            message = f"No model {quote_text(name[:80])} is configured; there are {names}."
            raise bad_request(message, status=404, code="model_not_found", param="model")
        is_anthropic = VERSION_HEADER in request.headers
        build_reply = anthropic.build_models_reply if is_anthropic else openai.build_models_reply
        backends = [self.models.choose(name)] if name else self.models.backends
        return json_response(build_reply(name, [await self._describe_model(backend) for backend in backends]))

    async def _describe_model(self, backend: Backend) -> ServedModelInfo:
        """Facts of a model; of several, as far as they were known when it was loaded last."""
        if not self.models.has_keeper:
            return make_model_info(await backend.state.status())
        info = make_model_info(backend.state.known_status)
        return replace(info, name=backend.name, is_loaded=backend.gate.is_open)

    async def get_request(self, request: web.Request) -> web.Response:
        """State of the client's own request."""
        name = trim_path(request).removeprefix(REQUESTS_PATH)
        return json_response(await self.states.find_state(name, request[CLIENT]))

    async def cancel_request(self, request: web.Request) -> web.Response:
        """Cancel a request by its own id or its response's id.  Other clients' requests are 404."""
        name = trim_path(request).removeprefix(REQUESTS_PATH)
        found = self.states.find_running(name, request[CLIENT])
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
        call = await read_call(body, request.headers)
        backend = self.models.choose(call.client_model)
        timeouts = self.pipeline.timeouts.override_by_headers(request.headers)
        async with use_model(backend, timeouts, may_swap=self.models.names_model(call.client_model)):
            return await self.renderer.count_tokens(backend, call, client.tenant)


@asynccontextmanager
async def use_model(backend: Backend, timeouts: RequestTimeouts, *, may_swap: bool) -> AsyncIterator[None]:
    """Scope that uses a model, entered once that is loaded, without a place in the queue.

    Raises ClientError where the model can't be loaded, and 503 after the shorter one of the limits for a start and for
    the queue.
    """
    user, limit_s = object(), min(filter(None, (timeouts.connect_s, timeouts.queue_s)), default=None)
    try:
        async with asyncio.timeout(limit_s):
            await backend.gate.enter(user, may_swap=may_swap)
    except TimeoutError:
        message = f"The request waited for more than {limit_s:g} s: {backend.describe_load_wait()}.  Try again soon."
        raise service_unavailable(message, "queue_timeout") from None
    try:
        yield
    finally:
        backend.gate.leave(user)
