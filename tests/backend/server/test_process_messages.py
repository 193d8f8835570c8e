"""Messages of the process: a failed start; requests that are no HTTP, a line each, without their bytes."""

import asyncio
import logging

import pytest
from aiohttp import web
from aiohttp.log import server_logger

from support.proxy.harness import on_loop, serve
from warmline_backend.__main__ import format_load_failure
from warmline_backend.server.unreadable_requests import UnreadableRequestFilter

HOST = "Host: localhost\r\n"
REQUESTS = [
    ("no HTTP at all SECRET\r\n\r\n", ""),  # logged for debugging only
    (f"GET / HTTP/1.1\r\n{HOST}Authorization: Bearer SECRET\x01\r\n\r\n", "Invalid header value char"),
    (f"GET / HTTP/1.1\r\n{HOST}{HOST}\r\n", "Duplicate '…' header found."),
    (f"GET / HTTP/1.1\r\n{HOST}X: {'SECRET' * 2000}\r\n\r\n", "Got more than"),
    (f"POST / HTTP/1.1\r\n{HOST}Content-Length: SECRET\r\n\r\n", "Invalid character in Content-Length"),
]


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("--model /nowhere: there is no such folder", "can't serve: --model /nowhere: there is no such folder"),
        ("the tokenizer can't be loaded", "can't serve /nowhere: the tokenizer can't be loaded"),
    ],
)
def test_load_failure_names_model_once(reason: str, message: str) -> None:
    assert format_load_failure("/nowhere", reason) == message


@on_loop
async def check_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    runner, port = await serve(web.Application())
    for request, reason in REQUESTS:
        caplog.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request.encode())
        assert b" 400 " in await reader.readline()
        writer.close()
        if not reason:
            assert not caplog.records
            continue
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and record.exc_info is None
        assert reason in record.message and "SECRET" not in record.message and "\n" not in record.message
    await runner.cleanup()


def test_unreadable_requests_log_one_line(caplog: pytest.LogCaptureFixture) -> None:
    own = UnreadableRequestFilter()
    server_logger.addFilter(own)
    try:
        check_one_line_each(caplog)
    finally:
        server_logger.removeFilter(own)


def test_other_records_keep_their_traceback() -> None:
    failure = (ValueError, ValueError("x"), None)
    record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 1, "failed", None, failure)
    assert UnreadableRequestFilter().filter(record)
    assert record.exc_info == failure and record.levelno == logging.ERROR
