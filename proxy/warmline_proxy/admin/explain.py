"""GET /warmline/explain: why a request was no warmer; POST /warmline/texts: what stored tokens say."""

import asyncio
import logging

import msgspec
from aiohttp import web

from warmline_common.process.redaction import quoted
from warmline_common.protocol.messages import TextsReply, decode
from warmline_proxy.admin.owners import Attribution
from warmline_proxy.admin.routes import Paths
from warmline_proxy.errors import bad_request
from warmline_proxy.explain.explain import (
    LAST,
    Since,
    UnknownRequest,
    explain,
    find_with_since,
    fingerprint_of,
    with_texts,
)
from warmline_proxy.http.bodies import json_answer, read_body
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord, TextsOf
from warmline_proxy.upstream.backend_state import Knowledge
from warmline_proxy.upstream.client import Upstream, UpstreamError

log = logging.getLogger(__name__)


class Explaining:
    """Handlers.  The index is read on threads."""

    def __init__(
        self,
        index: Index,
        upstream: Upstream,
        knowledge: Knowledge,
        attribution: Attribution,
        receive_timeout_s: float,
    ) -> None:
        self._index, self._upstream, self._knowledge = index, upstream, knowledge
        self._attribution, self._receive_timeout_s = attribution, receive_timeout_s

    @property
    def paths(self) -> Paths:
        return {("GET", "/warmline/explain"): self.explain, ("POST", "/warmline/texts"): self.texts}

    async def explain(self, request: web.Request) -> web.Response:
        """Of `?request=`, an id or its beginning, or an answer's id; of the last one that is worth it without."""
        try:
            record, since = await asyncio.to_thread(self._find, request.query.get("request") or LAST)
        except UnknownRequest as error:
            raise bad_request(f"{error}.", status=404, code="unknown_request") from error
        record = await self._with_texts(record)
        known = await self._attribution.whose()
        return json_answer(await asyncio.to_thread(explain, self._index, record, since, known))

    async def texts(self, request: web.Request) -> web.Response:
        """Of tokens that are stored in a segment, or before it."""
        try:
            wanted = decode(await read_body(request, self._receive_timeout_s), TextsOf)
        except msgspec.DecodeError as error:
            raise bad_request(f"Not a question for texts: {error}") from error
        row = await asyncio.to_thread(self._index.segment, wanted.segment)
        if row is None:
            raise bad_request(f"Segment {quoted(wanted.segment)} is not stored.", status=404, code="not_stored")
        if not await self._is_served(row.root):
            message = "These tokens are another model's than the one that is served now."
            raise bad_request(message, status=409, code="other_model")
        return json_answer(TextsReply(texts=await self._upstream.texts(wanted.sequences)))

    def _find(self, asked: str) -> tuple[RequestRecord, Since | None]:
        self._index.flush()
        return find_with_since(self._index.requests(), asked)

    async def _with_texts(self, record: RequestRecord) -> RequestRecord:
        """Where they could not be asked for in time."""
        seen = record.parting
        if seen is None or seen.stored_text or seen.prompt_text:
            return record
        try:
            if await self._is_served(record.root):
                return with_texts(record, await self._upstream.texts([seen.stored, seen.prompt]))
        except UpstreamError as error:
            log.info("request %s is explained without texts: %s", record.id, error)
        return record

    async def _is_served(self, root: bytes) -> bool:
        """Whether its tokens are the served model's.  Raises UpstreamError."""
        status = await self._knowledge.status()
        return await asyncio.to_thread(fingerprint_of, self._index, root) == status.fingerprint
