"""Misbehaving clients on real sockets: many, slow, silent, broken; other clients are unaffected."""

import asyncio
import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from support.proxy.harness import on_loop
from support.proxy.raw_connections import count_alive, frozen_heap, run_server, wait_until
from warmline_common.process.file_limits import count_open_descriptors, raise_descriptor_limit
from warmline_proxy.http import connections
from warmline_proxy.http.bodies import BODY_BYTES_MAX
from warmline_proxy.http.connections import (
    PIPELINED_BYTES_MAX,
    ConnectionPhase,
    Connections,
)

MANY = 1_000


@on_loop
async def test_thousand_idle_connections(tmp_path: Path) -> None:
    assert raise_descriptor_limit(8192) > 2 * MANY + 200
    async with run_server(tmp_path) as (server, connect):
        for _ in range(MANY // 100):
            await asyncio.gather(*(connect() for _ in range(100)))
        client = await connect()
        for _ in range(20):
            assert (await client.request("/echo"))[0] == 200
        assert server.connections.count == MANY + 1


@on_loop
async def test_connection_refused_when_all_busy(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_max=1) as (server, connect):
        busy = await connect()
        busy.get("/hold")
        await server.held.wait()
        newcomer = await connect()
        status, headers, body = await newcomer.request("/echo")
        assert (status, headers["connection"], body["error"]["code"]) == (503, "close", "connections_full")
        assert int(headers["retry-after"]) > 0
        assert await newcomer.is_closed()
        server.released.set()
        assert (await busy.read_response())[2] == {"held": True}
        assert (await (await connect()).request("/echo"))[0] == 200


@on_loop
async def test_longest_idle_connection_is_closed(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_max=3) as (server, connect):
        first, second, third = [await connect() for _ in range(3)]
        for client in (first, second, third, first):  # now the second is the longest idle
            assert (await client.request("/echo"))[0] == 200
        newcomer = await connect()
        assert (await newcomer.request("/echo"))[0] == 200
        assert await second.is_closed()
        for client in (first, third, newcomer):
            assert (await client.request("/echo"))[0] == 200
        assert server.connections.count == 3


@pytest.mark.parametrize(
    "beginning",
    ["GET /echo HTTP/1.1\r\nHo", "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", ""],
    ids=["half a head", "half a body", "nothing"],
)
@on_loop
async def test_unfinished_requests_do_not_lock_others_out(
    tmp_path: Path, beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_BYTE_S", 0.02)
    async with run_server(tmp_path, connections_max=5) as (server, connect):
        busy = await connect()
        busy.get("/hold")
        await server.held.wait()
        for _ in range(20):
            unfinished = await connect()
            unfinished.send(beginning)
        newcomer = await connect()
        assert (await newcomer.request("/echo"))[0] == 200
        assert server.connections.count == 5
        server.released.set()
        assert (await busy.read_response())[2] == {"held": True}


@on_loop
async def test_unfinished_request_that_makes_way_gets_503(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_max=1) as (server, connect):
        unfinished = await connect()
        unfinished.send("GET /echo HTTP/1.1\r\nHo")
        await wait_until(lambda: ConnectionPhase.HEAD in [each.phase for each in server.connections._open])
        assert (await (await connect()).request("/echo"))[0] == 200
        status, headers, body = await unfinished.read_response()
        assert (status, body["error"]["code"]) == (503, "connections_full") and int(headers["retry-after"]) > 0


@dataclass(eq=False)
class WaitingConnection:
    """Connection of some address that waits for its client."""

    address: str
    is_waiting: bool = True
    unsent_bytes: int = 0
    has_made_way: bool = False

    def makes_way(self, now: float) -> bool:
        return not self.unsent_bytes

    def displace(self) -> None:
        self.has_made_way = True


@on_loop
async def test_address_with_most_waiting_connections_makes_way() -> None:
    registry = Connections(1, 1.0, 1.0, print)

    def register(connection: WaitingConnection) -> WaitingConnection:
        registry._open.add(connection)  # type: ignore[arg-type]
        registry.update(connection)  # type: ignore[arg-type]
        return connection

    modest = register(WaitingConnection("10.0.0.1"))
    slow_reader = register(WaitingConnection("10.0.0.2", unsent_bytes=1))
    progressing, *idle = [register(WaitingConnection("10.0.0.2")) for _ in range(3)]
    register(WaitingConnection("10.0.0.3", is_waiting=False))
    registry.update(progressing)  # type: ignore[arg-type]  # it has sent a byte
    for next_one in (*idle, progressing, modest):
        assert registry.close_waiting() and next_one.has_made_way
    assert not registry.close_waiting() and not slow_reader.has_made_way


@on_loop
async def test_connections_beyond_refusals_wait_in_the_kernel(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_max=1) as (server, connect):
        busy = await connect()
        busy.get("/hold")
        await server.held.wait()
        silent = await connect()
        await wait_until(lambda: len(server.connections.refusals) == 1)
        waiting = [await connect() for _ in range(20)]
        for client in waiting:
            client.get("/echo")
        assert (await silent.request("/echo"))[0] == 503
        silent.writer.close()
        assert (await waiting[0].read_response())[0] == 503
        server.released.set()
        assert (await busy.read_response())[2] == {"held": True}
        waiting[0].writer.close()
        for client in waiting[1:]:  # refused before the held one ended, or answered
            assert (await client.read_response())[0] in (200, 503)
            client.writer.close()


@on_loop
async def test_head_timeout_returns_408(tmp_path: Path) -> None:
    async with run_server(tmp_path, receive_timeout_s=0.2) as (server, connect):
        for beginning in ("GET /echo HTTP/1.1\r\nHo", "\r\n"):
            client = await connect()
            client.send(beginning)
            status, headers, body = await client.read_response()
            assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "request_timeout")
            assert await client.is_closed()
        await server.wait_until_empty()


@on_loop
async def test_slow_head_times_out(tmp_path: Path) -> None:
    async with run_server(tmp_path, receive_timeout_s=0.3) as (_, connect):
        client = await connect()
        assert (await client.request("/echo"))[0] == 200
        client.send("GET /echo HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        answer = asyncio.ensure_future(client.read_response())
        while not answer.done():
            client.send("x")
            await asyncio.sleep(0.02)
        assert (await answer)[0] == 408


@on_loop
async def test_stalled_body_returns_408(tmp_path: Path) -> None:
    async with run_server(tmp_path, receive_timeout_s=0.2) as (server, connect):
        for length in ("Content-Length: 100\r\n", "Transfer-Encoding: chunked\r\n"):
            client = await connect()
            client.send(f"POST /echo HTTP/1.1\r\nHost: localhost\r\n{length}\r\n5\r\nabcde")
            status, headers, body = await client.read_response()
            assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "request_timeout")
            assert await client.is_closed()
            client.writer.close()
        await server.wait_until_empty()


@on_loop
async def test_slow_body_is_read(tmp_path: Path) -> None:
    """Longer in all than the limit for a pause."""
    async with run_server(tmp_path, receive_timeout_s=2.0) as (_, connect):
        client = await connect()
        client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n")
        for _ in range(15):
            await asyncio.sleep(0.15)
            client.send("x")
        status, headers, body = await client.read_response()
        assert (status, body) == (200, {"bytes": 15}) and headers.get("connection") != "close"


@on_loop
async def test_reset_during_body_ends_handler(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (server, connect):
        client, neighbour = await connect(), await connect()
        neighbour.get("/hold")
        client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        await server.held.wait()
        client.reset()
        await server.handler_cancelled.wait()
        server.released.set()
        assert (await neighbour.read_response())[2] == {"held": True}
        neighbour.writer.close()
        await server.wait_until_empty()


@on_loop
async def test_oversized_body_refused_early(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (server, connect):
        client = await connect()
        client.send(f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY_BYTES_MAX + 1}\r\n\r\n")
        status, headers, answer = await client.read_response()
        assert (status, headers["connection"]) == (413, "close")
        assert answer["error"]["message"] == f"The body is larger than {BODY_BYTES_MAX} bytes."
        for _ in range(100):  # more of the body causes no reset
            client.send(b"x" * 10_000)
        await client.writer.drain()
        assert await client.is_closed()
        client.writer.close()
        await server.wait_until_empty()


BAD_HEADS = {
    "a huge field": "GET /echo HTTP/1.1\r\nHost: localhost\r\nX-Huge: " + "x" * 1_000_000 + "\r\n\r\n",
    "a huge line": "GET /" + "x" * 100_000 + " HTTP/1.1\r\n\r\n",
    "too many fields": "GET /echo HTTP/1.1\r\n" + "".join(f"X-{n}: 1\r\n" for n in range(5_000)) + "\r\n",
    "no HTTP": "\x16\x03\x01\x02\x00\x01\x00 this is TLS, or what you will\r\n\r\n",
    "a space in a name": "GET /echo HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "two lengths": "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a negative length": "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
}


TOO_LARGE = ("a huge field", "a huge line", "too many fields")


@pytest.mark.parametrize("kind", BAD_HEADS)
@on_loop
async def test_garbage_is_refused(tmp_path: Path, kind: str) -> None:
    async with run_server(tmp_path) as (server, connect):
        neighbour, rude = await connect(), await connect()
        neighbour.get("/hold")
        await server.held.wait()
        assert (await rude.request("/echo"))[0] == 200
        rude.send(BAD_HEADS[kind])
        status, headers, body = await rude.read_response()
        expected = 431 if kind in TOO_LARGE else 400
        assert (status, headers["connection"], body["error"]["type"]) == (expected, "close", "invalid_request_error")
        assert ("at most 128 headers, of 8190 bytes" in body["error"]["message"]) == (status == 431)
        assert headers["server"] == "warmline"
        assert "\n" not in body["error"]["message"]
        assert await rude.is_closed()
        rude.writer.close()
        server.released.set()
        assert (await neighbour.read_response())[2] == {"held": True}
        neighbour.writer.close()
        await server.wait_until_empty()


@on_loop
async def test_broken_chunk_returns_400(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (_, connect):
        client = await connect()
        client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\nzz\r\n")
        assert (await client.read_response())[0] == 400
        assert await client.is_closed()


@on_loop
async def test_pipelined_requests(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (_, connect):
        client = await connect()
        lengths = [3, 0, 70_000, 1]
        client.send(
            "".join(f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n}\r\n\r\n{'x' * n}" for n in lengths)
        )
        assert [(await client.read_response())[2]["bytes"] for _ in lengths] == lengths
        assert (await client.request("/echo", "Connection: close\r\n"))[1]["connection"] == "close"
        assert await client.is_closed()


@on_loop
async def test_pipelined_bodies_wait_in_the_kernel(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (server, connect):
        client = await connect()
        client.get("/hold")
        await server.held.wait()
        request = f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{'x' * 100_000}"
        client.send(request * 100)
        (connection,) = server.connections._open
        await wait_until(lambda: connection._pipelined_bytes > PIPELINED_BYTES_MAX)
        neighbour = await connect()
        for _ in range(20):
            assert (await neighbour.request("/echo"))[0] == 200
        assert connection._pipelined_bytes < PIPELINED_BYTES_MAX + 300_000
        server.released.set()
        assert (await client.read_response())[2] == {"held": True}
        assert [(await client.read_response())[2]["bytes"] for _ in range(100)] == [100_000] * 100


@on_loop
async def test_many_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (server, connect):
        client = await connect()
        client.get("/hold")
        await server.held.wait()
        sizes = [number % 9 for number in range(1500)]
        client.send(
            "".join(f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n}\r\n\r\n{'x' * n}" for n in sizes)
        )
        (connection,) = server.connections._open
        await wait_until(lambda: connection._pipelined_bytes > PIPELINED_BYTES_MAX)
        server.released.set()
        assert (await client.read_response())[2] == {"held": True}
        assert [(await client.read_response())[2]["bytes"] for _ in sizes] == sizes


@on_loop
async def test_no_leak_after_disconnects(tmp_path: Path) -> None:
    async def connect_and_leave(number: int) -> None:
        client = await connect()
        if number % 4 == 1:
            await client.request("/echo")
        elif number % 4 == 2:
            client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        elif number % 4 == 3:
            client.get("/flood?bytes=1000000")
        client.reset() if number % 2 else client.writer.close()

    with frozen_heap():
        async with run_server(tmp_path) as (server, connect):
            before = count_open_descriptors()
            for number in range(200):
                await connect_and_leave(number)
            await wait_until(lambda: count_open_descriptors() <= before)
            await wait_until(lambda: count_alive() == 0)
            assert server.connections.count == 0


@on_loop
async def test_keepalive_options(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (_, connect):
        options = (await (await connect()).request("/socket"))[2]
        assert options["on"] and options["after_s"] + options["interval_s"] * options["count"] == 90


@on_loop
async def test_idle_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, receive_timeout_s=0.4) as (server, connect):
        silent, busy, used = await connect(), await connect(), await connect()
        busy.get("/hold")
        await server.held.wait()
        assert (await used.request("/echo"))[0] == 200
        monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 0.1)
        assert await silent.is_closed() and await used.is_closed()
        server.released.set()
        assert (await busy.read_response())[2] == {"held": True}


@pytest.mark.parametrize("path", ["/flood", "/lump"])
@on_loop
async def test_send_timeout(tmp_path: Path, path: str) -> None:
    async with run_server(tmp_path, send_timeout_s=0.2) as (server, connect):
        client = await connect(receive_buffer_bytes=4096)
        client.get(f"{path}?bytes=20000000")
        await server.wait_until_empty()
        if path == "/flood":
            await server.handler_cancelled.wait()


@pytest.mark.parametrize("path", ["/flood", "/lump"])
@on_loop
async def test_slow_reader_gets_whole_response(tmp_path: Path, path: str) -> None:
    """Longer in all than the limit for a pause."""
    async with run_server(tmp_path, send_timeout_s=2.0) as (_, connect):
        client, count = await connect(receive_buffer_bytes=4096), 0
        client.get(f"{path}?bytes=300000", "Connection: close\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        while piece := await client.reader.read(4_000):
            count += piece.count(b"x")
            await asyncio.sleep(0.03)
        assert count == 300_000


@on_loop
async def test_idle_connection_keeps_no_response(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (_, connect):
        client = await connect()
        client.get("/lump?bytes=1000000")
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readexactly(1_000_000)
        await wait_until(lambda: not count_bodies())


def count_bodies() -> int:
    return sum(isinstance(each, web.Response) and each.body is not None for each in gc.get_objects())


@on_loop
async def test_partial_response_is_aborted(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (server, connect):
        client = await connect()
        client.get("/half")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.reader.readuntil(b"0\r\n\r\n")
        await server.wait_until_empty()


@on_loop
async def test_internal_error_envelope(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (_, connect):
        status, headers, body = await (await connect()).request("/fault")
        assert (status, headers["connection"], body["error"]["type"]) == (500, "close", "server_error")
        assert "unforeseen" not in body["error"]["message"]
