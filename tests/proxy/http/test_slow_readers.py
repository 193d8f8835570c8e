"""Slow readers: the engine does not wait for them, and their responses are correct."""

import asyncio
import json
import socket
from pathlib import Path

from support.proxy.harness import ProxyHarness, on_loop, run_proxy

STREAMED = {"messages": [{"role": "user", "content": "Everything"}], "stream": True}


class SlowClient:
    """Client with a small receive window that reads on demand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, proxy: ProxyHarness, headers: dict[str, str]) -> "SlowClient":
        wire = socket.socket()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.setblocking(False)
        port = int(proxy.url.rsplit(":", 1)[1])
        await asyncio.get_running_loop().sock_connect(wire, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=wire, limit=1024)
        body = json.dumps(STREAMED).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return cls(reader, writer)

    async def read_rest(self) -> bytes:
        """Read until the connection ends or is silent for a second."""
        received = b""
        try:
            while data := await asyncio.wait_for(self.reader.read(65536), 1.0):
                received += data
        except (TimeoutError, ConnectionError):
            pass
        return received


@on_loop
async def test_slow_read_of_complete_answer_is_no_stall(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.answer = ["x" * 10_000] * 100
        slow = await SlowClient.ask(proxy, {"X-Warmline-Stall-Timeout": "0.3", "Connection": "close"})
        while not (await proxy.status())["settling"]:
            pass  # until the engine has ended
        await asyncio.sleep(0.8)
        received = await slow.read_rest()
        slow.writer.close()
        assert b"[DONE]" in received and b"stalled" not in received


@on_loop
async def test_engine_released_for_stalled_reader(tmp_path: Path) -> None:
    """Released before the last bytes are read: the bytes in flight decide where the response waits."""
    async with run_proxy(tmp_path) as proxy:
        for events in range(5, 14):
            name = f"mine-{events}"
            proxy.backend.answer = ["x" * 20_000] * (events + 1)
            proxy.backend.hold_after = events
            proxy.backend.holding.clear()
            slow = await SlowClient.ask(proxy, {"X-Warmline-Request": name})
            await proxy.backend.holding.wait()
            await proxy.status()
            deleting = proxy.client.delete(f"{proxy.url}/v1/requests/{name}")
            try:
                async with await asyncio.wait_for(deleting, 3.0) as deleted:
                    assert deleted.status == 200
            finally:
                slow.writer.close()


@on_loop
async def test_no_error_after_end_of_stream(tmp_path: Path) -> None:
    """The last bytes still wait for their client when the request is cancelled."""
    async with run_proxy(tmp_path) as proxy:
        for events in range(4, 40, 3):
            name = f"mine-{events}"
            proxy.backend.answer = ["x" * 20_000] * events
            slow = await SlowClient.ask(proxy, {"X-Warmline-Request": name, "Connection": "close"})
            while not (await proxy.status())["settling"]:
                if not (await proxy.status())["lives"] and proxy.backend.calls["generate"]:
                    break
            async with proxy.client.delete(f"{proxy.url}/v1/requests/{name}"):
                pass
            received = await slow.read_rest()
            slow.writer.close()
            end = received.find(b"\r\n0\r\n\r\n")
            assert end < 0 or received[end + 7 :] == b"", f"{events}: {received[end:][:300]!r}"
