"""What Anthropic's clients ask besides messages: how long a prompt is, and what is served."""

from dataclasses import replace

from aiohttp import web

from warmline_proxy.apis.api import Call
from warmline_proxy.apis.messages import Messages
from warmline_proxy.apis.messages_errors import overflow
from warmline_proxy.apis.messages_models import model_info, model_list
from warmline_proxy.bodies import read_body
from warmline_proxy.config import Config
from warmline_proxy.errors import bad_request, from_upstream
from warmline_proxy.hygiene.stabilize import stabilized
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.trace import new_request_id
from warmline_proxy.upstream import Refused, Upstream
from warmline_wire.keys import TOKEN_BYTES
from warmline_wire.messages import PromptRequest

MODELS_PATH = "/v1/models"
VERSION_HEADER = "anthropic-version"  # by which its clients are known


class Anthropic:
    """Takes no place in the queue and leaves nothing behind.  Event loop thread."""

    def __init__(self, api: Messages, config: Config, upstream: Upstream, knowledge: Knowledge) -> None:
        self._api, self._config, self._upstream, self._knowledge = api, config, upstream, knowledge

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Raises ClientError and UpstreamError."""
        if request.method != "POST":
            raise bad_request(f"{request.method} is not allowed here; send a POST.", status=405)
        body = await read_body(request, self._config.receive_timeout_s)
        tokens = await self._count(self._api.read_to_count(body, request.headers))
        return web.json_response({"input_tokens": tokens})

    async def _count(self, call: Call) -> int:
        """Of the very prompt that the same body would be answered from; one that is too long has a length, too."""
        if self._config.stabilize:
            call = replace(call, fields=stabilized(call.fields, self._config.stabilize_rules)[0])
        body = call.prompt_body((await self._knowledge.status()).model)
        asked = PromptRequest(request_id=new_request_id(), endpoint=self._api.endpoint, body=body)
        try:
            return len((await self._upstream.prompt(asked)).tokens) // TOKEN_BYTES
        except Refused as error:
            if numbers := overflow(from_upstream(error)):
                return numbers[0]
            raise

    async def models(self, path: str) -> web.Response:
        """`path`: of all models, or of one; any name is served.  Raises UpstreamError."""
        status = await self._knowledge.status()
        name = path.removeprefix(MODELS_PATH).strip("/")
        return web.json_response(model_info(status, name) if name else model_list(status))


def asks_for_models(request: web.Request, path: str) -> bool:
    """Whether Anthropic's list is meant, where OpenAI's has the same path."""
    is_there = path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    return is_there and request.method in ("GET", "HEAD") and VERSION_HEADER in request.headers
