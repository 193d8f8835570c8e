"""Server with a handler per failure, and raw client connections to it."""

import asyncio
import gc
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from warmline_common.storage.home import Home
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError
from warmline_proxy.http import connections
from warmline_proxy.http.bodies import BodyReader, write_chunk
from warmline_proxy.http.body_budget import BodyBudget
from warmline_proxy.http.connections import KEEPALIVE_IDLE_OPTION, Connections
from warmline_proxy.listener import listen

Answer = tuple[int, dict[str, str], Any]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition without an event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave all objects so far out of garbage collections: of a worker's whole heap each takes seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def count_alive() -> int:
    """Number of connections that are still referenced, but for those in a frozen heap."""
    gc.collect()
    return sum(isinstance(each, connections.Connection) for each in gc.get_objects())


class HandlerServer:
    """Application with one handler per failure."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        self.budget = BodyBudget(config.body_budget_bytes)
        self.reader = BodyReader(self.budget, config.receive_timeout_s)
        self.port = 0
        self.connections: Connections
        self.held = asyncio.Event()  # set while a request is held
        self.released = asyncio.Event()  # releases held requests
        self.handler_cancelled = asyncio.Event()  # a handler was cancelled

    def make_app(self) -> web.Application:
        app = web.Application()
        for path in ("echo", "hold", "flood", "lump", "half", "fault", "socket"):
            app.router.add_route("*", f"/{path}", getattr(self, path))
        return app

    async def echo(self, request: web.Request) -> web.Response:
        try:
            return web.json_response({"bytes": len(await self.reader.read(request))})
        except ClientError as error:
            return error.build_response(error.body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.handler_cancelled.set()
            raise

    async def hold(self, request: web.Request) -> web.Response:
        self.held.set()
        await self.released.wait()
        return web.json_response({"held": True})

    async def flood(self, request: web.Request) -> web.StreamResponse:
        """Stream the requested number of bytes in pieces."""
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for _ in range(int(request.query["bytes"]) // 10_000):
                await write_chunk(response, b"x" * 10_000, self.config.send_timeout_s)
        except (asyncio.CancelledError, ConnectionResetError):
            self.handler_cancelled.set()
            raise
        await response.write_eof()
        return response

    async def lump(self, request: web.Request) -> web.Response:
        """Send the requested number of bytes at once."""
        return web.Response(body=b"x" * int(request.query["bytes"]))

    async def half(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half of it")
        raise ValueError("something unforeseen")

    async def fault(self, request: web.Request) -> web.Response:
        raise ValueError("something unforeseen")

    async def socket(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        sock = request.transport.get_extra_info("socket")
        options = {
            "on": sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            "after_s": sock.getsockopt(socket.IPPROTO_TCP, KEEPALIVE_IDLE_OPTION),
            "interval_s": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            "count": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
        }
        return web.json_response(options)

    async def wait_until_empty(self) -> None:
        """Wait until no connection is left."""
        await wait_until(lambda: not self.connections.count)


class RawClient:
    """Client with one raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, text: str | bytes) -> None:
        self.writer.write(text.encode() if isinstance(text, str) else text)

    def get(self, path: str, more: str = "") -> None:
        self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n")

    async def read_response(self) -> Answer:
        """Read one response: (status, headers in lower case, JSON)."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)

    async def request(self, path: str, more: str = "") -> Answer:
        self.get(path, more)
        return await self.read_response()

    async def is_closed(self) -> bool:
        """True if the server closes the connection; False if it sends data."""
        try:
            return not await self.reader.read(1)
        except ConnectionResetError:
            return True

    def reset(self) -> None:
        """Abort the connection with a reset."""
        plug = self.writer.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def open_client(port: int, receive_buffer_bytes: int = 0) -> RawClient:
    """Connect to a port of this machine."""
    plug = socket.socket()
    plug.setblocking(False)
    if receive_buffer_bytes:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", port))
    return RawClient(*await asyncio.open_connection(sock=plug, limit=4096))


@asynccontextmanager
async def run_server(
    folder: Path, **settings: Any
) -> AsyncIterator[tuple[HandlerServer, Callable[..., Awaitable[RawClient]]]]:
    """Run a server; (server, function that connects to it)."""
    server, clients = HandlerServer(ProxyConfig(home=Home(folder), port=0, **settings)), list[RawClient]()

    async def connect(receive_buffer_bytes: int = 0) -> RawClient:
        clients.append(await open_client(server.port, receive_buffer_bytes))
        return clients[-1]

    async with listen(server.make_app(), server.config) as listener:
        server.port, server.connections = listener.port, listener.connections
        try:
            yield server, connect
        finally:
            server.released.set()
            for client in clients:
                client.writer.transport.abort()
