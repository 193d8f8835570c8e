"""Prewarming where clients have keys: each head stays with its key, and an entry without a key says what to do."""

import json
from pathlib import Path

import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_common.storage.home import Home
from warmline_proxy.app import COMPONENTS
from warmline_proxy.auth import key_store
from warmline_proxy.auth.key_store import KeyNotFoundError
from warmline_proxy.auth.principals import ANONYMOUS, ClientKeys
from warmline_proxy.config import ProxyConfig

ENTRIES = json.dumps([{"client": "agent", "key": "laptop"}, {"client": "desk"}, {"client": "agent"}])


@on_loop
async def test_heads_are_kept_of_the_entrys_own_key_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    keys = {name: key_store.add_key(home, name).key for name in ("laptop", "desk")}
    async with run_proxy(tmp_path, prewarm=ENTRIES) as proxy:
        for key, agent in (("laptop", "Agent/2.1"), ("desk", "agent/2.1"), ("laptop", "other/1.0")):
            messages = [{"role": "system", "content": f"{key} {agent}"}, {"role": "user", "content": "Hello"}]
            headers = {"Authorization": f"Bearer {keys[key]}", "User-Agent": agent}
            assert (await proxy.chat(messages=messages, headers=headers)).status == 200
            await proxy.wait_until_saved()
        prewarmer = proxy.app[COMPONENTS].prewarmer
        heads = {
            entry.name: [head["messages"][0]["content"] for head in prewarmer.heads.list_heads(entry.name)]
            for entry in proxy.app[COMPONENTS].config.prewarm_entries
        }
        assert heads == {"agent laptop": ["laptop Agent/2.1"], "desk": ["desk agent/2.1"], "agent": []}
        while (unnamed := prewarmer.describe().entries[2]).state != "failed":
            await proxy.status()
        assert "each key has a cache of its own: name one of 'laptop', 'desk'" in unnamed.detail


def test_client_of_a_key_name(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare()
    assert ClientKeys(ProxyConfig(home=home)).find_client("") == ANONYMOUS
    key_store.add_key(home, "laptop")
    keys, shared = ClientKeys(ProxyConfig(home=home)), ClientKeys(ProxyConfig(home=home, share_cache=True))
    assert keys.find_client("laptop").name == "laptop" and keys.find_client("laptop").tenant
    assert shared.find_client("") == ANONYMOUS and not shared.find_client("laptop").tenant
    with pytest.raises(KeyNotFoundError, match="did you mean 'laptop'"):
        keys.find_client("laptpo")
