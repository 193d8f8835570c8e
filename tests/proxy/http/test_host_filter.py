"""Host names allowed in requests, checked before all else."""

import asyncio
from pathlib import Path

import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_common.process.loopback import parse_host
from warmline_common.settings.parsers import parse_hosts, split_names
from warmline_proxy.errors import ClientError
from warmline_proxy.http.host_filter import ANY_HOST, HostFilter, find_machine_names

HTTP_1_0, HTTP_1_1 = (1, 0), (1, 1)
HOSTS = HostFilter({"mac", "mac.local", "mac.tail1234.ts.net"})

ALLOWED = [
    "localhost", "LOCALHOST:8026", "localhost.", "localhost.:8026", "app.localhost", "host.docker.internal:8026",
    "127.0.0.1", "127.0.0.1:8026", "192.168.1.5:8026", "[::1]", "[::1]:8026", "[fe80::1%25en0]:8026", "[2001:db8::1]",
    "mac:8026", "Mac.Local", "mac.local.:8026", "mac.tail1234.ts.net",
]  # fmt: skip
FOREIGN = [
    "evil.example", "localhost.evil", "127.0.0.1.evil.example", "mac.local.evil.example", "evilmac.local", "xlocalhost",
    "2130706433", "0x7f.1", "127.1", "tail1234.ts.net", "a.mac.tail1234.ts.net",
]  # fmt: skip
MALFORMED = [
    "", " ", "localhost@evil.example", "user:pw@localhost", "localhost:80:80", "::1", "[::1", "localhost/", "a b",
    "localhost,evil.example", "localhost#", "localhost?", "l%6fcalhost", "localhost\\", "löcalhost", "localhost:8026x",
]  # fmt: skip


def find_refusal(
    *hosts: str, target: str = "/v1/models", version: tuple[int, int] = HTTP_1_1, names: HostFilter = HOSTS
) -> int:
    """HTTP status of the refusal; 0 without one."""
    try:
        names.check(hosts, target, version)
    except ClientError as error:
        assert "evil" not in str(error) or error.status == 403
        return error.status
    return 0


@pytest.mark.parametrize(("hosts", "status"), [(ALLOWED, 0), (FOREIGN, 403), (MALFORMED, 400)])
def test_allowed_hosts(hosts: list[str], status: int) -> None:
    assert {host: find_refusal(host) for host in hosts} == dict.fromkeys(hosts, status)


def test_single_host_header_required() -> None:
    assert find_refusal("localhost", "localhost") == find_refusal("localhost", "evil.example") == 400
    assert find_refusal() == 400
    assert find_refusal(version=HTTP_1_0) == 0, "browsers do not use HTTP/1.0"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost:8026/v1/models", 0),
        ("*", 0),
        ("http://evil.example/v1/models", 403),
        ("http://localhost@evil.example/health", 400),
        ("http:///health", 400),
        ("evil.example:443", 403),
        ("//evil.example/health", 0),
    ],
)
def test_absolute_target_host_is_checked(target: str, status: int) -> None:
    assert find_refusal("localhost", target=target) == status


def test_any_host_setting() -> None:
    names = HostFilter(split_names(parse_hosts(" *, x.example ")))
    assert find_refusal("evil.example", names=names) == 0 and find_refusal("evil example", names=names) == 400


def test_host_names_of_the_setting() -> None:
    assert split_names(parse_hosts("")) == frozenset()
    assert split_names(parse_hosts("Mac.Example., b ,")) == {"mac.example", "b"}
    assert split_names(parse_hosts(f"{ANY_HOST},10.0.0.1")) == {ANY_HOST, "10.0.0.1"}
    for bad in ("https://x", "x:80", "a/b", "*.x", "a b", "x..y"):
        with pytest.raises(ValueError, match="expected host names"):
            parse_hosts(bad)


def test_find_machine_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Studio.home.arpa")
    monkeypatch.setattr("socket.getfqdn", lambda: "studio.example.org")
    monkeypatch.setattr("sys.platform", "linux")
    alone, reached = find_machine_names(with_domains=False), find_machine_names(with_domains=True)
    assert alone == {"studio", "studio.local"}, "the network could assign a foreign name"
    assert reached - alone == {"studio.home.arpa", "studio.example.org"}
    assert all(parse_host(name) == name for name in reached)


async def fetch_status(url: str, head: str) -> int:
    """HTTP status of the response to this request head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


@on_loop
async def test_host_checked_on_every_path_despite_key(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, client_key="sesame", allowed_hosts="mac.example") as proxy:
        secret = proxy.home.load_secret()
        for key in ("sesame", secret):
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/warmline/status", "/admin", "/none"):
                headers = f"Connection: close\nAuthorization: Bearer {key}"
                assert await fetch_status(proxy.url, f"GET {path} HTTP/1.1\nHost: evil.example\n{headers}") == 403, path
        assert await fetch_status(proxy.url, "OPTIONS /v1/models HTTP/1.1\nHost: evil.example") == 403
        assert await fetch_status(proxy.url, "GET /health HTTP/1.1\nHost: MAC.example:8026") == 200
        assert await fetch_status(proxy.url, "GET http://evil.example/health HTTP/1.1\nHost: localhost") == 403
        assert await fetch_status(proxy.url, "GET /health HTTP/1.1\nHost: localhost\nHost: evil.example") == 400
        assert await fetch_status(proxy.url, "GET /health HTTP/1.1\nHost: evil.example\nHost: localhost") == 400
        assert await fetch_status(proxy.url, "GET /health HTTP/1.1\nX: y") == 400
        assert await fetch_status(proxy.url, "CONNECT evil.example:443 HTTP/1.1\nHost: localhost") in (403, 404)
        async with proxy.client.get(f"{proxy.url}/health", headers={"Host": "evil.example"}) as response:
            error = (await response.json())["error"]
        assert error["code"] == "host_not_allowed" and "the setting allowed_hosts" in error["message"]
