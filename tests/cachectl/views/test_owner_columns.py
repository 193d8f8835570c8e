"""Owners in cachectl: whose a conversation is, and purges by key, with and without a proxy."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support.cachectl.homes import read_json, run_cachectl
from support.index.indexes import MODEL, begin_save, commit_save, make_home
from warmline_common.protocol.messages import encode
from warmline_common.protocol.tokens import namespace
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.auth.key_store import derive_tenant
from warmline_proxy.auth.owners import OwnerLabels
from warmline_proxy.home_lock import home_lock
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.store.rows import RequestRecord

TALK = list(range(1000, 1300))


def store_under_key(home: Home, tenant: str, client: str, model: str = MODEL) -> str:
    """Store a conversation under a key; its file's id."""
    with Index(home, 1 << 30) as index:
        plan = begin_save(index, TALK, root=namespace(model, tenant))
        assert plan is not None
        commit_save(index, plan, client=client)
        return plan.segments[0].id


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Conversations without a key, of a `default` that was removed, of another one of that name, and of `laptop`."""
    home = make_home(tmp_path / "home")
    store_under_key(home, "", "first")
    store_under_key(home, keys_file.add_key(home, "default").tenant, "second")
    keys_file.remove_key(home, "default")
    store_under_key(home, keys_file.add_key(home, "default").tenant, "third")
    store_under_key(home, keys_file.add_key(home, "laptop").tenant, "fourth")
    return home


def list_labels(home: Home) -> dict[str, str]:
    return {row["client"]: row["key"] for row in read_json(home, "ls")["sessions"]}


WORDS = {"first": "no key", "second": "a removed key", "third": "default", "fourth": "laptop"}


def test_conversations_show_key_names(home: Home) -> None:
    assert list_labels(home) == WORDS
    for words in (["ls"], ["inspect"]):
        shown = run_cachectl(home, *words, columns=80).stdout
        assert " key " in shown.splitlines()[1] and all(f"│ {word[:9]}" in shown for word in WORDS.values())
        assert " key " not in run_cachectl(home, *words, columns=40).stdout.splitlines()[1], (
            "it goes where there is no room"
        )
    trees = read_json(home, "tree")["trees"]
    assert {each["key"] for each in trees} == set(WORDS.values())
    heads = [line for line in run_cachectl(home, "tree").stdout.splitlines() if MODEL in line]
    assert sorted(heads) == sorted(
        f"{each['key']}, {MODEL} ({each['root'][:8]}): 1 conversation, 1 segment, {_count_bytes(home)}"
        for each in trees
    )
    (leaf,) = {row["leaf"] for row in read_json(home, "inspect")["sessions"] if row["client"] == "second"}
    assert read_json(home, "inspect", leaf)["segment"]["key"] == "a removed key"


def _count_bytes(home: Home) -> str:
    (size,) = {row["bytes"] for row in read_json(home, "ls")["sessions"]}
    return f"{size / 1000:.1f} KB"


def test_no_key_column_without_keys(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    store_under_key(home, "", "first")
    assert list_labels(home) == {"first": ""}
    assert " key " not in run_cachectl(home, "ls").stdout + run_cachectl(home, "inspect").stdout
    assert run_cachectl(home, "tree").stdout.startswith(MODEL)


def test_settings_key_is_labelled(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    store_under_key(home, derive_tenant("wl-settings"), "fifth")
    assert list_labels(home)["fifth"] == "a removed key"
    home.settings_tenant.write_text(derive_tenant("wl-settings"))
    assert list_labels(home)["fifth"] == "environment", "as the last proxy knew, which alone may have been given it"
    home.settings_tenant.unlink()
    monkeypatch.setenv("WARMLINE_CLIENT_KEY", "wl-settings")
    (home.root / "warmline.toml").write_text("share_cache = true")
    assert list_labels(home) == WORDS | {"first": "shared", "fifth": "environment"}


def test_read_commands_need_no_keys_file(home: Home) -> None:
    home.keys.write_text("{")
    assert set(list_labels(home).values()) == {""}
    done = run_cachectl(home, "purge", "--key", "laptop", "--yes")
    assert done.returncode == 3 and "is damaged" in done.stderr


@pytest.fixture
def proxy(home: Home) -> Iterator[Callable[[OwnerLabels], None]]:
    """Running proxy that answers GET /warmline/whose with the labels passed to the fixture's function."""
    replies: list[bytes] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/warmline/whose" else 404)
            self.end_headers()
            self.wfile.write(replies[-1])

        def log_message(self, *_: object) -> None:
            pass

    with home_lock(home), HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        pid = int(home.lock.read_text())
        announced = {"pid": pid, "url": f"http://127.0.0.1:{server.server_port}"}
        (home.run / "proxy.json").write_text(json.dumps(announced))
        yield lambda whose: replies.append(encode(whose))
        server.shutdown()
        thread.join()


def test_running_proxy_labels_owners(home: Home, proxy: Callable[[OwnerLabels], None]) -> None:
    proxy(OwnerLabels(keys=["environment"], words={namespace(MODEL).hex(): "environment"}))
    assert list_labels(home) == {"first": "environment", "second": "", "third": "", "fourth": ""}


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("laptop", "first second third"),
        ("default", "first second fourth"),
        ("no key", "second third fourth"),
        ("a removed key", "first third fourth"),
    ],
)
def test_purge_by_key(home: Home, words: str, left: str) -> None:
    would = run_cachectl(home, "purge", "--key", words, "--dry-run")
    assert would.stdout.startswith("would purge 1 conversation: 1 segment") and list_labels(home) == WORDS
    assert run_cachectl(home, "purge", "--key", words).returncode == 2, "it asks"
    assert run_cachectl(home, "purge", "--key", words, "--yes").stdout.startswith("purged 1 conversation: 1 segment")
    assert set(list_labels(home)) == set(left.split())
    assert run_cachectl(home, "purge", "--key", words, "--yes").returncode == 1, "nothing is left"


def test_removed_keys_are_named_by_root(home: Home) -> None:
    store_under_key(home, "another", "fifth")
    root = namespace(MODEL, "another").hex()
    assert run_cachectl(home, "purge", "--key", f"a removed key ({root[:8]})", "--yes").returncode == 0
    assert list_labels(home) == WORDS


def test_purge_of_unknown_key_name_is_refused(home: Home) -> None:
    done = run_cachectl(home, "purge", "--key", "desktop", "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no client key 'desktop'; there are 'default', 'laptop', 'no key', 'a removed key'" in done.stderr
    near = run_cachectl(home, "purge", "--key", "lapto", "--yes")
    assert near.returncode == 1 and "no client key 'lapto'; did you mean 'laptop'?" in near.stderr
    assert run_cachectl(home, "purge", "--key", "laptop", "--all", "--yes").returncode == 2
    keys_file.add_key(home, "desktop")
    assert "nothing matches\n" in run_cachectl(home, "purge", "--key", "desktop", "--yes").stderr
    (home.root / "warmline.toml").write_text("share_cache = true")
    assert "all keys share a cache: --key 'shared'" in run_cachectl(home, "purge", "--key", "desktop", "--yes").stderr


def test_purge_by_key_reports_ambiguous_data(home: Home) -> None:
    """A model that no file names: of which key the root is can't be found."""
    tenant = keys_file.find_key(keys_file.read_keys(home), "laptop").tenant
    home.segment_file(store_under_key(home, tenant, "fifth", model="lost")).write_bytes(b"")
    assert list_labels(home) == WORDS | {"fifth": ""}
    done = run_cachectl(home, "purge", "--key", "laptop", "--yes")
    assert done.stdout.startswith("purged 1 conversation") and done.returncode == 3
    assert "1 more segment may be that key's too" in done.stderr


def test_key_remove_reports_stored_data(home: Home) -> None:
    done = run_cachectl(home, "key", "remove", "laptop")
    roots = {each["root"][:8] for each in read_json(home, "tree")["trees"] if each["key"] == "a removed key"}
    (command,) = [line.split("`")[1] for line in done.stdout.splitlines() if "`" in line]
    assert command.removeprefix("cachectl purge --key 'a removed key ").removesuffix(f"' --home {home.root}") in roots
    assert run_cachectl(home, "purge", "--yes", "--key", command.split("'")[1]).returncode == 0
    assert list_labels(home) == {client: word for client, word in WORDS.items() if client != "fourth"}
    gone = read_json(home, "key", "remove", "default", "--purge")
    assert (gone["removed"], gone["stored"], len(gone["purged"]["sessions"])) == ("default", [], 1)
    assert list_labels(home) == {"first": "no key", "second": "a removed key"}
    keys_file.add_key(home, "desktop")
    assert run_cachectl(home, "key", "remove", "desktop", "--purge").stdout.startswith("removed desktop\n")


def test_key_remove_works_with_any_stored_data(home: Home) -> None:
    for data in home.index.glob("*/data.mdb"):
        data.write_bytes(b"no index at all" * 1000)
    assert run_cachectl(home, "key", "remove", "laptop", "--purge").returncode == 3
    assert [each.name for each in keys_file.read_keys(home)] == ["default", "laptop"]
    assert run_cachectl(home, "key", "remove", "laptop").stdout == "removed laptop\n"


def test_purge_by_key_removes_records_without_segments(home: Home) -> None:
    root = namespace(MODEL, keys_file.add_key(home, "desktop").tenant)
    with Index(home, 1 << 30) as index:
        index.record_request(
            RequestRecord(
                id="r1",
                at=1.0,
                endpoint="chat",
                client_model="m",
                key="desktop",
                outcome="ok",
                source="cold",
                root=root,
            )
        )
        index.flush()
    assert run_cachectl(home, "purge", "--key", "desktop", "--dry-run").returncode == 1
    done = run_cachectl(home, "purge", "--key", "desktop", "--yes")
    assert done.returncode == 1 and done.stderr.endswith("nothing matches\n")
    with IndexReader(home) as reader:
        assert reader.requests() == [] and len(reader.sessions()) == len(WORDS)
