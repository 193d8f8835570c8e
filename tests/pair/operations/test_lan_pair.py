"""Pair that is open to the LAN: created keys, a cache for each, the owner's paths, a private home."""

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.pair.pair import FolderOf, Pair, Reply, send_request
from support.run.warmline_command import invoke_warmline
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file

TALE = "A stranger came to the village and told us the following. " * 24


@contextmanager
def open_umask() -> Iterator[None]:
    """Set a umask that leaves new files open to all, unless their writer restricts them."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def chat_with_key(pair: Pair, key: str) -> Reply:
    body = {"messages": [{"role": "user", "content": TALE}], "max_tokens": 4, "temperature": 0}
    return pair.post("/v1/chat/completions", body, Authorization=f"Bearer {key}")


def count_cached(pair: Pair, key: str) -> int:
    """Count the tokens that the key's holder reuses; header and usage agree."""
    reply = chat_with_key(pair, key)
    assert reply.status == 200, reply.raw
    source, _, count = reply.headers["X-Warmline-Cache"].partition(" ")
    assert reply.cached == int(count) and (source == "cold") == (reply.cached == 0)
    pair.settle()
    return reply.cached


def test_keys_have_separate_persistent_caches(tiny_folder: FolderOf, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with open_umask():
        home.segments.mkdir(parents=True)
        (home.root / "warmline.toml").touch()
        pair = Pair(home.root, tiny_folder("llama"), "--lan", "--log-files", "--prefill-step-size", "16")
        with pair:
            assert pair.wait_for_log_line(r"^(ready|also) .*\.local:")
            assert f"cachectl key show --home {home.root})" in pair.wait_for_log_line("^curl ")
            one = pair.cachectl("key", "show")["key"]
            check_launch_finds_key(pair, one)
            two, three = (pair.cachectl("key", "add", name)["key"] for name in ("two", "three"))
            assert (
                chat_with_key(pair, "").status
                == chat_with_key(pair, "wl-guessed").status
                == chat_with_key(pair, home.load_secret()).status
                == 401
            )
            assert count_cached(pair, one) == 0
            whole = count_cached(pair, one)
            assert whole > 100
            assert count_cached(pair, two) == 0, "what one had computed is in memory, and on disk"

            os.kill(pair.pid("proxy"), signal.SIGKILL)
            wait_until_up(pair)
            assert count_cached(pair, three) == 0, "what is in memory was adopted for whom it belongs to"
            assert count_cached(pair, one) == whole
            pair.kill()
            pair.start()
            four = pair.cachectl("key", "add", "four")["key"]
            assert count_cached(pair, four) == 0, "what is on disk, too"
            assert count_cached(pair, one) == whole and count_cached(pair, two) == whole

            renewed = pair.cachectl("key", "rotate", "default")["key"]
            assert chat_with_key(pair, one).status == 401
            assert count_cached(pair, renewed) == whole
            check_owner_authentication(pair, renewed)
        assert_private(home)


def check_launch_finds_key(pair: Pair, key: str) -> None:
    """Check that `warmline launch` uses the home's only key, and that a shell that its text is pasted into finds it."""
    home = str(pair.home.root)
    text = invoke_warmline("launch", "llm", "--print", "--home", home).stdout
    assert key not in text
    shown = text.replace("llm\n", "sh -c 'echo $OPENAI_API_KEY'\n")
    assert subprocess.run(["sh", "-c", shown], capture_output=True, text=True).stdout == f"{key}\n"


def wait_until_up(pair: Pair) -> None:
    """Another proxy than before answers."""
    while True:
        try:
            if send_request(f"{pair.url}/ready", None, {}, "GET").status == 200:
                return
        except OSError:
            pass


def check_owner_authentication(pair: Pair, client_key: str) -> None:
    """Check that the owner must authenticate by the LAN address, and not on this machine."""
    admin, elsewhere = pair.cachectl("key", "show", "admin")["key"], {"Host": f"192.168.1.5:{pair.port}"}
    for headers, status in (
        ({}, 200),
        (elsewhere, 401),
        (elsewhere | {"X-Api-Key": client_key}, 401),
        (elsewhere | {"X-Api-Key": admin}, 200),
        ({"Host": "evil.example", "X-Api-Key": admin}, 403),
        ({"X-Forwarded-For": "192.168.1.7"}, 401),
    ):
        assert send_request(f"{pair.url}/warmline/status", None, headers, "GET").status == status, headers


def assert_private(home: Home) -> None:
    found = [home.root, *home.root.rglob("*")]
    assert {"keys.json", "keys.lock", "proxy.log", "secret", "warmline.toml"} <= {path.name for path in found}
    modes = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in found}
    assert modes == {str(path): 0o700 if path.is_dir() else 0o600 for path in found}
    assert len([each for each in keys_file.read_keys(home) if each.kind == keys_file.ADMIN_KIND]) == 1
