"""Paths with doubled slashes, as clients make them of a base URL that ends with one: read as nginx does by default."""

import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from yarl import URL

_SLASHES = re.compile("//+")
_TARGET = re.compile(r"(?P<origin>[a-z]+://[^/?]*)?(?P<path>/[^?]*)(?P<query>.*)", re.I | re.S)  # RFC 9112, 3.2.1-2

RequestFactory = Callable[..., web.BaseRequest]  # of a message, and of what belongs to its connection


def merge_slashes(make_request: RequestFactory) -> RequestFactory:
    """Factory whose requests have single slashes in their paths, before any rule of access or route is applied."""

    def make_merged_request(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        target = _TARGET.fullmatch(message.path)
        if target and "//" in target["path"]:  # no other form of a target has a path that is served
            merged, query = _SLASHES.sub("/", target["path"]), target["query"]
            url = URL.build(path=merged, query_string=query.removeprefix("?"), encoded=True)
            if origin := target["origin"]:
                url = URL(origin, encoded=True).join(url)
            message = message._replace(path=(origin or "") + merged + query, url=url)
        return make_request(message, *rest)

    return make_merged_request
