"""Routes of OpenAI's Responses: generation, and stored responses by their ids.  Event loop thread."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from warmline_common.process.redaction import quote_text
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.responses.history import (
    PAGE_ITEMS_DEFAULT,
    PAGE_ITEMS_MAX,
    RESPONSE_PREFIX,
    AnsweredRequest,
    StoredResponse,
    build_item_page,
    normalize_input,
    still_running,
)
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http.bodies import json_response
from warmline_proxy.models.admission import identify_caller
from warmline_proxy.pipeline.completion import Completion
from warmline_proxy.pipeline.pipeline import Pipeline
from warmline_proxy.pipeline.response_store import ClientHistory, ResponseStore, list_stored_input
from warmline_proxy.request.request import Request
from warmline_proxy.routes.middlewares import CLIENT

TokenCounter = Callable[[web.Request, ResponsesApi], Awaitable[int]]


@dataclass(eq=False)
class ResponseRoutes:
    """Handlers, which raise ClientError, UpstreamError and IndexStoreError.  Another key's response is unknown."""

    pipeline: Pipeline
    completion: Completion
    store: ResponseStore
    count_tokens: TokenCounter

    async def create(self, http_request: web.Request) -> web.StreamResponse:
        return await self.pipeline.handle(http_request, self._open_api(http_request), http_request[CLIENT])

    async def count_input_tokens(self, http_request: web.Request) -> web.Response:
        """Count the tokens of a prompt, without an answer."""
        tokens = await self.count_tokens(http_request, self._open_api(http_request))
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def compact(self, http_request: web.Request) -> web.Response:
        raise bad_request("Conversations are not compacted here.", status=404, code="not_found")

    async def get_response(self, http_request: web.Request) -> web.Response:
        """The stored response, or the present state of one on its way."""
        if http_request.query.get("stream", "").lower() not in ("", "false", "0"):
            message = "'stream' can't be true here: a stored response is sent whole.  Leave 'stream' out."
            raise bad_request(message, param="stream")
        if (request := self._find_running(http_request)) is not None:
            return json_response(_build_unfinished_response(request, "in_progress"))
        return json_response((await self._read_stored(http_request)).response)

    async def list_input_items(self, http_request: web.Request) -> web.Response:
        """A page of the input's items, those of previous responses included, newest first unless `order` is "asc"."""
        query = http_request.query
        limit, order = query.get("limit", str(PAGE_ITEMS_DEFAULT)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_ITEMS_MAX):
            raise bad_request(f"'limit' must be a number from 1 to {PAGE_ITEMS_MAX}.", param="limit")
        if order not in ("asc", "desc"):
            raise bad_request("'order' must be asc or desc.", param="order")
        if (request := self._find_running(http_request)) is not None:
            raise still_running(http_request.match_info["id"], list_stored_input(request) is not None)
        items = (await self._read_stored(http_request)).input
        return json_response(build_item_page(items, int(limit), order == "asc", query.get("after", "")))

    async def delete_response(self, http_request: web.Request) -> web.Response:
        """Delete a stored response; one on its way is cancelled, and not stored."""
        client, answer_id = http_request[CLIENT], _read_answer_id(http_request)
        if (request := self._find_running(http_request)) is not None:
            request.is_response_deleted = True
            await self.completion.cancel(request)
        if not await self.store.delete(client, answer_id) and request is None:
            raise _not_found(http_request)
        return json_response({"id": http_request.match_info["id"], "object": "response", "deleted": True})

    async def cancel_response(self, http_request: web.Request) -> web.Response:
        """Cancel a response on its way; one that has ended is returned as it is."""
        if (request := self._find_running(http_request)) is None:
            return json_response((await self._read_stored(http_request)).response)
        await self.completion.cancel(request)
        if request.stored_response:  # it ended just before
            return json_response((await self._read_stored(http_request)).response)
        response = _build_unfinished_response(request, "cancelled")
        if response["store"]:
            items = normalize_input(list_stored_input(request) or [], request.log.id)
            response["store"] = self.store.store(request, AnsweredRequest(response, items))
            await self.store.wait_until_written(request)
        return json_response(response)

    def _open_api(self, http_request: web.Request) -> ResponsesApi:
        return ResponsesApi(self._open_history(http_request))

    def _open_history(self, http_request: web.Request) -> ClientHistory:
        client = http_request[CLIENT]
        caller = identify_caller(client, http_request.headers, http_request.remote)
        return self.store.open_history(client, self.store.body_reader.open_body(http_request, caller))

    def _find_running(self, http_request: web.Request) -> Request | None:
        return self.store.find_running(http_request[CLIENT], _read_answer_id(http_request))

    async def _read_stored(self, http_request: web.Request) -> StoredResponse:
        history = self._open_history(http_request)
        history.body.take()  # empty, and complete: it makes no way for others
        stored = await history.read_response(_read_answer_id(http_request))
        if stored is None:
            raise _not_found(http_request)
        return stored


def _read_answer_id(http_request: web.Request) -> str:
    return http_request.match_info["id"].removeprefix(RESPONSE_PREFIX)


def _not_found(http_request: web.Request) -> ClientError:
    name = quote_text(http_request.match_info["id"][:80])
    message = (
        f"Response with id {name} not found: it is not on its way, and it is not stored (answered with 'store: false', "
        "deleted, or no longer stored)."
    )
    return bad_request(message, status=404, code="not_found")


def _build_unfinished_response(request: Request, status: str) -> dict[str, Any]:
    """Response object without output, of a request on its way or cancelled."""
    return {
        "id": f"{RESPONSE_PREFIX}{request.log.id}",
        "object": "response",
        "created_at": int(request.log.arrived_at),
        "status": status,
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
        "store": list_stored_input(request) is not None,
        "error": None,
    }
