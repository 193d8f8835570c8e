"""Prewarming on a real pair: first turns are warm from disk, also with another model, and requests go before it.

The model has recurrent layers, which start from checkpoints alone.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.pair.pair import POLL_S, SETTLE_TIMEOUT_S, FolderOf, Message, Pair
from support.pair.pair import Reply as Answer

SYSTEM: Message = {"role": "system", "content": "The ships wait for the tide, and nobody says a word. " * 12}
DAY: list[Message] = [
    SYSTEM | {"content": "Look after the harbour. " * 30},
    {"role": "user", "content": "Begin. " * 60},
]
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "The tide.", "parameters": {}}}]
TABLES = """
[[prewarm]]
file = "prewarm/day.json"
pin = true

[[prewarm]]
client = "harbour"

[[prewarm]]
file = "prewarm/missing.json"
"""


@pytest.fixture
def pair(tmp_path: Path, tiny_folder: FolderOf) -> Iterator[Pair]:
    home, model = tmp_path / "home", shutil.copytree(tiny_folder("qwen3_5"), tmp_path / "model")
    (home / "prewarm").mkdir(parents=True, mode=0o700)
    (home / "prewarm" / "day.json").write_text(json.dumps({"messages": DAY, "max_tokens": 50, "n": 2}))
    (home / "warmline.toml").write_text(TABLES)
    with Pair(home, model, "--audit-quiet-s", "0", "--prefill-step-size", "256", "--speculation", "off") as pair:
        yield pair


def upgrade_model(pair: Pair, model: Path) -> None:
    """Change the model, and have its backend started again."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"version": 2}))
    os.kill(pair.pid("backend"), signal.SIGKILL)


def list_entries(pair: Pair) -> list[Any]:
    return list(pair.as_owner("GET", pair.url + "/warmline/prewarm").json["entries"])


def wait_for_entries(pair: Pair, is_done: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Wait until the entries are as wanted; the entries."""
    limit = time.monotonic() + SETTLE_TIMEOUT_S
    while not is_done(entries := list_entries(pair)):
        assert time.monotonic() < limit, "\n".join(map(str, entries))
        time.sleep(POLL_S)
    return entries


def list_states(entries: Sequence[Any]) -> list[str]:
    return [entry["state"] for entry in entries]


def ask_as_client(pair: Pair, question: str) -> Answer:
    """First turn of a conversation of the configured client."""
    body = {"messages": [SYSTEM, {"role": "user", "content": question}], "tools": TOOLS, "max_tokens": 2}
    reply = pair.post("/v1/chat/completions", body, **{"User-Agent": "harbour/2.0 (external)"})
    assert reply.status == 200, reply.raw
    pair.settle()
    return reply


def test_first_turns_are_warm_also_after_an_upgrade(pair: Pair, tmp_path: Path) -> None:
    day, client, missing = wait_for_entries(pair, lambda found: list_states(found) == ["stored", "waiting", "failed"])
    assert day["pinned"] and day["tokens"] == day["computed_tokens"] and "no request" in client["detail"]
    assert "there is no such file" in missing["detail"]
    pair.forget_residents()
    warm = pair.chat(DAY, max_tokens=2)
    assert warm.headers["X-Warmline-Cache"].startswith("restored") and warm.cached > 0.9 * day["tokens"]
    ask_as_client(pair, "When is the tide?")
    wait_for_entries(pair, lambda found: list_states(found)[1] == "stored")
    check_yield(pair, tmp_path)
    check_command(pair, tmp_path)

    upgrade_model(pair, tmp_path / "model")
    day, client, *_ = wait_for_entries(pair, lambda found: found[0]["computed_tokens"] > day["computed_tokens"])
    day, client, *_ = wait_for_entries(pair, lambda found: list_states(found)[:2] == ["stored", "stored"])
    assert (day["computed_tokens"], client["computed_tokens"]) == (2 * day["tokens"], client["tokens"])
    pair.forget_residents()
    first = ask_as_client(pair, "How many ships are there?")
    assert (first.headers["X-Warmline-Cache"], first.cached) == (f"restored {client['tokens']}", client["tokens"])
    sessions = [row for row in pair.cachectl("inspect")["sessions"] if row["client"].startswith("prewarm:")]
    pinned = [row["client"] for row in sessions if row["pinned"]]
    assert sorted(pinned) == ["prewarm:command", "prewarm:prewarm/day.json"], "one of each model is not"
    assert {record["endpoint"] for record in pair.requests()} == {"chat"}, "the owner's records are clients' requests"
    pair.cachectl("purge", "--all", "--yes")
    assert not pair.home.prompt_heads.exists()


def check_yield(pair: Pair, folder: Path) -> None:
    """A request ends the computation at once, which goes on from there, and is stored in the end."""
    long: list[Message] = [{"role": "user", "content": "All the ships of the harbour. " * 150}]
    (folder / "long.json").write_text(json.dumps({"messages": long}))
    sent = pair.cachectl("prewarm", str(folder / "long.json"), "--no-wait")

    def find(entries: Sequence[Any]) -> Any:
        return next(entry for entry in entries if entry["id"] == sent["id"])

    wait_for_entries(pair, lambda found: find(found)["progress_tokens"] > 0)
    assert [row["phase"] for row in pair.proxy_status()["live"]] == ["prewarming"]
    assert pair.chat([{"role": "user", "content": "Quick!"}], max_tokens=1).status == 200
    assert find(list_entries(pair))["state"] != "stored", "or it proves nothing"
    done = find(wait_for_entries(pair, lambda found: find(found)["state"] == "stored"))
    assert done["computed_tokens"] < done["tokens"] == sent["tokens"], "it has gone on where it was"
    metrics = pair.as_owner("GET", pair.url + "/metrics").raw.decode()
    assert 'warmline_prewarms_total{outcome="cancelled",source="cold"} 1.0' in metrics


def check_command(pair: Pair, folder: Path) -> None:
    file = str(folder / "home" / "prewarm" / "day.json")
    done = pair.cachectl("prewarm", file, "--pin", "--api", "chat")
    assert (done["state"], done["computed_tokens"], done["pinned"]) == ("stored", 0, True)
    (folder / "huge.json").write_text(json.dumps({"prompt": "word " * 30_000}))
    for words in ([str(folder / "huge.json")], [file, "--key", "nobody"], [file, "--api", "responses"]):
        pair.cachectl("prewarm", *words, code=3)
    assert [entry["id"] for entry in pair.cachectl("prewarm", "--list")["entries"]][-1] == done["id"]
    pair.cachectl("prewarm", file, "--list", code=2)
    pair.cachectl("prewarm", str(folder / "none.json"), code=2)
