"""Request ids in every response, under the headers that SDKs read, and in log lines."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.logging import current_request_id
from warmline_proxy.http.connections import connections_full, encode_error_response

NAMES = ("X-Warmline-Request", "X-Request-Id", "Request-Id")


def get_request_id(headers: Mapping[str, str]) -> str:
    (request_id,) = {headers[name] for name in NAMES}
    return request_id


async def fetch_raw(proxy: ProxyHarness, data: bytes) -> dict[str, str]:
    """Response headers for bytes that may not be HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(data)
    await writer.drain()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().strip()
    writer.close()
    return dict(line.split(": ", 1) for line in head.splitlines()[1:])


@on_loop
async def test_every_response_has_unique_id(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        streamed = await proxy.chat(stream=True)
        answered = await proxy.chat()
        wrong = await proxy.client.post(f"{proxy.url}/v1/messages", data=b"no JSON")
        ids = [get_request_id(response.headers) for response in (streamed, answered, wrong)]
        for path in ("/health", "/nowhere", "/v1/models"):
            async with proxy.client.get(proxy.url + path) as response:
                ids.append(get_request_id(response.headers))
        ids += [
            get_request_id(await fetch_raw(proxy, b"no HTTP\r\n\r\n")),
            get_request_id(await fetch_raw(proxy, b"GET / HTTP/1.1\r\nA\r\n\r\n")),
        ]
        assert len(set(ids)) == len(ids)


@on_loop
async def test_client_request_id_is_kept_if_valid(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for path in ("/v1/models", "/nowhere"):
            async with proxy.client.get(proxy.url + path, headers={NAMES[0]: "mine-1"}) as response:
                assert get_request_id(response.headers) == "mine-1"
        answered = await proxy.chat(headers={NAMES[0]: "mine-2"})
        assert answered.status == 200 and get_request_id(answered.headers) == "mine-2"
        refused = await proxy.chat(headers={NAMES[0]: "not one"})
        assert refused.status == 400 and get_request_id(refused.headers) != "not one"


def test_refused_connection_has_request_id() -> None:
    head = encode_error_response(connections_full()).partition(b"\r\n\r\n")[0].decode()
    assert len(get_request_id(dict(line.split(": ", 1) for line in head.splitlines()[1:]))) == 24


class LogCapture(logging.Handler):
    """Log lines with the request id of their context."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((current_request_id(), record.getMessage()))


@pytest.fixture
def capture() -> Iterator[LogCapture]:
    handler, logger = LogCapture(), logging.getLogger("warmline_proxy")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@on_loop
async def test_reads_of_unknown_paths_are_logged_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "warmline_proxy.http.request_id")
    async with run_proxy(tmp_path) as proxy:
        for method, path in (("HEAD", "/"), ("GET", "/api/tags"), ("POST", "/v1/embeddings")):
            async with proxy.client.request(method, proxy.url + path):
                pass
    levels = {record.message.split(":")[0]: record.levelname for record in caplog.records}
    assert levels == {
        "refused HEAD /": "DEBUG",
        "refused GET /api/tags": "DEBUG",
        "refused POST /v1/embeddings": "INFO",
    }


@on_loop
async def test_log_lines_carry_request_id(tmp_path: Path, capture: LogCapture) -> None:
    async with run_proxy(tmp_path) as proxy:
        await asyncio.gather(*(proxy.chat(f"Question {name}", headers={NAMES[0]: name}) for name in ("a", "b")))
        await proxy.chat(n=2, headers={NAMES[0]: "c"})
        refused = await proxy.chat(stop=5, headers={NAMES[0]: "d"})
        await proxy.wait_until_saved()
    perf = {about: line.split()[1] for about, line in capture.lines if line.startswith("PERF")}
    assert perf == {name: f"request={name}" for name in ("a", "b", "c.0", "c.1", "d")}
    assert refused.status == 400
    assert [about for about, line in capture.lines if line.startswith("refused POST /v1/chat/completions: 400")] == [
        "d"
    ]
    assert not current_request_id()
