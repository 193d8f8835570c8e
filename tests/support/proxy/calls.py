"""Bodies read by an API outside an event loop."""

import asyncio
from collections.abc import Mapping

from warmline_proxy.api.base import Api, ApiCall


def read_call(api: Api, body: bytes, headers: Mapping[str, str] | None = None) -> ApiCall:
    return asyncio.run(api.read_call(body, headers or {}))
