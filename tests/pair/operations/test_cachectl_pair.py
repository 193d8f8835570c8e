"""`cachectl` beside a running pair and without one, and the disk budget."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.pair.pair import POLL_S, FolderOf, Message, Pair
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens

BUDGET_BYTES = 4_000_000
TOKENS = 10
CHANGING = {"age_s", "idle_s", "bytes_index", "bytes_used"}  # by the clock alone, and by bookkeeping


@pytest.fixture(scope="module")
def pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    flags = ("--disk-budget-gb", str(BUDGET_BYTES / 1e9))
    with Pair(tmp_path_factory.mktemp("cachectl"), tiny_folder("llama"), *flags) as pair:
        yield pair


@pytest.fixture
def running(pair: Pair) -> Pair:
    return pair if pair.is_up else pair.start()


@pytest.fixture
def stopped(pair: Pair) -> Pair:
    if pair.is_up:
        pair.stop()
    return pair


def send_turn(pair: Pair, name: str, words: str = "Hello there.") -> bytes:
    """Send one turn of the conversation `name`; its packed tokens, all of them on disk."""
    messages: list[Message] = [
        {"role": "system", "content": f"{name} is your name."},
        {"role": "user", "content": words},
    ]
    reply = pair.chat(messages, max_tokens=TOKENS, session_id=name)
    pair.settle()
    messages.append({"role": "assistant", "content": reply.text})
    return pair.render_prompt(messages).tokens[: (reply.prompt_tokens + TOKENS) * TOKEN_BYTES]


def find_folders_containing(pair: Pair, wanted: bytes) -> set[str]:
    """Find the folders under the home with a file that has these bytes."""
    root = pair.home.root
    paths = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).parts[0] for path in paths if wanted in path.read_bytes()}


def get_tail(tokens: bytes) -> bytes:
    """Get the last tokens, which no other conversation has."""
    return tokens[-16 * TOKEN_BYTES :]


def find_session(pair: Pair, name: str) -> str:
    (found,) = [row["id"] for row in pair.cachectl("inspect")["sessions"] if row["client"] == name]
    return str(found)


def remove_changing_parts(view: Any) -> Any:
    if isinstance(view, dict):
        return {name: remove_changing_parts(value) for name, value in view.items() if name not in CHANGING}
    return [remove_changing_parts(value) for value in view] if isinstance(view, list) else view


def list_views(pair: Pair) -> list[Any]:
    """List all views of cachectl on conversation "beta"."""
    beta = find_session(pair, "beta")
    leaf = pair.cachectl("inspect", beta)["path"][-1]["id"]
    commands = [
        ["inspect"],
        ["inspect", beta],
        ["inspect", leaf],
        ["stats"],
        ["verify"],
        ["verify", "--deep"],
        *(["purge", "--dry-run", *what] for what in (["--session", beta], ["--model", "llama"], ["--all"])),
        ["purge", "--dry-run", "--older-than", "0s"],
    ]
    return [remove_changing_parts(pair.cachectl(*command)) for command in commands]


def test_cachectl_output_is_equal_with_and_without_pair(running: Pair) -> None:
    for name in ("alpha", "beta", "gamma"):
        send_turn(running, name)
    limit = time.monotonic() + 60
    while running.cachectl("stats")["requests"]["count"] < 3:  # records are written every second
        assert time.monotonic() < limit
        time.sleep(POLL_S)
    up = list_views(running)
    running.stop()
    assert list_views(running) == up
    assert len(up[0]["sessions"]) == len(up[-1]["sessions"]) == 3 and up[4]["findings"] == []


def test_purge_while_the_pair_is_down(stopped: Pair) -> None:
    alpha = find_session(stopped, "alpha")
    assert stopped.cachectl("purge", "--session", alpha, "--dry-run")["sessions"] == [alpha]
    assert stopped.cachectl("purge", "--session", alpha, "--yes")["sessions"] == [alpha]
    assert {row["client"] for row in stopped.cachectl("inspect")["sessions"]} == {"beta", "gamma"}
    assert stopped.cachectl("verify", "--deep")["findings"] == []
    assert stopped.cachectl("purge", "--model", "llama", "--yes")["bytes_freed"] > 0
    assert stopped.cachectl("stats")["stored"]["segments"] == 0
    assert stopped.cachectl("verify")["findings"] == []


def test_purge_while_the_pair_runs(running: Pair) -> None:
    kept, purged = send_turn(running, "kept"), send_turn(running, "purged")
    assert find_folders_containing(running, get_tail(purged)) == {"index", "segments"}
    row = find_session(running, "purged")
    assert running.cachectl("purge", "--session", row, "--dry-run")["dry_run"] is True
    assert find_session(running, "purged") == row
    assert running.cachectl("purge", "--session", row, "--yes")["sessions"] == [row]
    assert find_folders_containing(running, get_tail(purged)) == find_folders_containing(running, b"purged") == set()
    assert find_folders_containing(running, get_tail(kept)) == {"index", "segments"}
    assert running.cachectl("verify", "--deep")["findings"] == []
    again = running.chat([{"role": "system", "content": "purged is your name."}], max_tokens=1)
    assert again.cached < 10, "nothing of it is left in memory either"
    running.settle()


def test_purge_truncates_to_token_and_keeps_shared_prefix(running: Pair) -> None:
    alike: Message = {"role": "system", "content": "Both begin with this, and one of them alone is to stay. " * 4}
    texts = {"cut": "Snip, snip: so go the shears. " * 6, "left": "What is it that remains of a talk? " * 6}
    tokens = {}
    for name, text in texts.items():
        messages: list[Message] = [alike, {"role": "user", "content": text}]
        running.chat(messages, max_tokens=TOKENS, session_id=name)
        running.settle()
        tokens[name] = running.render_prompt(messages).tokens
    gone, left = (find_session(running, name) for name in texts)
    preview = running.cachectl("purge", "--session", gone, "--dry-run")
    done = running.cachectl("purge", "--session", gone, "--yes")
    assert done["bytes_freed"] == preview["bytes_freed"] and len(done["cuts"]) == len(preview["cuts"]) == 1
    until = done["cuts"][0]["until"]
    assert until == count_common_tokens(*tokens.values()) > 100
    own = tokens["cut"][until * TOKEN_BYTES :]
    assert (
        find_folders_containing(running, own[: 8 * TOKEN_BYTES])
        == find_folders_containing(running, get_tail(own[:-200]))
        == set()
    )
    assert running.cachectl("verify", "--deep")["findings"] == []
    (replay,) = running.cachectl("verify", "--replay", left)["replays"]
    assert replay["outcome"] in ("equal", "within") and replay["reused"] > until, "of both files, and as if cold"


def test_purge_by_age_and_all_while_the_pair_runs(running: Pair) -> None:
    spoken = [send_turn(running, name) for name in ("old", "new")]
    assert running.cachectl("purge", "--older-than", "1h", "--yes", code=1) is None, "nothing is as old"
    assert running.cachectl("purge", "--older-than", "0s", "--yes")["sessions"] != []
    spoken.append(send_turn(running, "newest"))
    running.cachectl("purge", "--all", "--yes")
    for tokens in spoken:
        assert find_folders_containing(running, get_tail(tokens)) == set()
    assert find_folders_containing(running, b"newest") == set()
    assert list(running.home.segments.rglob("*.safetensors")) == []
    left = running.cachectl("inspect")
    assert (left["sessions"], left["quarantined"], left["bytes_alone"]) == ([], [], 0)
    assert running.cachectl("verify")["findings"] == []
    first, second = send_turn(running, "newest"), send_turn(running, "newest")
    assert first == second


def count_bytes_on_disk(pair: Pair) -> int:
    paths: list[Path] = [*pair.home.index.rglob("*"), *pair.home.segments.rglob("*")]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_disk_budget_holds_after_every_conversation(running: Pair) -> None:
    words = "A word that weighs. " * 60
    for number in range(9):
        send_turn(running, f"{number} heavy", words)
        assert count_bytes_on_disk(running) <= BUDGET_BYTES
    stored = running.cachectl("stats")["stored"]
    assert BUDGET_BYTES / 2 < stored["bytes_used"] <= BUDGET_BYTES
    assert 0 < stored["sessions"] < 9
    assert running.cachectl("verify", "--deep")["findings"] == []
    assert find_session(running, "8 heavy"), "the latest one is there"
