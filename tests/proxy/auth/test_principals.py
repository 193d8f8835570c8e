"""Client keys in the home: created, rotated and removed while a proxy runs; caches are separate."""

import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.messages import SampledTurn
from warmline_common.storage.home import Home
from warmline_proxy.app import build_app
from warmline_proxy.auth import key_store
from warmline_proxy.auth.key_store import (
    ADMIN_KIND,
    CLIENT_KIND,
    ENVIRONMENT_NAME,
    KeyNotFoundError,
    KeyStoreError,
    NoClientKeysError,
)
from warmline_proxy.auth.principals import ANONYMOUS, Client, ClientKeys
from warmline_proxy.config import ProxyConfig
from warmline_proxy.errors import ClientError
from warmline_proxy.listener import listen
from warmline_proxy.models.admission import identify_caller

PROMPT = "Once upon a time there was a conversation. " * 20


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.prepare()
    return home


def make_bearer_header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_add_key(home: Home) -> None:
    one, two = key_store.add_key(home, "one"), key_store.add_key(home, "two@laptop")
    assert all(re.fullmatch(r"wl-[A-Za-z0-9_-]{43}", each.key) for each in (one, two))
    assert len({one.key, two.key, one.tenant, two.tenant}) == 4
    assert key_store.read_keys(home) == [one, two]
    assert stat.S_IMODE(home.keys.stat().st_mode) == 0o600
    for bad in ("", "a b", "-x", "x" * 65, "admin", "environment", "ü"):
        with pytest.raises(KeyStoreError):
            key_store.add_key(home, bad)
    with pytest.raises(KeyStoreError, match="key rotate one"):
        key_store.add_key(home, "one")


def test_rotated_key_keeps_tenant(home: Home) -> None:
    old = key_store.add_key(home, "me")
    new = key_store.rotate_key(home, "")
    assert new.key != old.key and (new.name, new.tenant) == (old.name, old.tenant)
    assert key_store.remove_key(home, "me") == new and key_store.read_keys(home) == []
    assert key_store.add_key(home, "me").tenant != old.tenant, "a new key of the same name has another tenant"


def test_find_key_without_name(home: Home) -> None:
    key_store.ensure_key(home, ADMIN_KIND)
    with pytest.raises(NoClientKeysError):
        key_store.find_key(key_store.read_keys(home), "")
    first = key_store.add_key(home, "first")
    assert key_store.find_key(key_store.read_keys(home), "") == first
    key_store.add_key(home, "second")
    with pytest.raises(KeyNotFoundError, match=r"name one of the keys: 'first', 'second'"):
        key_store.find_key(key_store.read_keys(home), "")
    default = key_store.add_key(home, "default")
    assert key_store.find_key(key_store.read_keys(home), "") == default


def test_concurrent_edits_are_all_kept(home: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: key_store.add_key(home, f"k{number}"), range(16)))
        same = {
            key_store.ensure_key(home, ADMIN_KIND).key
            for _ in pool.map(lambda _: key_store.ensure_key(home, ADMIN_KIND), range(8))
        }
    assert sorted(each.name for each in key_store.read_client_keys(home)) == sorted(
        f"k{number}" for number in range(16)
    )
    assert len(same) == 1 and sum(each.kind == ADMIN_KIND for each in key_store.read_keys(home)) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 2, "keys": []}', '{"keys": [{"name": "a", "key": "hush"}]}',
     '{"keys": [{"name": "a", "key": "", "tenant": "t", "created": 0}]}', b"\xff\xfe"],
)  # fmt: skip
def test_damaged_file_error_has_no_content(home: Home, content: str | bytes) -> None:
    home.keys.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(KeyStoreError, match=r"keys\.json is ") as caught:
        key_store.read_keys(home)
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(KeyStoreError):
        key_store.add_key(home, "me")


@pytest.mark.parametrize("name", ["first", ENVIRONMENT_NAME])
def test_ambiguous_key_name_is_refused(home: Home, name: str) -> None:
    """Its stored conversations would be labelled as a removed key's."""
    key_store.add_key(home, "first")
    key_store.add_key(home, "second")
    home.keys.write_text(home.keys.read_text().replace('"second"', f'"{name}"'))
    with pytest.raises(KeyStoreError, match=rf"another key called '{name}'.*rename that key"):
        key_store.read_keys(home)


def test_key_file_changes_apply_at_once(home: Home) -> None:
    keys = ClientKeys(ProxyConfig(home=home))
    assert keys.authenticate({}) == ANONYMOUS and not keys.is_required
    mine = key_store.add_key(home, "me")
    assert keys.authenticate(make_bearer_header(mine.key)) == Client("me", mine.tenant, mine.tenant)
    renewed = key_store.rotate_key(home, "me")
    assert keys.authenticate({"X-Api-Key": renewed.key}) == Client("me", mine.tenant, mine.tenant)
    for wrong in (mine.key, "", renewed.key[:-1], renewed.key + "x", "é", "\udcff"):
        with pytest.raises(Exception, match="401"):
            keys.authenticate(make_bearer_header(wrong))
    good = home.keys.read_bytes()
    home.keys.write_bytes(b"{")
    assert keys.authenticate(make_bearer_header(renewed.key)).name == "me", "a damaged file changes nothing"
    for place in ("FIFO", "link"):
        home.keys.unlink()
        os.mkfifo(home.keys) if place == "FIFO" else home.keys.symlink_to("/dev/zero")
        assert keys.authenticate(make_bearer_header(renewed.key)).name == "me", place
        with pytest.raises(KeyStoreError, match=r"keys\.json can't be read: it is no regular file"):
            ClientKeys(ProxyConfig(home=home))
    home.keys.unlink()
    assert keys.authenticate(make_bearer_header(renewed.key)).name == "me", "a deleted file must not admit everybody"
    with pytest.raises(Exception, match="401"):
        keys.authenticate({})
    home.keys.write_bytes(good)
    home.keys.chmod(0o644)
    assert keys.authenticate(make_bearer_header(renewed.key)).name == "me"
    assert stat.S_IMODE(home.keys.stat().st_mode) == 0o600, "permissions are restricted again"
    key_store.remove_key(home, "me")
    assert keys.authenticate(make_bearer_header(renewed.key)) == ANONYMOUS
    assert keys.known_tenants == {"", mine.tenant}


def test_open_proxy_without_keys_refuses_all(home: Home) -> None:
    keys = ClientKeys(ProxyConfig(home=home, lan=True))
    with pytest.raises(Exception, match="401"):
        keys.authenticate({})


def test_settings_key_beside_key_file(home: Home) -> None:
    mine = key_store.add_key(home, "me")
    keys = ClientKeys(ProxyConfig(home=home, client_key="sesame"))
    assert keys.authenticate(make_bearer_header("sesame")).name == "environment"
    assert keys.authenticate(make_bearer_header(mine.key)).name == "me"
    shared = ClientKeys(ProxyConfig(home=home, client_key="sesame", share_cache=True))
    assert {shared.authenticate(make_bearer_header(key)).tenant for key in ("sesame", mine.key)} == {""}


def test_client_key_in_each_header() -> None:
    me, you = Client("me", "t", "h1"), Client("me", "t", "h2")
    assert identify_caller(me, make_bearer_header("a"), "10.0.0.1") == identify_caller(
        me, make_bearer_header("b"), "10.0.0.2"
    )
    assert identify_caller(me, make_bearer_header("a"), "10.0.0.1") != identify_caller(
        you, make_bearer_header("a"), "10.0.0.1"
    )
    assert identify_caller(ANONYMOUS, {}, "10.0.0.1") != identify_caller(ANONYMOUS, {}, "10.0.0.2")


# ---- two keys, one proxy


async def read_chat_source(proxy: ProxyHarness, key: str, text: str = PROMPT, **headers: str) -> tuple[str, int]:
    """(source in X-Warmline-Cache, cached tokens in the usage)."""
    response = await proxy.chat(text, headers={**make_bearer_header(key), **headers})
    assert response.status == 200
    usage: dict[str, Any] = json.loads(await response.text())["usage"]
    return response.headers["X-Warmline-Cache"], usage["prompt_tokens_details"]["cached_tokens"]


@on_loop
async def test_keys_do_not_share_cache(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        one, two = (key_store.add_key(proxy.home, name).key for name in ("one", "two"))
        assert await read_chat_source(proxy, one) == ("cold 0", 0)
        assert await read_chat_source(proxy, two) == ("cold 0", 0), "in memory"
        await proxy.wait_until_saved()
        proxy.backend.restart()
        assert (await read_chat_source(proxy, one))[0].startswith("restored")
        three = key_store.add_key(proxy.home, "three").key
        assert await read_chat_source(proxy, three) == ("cold 0", 0), "on disk"
        records = await proxy.wait_until_saved()
        assert [each.key for each in records] == ["three", "one", "two", "one"]
        assert len({each.root for each in records}) == 3


@on_loop
async def test_share_cache_reuses_across_keys(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, share_cache=True) as proxy:
        one, two = (key_store.add_key(proxy.home, name).key for name in ("one", "two"))
        assert await read_chat_source(proxy, one) == ("cold 0", 0)
        assert (await read_chat_source(proxy, two))[0].startswith("resident")
        assert [each.key for each in await proxy.wait_until_saved()] == ["two", "one"]


@on_loop
async def test_residents_adopted_for_their_tenant(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        one, two = (key_store.add_key(proxy.home, name).key for name in ("one", "two"))
        await read_chat_source(proxy, one)
        await proxy.wait_until_saved()
        backend_url, backend = proxy.backend_url, proxy.backend
        await proxy.stop_proxy()
        config = ProxyConfig(home=proxy.home, port=0, backend_url=backend_url, audit_fraction=0.0)
        async with listen(build_app(config, proxy.home.load_secret(), proxy.index), config) as another:
            proxy.url = f"http://127.0.0.1:{another.port}"
            assert len(backend.residents) == 1
            assert await read_chat_source(proxy, two) == ("cold 0", 0)
            assert (await read_chat_source(proxy, one))[0].startswith("resident")


@on_loop
async def test_other_keys_requests_are_inaccessible(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        one, two = (key_store.add_key(proxy.home, name).key for name in ("one", "two"))
        proxy.backend.hold_after = 1
        name = {"X-Warmline-Request": "mine"}
        body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
        url = f"{proxy.url}/v1/chat/completions"
        async with proxy.client.post(url, json=body, headers={**make_bearer_header(one), **name}) as running:
            await proxy.backend.holding.wait()
            for path in ("requests/mine", "requests/chatcmpl-mine", "responses/resp_mine"):
                async with proxy.client.delete(f"{proxy.url}/v1/{path}", headers=make_bearer_header(two)) as refused:
                    assert refused.status == 404
                async with proxy.client.get(f"{proxy.url}/v1/{path}", headers=make_bearer_header(two)) as refused:
                    assert refused.status == 404
            async with proxy.client.get(f"{proxy.url}/v1/requests/mine", headers=make_bearer_header(one)) as shown:
                state = await shown.json()
            assert (state["id"], state["client"], state["state"]) == ("mine", "one", "decoding")
            proxy.backend.holding.clear()
            async with proxy.client.post(url, json=body, headers={**make_bearer_header(two), **name}) as other:
                assert other.status == 200, "its id is free: other clients' requests are invisible"
                assert other.headers["X-Warmline-Cache"] == "cold 0"
                await proxy.backend.holding.wait()
                async with proxy.client.post(url, json=body, headers={**make_bearer_header(two), **name}) as taken:
                    assert taken.status == 409, "its own id is taken"
                async with proxy.client.delete(
                    f"{proxy.url}/v1/requests/mine", headers=make_bearer_header(two)
                ) as ended:
                    assert ended.status == 200
            before = proxy.home.keys.read_bytes()
            key_store.remove_key(proxy.home, "one")
            namesake = key_store.add_key(proxy.home, "one").key
            async with proxy.client.delete(
                f"{proxy.url}/v1/requests/mine", headers=make_bearer_header(namesake)
            ) as refused:
                assert refused.status == 404, "a new key of the same name is another client"
            proxy.home.keys.write_bytes(before)
            async with proxy.client.delete(f"{proxy.url}/v1/requests/mine", headers=make_bearer_header(one)) as ended:
                assert ended.status == 200
            await running.read()


@on_loop
async def test_sampled_turns_are_per_tenant(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        one, two = (key_store.add_key(proxy.home, name).key for name in ("one", "two"))
        call = "call_" + "0" * 24
        proxy.backend.turn = SampledTurn(calls=[call], tokens=b"\x01\x00\x00\x00")
        await read_chat_source(proxy, one)
        messages = [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": "", "tool_calls": [{"id": call, "type": "function", "function": {}}]},
        ]
        sent = []
        for key in (two, one):
            await proxy.chat(messages=messages, headers=make_bearer_header(key))
            sent.append([turn.calls for turn in proxy.backend.calls["turns"][-1]])
        assert sent == [[], [[call]]]


def test_stale_draft_is_deleted(home: Home) -> None:
    draft = home.root / ".keys.0123abcd.tmp"
    draft.write_text("half")
    draft.chmod(0o600)
    key_store.add_key(home, "me")
    assert not draft.exists()
    assert key_store.read_keys(home)[0].kind == CLIENT_KIND


def test_errors_about_keys_say_what_to_do(home: Home) -> None:
    key = key_store.add_key(home, "laptop").key
    keys = ClientKeys(ProxyConfig(home=home))

    def explain(**headers: str) -> str:
        with pytest.raises(ClientError) as caught:
            keys.authenticate({name.replace("_", "-"): value for name, value in headers.items()})
        return str(json.loads(caught.value.body)["error"]["message"])

    assert all("does not begin with 'Bearer'" in explain(Authorization=value) for value in (key, f"Token {key}"))
    assert all(
        "client key as 'Authorization: Bearer" in explain(Authorization=value) for value in ("", "Bearer", "bearer ")
    )
    assert "cachectl key show NAME" in explain(X_Api_Key="wrong") == explain(Authorization="Bearer wrong")
    assert keys.authenticate({"Authorization": f"bearer {key}"}).name == "laptop"
