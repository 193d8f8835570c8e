"""What the owner may look at of what is stored and what was answered.  Reads the index, on threads."""

import asyncio

import msgspec
from aiohttp import web

from warmline_proxy.admin.query import number
from warmline_proxy.admin.routes import Paths
from warmline_proxy.http.bodies import json_answer
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord

RECORDS_MAX = 1000


class RequestsReply(msgspec.Struct, kw_only=True):
    """GET /warmline/requests?count=N."""

    requests: list[RequestRecord]  # newest first


class Looking:
    """Handlers."""

    def __init__(self, index: Index) -> None:
        self._index = index

    @property
    def paths(self) -> Paths:
        return {("GET", "/warmline/requests"): self.requests}

    async def requests(self, request: web.Request) -> web.Response:
        count = number(request, "count", RECORDS_MAX, RECORDS_MAX)
        records = await asyncio.to_thread(self._index.requests, count)
        return json_answer(RequestsReply(requests=[_without_windows(record) for record in records]))


def _without_windows(record: RequestRecord) -> RequestRecord:
    """What stands where it parts is /warmline/explain's to tell."""
    if record.parting is None:
        return record
    bare = msgspec.structs.replace(record.parting, stored=b"", prompt=b"", stored_text="", prompt_text="")
    return msgspec.structs.replace(record, parting=bare)
