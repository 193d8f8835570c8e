"""What OpenAI's clients ask of responses besides making them.  Nothing is stored, so most of it is not to be had."""

from typing import Any

from aiohttp import web

from warmline_common.process.redaction import quoted
from warmline_proxy.api.responses.adapter import Responses
from warmline_proxy.auth.principals import Client
from warmline_proxy.config import Config
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.bodies import json_answer, read_body
from warmline_proxy.pipeline.completion import Ending
from warmline_proxy.pipeline.rendering import Renderer
from warmline_proxy.request.registry import Lives
from warmline_proxy.request.request import Life

ID_PREFIX = "resp_"


class ResponsePaths:
    """POST input_tokens; DELETE {id} and POST {id}/cancel of a response that is on its way.  Event loop thread."""

    def __init__(self, api: Responses, config: Config, renderer: Renderer, lives: Lives, ending: Ending) -> None:
        self._api, self._config, self._renderer, self._lives, self._ending = api, config, renderer, lives, ending

    async def answer(self, request: web.Request, path: str, client: Client) -> web.Response:
        """`path`: what follows /v1/responses/.  Raises ClientError and UpstreamError."""
        name, _, rest = path.partition("/")
        if (request.method, path) == ("POST", "input_tokens"):
            return await self._count(request, client)
        if (request.method, path) == ("POST", "compact"):
            raise bad_request("Conversations are not compacted here.", status=404, code="not_found")
        if (request.method, rest) == ("POST", "cancel"):
            life = await self._cancel(name, client)
            return json_answer(_cancelled(life))
        if (request.method, rest) == ("DELETE", ""):
            await self._cancel(name, client)
            return json_answer({"id": name, "object": "response", "deleted": True})
        raise _not_stored(name)

    async def _count(self, request: web.Request, client: Client) -> web.Response:
        body = await read_body(request, self._config.receive_timeout_s)
        tokens = await self._renderer.count(self._api.read(body, request.headers), client.tenant)
        return json_answer({"object": "response.input_tokens", "input_tokens": tokens})

    async def _cancel(self, name: str, client: Client) -> Life:
        """Returns when the engine has let go."""
        life = self._lives.find(name.removeprefix(ID_PREFIX), client)
        if life is None or life.let_go.is_set():
            raise _not_stored(name)
        await self._ending.cancel(life)
        return life


def _not_stored(name: str) -> ClientError:
    message = f"Response {quoted(name[:80])} is neither on its way nor stored: no responses are stored here."
    return bad_request(message, status=404, code="not_found")


def _cancelled(life: Life) -> dict[str, Any]:
    """As much of a response as is known of one that nobody gets."""
    return {
        "id": f"{ID_PREFIX}{life.trace.id}",
        "object": "response",
        "created_at": int(life.trace.at),
        "status": "cancelled",
        "model": life.trace.client_model or life.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "store": False,
        "error": None,
    }
