"""Accepting of connections: bursts, few descriptors, errors of the system."""

import asyncio
import errno
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from support.proxy.harness import on_loop
from support.proxy.raw_connections import run_server, wait_until
from warmline_proxy import listener
from warmline_proxy.http import connections
from warmline_proxy.http.connections import Connections
from warmline_proxy.listener import compute_connections_max


def test_compute_connections_max() -> None:
    assert compute_connections_max(2048, 8192) == 2048
    assert compute_connections_max(2048, 256) == 64
    assert compute_connections_max(2048, 128) == 32
    assert compute_connections_max(10, 128) == 10


@on_loop
async def test_burst_of_requests_gets_answers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered or refused with a 503, though unfinished heads have all places; none is reset."""
    monkeypatch.setattr(connections, "FIRST_BYTE_S", 60.0)  # a slow machine displaces none of those that are silent
    async with run_server(tmp_path, connections_max=4) as (server, connect):
        for _ in range(20):
            (await connect()).send("GET /echo HTTP/1.1\r\nHo")

        async def ask(number: int) -> int:
            client = await connect()
            await asyncio.sleep(number % 3 * 0.02)  # accepted by then, and silent
            status, _, _ = await client.request("/hold")
            client.writer.close()
            return status

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(number)) for number in range(30)]
            await wait_until(lambda: any(each.done() for each in asked))
            server.released.set()
        statuses = [each.result() for each in asked]
        assert set(statuses) == {200, 503} and statuses.count(200) >= 4


@pytest.mark.parametrize(
    ("beginning", "accepted_count", "refused_count"),
    [("GET /echo HTTP/1.1\r\nHo", 100, 0), ("GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n", 10 + 5, 5)],
    ids=["unfinished", "being answered"],
)
@on_loop
async def test_accepted_sockets_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: str, accepted_count: int, refused_count: int
) -> None:
    """Descriptors are reckoned by that: 10 connections, 5 refusals, and what is closed in the loop's next turns."""
    accepted, counts = list[socket.socket](), list[int]()
    loop, real = asyncio.get_running_loop(), asyncio.get_running_loop().sock_accept

    async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        found, address = await real(listening)
        accepted.append(found)
        counts.append(sum(each.fileno() >= 0 for each in accepted))
        return found, address

    monkeypatch.setattr(loop, "sock_accept", accept)
    async with run_server(tmp_path, connections_max=10) as (server, _), AsyncExitStack() as clients:
        for _ in range(100):  # all are in the kernel before the first is accepted
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(beginning.encode())
        refusals = server.connections.refusals  # the last of them comes some turns of the loop after it was accepted
        await wait_until(lambda: len(counts) == accepted_count and len(refusals) == refused_count)
        assert max(counts) <= 10 + 5 + 3 and server.connections.count == 10


@on_loop
async def test_lack_of_descriptors_is_logged_once_and_overcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, lacking = asyncio.get_running_loop(), 5

    async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        nonlocal lacking
        if lacking:
            lacking -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await real(listening)

    async with run_server(tmp_path) as (_, connect):
        idle = await connect()
        assert (await idle.request("/echo"))[0] == 200
        real = loop.sock_accept
        monkeypatch.setattr(listener, "ACCEPT_RETRY_S", 0.01)
        monkeypatch.setattr(loop, "sock_accept", accept)
        first, second = await connect(), await connect()  # the acceptor waits in the real function for the first
        assert [(await each.request("/echo"))[0] for each in (first, second)] == [200, 200]
        assert await idle.is_closed()  # and made way
        assert lacking == 0 and caplog.text.count("no connection can be accepted: [Errno 24]") == 1


@on_loop
async def test_accepting_goes_on_after_a_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_server(tmp_path) as (_, connect):
        real, failures = Connections.admit, [RuntimeError("a defect")]

        def admit(self: Connections, http: web.Server) -> asyncio.Protocol:
            if failures:
                raise failures.pop()
            return real(self, http)

        monkeypatch.setattr(Connections, "admit", admit)
        await connect()
        await wait_until(lambda: "accepting connections failed" in caplog.text)
        assert (await (await connect()).request("/echo"))[0] == 200
