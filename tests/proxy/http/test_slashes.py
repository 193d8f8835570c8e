"""Doubled slashes in paths: the same path for access, routes, envelopes of errors and preflights."""

import asyncio
import json
from pathlib import Path

from support.proxy.harness import ProxyHarness, on_loop, run_proxy

CHAT = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 5}


async def send(proxy: ProxyHarness, target: str, body: object = None, *headers: str) -> tuple[int, dict[str, object]]:
    """Send a request line as it is: clients' libraries may merge slashes themselves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = [
        f"{method} {target} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Length: {len(data)}",
        *headers,
        "Connection: close",
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + data)
    status_line, _, rest = (await reader.read()).partition(b"\r\n")
    writer.close()
    return int(status_line.split()[1]), json.loads(rest.partition(b"\r\n\r\n")[2])


@on_loop
async def test_doubled_slashes_are_one(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for path in ("//v1/chat/completions", "/v1//chat/completions", "///v1/chat///completions//?a=//b"):
            status, answer = await send(proxy, path, CHAT)
            assert status == 200 and answer["object"] == "chat.completion", path
        status, answer = await send(proxy, "//v1//messages//count_tokens", CHAT)
        assert status == 200 and answer["input_tokens"]
        status, answer = await send(proxy, "/v1//messages", {})
        assert (status, answer["type"]) == (400, "error")
        assert (await send(proxy, "//v1/models"))[1]["object"] == "list"
        assert (await send(proxy, "//health"))[0] == 200


@on_loop
async def test_doubled_slashes_in_a_url_are_one(tmp_path: Path) -> None:
    """RFC 9112, 3.2.2: a target may be a whole URL, of which the path counts, and the host is checked."""
    async with run_proxy(tmp_path) as proxy:
        for origin in ("http://localhost", "HTTP://127.0.0.1:1", "https://localhost:99"):
            assert (await send(proxy, f"{origin}//v1//models"))[1]["object"] == "list"
            assert (await send(proxy, f"{origin}/v1/models//?a=//b"))[1]["object"] == "list"
            assert (await send(proxy, f"{origin}//v1/chat//completions", CHAT))[0] == 200
            assert (await send(proxy, f"{origin}//warmline//status", None, "Via: 1.1 other"))[0] == 401
        status, answer = await send(proxy, "http://foreign.example//v1//models")
        assert status == 403 and "foreign.example" in str(answer)
        assert (await send(proxy, "http://localhost//"))[0] == 404


@on_loop
async def test_doubled_slashes_open_no_path_of_the_owner(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for path in ("/warmline/status", "//warmline/status", "/warmline//status"):
            assert (await send(proxy, path))[0] == 200, path
            assert (await send(proxy, path, None, "Via: 1.1 other"))[0] == 401, path
        assert (await send(proxy, "/%2Fwarmline/status"))[0] == 404
