"""Stored responses of OpenAI's Responses, each of one key alone.

A response's last event is sent once the index has written it, so that it survives the kill of all processes.  Event
loop thread, like the lookups of a request: each reads a few entries of the index.  What is read counts as the body of
the request that reads it, and is decompressed in small pieces.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from warmline_common.protocol.json_structure import JsonStructure
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.responses.history import AnsweredRequest, Item, StoredItem, StoredResponse, parse_response
from warmline_proxy.auth.principals import Client
from warmline_proxy.http.bodies import (
    BODY_BYTES_MAX,
    BodyReader,
    StoredText,
    check_structure,
    estimate_parsed_bytes,
    measure_structure,
)
from warmline_proxy.http.body_budget import RequestBody
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.responses import FoundResponse, ResponseEntry, join_keys
from warmline_proxy.index.tree import digest_prefix
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.store.rows import ResponseRow

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 2.0  # of an answer, for its response to be written; a disk may hang, or a compaction take longer


@dataclass(eq=False)
class ClientHistory:
    """ResponseHistory of one client, for one request.  Lookups raise IndexStoreError, too."""

    store: "ResponseStore"
    client: Client
    body: RequestBody  # of the request
    _read_ids: set[str] = field(default_factory=set, init=False)  # of responses whose items were searched

    @property
    def is_off(self) -> bool:
        return self.store.index.response_limits.is_off

    @property
    def response_bytes_max(self) -> int:
        return self.store.response_bytes_max

    async def find_response(self, answer_id: str) -> StoredResponse | None:
        if not (loaded := await self._load(self._find(self.store.index.find_response, answer_id))):
            return None
        response, text = loaded
        self._include(text.structure)
        self._read_ids.add(answer_id)
        return response

    async def read_response(self, answer_id: str) -> StoredResponse | None:
        """As `find_response`, for a request that only reads it: no bound but that of the memory applies."""
        loaded = await self._load(self._find(self.store.index.find_response, answer_id))
        return loaded[0] if loaded else None

    async def find_items(self, item_id: str, wanted_ids: Collection[str]) -> Mapping[str, StoredItem]:
        """Search the newest response that has the item, unless this request has searched it before."""
        found = self._find(self.store.index.find_response_holder, item_id)
        if found is None or found.row.id in self._read_ids:
            return {}
        self._read_ids.add(found.row.id)
        return await self._load_items(found, wanted_ids)

    def find_running(self, answer_id: str) -> bool | None:
        request = self.store.find_running(self.client, answer_id)
        return None if request is None or request.call is None else list_stored_input(request) is not None

    def count(self, item: StoredItem) -> None:
        structure = measure_structure(item.text)
        self.body.count(item.size + estimate_parsed_bytes(structure))
        self._include(structure)

    def _include(self, structure: JsonStructure) -> None:
        self.body.structure.include(structure)
        check_structure(self.body.structure)

    def _find(self, find: Callable[[str, str], FoundResponse | None], answer_id: str) -> FoundResponse | None:
        return None if self.is_off else find(self.client.key_tenant, answer_id)

    async def _load_items(self, found: FoundResponse, wanted_ids: Collection[str]) -> dict[str, StoredItem]:
        if not (loaded := await self._load(found)):
            return {}
        response, text = loaded
        items = {item.id: item.copy() for item in response.items if item.id in wanted_ids}
        self.body.discount(text.counted_bytes)
        self.body.count(sum(item.size for item in items.values()))
        return items

    async def _load(self, found: FoundResponse | None) -> tuple[StoredResponse, StoredText] | None:
        """Read and decode a response; None where it is damaged."""
        if found is None or (stored := found.read_body()) is None:
            return None
        try:
            text = await self.store.body_reader.read_stored(self.body, stored.data, stored.coding)
            return parse_response(text.data), text
        except ValueError as error:  # msgspec's errors are such
            log.warning("a stored response is damaged, and is not used: %s", error)
            return None


@dataclass(frozen=True)
class ResponseStore:
    """Owner of the stored responses: stores them by request, and deletes them."""

    index: Index
    registry: RequestRegistry
    body_reader: BodyReader

    @property
    def response_bytes_max(self) -> int:
        """Size of the largest response that is stored, as JSON; 0 where none are."""
        limits = self.index.response_limits
        return 0 if limits.is_off else min(BODY_BYTES_MAX, limits.bytes_max)

    def open_history(self, client: Client, body: RequestBody) -> ClientHistory:
        """History for one request, of which all that it keeps counts as its body's."""
        return ClientHistory(self, client, body)

    def find_running(self, client: Client, answer_id: str) -> Request | None:
        """The client's request of that response; None once its answer has ended."""
        request = self.registry.find(answer_id, client)
        if request is None or request.log.endpoint != ResponsesApi.name:
            return None
        return None if request.response.is_closed or request.released.is_set() else request

    def store(self, request: Request, answered: AnsweredRequest) -> bool:
        """Store the response of a request; False where it is not.

        It is not where it is too large, its conversation was purged, or its client has deleted it.
        """
        if request.purged or request.is_response_deleted or request.prompt is None:
            return False
        body = answered.encode()
        owner, tokens, turn_end = request.client.key_tenant, request.prompt.tokens, request.prompt.turn_end
        turn_end = turn_end or len(tokens) // TOKEN_BYTES
        row = ResponseRow(
            id=request.log.id,
            owner=owner,
            root=request.root,
            fingerprint=request.prompt.fingerprint,
            model=request.model,
            session=request.log.session,
            items=join_keys(owner, request.log.id, answered.item_ids),
            turn_end=turn_end,
            turn_digest=digest_prefix(tokens, turn_end),
            tokens=b"" if request.log.session else tokens,
            at=time.time(),
        )
        if len(body) > BODY_BYTES_MAX or not self.index.response_limits.has_room(row, len(body)):
            log.warning("request %s: its response has %d bytes, too many to be stored", request.log.id, len(body))
            return False
        try:
            request.response_write = asyncio.wrap_future(self.index.record_response(ResponseEntry(row, body)))
        except IndexStoreError as error:  # the proxy is being stopped
            log.warning("request %s: its response was not stored: %s", request.log.id, error)
            return False
        request.stored_response = owner, request.log.id
        return True

    async def wait_until_written(self, request: Request) -> None:
        """Wait, once, until the index has written the response of a request, if any, or could not."""
        write, request.response_write = request.response_write, None
        if write:
            await asyncio.wait({write}, timeout=WRITE_TIMEOUT_S)

    def record_session(self, request: Request) -> None:
        """Add the conversation of a saved request to its response, so that they are purged together."""
        if request.stored_response and request.log.session:
            self.index.record_response_session(*request.stored_response, request.log.session)

    async def delete(self, client: Client, answer_id: str) -> bool:
        """Delete the client's response of that id; False where none is stored.  Raises IndexStoreError."""
        return await asyncio.shield(asyncio.to_thread(self.index.delete_response, client.key_tenant, answer_id))


def list_stored_input(request: Request) -> list[Item] | None:
    """Items of a running request's input; None where its response will not be stored, or it was not read yet."""
    return request.call.api_options.stored_input if request.call else None
