"""GET /warmline/explain: reason of a cache miss; POST /warmline/texts: texts of stored tokens."""

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web

from warmline_common.process.redaction import quote_text
from warmline_common.protocol.messages import DetokenizeReply
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.errors import bad_request
from warmline_proxy.explain import explain as explanations
from warmline_proxy.explain.explain import RequestNotFoundError, WarmSince, add_texts
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.index.index import Index
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.store.rows import RequestRecord, SegmentTextsRequest
from warmline_proxy.upstream.client import UpstreamError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ExplainRoutes:
    """Handlers; they read the index on threads."""

    index: Index
    models: ServedModels
    owner_resolver: OwnerResolver
    body_reader: BodyReader

    async def get_explanation(self, request: web.Request) -> web.Response:
        """Explain `?request=`: a request id, its prefix or a response id; without it, the last notable request."""
        request_id = request.query.get("request") or explanations.LAST
        try:
            record, since = await asyncio.to_thread(self._find_record, request_id)
        except RequestNotFoundError as error:
            raise bad_request(f"{error}.", status=404, code="unknown_request") from error
        record = await self._add_texts(record)
        owner_labels = await self.owner_resolver.resolve_owners()
        return json_response(await asyncio.to_thread(explanations.explain, self.index, record, since, owner_labels))

    async def get_texts(self, request: web.Request) -> web.Response:
        """Texts of token sequences that are stored in a segment or before it."""
        query = await self.body_reader.read_message(request, SegmentTextsRequest, "question for texts")
        row = await asyncio.to_thread(self.index.segment, query.segment)
        if row is None:
            raise bad_request(f"Segment {quote_text(query.segment)} is not stored.", status=404, code="not_stored")
        if (backend := await self._find_backend(row.root)) is None:
            message = "The model that these tokens are of is not loaded now, or no longer served here."
            raise bad_request(message, status=409, code="other_model")
        return json_response(DetokenizeReply(texts=await backend.upstream.detokenize(query.sequences)))

    def _find_record(self, request_id: str) -> tuple[RequestRecord, WarmSince | None]:
        self.index.flush()
        return explanations.find_record_with_since(self.index.requests(), request_id)

    async def _add_texts(self, record: RequestRecord) -> RequestRecord:
        """Add the diverging texts if the record lacks them and the backend can detokenize."""
        divergence = record.parting
        if divergence is None or divergence.stored_text or divergence.prompt_text:
            return record
        try:
            if backend := await self._find_backend(record.root):
                return add_texts(record, await backend.upstream.detokenize([divergence.stored, divergence.prompt]))
        except UpstreamError as error:
            log.info("request %s is explained without texts: %s", record.id, error)
        return record

    async def _find_backend(self, root: bytes) -> Backend | None:
        """Backend of the model that a root's tokens are of; None where none serves it now.

        Raises UpstreamError where none is known to, and one could not be asked.
        """
        fingerprint = await asyncio.to_thread(explanations.find_fingerprint, self.index, root)
        failure: UpstreamError | None = None
        for backend in self.models.usable_backends:
            try:
                if (await backend.state.status()).fingerprint == fingerprint:
                    return backend
            except UpstreamError as error:
                failure = error
        if failure is not None:
            raise failure
        return None
