"""`cachectl key`: its output, the files that it changes, and its exit codes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.index.indexes import BUDGET, make_response
from warmline_cachectl.cli import app
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.config import parse_config
from warmline_proxy.http.bodies import BODY_BYTES_MAX
from warmline_proxy.http.connections import HEAD_LINE_BYTES_MAX, HEADERS_COUNT_MAX
from warmline_proxy.index.index import Index, IndexReader


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def run_key(home: Home, *words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["key", *words, "--home", str(home.root)])
    assert done.exit_code == code, done.output
    return done


def read_keys(home: Home, *words: str) -> Any:
    return json.loads(run_key(home, *words, "--json").stdout)


def test_key_is_printed_alone(home: Home) -> None:
    made = run_key(home, "add", "laptop")
    assert made.stdout == f"{keys_file.read_keys(home)[0].key}\n" and not made.stderr
    assert run_key(home, "show").stdout == run_key(home, "show", "laptop").stdout == made.stdout
    renewed = run_key(home, "rotate", "laptop").stdout
    assert renewed != made.stdout and run_key(home, "show").stdout == renewed


def test_missing_key_prints_hint_on_stderr(home: Home) -> None:
    for verb in ("show", "rotate"):
        done = run_key(home, verb, code=1)
        assert done.stdout == "" and "--lan" in done.stderr
        assert f"`cachectl key add NAME --home {home.root}`" in done.stderr
    assert f"`cachectl key add NAME --home {home.root}`" in run_key(home, "list").stdout


def test_admin_key_is_created_when_first_shown(home: Home) -> None:
    admin = run_key(home, "show", "admin").stdout
    assert run_key(home, "show", "admin").stdout == admin
    assert run_key(home, "show", code=1).stdout == "", "it is no client's"
    assert run_key(home, "rotate", "admin").stdout != admin


def test_key_list_shows_no_keys(home: Home) -> None:
    shown = [read_keys(home, "add", name) for name in ("one", "two")]
    assert [sorted(each) for each in shown] == [["created", "key", "kind", "name"]] * 2
    table = run_key(home, "list").stdout
    assert table.splitlines()[0].startswith("┏"), "it has a box, as all tables have"
    listed = table + json.dumps(read_keys(home, "list"))
    assert "one" in listed and not any(each["key"] in listed for each in shown)
    assert [sorted(each) for each in read_keys(home, "list")["keys"]] == [["created", "kind", "name"]] * 2


def test_key_errors_are_one_line_and_exit_code(home: Home) -> None:
    run_key(home, "add", "one")
    run_key(home, "add", "two")
    assert "name one of the keys: 'one', 'two'" in run_key(home, "show", code=1).stderr
    assert "there is no key 'three'; there are 'one', 'two'" in run_key(home, "remove", "three", code=1).stderr
    for verb in ("show", "rotate", "remove"):
        assert "there is no key 'onee'; did you mean 'one'?" in run_key(home, verb, "onee", code=1).stderr
    assert "already" in run_key(home, "add", "one", code=3).stderr
    for name in ("admin", "a b", ""):
        run_key(home, "add", name, code=2)
    assert read_keys(home, "remove", "two") == {"removed": "two", "stored": [], "purged": None}
    home.keys.write_text("{")
    assert "is damaged" in run_key(home, "list", code=3).stderr


@pytest.mark.parametrize("is_purge", [True, False])
def test_removed_key_takes_its_stored_responses_along(home: Home, is_purge: bool) -> None:
    """Also where none of its KV is stored any more."""
    run_key(home, "add", "laptop")
    run_key(home, "add", "desk")
    with Index(home, BUDGET) as index:
        for entry in keys_file.read_client_keys(home):
            index.record_response(make_response("a", owner=entry.tenant))
    removed = read_keys(home, "remove", "laptop", *(["--purge"] if is_purge else []))
    if is_purge:
        assert removed["purged"]["responses"] == 1
    else:
        assert removed["purged"] is None and len(removed["stored"]) == 1
    with IndexReader(home) as reader:
        assert len(reader.responses()) == (1 if is_purge else 2)


def test_security_doc_commands_run_in_order(home: Home) -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    typed = re.findall(r"^\.venv/bin/cachectl key (.+)$", text, flags=re.MULTILINE)
    assert {words.split()[0] for words in typed} == {"add", "list", "show", "rotate", "remove"}
    for words in typed:
        run_key(home, *words.split())
    run_key(home, *re.findall(r"`cachectl key (show admin)`", text)[0].split())
    starts = re.findall(r"^\.venv/bin/warmline serve (.+)$", text, flags=re.MULTILINE)
    assert len(starts) == 3
    for words in starts:
        settings = parse_config(["--home", str(home.root), *words.split()], {})
        assert settings.lan or settings.admin_needs_key
    limits = [f"{HEAD_LINE_BYTES_MAX:,} bytes", f"| headers | {HEADERS_COUNT_MAX} |", f"{BODY_BYTES_MAX >> 20} MiB"]
    assert all(limit in text for limit in limits)
