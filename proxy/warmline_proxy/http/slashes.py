"""Paths with doubled slashes, as clients make them of a base URL that ends with one: read as nginx does by default."""

import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from yarl import URL

_SLASHES = re.compile("//+")

RequestFactory = Callable[..., web.BaseRequest]  # of a message, and of what belongs to its connection


def merge_slashes(make_request: RequestFactory) -> RequestFactory:
    """Factory whose requests have single slashes in their paths, before any rule of access or route is applied."""

    def make_merged_request(message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
        path, question_mark, query = message.path.partition("?")
        if path.startswith("/") and "//" in path:  # no other form of a target has a path that is served
            merged = _SLASHES.sub("/", path)
            url = URL.build(path=merged, query_string=query, encoded=True)
            message = message._replace(path=merged + question_mark + query, url=url)
        return make_request(message, *rest)

    return make_merged_request
