"""Access to all paths: keys, hosts, unknown paths, admin paths."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yarl

from support.proxy.harness import on_loop, run_proxy
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.auth import authenticator as doors
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.auth.key_store import derive_tenant
from warmline_proxy.auth.principals import prepare_keys
from warmline_proxy.config import ProxyConfig, ProxyConfigError, parse_config
from warmline_proxy.index.index import IndexStoreError


@on_loop
async def test_missing_key_returns_401(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, client_key="sesame") as proxy:
        refused = await proxy.chat()
        assert refused.status == 401 and "Authorization: Bearer KEY" in await refused.text()
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}, {"X-Api-Key": "é"}):
            async with proxy.client.get(f"{proxy.url}/v1/models", headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        proxy.client.headers["Authorization"] = "Bearer sesame"
        assert (await proxy.chat()).status == 200
        async with proxy.client.get(f"{proxy.url}/v1/models", headers={"X-Api-Key": "sesame"}) as response:
            assert response.status == 200


@on_loop
async def test_no_keys_message_only_for_owner(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, lan=True) as proxy:
        admin = keys_file.ensure_key(proxy.home, keys_file.ADMIN_KIND).key
        keys_file.add_key(proxy.home, "laptop")
        old, elsewhere = {"X-Api-Key": keys_file.remove_key(proxy.home, "laptop").key}, {"Host": "192.168.1.5"}
        for headers, words in (
            ({}, f"make one (`cachectl key add NAME --home {tmp_path}"),
            (old, f"make one (`cachectl key add NAME --home {tmp_path}"),
            (elsewhere | {"X-Api-Key": admin}, f"make one (`cachectl key add NAME --home {tmp_path}"),
            (elsewhere, "send this server's client key"),
            (elsewhere | old, "it is no client key"),
            ({"X-Forwarded-For": "192.168.1.7"}, "send this server's client key"),
            ({"Origin": "http://a.page"}, "send this server's client key"),
        ):
            refused = await proxy.chat(headers=headers)
            assert refused.status == 401 and words in await refused.text(), headers
        new = keys_file.add_key(proxy.home, "laptop").key
        assert "it is no client key" in await (await proxy.chat(headers=old)).text(), "a key exists"
        assert (await proxy.chat(headers={"X-Api-Key": new})).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:8026", 200), ("[::1]:8026", 200), ("evil.example", 403), ("localhost.evil", 403)],
)
@on_loop
async def test_host_header_check(tmp_path: Path, host: str, status: int) -> None:
    async with (
        run_proxy(tmp_path) as proxy,
        proxy.client.get(f"{proxy.url}/v1/models", headers={"Host": host}) as response,
    ):
        assert response.status == status


@on_loop
async def test_refusal_log_is_rate_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "LOG_INTERVAL_S", 3600.0)
    async with run_proxy(tmp_path, client_key="sesame") as proxy:
        caplog.clear()
        for key in ("", "guess", "another guess"):
            assert (await proxy.chat(headers={"Authorization": f"Bearer {key}"})).status == 401
        (line,) = (line for line in caplog.messages if "refused" in line or " key" in line)
        assert line == "a request with a wrong key, or none, for the client's paths, the last one from 127.0.0.1"
        monkeypatch.setattr(doors, "LOG_INTERVAL_S", 0.0)
        await proxy.chat(headers={"Authorization": "Bearer last guess"})
        assert caplog.messages[-1].startswith("3 requests with a wrong key, or none,")


@on_loop
async def test_other_refusals_are_not_logged_as_wrong_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with run_proxy(tmp_path) as proxy:
        admin = {"X-Api-Key": keys_file.ensure_key(proxy.home, keys_file.ADMIN_KIND).key}
        async with proxy.client.post(f"{proxy.url}/warmline/purge", json={}, headers=admin) as response:
            assert response.status == 403
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            assert 'warmline_unauthorized_total{door="owner"} 0.0' in await response.text()
        assert "wrong key" not in caplog.text and "refused POST /warmline/purge: 403" in caplog.text


@on_loop
async def test_models_list(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:

        async def got(path: str) -> Any:
            async with proxy.client.get(yarl.URL(f"{proxy.url}/v1/models{path}", encoded=True)) as response:
                assert response.status == 200
                return await response.json()

        (entry,) = (await got("/?a=%20b"))["data"]
        assert entry == {
            "id": "fake-model",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "warmline",
            "root": "fake-model",
            "max_model_len": 100_000,
        }
        assert await got("/fake-model") == entry
        for spelled in ("/openai/glm-5.2", "/openai%2Fglm-5.2", "/openai/glm-5.2/"):
            assert await got(spelled) == {**entry, "id": "openai/glm-5.2"}
        async with proxy.client.head(f"{proxy.url}/v1/models") as response:
            assert response.status == 200 and await response.read() == b""
        for method, path in (("POST", "/v1/models"), ("GET", "/v1/chat/completions")):
            async with proxy.client.request(method, proxy.url + path) as response:
                assert response.status == 405
        async with proxy.client.options(f"{proxy.url}/v1/chat/completions") as response:
            assert response.status == 204


@on_loop
async def test_responses_are_compact_without_versions(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        requests = [
            ("GET", "/health", None),
            ("GET", "/ready", None),
            ("GET", "/v1/models", None),
            ("GET", "/props", None),
        ]
        requests += [("POST", "/v1/messages/count_tokens", body), ("POST", "/v1/chat/completions", body)]
        for method, path, given in requests:
            async with proxy.client.request(method, proxy.url + path, json=given) as response:
                assert response.headers.getall("Server") == ["warmline"], path
                text = await response.text()
                assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False), path
        streamed = await proxy.chat(stream=True)
        assert streamed.headers["Server"] == "warmline"


PROBES = [
    "/",
    "/api/tags",
    "/api/show",
    "/props",
    "/v1/props",
    "/version",
    "/slots",
    "/v1/embeddings",
    "/v1",
    "/v1/modelsx",
]


@on_loop
async def test_unknown_paths_return_404_without_backend(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, connect_timeout_s=60.0) as proxy:
        await proxy.stop_backend()
        for path in PROBES:
            for method in ("GET", "POST"):
                data = b"x" * 100_000 if method == "POST" else None
                async with proxy.client.request(method, proxy.url + path, data=data) as response:
                    assert response.status == 404
                    error = (await response.json())["error"]
                assert error["code"] == "not_found" and error["type"] == "invalid_request_error"
                assert path in error["message"] and "/v1/chat/completions, /v1/completions" in error["message"]
                assert ("The dashboard is at /admin" in error["message"]) == (path in ("/", "/v1")), "hint for browsers"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
    ],
)
@on_loop
async def test_wrong_base_url_hint(tmp_path: Path, path: str, meant: str) -> None:
    async with run_proxy(tmp_path) as proxy, proxy.client.post(proxy.url + path, json={}) as response:
        assert response.status == 404 and f"If {meant} was meant" in await response.text()


@on_loop
async def test_unicode_path_returns_404(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy, proxy.client.get(yarl.URL(f"{proxy.url}/x%0ay", encoded=True)) as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/kv/status", "/kv", "/%6bv/status", "//kv/status", "/requests/1", "/warmline/none",
                                  "/x/%2e%2e/kv/status"])  # fmt: skip
@on_loop
async def test_backend_paths_return_404(tmp_path: Path, path: str) -> None:
    async with run_proxy(tmp_path) as proxy, proxy.client.get(yarl.URL(proxy.url + path, encoded=True)) as response:
        assert response.status in (401, 404)
        assert not proxy.backend.calls


@on_loop
async def test_admin_paths_require_secret(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, admin_needs_key=True) as proxy:
        await proxy.chat("x " * 50)
        for method, path in (("GET", "/warmline/status"), ("POST", "/warmline/purge"), ("POST", "/warmline/repair")):
            async with proxy.client.request(method, proxy.url + path) as response:
                assert response.status == 401
        await proxy.wait_until_saved()
        status = await proxy.status()
        assert status["totals"]["segments"] > 0 and len(status["residents"]) == 1
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        purge = {"everything": True}
        async with proxy.client.post(f"{proxy.url}/warmline/purge", json=purge, headers=owner) as response:
            assert response.status == 200
        status = await proxy.status()
        assert status["totals"]["segments"] == 0 and not status["residents"]


@on_loop
async def test_index_error_envelope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise IndexStoreError("no space left")

    async with run_proxy(tmp_path) as proxy:
        monkeypatch.setattr(proxy.index, "totals", fail)
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        async with proxy.client.get(f"{proxy.url}/warmline/status", headers=owner) as response:
            assert response.status == 500
            error = (await response.json())["error"]
        assert error["code"] == "index_failed" and "no space left" in error["message"]
        monkeypatch.setattr(disk, "make_folders", raise_disk_full)
        async with proxy.client.post(f"{proxy.url}/warmline/repair", headers=owner) as response:
            assert response.status == 500
            error = (await response.json())["error"]
        assert error["code"] == "index_failed" and "No space left" in error["message"]


def raise_disk_full(_: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "some.name"])
def test_open_proxy_requires_key(tmp_path: Path, host: str) -> None:
    home = Home(tmp_path)
    with pytest.raises(
        ProxyConfigError, match=r"--lan, .*\(cachectl key add NAME --home \S+, or WARMLINE_CLIENT_KEY\)"
    ):
        prepare_keys(parse_config(["--home", str(tmp_path), "--host", host], {}))
    prepare_keys(parse_config(["--home", str(tmp_path), "--host", host], {"WARMLINE_CLIENT_KEY": "k"}))
    assert not home.keys.exists()
    keys_file.add_key(home, "me")
    prepare_keys(parse_config(["--home", str(tmp_path), "--host", host], {}))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_requires_no_key(tmp_path: Path, host: str) -> None:
    prepare_keys(parse_config(["--home", str(tmp_path), "--host", host], {}))


def test_lan_creates_keys_once(tmp_path: Path) -> None:
    config, home = parse_config(["--home", str(tmp_path), "--lan"], {}), Home(tmp_path)
    assert config.bind_host == "0.0.0.0" and config.is_open_to_network
    prepare_keys(config)
    made = keys_file.read_keys(home)
    assert [(each.name, each.kind) for each in made] == [("admin", "admin"), ("default", "client")]
    prepare_keys(config)
    assert keys_file.read_keys(home) == made
    assert parse_config(["--home", str(tmp_path), "--lan", "--host", "10.0.0.7"], {}).bind_host == "10.0.0.7"


@pytest.mark.parametrize("bad", [{"port": 70_000}, {"backend_url": "https://x"}, {"running_count_max": 0},
                                 {"allowed_hosts": "https://x"}, {"client_key": "a "}, {"client_key": "a\nb"},
                                 {"client_key": "\udcff"}])  # fmt: skip
def test_bad_settings_error_is_one_line(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ProxyConfigError):
        ProxyConfig(home=Home(tmp_path), **bad)  # type: ignore[arg-type]


def test_derive_tenant_is_stable() -> None:
    assert derive_tenant("") == ""
    assert derive_tenant("a") == derive_tenant("a") != derive_tenant("b")
    assert "sesame" not in derive_tenant("sesame")
