"""CORS headers: none by default; for named origins under /v1 only."""

from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.settings.parsers import parse_origins, split_names
from warmline_common.storage.home import Home
from warmline_proxy.config import ProxyConfig, ProxyConfigError
from warmline_proxy.http.cors import build_cors_headers, is_untrusted_origin

PAGE = "https://chat.example"
ANY = frozenset({"*"})
ALLOW = "Access-Control-Allow-Origin"
ASKED = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type, Anthropic-Beta,x-stainless-lang,x-other",
}


@pytest.mark.parametrize(
    ("allowed", "origin", "answer"),
    [
        (f"{PAGE},http://localhost:3000", PAGE, {ALLOW: PAGE, "Vary": "Origin"}),
        (f"{PAGE}, http://LOCALHOST:3000", "http://localhost:3000", {ALLOW: "http://localhost:3000", "Vary": "Origin"}),
        ("*", PAGE, {ALLOW: "*"}),
        ("*", "null", {ALLOW: "*"}),
        ("*", "", {}),
        (PAGE, "https://chat.example.evil", {"Vary": "Origin"}),
        (PAGE, "http://chat.example", {"Vary": "Origin"}),
        (PAGE, "null", {"Vary": "Origin"}),
        ("", PAGE, {}),
    ],
)
def test_build_cors_headers(allowed: str, origin: str, answer: dict[str, str]) -> None:
    request_headers = {"Origin": origin} if origin else {}
    headers = build_cors_headers(split_names(parse_origins(allowed)), "POST", "/v1/messages", request_headers)
    exposed = headers.pop("Access-Control-Expose-Headers", "")
    assert headers == answer
    assert ("X-Warmline-Cache" in exposed) == (ALLOW in answer)


@pytest.mark.parametrize(
    ("origin", "strange"),
    [
        (None, False),
        ("http://192.168.1.5:8026", False),  # the proxy's own page
        (PAGE, False),
        ("http://localhost:3000", False),
        ("http://127.0.0.1", False),
        ("http://tauri.localhost", False),
        ("app://obsidian.md", False),
        ("chrome-extension://abcdef", False),
        ("vscode-webview://abcdef", False),
        ("file://", False),  # an Electron app; browsers send "null" for files
        ("https://evil.example", True),
        ("http://192.168.1.66", True),
        ("http://localhost.evil.example", True),
        ("http://localhost@evil.example", True),
        ("null", True),
        ("http://[", True),
        ("http:", True),
        ("evil.example", True),
    ],
)
def test_is_untrusted_origin(origin: str | None, strange: bool) -> None:
    assert is_untrusted_origin(origin, ["192.168.1.5:8026"], {PAGE}) == strange
    assert not is_untrusted_origin(origin, ["192.168.1.5:8026"], ANY)


def test_preflight_headers() -> None:
    headers = build_cors_headers(ANY, "OPTIONS", "/v1/chat/completions", ASKED)
    assert headers["Access-Control-Allow-Headers"] == "authorization, content-type, Anthropic-Beta, x-stainless-lang"
    assert "POST" in headers["Access-Control-Allow-Methods"] and headers["Access-Control-Max-Age"] == "3600"
    near = {**ASKED, "Access-Control-Request-Private-Network": "true"}
    private = "Access-Control-Allow-Private-Network"
    assert private not in headers and build_cors_headers(ANY, "OPTIONS", "/v1", near)[private] == "true"


@pytest.mark.parametrize("path", ["/warmline/status", "/metrics", "/health", "/", "/v1x", "/x/v1/models"])
def test_no_cors_headers_outside_v1(path: str) -> None:
    assert build_cors_headers(ANY, "GET", path, {"Origin": PAGE}) == {}


@pytest.mark.parametrize("wrong", ["chat.example", "https://chat.example/", "https://*.example", "null", "*,//x"])
def test_invalid_origin_setting(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ProxyConfigError, match=r"--cors-origins .*expected origins such as https://app.example"):
        ProxyConfig(home=Home(tmp_path), cors_origins=wrong)


async def send_request(proxy: ProxyHarness, method: str, path: str, **more: str) -> tuple[int, dict[str, str]]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True} if method == "POST" else {}
    headers = {"Origin": PAGE, **more}
    async with proxy.client.request(method, proxy.url + path, json=body or None, headers=headers) as response:
        await response.read()
        return response.status, {name: value for name, value in response.headers.items() if name.startswith("Access-")}


@on_loop
async def test_all_responses_have_cors_headers(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, cors_origins=PAGE, client_key="sesame") as proxy:
        status, headers = await send_request(proxy, "OPTIONS", "/v1/chat/completions", **ASKED)
        assert status == 204 and headers[ALLOW] == PAGE
        status, headers = await send_request(
            proxy, "GET", "/v1/models"
        )  # without the key: the page may read the refusal
        assert status == 401 and headers[ALLOW] == PAGE
        status, headers = await send_request(proxy, "POST", "/v1/chat/completions", Authorization="Bearer sesame")
        assert (
            status == 200 and headers[ALLOW] == PAGE and "X-Warmline-Cache" in headers["Access-Control-Expose-Headers"]
        )
        for path in ("/metrics", "/warmline/status", "/health"):
            assert (await send_request(proxy, "GET", path))[1] == (await send_request(proxy, "OPTIONS", path))[1] == {}


@on_loop
async def test_no_cors_by_default_and_host_checked_first(tmp_path: Path) -> None:
    async with run_proxy(tmp_path / "none") as proxy:
        assert await send_request(proxy, "OPTIONS", "/v1/models", **ASKED) == (204, {})
        assert await send_request(proxy, "GET", "/v1/models") == (403, {})
        page = {
            "Origin": PAGE,
            "Content-Type": "text/plain",
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "no-cors",
        }
        body = '{"messages": [{"role": "user", "content": "hi"}]}'
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", data=body, headers=page) as refused:
            assert refused.status == 403 and (await refused.json())["error"]["code"] == "foreign_page"
        assert not proxy.backend.calls["prompts"], "sent without a preflight"
    async with run_proxy(tmp_path / "all", cors_origins="*") as proxy:
        for method in ("OPTIONS", "GET"):
            assert (await send_request(proxy, method, "/v1/models", Host="evil.example"))[0] == 403
