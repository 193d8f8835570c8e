"""Stored responses of OpenAI's Responses, each of one key alone.

A response's last event is sent once the index has written it, so that it survives the kill of all processes.  Event
loop thread, like the lookups of a request: each reads a few entries of the index.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

import msgspec

from warmline_common.protocol.messages import decode, encode
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.api.responses.history import StoredResponse
from warmline_proxy.auth.principals import Client
from warmline_proxy.http.bodies import BODY_BYTES_MAX
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.responses import ResponseEntry, join_keys
from warmline_proxy.index.tree import digest_prefix
from warmline_proxy.request.request import Request
from warmline_proxy.store.rows import ResponseRow

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 2.0  # of an answer, for its response to be written; a disk may hang, or a compaction take longer


@dataclass(frozen=True)
class ClientHistory:
    """ResponseHistory of one client.  Lookups raise IndexStoreError."""

    index: Index
    owner: str

    @property
    def is_off(self) -> bool:
        return self.index.response_limits.is_off

    def find_response(self, answer_id: str) -> StoredResponse | None:
        return _decode(None if self.is_off else self.index.find_response(self.owner, answer_id))

    def find_holder(self, item_id: str) -> StoredResponse | None:
        return _decode(None if self.is_off else self.index.find_response_holder(self.owner, item_id))


def _decode(entry: ResponseEntry | None) -> StoredResponse | None:
    try:
        return decode(entry.body, StoredResponse) if entry else None
    except msgspec.DecodeError as error:
        log.warning("a stored response can't be read, and is not used: %s", error)
        return None


@dataclass(frozen=True)
class ResponseStore:
    """Owner of the stored responses: stores them by request, and deletes them."""

    index: Index

    def open_history(self, client: Client) -> ClientHistory:
        return ClientHistory(self.index, client.key_tenant)

    def store(self, request: Request, response: StoredResponse) -> None:
        """Store the response of a request, unless its conversation was purged, or its client has deleted it."""
        if request.purged or request.is_response_deleted or request.prompt is None:
            return
        body = encode(response)
        if len(body) > BODY_BYTES_MAX:
            log.warning("request %s: its response has %d bytes, too many to be stored", request.log.id, len(body))
            return
        owner, tokens, turn_end = request.client.key_tenant, request.prompt.tokens, request.prompt.turn_end
        turn_end = turn_end or len(tokens) // TOKEN_BYTES
        row = ResponseRow(
            id=request.log.id,
            owner=owner,
            root=request.root,
            fingerprint=request.prompt.fingerprint,
            model=request.model,
            session=request.log.session,
            items=join_keys(owner, request.log.id, response.item_ids),
            turn_end=turn_end,
            turn_digest=digest_prefix(tokens, turn_end),
            tokens=b"" if request.log.session else tokens,
            at=time.time(),
        )
        try:
            request.response_write = asyncio.wrap_future(self.index.record_response(ResponseEntry(row, body)))
        except IndexStoreError as error:  # the proxy is being stopped
            log.warning("request %s: its response was not stored: %s", request.log.id, error)
        else:
            request.stored_response = owner, request.log.id

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
