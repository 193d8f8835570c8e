"""What the owner may look at of what is stored and what was answered.  Reads the index, on threads."""

import asyncio

import msgspec
from aiohttp import web

from warmline_proxy.admin.query import parse_number
from warmline_proxy.admin.routes import RouteTable
from warmline_proxy.http.bodies import json_response
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord

RECORDS_MAX = 1000


class RequestsReply(msgspec.Struct, kw_only=True):
    """GET /warmline/requests?count=N."""

    requests: list[RequestRecord]  # newest first


class InspectRoutes:
    """Handlers."""

    def __init__(self, index: Index) -> None:
        self._index = index

    @property
    def routes(self) -> RouteTable:
        return {("GET", "/warmline/requests"): self.get_requests}

    async def get_requests(self, request: web.Request) -> web.Response:
        count = parse_number(request, "count", RECORDS_MAX, RECORDS_MAX)
        records = await asyncio.to_thread(self._index.requests, count)
        return json_response(RequestsReply(requests=[_strip_divergence_text(record) for record in records]))


def _strip_divergence_text(record: RequestRecord) -> RequestRecord:
    """What stands where it parts is /warmline/explain's to tell."""
    if record.parting is None:
        return record
    stripped = msgspec.structs.replace(record.parting, stored=b"", prompt=b"", stored_text="", prompt_text="")
    return msgspec.structs.replace(record, parting=stripped)
