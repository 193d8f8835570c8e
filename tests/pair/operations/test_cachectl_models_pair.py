"""`cachectl` on a home with two models of which one is loaded, or none."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.pair.models_pair import ModelsPair, PairModel
from support.pair.pair import FolderOf
from warmline_cachectl.cli import app

FAMILIES = {"large": "llama", "small": "qwen3_5"}
ALIASES = {"large": ["gpt-4"]}


@pytest.fixture(scope="module")
def pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsPair]:
    models = [PairModel(name, tiny_folder(family), ALIASES.get(name, ())) for name, family in FAMILIES.items()]
    with ModelsPair(tmp_path_factory.mktemp("two"), models, memory_gb=4, stay_s=0) as pair:
        for name in FAMILIES:
            pair.chat([{"role": "user", "content": f"Hello, {name}. " * 20}], model=name, max_tokens=8, session_id=name)
            pair.settle()
        pair.set_loaded("large", False)
        yield pair


def run_cachectl(pair: ModelsPair, *words: str) -> str:
    return CliRunner().invoke(app, [*words, "--home", str(pair.home.root)]).output


def find_session(pair: ModelsPair, name: str) -> str:
    (found,) = [row["id"] for row in pair.cachectl("inspect")["sessions"] if row["client"] == name]
    return str(found)


def test_views_name_the_model_of_each_conversation(pair: ModelsPair) -> None:
    for verb in ("ls", "inspect"):
        assert {row["client"]: row["model"] for row in pair.cachectl(verb)["sessions"]} == {n: n for n in FAMILIES}
    for name in FAMILIES:
        (row,) = pair.cachectl("ls", "--model", name)["sessions"]
        assert row["client"] == name
    assert run_cachectl(pair, "explain").splitlines()[0].startswith("request ")


def test_top_and_doctor_show_which_models_are_loaded(pair: ModelsPair) -> None:
    stages = {model["name"]: model["stage"] for model in pair.cachectl("top")["models"]}
    assert stages == {"large": "unloaded", "small": "loaded"}
    assert "large: unloaded, small: loaded" in run_cachectl(pair, "top", "--once")
    assert find_check(pair, "backend") == ("ok", "large: unloaded, small: loaded")


def test_pair_without_loaded_models_is_healthy(pair: ModelsPair) -> None:
    pair.set_loaded("small", False)
    try:
        assert find_check(pair, "backend") == ("ok", "large: unloaded, small: unloaded")
        assert pair.cachectl("top")["backend"] == "up"
        assert pair.cachectl("verify", "--deep")["findings"] == []
    finally:
        pair.set_loaded("small", True)


def find_check(pair: ModelsPair, name: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["doctor", "--json", "--home", str(pair.home.root)])
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == name]
    return check["status"], check["seen"]


def test_replay_of_an_unloaded_model_says_how_to_load_it(pair: ModelsPair) -> None:
    loaded, unloaded = find_session(pair, "small"), find_session(pair, "large")
    (replay,) = pair.cachectl("verify", "--replay", loaded)["replays"]
    assert replay["outcome"] in ("equal", "within")
    shown = run_cachectl(pair, "verify", "--replay", unloaded)
    assert "skipped" in shown and "its model is not loaded: `warmline models load large`\n" in shown


def test_purge_of_an_unknown_name_lists_stored_models(pair: ModelsPair) -> None:
    shown = run_cachectl(pair, "purge", "--model", "gpt-4", "--yes")
    assert "nothing is stored of a model named 'gpt-4'; there is data of 'large', 'small'" in shown


def test_conversation_of_an_unloaded_model_is_moved(pair: ModelsPair, tmp_path: Path) -> None:
    """Export, purge of that model alone, import: it starts warm, and the other model's is untouched."""
    file, moved, kept = tmp_path / "large.tar", find_session(pair, "large"), find_session(pair, "small")
    pair.cachectl("export", moved, str(file))
    assert pair.cachectl("purge", "--model", "large", "--yes")["sessions"] == [moved]
    assert [row["id"] for row in pair.cachectl("ls")["sessions"]] == [kept]
    pair.cachectl("import", str(file))
    reply = pair.chat([{"role": "user", "content": "Hello, large. " * 20}], model="large", max_tokens=1)
    assert reply.cached == reply.prompt_tokens - 1
    pair.settle()


def test_prewarm_loads_no_model(pair: ModelsPair, tmp_path: Path) -> None:
    file = tmp_path / "day.json"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "What is to be done today? " * 20}]}))
    pair.set_loaded("large", False)
    pair.set_loaded("small", True)
    waiting = pair.cachectl("prewarm", str(file), "--model", "gpt-4", "--no-wait")
    assert (waiting["state"], waiting["detail"]) == (
        "waiting",
        "its model is not loaded: `warmline models load large`",
    )
    assert pair.cachectl("prewarm", str(file), "--model", "small")["state"] == "stored"
    assert "large: unloaded, small: loaded" in run_cachectl(pair, "top", "--once")
    pair.cachectl("prewarm", str(file), "--model", "other", code=3)
