"""Hostile bodies on real sockets: bounded memory and structure, a least rate; small requests go on meanwhile."""

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import on_loop, run_proxy
from support.proxy.raw_connections import RawClient, open_client, run_server, wait_until
from warmline_common.protocol.json_structure import JSON_DEPTH_MAX, JsonStructure
from warmline_proxy.app import COMPONENTS
from warmline_proxy.errors import ClientError
from warmline_proxy.http import bodies
from warmline_proxy.http.bodies import FIELDS_MAX, JSON_CONTAINERS_MAX, JSON_STRINGS_MAX, BodyReader, check_structure
from warmline_proxy.http.body_budget import BodyBudget

POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
GZIP_HEAD = POST + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n"


def compress_partly(size: int) -> bytes:
    """Request with an unfinished body, of which `size` bytes can be decompressed."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = compressor.compress(b'{"a": "' + b"a" * size) + compressor.flush(zlib.Z_SYNC_FLUSH)
    return GZIP_HEAD % (len(data), data)


@on_loop
async def test_unfinished_compressed_bodies_stay_within_the_budget(tmp_path: Path) -> None:
    async with run_server(tmp_path, body_budget_mb=8) as (server, connect):
        opening, largest = compress_partly(4_000_000), 0
        greedy = [await connect() for _ in range(8)]
        for client in greedy:
            client.send(opening)
        small = await connect()
        while not all(client.reader.at_eof() or server.budget.counted_bytes > 3_900_000 for client in greedy):
            small.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            assert (await small.read_response())[2] == {"bytes": 2}
            largest = max(largest, server.budget.counted_bytes)
        assert server.budget.counted_bytes > 3_900_000 and largest <= 8_000_000
        answers = [asyncio.ensure_future(client.read_response()) for client in greedy]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        status, headers, body = done.pop().result()
        assert (status, body["error"]["code"]) == (503, "bodies_full") and int(headers["retry-after"]) > 0
        for answer in answers:
            answer.cancel()
        for client in greedy:
            client.reset()
        await wait_until(lambda: not server.budget.counted_bytes)


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b'"%s"' % (b"a" * 749_000), ""),
        (b'"%s"' % (b"a" * 750_000), "budget"),
        (b'{"a": [%s]}' % b",".join([b"{}"] * 2_500), ""),
        (b'{"a": [%s]}' % b",".join([b"{}"] * 3_000), "budget"),
    ],
    ids=["within", "too long", "values within", "too many values"],
)
@on_loop
async def test_small_budget_is_named_where_it_is_the_limit(tmp_path: Path, body: bytes, refused: str) -> None:
    async with run_server(tmp_path, body_budget_mb=1) as (server, connect):
        client = await connect()
        client.send(f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n")
        client.send(body)
        status, _, answer = await client.read_response()
        assert status == (413 if refused else 200)
        if refused:
            assert "more than the 750000 bytes of memory that body_budget_mb leaves" in answer["error"]["message"]
        await wait_until(lambda: not server.budget.counted_bytes)


@on_loop
async def test_body_counts_until_its_request_is_answered(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        budget = proxy.app[COMPONENTS].body_reader._budget
        proxy.backend.hold_after = 0
        asked = asyncio.ensure_future(proxy.chat("x" * 5000))
        await proxy.backend.holding.wait()
        assert budget.counted_bytes > 5000
        proxy.backend.may_continue.set()
        assert (await asked).status == 200
        await wait_until(lambda: not budget.counted_bytes)


@on_loop
async def test_body_counts_until_its_answer_is_read(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        budget, proxy.backend.answer = proxy.app[COMPONENTS].body_reader._budget, ["x" * 3_000_000]
        body = json.dumps({"messages": [{"role": "user", "content": "y" * 5000}]}).encode()
        client = await open_client(int(proxy.url.rpartition(":")[2]), 4096)
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        client.send(body)
        head = await client.reader.readuntil(b"\r\n\r\n")
        await proxy.wait_until_saved()
        assert budget.counted_bytes > 5000
        await client.reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        await wait_until(lambda: not budget.counted_bytes)
        client.reset()


def compress(text: bytes) -> tuple[bytes, str]:
    return zlib.compress(text, 1), "deflate"


@pytest.mark.parametrize("encode", [compress, lambda text: (text, "identity")])
@pytest.mark.parametrize("size", [0, 10, 70_000, 500_000])
@on_loop
async def test_stored_text_counts_as_a_part_of_the_body(size: int, encode: Any) -> None:
    budget = BodyBudget(1_000_000)
    body = budget.open_body("a")
    body.append(b"{}", 100)
    body.take()
    stored = json.dumps({"a": "x" * size, "b": [1, 2]}).encode()
    text = await BodyReader(budget, 1.0).read_stored(body, *encode(stored))
    assert text.data == stored and text.structure.containers == 2
    assert budget.counted_bytes == 102 + text.counted_bytes and len(stored) < text.counted_bytes < len(stored) + 1000


@pytest.mark.parametrize("data", [b"", b"x" * 100, zlib.compress(b"x" * 100_000)[:-9], zlib.compress(b"{}") + b"x"])
@on_loop
async def test_damaged_stored_text_is_a_value_error(data: bytes) -> None:
    budget = BodyBudget(1_000_000)
    with pytest.raises(ValueError, match="can't be read as deflate"):
        await BodyReader(budget, 1.0).read_stored(budget.open_body("a"), data, "deflate")
    assert budget.counted_bytes == 0


@on_loop
async def test_stored_text_that_expands_beyond_the_budget_is_not_kept() -> None:
    budget, data = BodyBudget(1_000_000), zlib.compress(b"x" * 740_000)
    budget.open_body("other").count(300_000)
    body = budget.open_body("a")
    with pytest.raises(ClientError, match=r"^503"):
        await BodyReader(budget, 1.0).read_stored(body, data, "deflate")
    assert body.counted_bytes == 0
    body.count(20_000)
    with pytest.raises(ClientError, match=r"^413"):
        await BodyReader(BodyBudget(900_000), 1.0).read_stored(BodyBudget(900_000).open_body("a"), data, "deflate")


@on_loop
async def test_body_that_trickles_returns_408(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_RATE_GRACE_S", 0.2)
    async with run_server(tmp_path, receive_timeout_s=10.0) as (_, connect):
        client = await connect()
        client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        answer = asyncio.ensure_future(client.read_response())
        while not answer.done():
            client.send("x")
            await asyncio.sleep(0.02)
        status, _, body = await answer
        assert status == 408 and "1000 bytes a second" in body["error"]["message"]


def check(body: bytes) -> None:
    structure = JsonStructure()
    structure.feed(body)
    check_structure(structure)


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def make_transcript(messages: int, tools: int) -> bytes:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": 2}]}'}}
    turn = {"role": "assistant", "content": [{"type": "text", "text": "words " * 300}], "tool_calls": [call]}
    properties = {f"p{n}": {"type": "string", "description": "d", "enum": ["a", "b"]} for n in range(40)}
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": properties}}
    tool = {"type": "function", "function": function}
    return json.dumps({"model": "m", "messages": [turn] * messages, "tools": [tool] * tools}).encode()


@pytest.mark.parametrize(
    "body",
    [
        make_transcript(2_000, 500),
        json.dumps(nest(JSON_DEPTH_MAX)).encode(),
        b'{"prompt": [' + b",".join([b"5"] * 1_000_000) + b"]}",
        json.dumps(dict.fromkeys(map(str, range(FIELDS_MAX)))).encode(),
        json.dumps({"messages": "[{" * 200_000}).encode(),
    ],
    ids=["long transcript", "deepest", "many ids", "most fields", "brackets in text"],
)
def test_large_bodies_are_accepted(body: bytes) -> None:
    check(body)


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        (json.dumps(nest(JSON_DEPTH_MAX + 1)).encode(), "128 levels"),
        (b"[" * 100_000, "128 levels"),
        (b'{"a":' * 100_000, "128 levels"),
        (json.dumps(dict.fromkeys(map(str, range(FIELDS_MAX + 1)))).encode(), "1000 fields"),
        (b'{"m": [' + b",".join([b"{}"] * JSON_CONTAINERS_MAX) + b"]}", "100000 objects"),
        (b'{"m": [' + b",".join([b'"a"'] * JSON_STRINGS_MAX) + b"]}", "250000 strings"),
        (b'{"m": [' + b",".join([b"5"] * 2_000_001) + b"]}", "2000000 values"),
    ],
    ids=["one level too deep", "lists", "objects", "fields", "containers", "strings", "values"],
)
def test_json_beyond_bounds_returns_400(body: bytes, bound: str) -> None:
    with pytest.raises(ClientError, match=f"^400: .*more than {bound}"):
        check(body)


@on_loop
async def test_hostile_json_is_refused_before_its_end(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (_, connect):
        client: RawClient = await connect()
        client.send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n")
        client.send(b"{" + b",".join(b'"k%d":1' % number for number in range(5000)))
        status, _, body = await client.read_response()
        assert status == 400 and "1000 fields" in body["error"]["message"]
