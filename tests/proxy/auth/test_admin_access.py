"""Admin access by credential, peer, host and page."""

import base64
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.auth.admin_access import ADMIN, MISSING, SECRET, WRONG, AccessRequest, check_admin, extract_key
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError

HERE, LAN = "127.0.0.1", "192.168.1.7"
OWN = "http://127.0.0.1:8026"
CHANGES = {"X-Warmline-Admin": "1"}
VISIT = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


def find_refusal_status(
    shown: str = MISSING,
    headers: dict[str, str] | None = None,
    *,
    method: str = "GET",
    peer: str = HERE,
    host: str = "127.0.0.1:8026",
    page: bool = False,
    needs_key: bool = False,
    version: tuple[int, int] = (1, 1),
) -> int:
    """HTTP status of the refusal; 200 without one."""
    hosts = host.split("|") if host else []
    access_request = AccessRequest(method, peer, hosts, CIMultiDict({"Host": host, **(headers or {})}), page, version)
    try:
        check_admin(access_request, shown, needs_key)
    except ClientError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("peer", "host", "expected"),
    [
        (HERE, "127.0.0.1:8026", 200),
        (HERE, "localhost", 200),
        (HERE, "LOCALHOST.:8026", 200),
        (HERE, "admin.localhost:8026", 200),
        (HERE, "[::1]:8026", 200),
        ("::1", "[::1]", 200),
        ("::ffff:127.0.0.1", "127.0.0.1", 200),
        ("127.8.9.1", "127.0.0.1", 200),
        (LAN, "127.0.0.1", 401),
        ("::ffff:192.168.1.7", "localhost", 401),
        ("", "localhost", 401),
        ("not an address", "localhost", 401),
        (HERE, "192.168.1.5", 401),
        (HERE, "mac.local", 401),
        (HERE, "host.docker.internal", 401),
        (HERE, "localhost.evil", 401),
        (HERE, "localhost@evil", 401),
        (HERE, "", 401),
        (HERE, "localhost|localhost", 401),
    ],
)
def test_local_peer_and_host_are_owner(peer: str, host: str, expected: int) -> None:
    assert find_refusal_status(peer=peer, host=host) == expected
    assert find_refusal_status(ADMIN, peer=peer, host=host) == 200
    assert find_refusal_status(peer=peer, host=host, needs_key=True) == 401
    assert find_refusal_status(WRONG, peer=peer, host=host) == 401, "a wrong key is refused even locally"


@pytest.mark.parametrize(
    "header",
    ["X-Forwarded-For", "x-forwarded-host", "Forwarded", "Via", "X-Real-IP", "CF-Connecting-IP", "Tailscale-User-Login",
     "X-Forwarded-Proto", "True-Client-IP", "X-Forwarded", "X-Cluster-Client-IP", "Fastly-Client-IP"],
)  # fmt: skip
def test_forwarding_header_is_not_local(header: str) -> None:
    assert find_refusal_status(headers={header: "127.0.0.1"}) == 401
    assert find_refusal_status(ADMIN, headers={header: "127.0.0.1"}) == 200


def test_http_1_0_is_not_local() -> None:
    assert find_refusal_status(version=(1, 0)) == find_refusal_status(version=(0, 9)) == 401
    assert find_refusal_status(ADMIN, version=(1, 0)) == 200


@pytest.mark.parametrize("shown", [MISSING, ADMIN])
@pytest.mark.parametrize(
    ("headers", "reads", "changes"),
    [
        ({}, 200, 200),
        ({"Sec-Fetch-Site": "none"}, 200, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": OWN}, 200, 200),
        ({"Sec-Fetch-Site": "same-site"}, 200, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403, 403),
        ({"Origin": OWN}, 200, 200),
        ({"Origin": "https://127.0.0.1:8026"}, 200, 200),
        ({"Origin": "http://127.0.0.1:3000"}, 403, 403),
        ({"Origin": "http://localhost:8026"}, 403, 403),
        ({"Origin": "http://evil.example"}, 403, 403),
        ({"Origin": "null"}, 403, 403),
        ({"Origin": ""}, 403, 403),
        ({"Origin": "ftp://127.0.0.1:8026"}, 403, 403),
        ({"Origin": "http://["}, 403, 403),
        ({"Origin": "http://\u2100.example"}, 403, 403),
        (VISIT, 403, 403),
    ],
)
def test_cross_site_pages_are_refused(shown: str, headers: dict[str, str], reads: int, changes: int) -> None:
    assert find_refusal_status(shown, headers) == find_refusal_status(shown, headers, method="HEAD") == reads
    assert find_refusal_status(shown, {**headers, **CHANGES}, method="POST") == changes
    assert find_refusal_status(shown, {**headers, **CHANGES}, method="DELETE") == changes
    for forgery in ({}, {"X-Warmline-Admin": "0"}):
        assert find_refusal_status(shown, {**headers, **forgery}, method="POST") == 403, "a form can't send the header"
    assert find_refusal_status(SECRET, headers, method="POST") == 200, "no browser knows the secret"


def test_cross_site_navigation_opens_pages_only() -> None:
    assert find_refusal_status(headers=VISIT, page=True) == 200
    assert find_refusal_status(headers={**VISIT, **CHANGES}, page=True, method="POST") == 403
    assert find_refusal_status(headers={**VISIT, "Sec-Fetch-Dest": "iframe"}, page=True) == 403
    assert find_refusal_status(headers={"Sec-Fetch-Site": "cross-site"}, page=True) == 403


def make_basic_header(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({}, ""),
        ({"Authorization": "Bearer k"}, "k"),
        ({"X-Api-Key": "k"}, "k"),
        ({"Authorization": make_basic_header("anybody:k:with:colons")}, "k:with:colons"),
        ({"Authorization": make_basic_header(":k")}, "k"),
        ({"Authorization": make_basic_header("k:")}, ""),
        ({"Authorization": "Basic %%%"}, "%%%"),
        ({"Authorization": "Basic "}, ""),
    ],
)
def test_extract_key(headers: dict[str, str], shown: str) -> None:
    assert extract_key(CIMultiDict(headers)) == shown


async def send_request(
    proxy: ProxyHarness, method: str, path: str, headers: dict[str, str], **more: Any
) -> tuple[int, str]:
    async with proxy.client.request(method, proxy.url + path, headers=headers, **more) as response:
        return response.status, response.headers.get("WWW-Authenticate", "")


@pytest.mark.parametrize("needs_key", [True, False])
def test_refusal_mentions_local_access_if_sufficient(needs_key: bool) -> None:
    with pytest.raises(ClientError, match="cachectl key show admin") as caught:
        check_admin(AccessRequest("GET", LAN, ["127.0.0.1"], CIMultiDict(), is_page=True), MISSING, needs_key)
    assert ("localhost" in str(caught.value)) is not needs_key


@on_loop
async def test_client_key_and_admin_key_are_separate(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, admin_needs_key=True) as proxy:
        admin = keys_file.ensure_key(proxy.home, keys_file.ADMIN_KIND).key
        client = keys_file.add_key(proxy.home, "me").key
        away, secret = {"X-Forwarded-For": "10.0.0.1"}, proxy.home.load_secret()
        for path in ("/warmline/status", "/warmline/requests"):
            for headers, expected in (
                ({}, 401),
                ({"Authorization": f"Bearer {client}"}, 401),
                ({"X-Api-Key": admin}, 200),
                ({"Authorization": make_basic_header(f"owner:{admin}"), **away}, 200),
                ({"Authorization": f"Bearer {admin}"}, 200),
                ({"Authorization": f"Bearer {secret}", **away}, 200),
            ):
                found, challenge = await send_request(proxy, "GET", path, headers)
                assert found == expected and challenge == ("Bearer" if expected == 401 else "")
        purge = {"json": {"everything": True}}
        as_admin = {"Authorization": make_basic_header(f"owner:{admin}")}
        for by_itself in (
            as_admin,
            {"Authorization": make_basic_header(f":{secret}")},
        ):  # browsers repeat Basic credentials
            assert (await send_request(proxy, "POST", "/warmline/purge", by_itself, **purge))[0] == 403
            assert (await send_request(proxy, "GET", "/warmline/status", by_itself))[0] == 200
        assert (await send_request(proxy, "POST", "/warmline/purge", {**as_admin, **CHANGES}, **purge))[0] == 200
        for key in (admin, secret, ""):
            assert (await proxy.chat(headers={"Authorization": f"Bearer {key}"})).status == 401
        assert (await proxy.chat(headers={"Authorization": f"Bearer {client}"})).status == 200
        for key, expected in ((client, 200), (admin, 200), (secret, 200), ("wrong", 401)):
            assert (await send_request(proxy, "GET", "/metrics", {"X-Api-Key": key}))[0] == expected
        async with proxy.client.get(f"{proxy.url}/metrics", headers={"X-Api-Key": admin}) as response:
            counted = await response.text()
        assert 'warmline_unauthorized_total{door="owner"}' in counted and 'door="client"' in counted


@on_loop
async def test_page_refusal_has_basic_challenge(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, admin_needs_key=True) as proxy:
        assert await send_request(proxy, "GET", "/admin", {}) == (401, 'Basic realm="Warmline", charset="UTF-8"')
    async with run_proxy(tmp_path / "open") as proxy:
        assert (await send_request(proxy, "GET", "/admin", VISIT))[0] == 200
        assert (await send_request(proxy, "GET", "/warmline/status", VISIT))[0] == 403
        assert (await send_request(proxy, "GET", "/warmline/status", {}))[0] == 200
        assert (await send_request(proxy, "POST", "/warmline/purge", {}, json={"everything": True}))[0] == 403


@on_loop
async def test_local_peer_is_not_owner_behind_proxy(
    tmp_path: Path,
) -> None:
    """Further host names on loopback imply a reverse proxy, which may add no header."""
    async with run_proxy(tmp_path, allowed_hosts="llm.example.org") as proxy:
        assert (await send_request(proxy, "GET", "/warmline/status", {}))[0] == 401
        async with proxy.client.get(
            f"{proxy.url}/warmline/status", headers={"X-Api-Key": proxy.home.load_secret()}
        ) as response:
            assert response.status == 200 and response.headers["Cache-Control"] == "no-store"
    home = Home(tmp_path / "other")
    assert not ProxyConfig(home=home, lan=True, allowed_hosts="llm.example.org").is_admin_key_required
    assert ProxyConfig(home=home, lan=True, admin_needs_key=True).is_admin_key_required
    assert not ProxyConfig(home=home).is_admin_key_required


BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@on_loop
async def test_browser_is_redirected_to_dashboard(tmp_path: Path) -> None:
    """Only with access to the dashboard; other clients' requests for "/" are answered and counted as before."""
    async with run_proxy(tmp_path) as proxy:

        async def visit(method: str, headers: dict[str, str], path: str = "/") -> tuple[int, str]:
            more = {"headers": headers, "allow_redirects": False}
            async with proxy.client.request(method, proxy.url + path, **more) as response:
                if response.status == 303:
                    assert response.headers["Cache-Control"] == "no-store" and await response.read() == b""
                return response.status, response.headers.get("Location", "")

        for method in ("GET", "HEAD"):
            for headers in (BROWSER, {**BROWSER, **VISIT}):
                assert await visit(method, headers, "/?x=1") == (303, "/admin")
            for headers in ({}, {"Accept": "text/html-not, */*"}, {**BROWSER, "Sec-Fetch-Site": "cross-site"}):
                assert await visit(method, headers) == (404, "")
            assert await visit(method, {**BROWSER, "X-Forwarded-For": "10.0.0.1"}) == (404, ""), "from elsewhere"
            assert await visit(method, {**BROWSER, "Host": "stranger.example"}) == (403, "")
        assert await visit("POST", BROWSER) == await visit("GET", BROWSER, "/v1") == (404, "")
        client, admin = (
            keys_file.ensure_key(proxy.home, name).key for name in (keys_file.CLIENT_KIND, keys_file.ADMIN_KIND)
        )
        away = {**BROWSER, "Host": f"{LAN}:8026"}
        assert await visit("GET", BROWSER) == (303, "/admin")
        assert await visit("GET", away) == (401, "")
        assert await visit("GET", {**away, "Authorization": f"Bearer {client}"}) == (404, "")
        assert await visit("GET", {**away, "Authorization": make_basic_header(f":{admin}")}) == (303, "/admin")
        async with proxy.client.get(f"{proxy.url}/metrics", headers={"X-Api-Key": admin}) as response:
            assert 'warmline_unauthorized_total{door="owner"} 0.0' in await response.text()


@pytest.mark.parametrize(
    ("headers", "alone"),
    [
        ({}, True),
        ({"Host": "localhost:8026"}, True),
        ({"Host": "[::1]:8026"}, True),
        ({"Host": f"{LAN}:8026"}, False),
        ({"Host": f"{LAN}:8026", **VISIT}, True),  # by HTTPS
    ],
)
@on_loop
async def test_opener_policy_only_in_secure_contexts(tmp_path: Path, headers: dict[str, str], alone: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        shown = {"Authorization": f"Bearer {proxy.home.load_secret()}", **headers}
        async with proxy.client.get(f"{proxy.url}/admin", headers=shown) as response:
            assert response.status == 200
            assert ("Cross-Origin-Opener-Policy" in response.headers) == alone
