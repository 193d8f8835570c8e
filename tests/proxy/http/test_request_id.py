"""Every answer has its request's id, whoever gives it, and under the names that SDKs look for."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.proxy.harness import Pair, on_loop, pair
from warmline_common.logging import current_request_id
from warmline_proxy.http.connections import connections_full, encode_error_response

NAMES = ("X-Warmline-Request", "X-Request-Id", "Request-Id")


def id_in(headers: Mapping[str, str]) -> str:
    (request_id,) = {headers[name] for name in NAMES}
    return request_id


async def raw(proxy: Pair, data: bytes) -> dict[str, str]:
    """The head of the answer to something that may be no HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(data)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().strip()
    writer.close()
    return dict(line.split(": ", 1) for line in head.splitlines()[1:])


@on_loop
async def test_every_answer_has_one_of_its_own(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        streamed = await proxy.chat(stream=True)
        answered = await proxy.chat()
        wrong = await proxy.client.post(f"{proxy.url}/v1/messages", data=b"no JSON")
        found = [id_in(response.headers) for response in (streamed, answered, wrong)]
        for path in ("/health", "/nowhere", "/v1/models"):
            async with proxy.client.get(proxy.url + path) as response:
                found.append(id_in(response.headers))
        found += [id_in(await raw(proxy, b"no HTTP\r\n\r\n")), id_in(await raw(proxy, b"GET / HTTP/1.1\r\nA\r\n\r\n"))]
        assert len(set(found)) == len(found)


@on_loop
async def test_a_clients_own_name_is_kept_where_it_can_be_one(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        for path in ("/v1/models", "/nowhere"):
            async with proxy.client.get(proxy.url + path, headers={NAMES[0]: "mine-1"}) as response:
                assert id_in(response.headers) == "mine-1"
        answered = await proxy.chat(headers={NAMES[0]: "mine-2"})
        assert answered.status == 200 and id_in(answered.headers) == "mine-2"
        refused = await proxy.chat(headers={NAMES[0]: "not one"})
        assert refused.status == 400 and id_in(refused.headers) != "not one"


def test_whoever_finds_no_room_is_told_one_too() -> None:
    head = encode_error_response(connections_full()).partition(b"\r\n\r\n")[0].decode()
    assert len(id_in(dict(line.split(": ", 1) for line in head.splitlines()[1:]))) == 24


class Heard(logging.Handler):
    """Lines, and which request each is about."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((current_request_id(), record.getMessage()))


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("warmline_proxy")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@on_loop
async def test_lines_are_about_their_request_also_after_its_answer(tmp_path: Path, heard: Heard) -> None:
    async with pair(tmp_path) as proxy:
        await asyncio.gather(*(proxy.chat(f"Question {name}", headers={NAMES[0]: name}) for name in ("a", "b")))
        await proxy.chat(n=2, headers={NAMES[0]: "c"})
        refused = await proxy.chat(stop=5, headers={NAMES[0]: "d"})
        await proxy.settled()
    perf = {about: line.split()[1] for about, line in heard.lines if line.startswith("PERF")}
    assert perf == {name: f"request={name}" for name in ("a", "b", "c.0", "c.1", "d")}
    assert refused.status == 400
    assert [about for about, line in heard.lines if line.startswith("refused POST /v1/chat/completions: 400")] == ["d"]
    assert not current_request_id()
