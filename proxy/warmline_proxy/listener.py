"""Listener: serves an application to clients.  Event loop thread.

asyncio's own server takes all sockets that wait in the kernel, hundreds at once, before it makes a connection of the
first one, and logs each that it finds no descriptor for.  Here none is accepted that has no place yet; and while all
places are taken, what has arrived of a request is read before the next socket is accepted, which may displace it.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import NamedTuple

from aiohttp import web

from warmline_common.process.file_limits import UNLIMITED
from warmline_proxy.config import ProxyConfig
from warmline_proxy.http.bodies import set_server_header
from warmline_proxy.http.connections import (
    CONNECTIONS,
    LOG_INTERVAL_S,
    SHUTDOWN_GRACE_S,
    Connections,
    connection_middleware,
)
from warmline_proxy.http.slashes import merge_slashes
from warmline_proxy.metrics import METRICS

log = logging.getLogger(__name__)

BACKLOG_COUNT = 512  # not yet accepted connections in the kernel
ACCEPTS_AT_ONCE = 64  # before other work of the event loop
ACCEPT_RETRY_S = 0.1  # after an error of the system
DESCRIPTORS_RESERVED = 128  # for refusals, the index, the log and Python
DESCRIPTORS_PER_CONNECTION = 2  # the client's and one to the backend


class HttpListener(NamedTuple):
    """A listening application.  `close` is idempotent."""

    port: int
    connections: Connections
    close: Callable[[], Awaitable[None]]


@asynccontextmanager
async def listen(
    app: web.Application, config: ProxyConfig, descriptor_count_max: int = UNLIMITED
) -> AsyncIterator[HttpListener]:
    """Serve `app` at `bind_host` and `port`, with at most as many connections as there are descriptors for.

    Closing it stops accepting, gives running handlers a short grace, and runs the application's clean-up.  Raises
    OSError if it can't listen.
    """
    count_max = compute_connections_max(config.connections_max, descriptor_count_max)
    connections = app[CONNECTIONS] = Connections(
        count_max, config.receive_timeout_s, config.send_timeout_s, app[METRICS].record_error if METRICS in app else str
    )
    app.middlewares.insert(0, connection_middleware)
    app.on_response_prepare.append(set_server_header)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_GRACE_S)
    async with AsyncExitStack() as stack:
        stack.callback(connections.abort)
        sweep = asyncio.get_running_loop().create_task(connections.sweep(), name="limits of connections")
        stack.callback(sweep.cancel)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        http = runner.server
        assert http is not None
        http.request_factory = merge_slashes(http.request_factory)
        listening = await bind(config.bind_host, config.port)
        for each in listening:
            await stack.enter_async_context(_run_acceptor(each, connections, http))
        yield HttpListener(listening[0].getsockname()[1], connections, stack.aclose)


async def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, one for each address of the host.  Raises OSError."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
        sockets = [each.dup() for each in server.sockets]
        server.close()
        for each in sockets:
            each.listen(BACKLOG_COUNT)
    except OSError as error:
        message = (
            f"can't listen on {host} port {port}: {error}; stop the program that listens there, or use another port"
        )
        raise OSError(message) from error
    return sockets


@asynccontextmanager
async def _run_acceptor(listening: socket.socket, connections: Connections, http: web.Server) -> AsyncIterator[None]:
    """Accept connections within the block; closes the socket at its end."""
    with listening:
        accepting = asyncio.create_task(_accept(listening, connections, http), name="acceptor")
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])


async def _accept(listening: socket.socket, connections: Connections, http: web.Server) -> None:
    """Accept connections until cancelled, whatever becomes of one of them."""
    while True:
        try:
            await _accept_until_error(listening, connections, http)
        except Exception:
            log.exception("accepting connections failed; trying again")
            await asyncio.sleep(ACCEPT_RETRY_S)


async def _accept_until_error(listening: socket.socket, connections: Connections, http: web.Server) -> None:
    loop, logged_at = asyncio.get_running_loop(), float("-inf")
    async with asyncio.TaskGroup() as openings:
        for number in count(1):
            await connections.wait_for_place()
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:  # by its client
                continue
            except OSError as error:
                if loop.time() - logged_at >= LOG_INTERVAL_S:
                    logged_at = loop.time()
                    log.error("no connection can be accepted: %s; trying again", error)
                connections.close_waiting()
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            opening = openings.create_task(_open(accepted, connections.admit(http)))
            if connections.is_full or not number % ACCEPTS_AT_ONCE:
                await opening


async def _open(accepted: socket.socket, protocol: asyncio.Protocol) -> None:
    """Make a connection of an accepted socket; it is being read from when this returns."""
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted)
    except OSError as error:
        log.info("a connection ended as it was accepted: %s", error)
        accepted.close()


def compute_connections_max(connections_max: int, descriptor_count_max: int) -> int:
    """Maximum of connections by the setting and by the descriptors that they need."""
    reserved = min(DESCRIPTORS_RESERVED, descriptor_count_max // 2)
    return max(1, min(connections_max, (descriptor_count_max - reserved) // DESCRIPTORS_PER_CONNECTION))
