"""Routes of Anthropic's API besides messages: token counts and models.  Event loop thread."""

from dataclasses import dataclass

from aiohttp import web

from warmline_proxy.api.anthropic.adapter import MessagesApi, build_model_info, build_model_list
from warmline_proxy.api.openai import MODELS_PATH
from warmline_proxy.config import ProxyConfig
from warmline_proxy.http.bodies import json_response, read_body
from warmline_proxy.pipeline.rendering import RemoteRenderer
from warmline_proxy.routes.middlewares import CLIENT, trim_path
from warmline_proxy.upstream.backend_state import BackendState

VERSION_HEADER = "anthropic-version"  # sent by all clients of the API


@dataclass(eq=False)
class AnthropicRoutes:
    """Handlers of Anthropic's paths; they take no place in the queue and store nothing."""

    api: MessagesApi
    config: ProxyConfig
    renderer: RemoteRenderer
    backend_state: BackendState

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a request's prompt.  Raises ClientError and UpstreamError."""
        body = await read_body(request, self.config.receive_timeout_s)
        tokens = await self.renderer.count_tokens(
            self.api.read_count_call(body, request.headers), request[CLIENT].tenant
        )
        return json_response({"input_tokens": tokens})

    async def get_models(self, request: web.Request) -> web.Response:
        """List of the served model, or its entry under the path's name.  Raises UpstreamError."""
        status = await self.backend_state.status()
        name = trim_path(request).removeprefix(MODELS_PATH).strip("/")
        return json_response(build_model_info(status, name) if name else build_model_list(status))


def is_anthropic_request(request: web.Request) -> bool:
    """True for clients of Anthropic's API, whose models path is OpenAI's too."""
    return VERSION_HEADER in request.headers
