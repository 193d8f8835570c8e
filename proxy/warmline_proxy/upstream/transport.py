"""HTTP connections to the backend, of two kinds with one interface.

Calls of requests take aiohttp's client, which finds a free connection without a look at the others, and takes a third
of httpx's CPU time.  Control calls, some a second, take httpx on connections of their own: a pulse never waits for
streams, and regular calls do not keep the connections of a busy hour (aiohttp takes the one that is unused longest).
Errors are the libraries' own; `client` translates them.  Event loop thread.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import aiohttp
import httpx
from yarl import URL

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_TIMEOUT_S = 5.0  # of an unused connection, which is a task at the backend; less than the backend's
CONTROL_CONNECTIONS_MAX = 64  # kept
UNSENT_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")  # of aiohttp's own


@dataclass(frozen=True)
class UpstreamRequest:
    """A request to the backend.  Connecting has a time limit of its own; `timeout_s` None: nothing else has."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = b""
    timeout_s: float | None = None


class UpstreamResponse(Protocol):
    """A response whose head has come.  Close it, or read it to its end."""

    status: int

    def find_header(self, name: str) -> str:
        """Value of a header; "" without it."""

    async def read(self) -> bytes: ...
    def iterate(self) -> AsyncIterator[bytes]:
        """Bytes as they arrive, not decoded."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Sends requests on connections that it keeps."""

    async def send(self, request: UpstreamRequest) -> UpstreamResponse: ...
    async def close(self) -> None: ...


class RequestTransport:
    """Transport of requests' calls.  Raises aiohttp.ClientError, TimeoutError."""

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Made on the event loop."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S, ssl=False),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=UNSENT_HEADERS,
            auto_decompress=False,
        )

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        timeout = aiohttp.ClientTimeout(total=request.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        response = await self._session.request(
            request.method,
            URL(request.url, encoded=True),
            headers=request.headers,
            data=request.body or None,
            timeout=timeout,
            allow_redirects=False,
        )
        return _AiohttpResponse(response)

    async def close(self) -> None:
        await self._session.close()


@dataclass(eq=False)
class _AiohttpResponse:
    """An UpstreamResponse."""

    _response: aiohttp.ClientResponse
    status: int = field(init=False)

    def __post_init__(self) -> None:
        self.status = self._response.status

    def find_header(self, name: str) -> str:
        return self._response.headers.get(name, "")

    async def read(self) -> bytes:
        return await self._response.read()

    def iterate(self) -> AsyncIterator[bytes]:
        return self._response.content.iter_any()

    async def close(self) -> None:
        self._response.close()


class ControlTransport:
    """Transport of control calls.  Raises httpx.HTTPError, httpx.StreamError."""

    def __init__(self) -> None:
        # The bare transport: httpx.AsyncClient's cookies, redirects and environment take a third more time a call.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONTROL_CONNECTIONS_MAX)
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False, verify=False)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        timeout = httpx.Timeout(request.timeout_s, connect=CONNECT_TIMEOUT_S).as_dict()
        headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
        response = await self._transport.handle_async_request(
            httpx.Request(
                request.method,
                request.url,
                headers=headers,
                content=request.body or None,
                extensions={"timeout": timeout},
            )
        )
        return _HttpxResponse(response)

    async def close(self) -> None:
        await self._transport.aclose()


@dataclass(eq=False)
class _HttpxResponse:
    """An UpstreamResponse."""

    _response: httpx.Response
    status: int = field(init=False)

    def __post_init__(self) -> None:
        self.status = self._response.status_code

    def find_header(self, name: str) -> str:
        return str(self._response.headers.get(name, ""))

    async def read(self) -> bytes:
        return await self._response.aread()

    def iterate(self) -> AsyncIterator[bytes]:
        return self._response.aiter_raw()

    async def close(self) -> None:
        await self._response.aclose()


# A kept connection that the other side was just closing.
CONNECTION_LOST_ERRORS = (
    *(aiohttp.ServerDisconnectedError, aiohttp.ClientOSError),
    *(httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError),
)
