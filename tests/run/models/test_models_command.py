"""`warmline models` against a stand-in of the proxy's routes, and its table."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.run.models_proxy import GB, make_model, run_models_proxy, write_dead_announcement
from support.run.warmline_command import invoke_warmline, run_warmline
from warmline_common.storage.home import Home
from warmline_run.models.changes import list_unloaded
from warmline_run.models.client import ListedModel, ModelList
from warmline_run.models.table import format_models

NOW = 1_000_000.0
SIZES = {"weight_bytes": 40 * GB, "need_bytes": 41 * GB, "held_bytes": 43 * GB, "kv_bytes": 2 * GB}
LARGE = make_model("large", aliases=["big"], default=True, stage="loaded", **SIZES)
SMALL = make_model("org/small", need_bytes=9 * GB)
HUGE = make_model("huge", need_bytes=400 * GB)


def test_table_shows_stage_memory_marks_and_use() -> None:
    large = ListedModel(
        name="large", stage="loaded", aliases=["big"], default=True, pinned=True, running=1, waiting=12,
        last_used_at=NOW - 90, **SIZES,
    )  # fmt: skip
    small = ListedModel(
        name="s", stage="failed", weight_bytes=250_000, need_bytes=9 * 10**8, idle_s=600.0, reason="no config\n.json",
        wait_reason="large stays",
    )  # fmt: skip
    assert list(format_models(ModelList(models=[large, small], memory_bytes=100 * GB, keeper=True), NOW)) == [
        "model  stage    weights    needs    holds      KV  running  waiting    used",
        "large  loaded   40.0 GB  41.0 GB  43.0 GB  2.0 GB        1       12  2m ago  default, pinned, also big",
        "s      failed  0.250 MB   900 MB        -       -        0        0   never  unloaded after 600 s",
        "s: no config\\n.json",
        "requests wait for s: large stays",
        "memory: 43.0 GB of 100.0 GB held",
    ]


def test_ls_prints_table_and_json(tmp_path: Path) -> None:
    with run_models_proxy(Home(tmp_path), LARGE, SMALL) as proxy:
        table = run_warmline("models", "ls", WARMLINE_HOME=str(tmp_path))
        assert (table.returncode, table.stderr) == (0, "")
        assert table.stdout.splitlines()[1].split()[:5] == ["large", "loaded", "40.0", "GB", "41.0"]
        whole = run_warmline("models", "ls", "--home", str(tmp_path), "--json")
        assert json.loads(whole.stdout) == proxy.list_models()


def test_load_unload_and_pin_send_their_requests(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    with run_models_proxy(Home(tmp_path), dict(LARGE), dict(SMALL), dict(HUGE)) as proxy:
        done = [
            invoke_warmline("models", *words, *home).stdout
            for words in (
                ("load", "org/small"), ("load", "org/small"), ("pin", "big"), ("pin", "big"), ("pin", "big", "--off"),
                ("pin", "big", "--off"), ("unload", "large"), ("unload", "large"), ("load", "big", "--no-wait"),
                ("pin", "huge"),
            )
        ]  # fmt: skip
        assert proxy.requests == [
            *[("/warmline/models/org%2Fsmall/load", {"wait": True})] * 2,
            *[("/warmline/models/big/pin", {"pinned": True})] * 2,
            *[("/warmline/models/big/pin", {"pinned": False})] * 2,
            *[("/warmline/models/large/unload", {})] * 2,
            ("/warmline/models/big/load", {"wait": False}),
            ("/warmline/models/huge/pin", {"pinned": True}),
        ]
        assert done == [
            "org/small is loaded now\n",
            "org/small was loaded already\n",
            "large is pinned now, and stays loaded\n",
            "large was pinned already\n",
            "large is not pinned any more\n",
            "large was not pinned\n",
            "large is unloaded now; it held 43.0 GB\n",
            "large was not loaded\n",
            "large is starting\n",
            "huge is pinned now, and is loaded next\n",
        ]


def test_load_names_the_models_that_were_unloaded_for_it() -> None:
    models = [ListedModel(name="large", stage="loaded"), ListedModel(name="small", stage="unloaded")]
    before, after = ModelList(models=models), ModelList(models=[replace(models[0], stage="stopping"), models[1]])
    assert list(list_unloaded(before, after, "small")) == ["large"] and not list(list_unloaded(before, after, "large"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("load", "nosuch"), 1, "there is no model nosuch"),
        (("unload", "large"), 3, "large is pinned"),
        (("load", "huge"), 3, "huge needs 400 GB, there are 100 GB"),
    ],
)
def test_refusals_are_one_line_and_a_code(tmp_path: Path, words: tuple[str, ...], code: int, message: str) -> None:
    with run_models_proxy(Home(tmp_path), {**LARGE, "pinned": True}, HUGE):
        done = invoke_warmline("models", *words, "--home", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"warmline: {message}\n")


def test_pair_of_one_model_refuses_to_unload_it(tmp_path: Path) -> None:
    with run_models_proxy(Home(tmp_path), LARGE, keeper=False):
        done = invoke_warmline("models", "unload", "large", "--home", str(tmp_path))
        assert "memory:" not in invoke_warmline("models", "ls", "--home", str(tmp_path)).stdout
    assert (done.returncode, done.stderr) == (3, "warmline: one model is configured: it stays loaded\n")


def test_without_proxy_the_message_says_how_to_start(tmp_path: Path) -> None:
    expected = f"warmline: no proxy runs on {tmp_path} (start `warmline serve --home {tmp_path}`)\n"
    assert invoke_warmline("models", "ls", "--home", str(tmp_path)).stderr == expected
    write_dead_announcement(tmp_path, 9)
    done = invoke_warmline("models", "unload", "x", "--home", str(tmp_path))
    assert (done.returncode, done.stderr) == (3, expected), "a killed proxy's file is no proxy"


def test_empty_home_exits_with_2() -> None:
    done = run_warmline("models", "ls", "--home", "")
    assert (done.returncode, done.stderr) == (2, "warmline: --home: expected a directory, not ''\n")
