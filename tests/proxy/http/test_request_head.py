"""Request heads on raw sockets: ambiguous, unknown or malformed ones are refused in the JSON envelope, by name."""

import re
from pathlib import Path

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from support.proxy.raw_connections import RawClient, open_client
from warmline_proxy.http import request_head
from warmline_proxy.http.request_head import HeaderNotices

HOST, BODY = "Host: localhost\r\n", "{}"
POST = f"POST /v1/messages/count_tokens HTTP/1.1\r\n{HOST}"
SIZE = f"Content-Length: {len(BODY)}\r\n"
CHUNKED_BODY = "2\r\n{}\r\n0\r\n\r\n"
GET = f"GET /v1/models HTTP/1.1\r\n{HOST}"
STALL = "X-Warmline-Stall-Timeout"

REFUSED = {
    # what: (request, status, words of the message)
    "two hosts": (f"{GET}{HOST}\r\n", 400, "one Host header; this one has several"),
    "no host": ("GET /v1/models HTTP/1.1\r\n\r\n", 400, "one Host header; this one has none"),
    "two equal lengths": (f"{POST}{SIZE}{SIZE}\r\n{BODY}", 400, "one Content-Length header"),
    "two lengths": (f"{POST}{SIZE}Content-Length: 3\r\n\r\n{BODY}", 400, "one Content-Length header"),
    "two types": (f"{POST}Content-Type: a/b\r\nContent-Type: a/c\r\n{SIZE}\r\n{BODY}", 400, "one Content-Type header"),
    "two keys": (f"{GET}Authorization: Bearer a\r\nAUTHORIZATION: Bearer b\r\n\r\n", 400, "one Authorization header"),
    "two other keys": (f"{GET}X-Api-Key: a\r\nX-Api-Key: a\r\n\r\n", 400, "one X-Api-Key header"),
    "two timeouts": (f"{POST}{STALL}: 1\r\n{STALL}: 2\r\n{SIZE}\r\n{BODY}", 400, f"one {STALL} header"),
    "two origins": (f"{GET}Origin: null\r\nOrigin: null\r\n\r\n", 400, "one Origin header"),
    "compressed transfer": (f"{POST}Transfer-Encoding: gzip, chunked\r\n\r\n{CHUNKED_BODY}", 501, "must be chunked"),
    "transfer without chunks": (f"{POST}Transfer-Encoding: gzip\r\n\r\n{BODY}", 400, "Transfer-Encoding"),
    "chunked twice": (f"{POST}Transfer-Encoding: chunked, chunked\r\n\r\n{CHUNKED_BODY}", 400, "Transfer-Encoding"),
    "two transfer codings": (
        f"{POST}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKED_BODY}",
        400,
        "Transfer-Encoding",
    ),
    "length and chunks": (f"{POST}{SIZE}Transfer-Encoding: chunked\r\n\r\n{CHUNKED_BODY}", 400, "Content-Length"),
    "chunks of HTTP/1.0": (
        f"{POST.replace('1.1', '1.0')}Transfer-Encoding: chunked\r\n\r\n{CHUNKED_BODY}",
        400,
        "HTTP/1.0",
    ),
    "signed length": (f"{POST}Content-Length: +2\r\n\r\n{BODY}", 400, "Content-Length"),
    "length in other digits": (f"{POST}Content-Length: ٢\r\n\r\n{BODY}", 400, "Content-Length"),
    "length with underscore": (f"{POST}Content-Length: 0_2\r\n\r\n{BODY}", 400, "Content-Length"),
    "list of lengths": (f"{POST}Content-Length: 2, 2\r\n\r\n{BODY}", 400, "Content-Length"),
    "folded header": (f"{POST}X-A: 1\r\n 2\r\n{SIZE}\r\n{BODY}", 400, "whitespace"),
    "bare line feeds": (GET.replace("\r", "") + "\n", 400, "CRLF"),
    "NUL in a header": (f"{GET}X-A: a\0b\r\n\r\n", 400, "header value"),
    "target without a path": (f"GET * HTTP/1.1\r\n{HOST}\r\n", 400, "must be a path"),
    "target with a wrong port": (f"GET http://localhost:99999/ HTTP/1.1\r\n{HOST}\r\n", 400, "must be a path"),
    "other host in the target": (f"GET http://evil.example/v1/models HTTP/1.1\r\n{HOST}\r\n", 403, "evil.example"),
    "tunnel": (f"CONNECT localhost:443 HTTP/1.1\r\n{HOST}\r\nGET /v1/models HTTP/1.1\r\n{HOST}\r\n", 405, "proxy"),
    "tunnel without a port": (f"CONNECT localhost HTTP/1.1\r\n{HOST}\r\n", 405, "proxy"),
    "tunnel elsewhere": (f"CONNECT evil.example:443 HTTP/1.1\r\n{HOST}\r\n", 403, "evil.example"),
}


async def ask(proxy: ProxyHarness, request: str) -> tuple[RawClient, int, dict[str, str], str]:
    """Client, status, headers and body of the answer to one raw request."""
    client = await open_client(int(proxy.url.rpartition(":")[2]))
    client.send(request)
    head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
    headers = {name.lower(): value for name, value in re.findall(r"(?m)^([\w-]+): (.*)\r$", head)}
    body = await client.reader.readexactly(int(headers.get("content-length", "0")))
    return client, int(head.split()[1]), headers, body.decode()


@on_loop
async def test_heads_are_refused_in_the_envelope(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for kind, (request, status, words) in REFUSED.items():
            client, *answer, body = await ask(proxy, request)
            assert answer[0] == status and answer[1]["content-type"] == "application/json", kind
            assert words in body and '"message":' in body, (kind, body)
            if "evil" not in request and "two" not in kind:
                assert await client.is_closed(), kind
            client.writer.close()


@pytest.mark.parametrize("target", ["*", "/v1/models", "http://localhost/v1/models"])
@on_loop
async def test_options_name_the_methods(tmp_path: Path, target: str) -> None:
    async with run_proxy(tmp_path) as proxy:
        client, status, headers, _ = await ask(proxy, f"OPTIONS {target} HTTP/1.1\r\n{HOST}\r\n")
        assert status == 204 and "POST" in headers["allow"]
        client.writer.close()


@on_loop
async def test_unusual_heads_are_read(tmp_path: Path) -> None:
    requests = [
        f"GET http://localhost/v1/models HTTP/1.1\r\n{HOST}\r\n",
        f"{GET}Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
        f"{GET}Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{{}}\r\n0\r\nX-Trailer: 1\r\n\r\n",
        "GET /v1/models HTTP/1.0\r\n\r\n",
        f"{GET}Accept: a\r\nAccept: b\r\nAuthorization: Bearer a\r\nX-Api-Key: a\r\n\r\n",
    ]
    async with run_proxy(tmp_path) as proxy:
        for request in requests:
            client, status, _, body = await ask(proxy, request)
            assert status == 200 and '"list"' in body, request
            client.writer.close()


def test_misspelt_header_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    notices = HeaderNotices()
    names = ("X-Warmline-Totl-Timeout", "x-warmline-stall_timeout", STALL.upper(), "X-Warmline-Cache", "X-Request-Id")
    for _ in range(2):
        notices.log_typos([*names, "X-Warmline-Totl-Timeout" + "t" * 40])
    assert [record.getMessage() for record in caplog.records] == [
        "request header 'X-Warmline-Totl-Timeout' is not known and has no effect; did you mean "
        "'X-Warmline-Total-Timeout'?",
        "request header 'x-warmline-stall_timeout' is not known and has no effect; did you mean "
        "'X-Warmline-Stall-Timeout'?",
    ]


def test_misspelt_header_names_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_head, "NOTICES_MAX", 2)
    HeaderNotices().log_typos([f"X-Warmline-Total-Timeout{letter}" for letter in "abc"])
    assert len(caplog.records) == 2


@on_loop
async def test_misspelt_header_of_a_generation_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with run_proxy(tmp_path) as proxy:
        assert (await proxy.chat(headers={"X-Warmline-Totl-Timeout": "1"})).status == 200
    assert "did you mean 'X-Warmline-Total-Timeout'?" in caplog.text
