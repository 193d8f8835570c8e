"""Full, failing, read-only and tampered disks: serving goes on, reports the state, and recovers."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pair.pair import POLL_S, WARMLINE, FolderOf, Message, Pair, Reply
from support.planted.faults import FaultControl
from support.processes import free_port

ANSWER = {"max_tokens": 6, "ignore_eos": True}
WRITES = ["create", "write", "sync", "rename"]
CHANGES = [*WRITES, "sync_folder", "link", "delete", "delete_folder", "make_folder", "set_mode"]
CHANGES += ["allocate", "run_lmdb"]
SLOW = ("--prefill-step-size", "16")  # so that restoring takes less time than computing, with a model of this size too
LIMIT_S = 60.0
TRIES_MAX = 20
SHARED_TOKENS_MAX = 40  # that two conversations begin with
BEGINS, ENDS = "KV can't be saved", "saving works again"
REFUSED = "a restore was refused"


class CheckedConversation:
    """Conversation whose every answer is compared with the cold one."""

    def __init__(self, pair: Pair, name: str) -> None:
        self._pair = pair
        self.messages: list[Message] = [{"role": "system", "content": f"{name} " * 40}]

    def send_turn(self, question: str) -> Reply:
        self.messages.append({"role": "user", "content": f"{question} " * 10})
        reply = self._pair.chat(self.messages, **ANSWER)
        assert reply.text == self._pair.ask_backend(self.messages, **ANSWER).text
        self.messages.append({"role": "assistant", "content": reply.text})
        return self._wait_for_log(reply)

    def repeat_from_disk(self) -> Reply:
        """Repeat the last turn from what is on disk alone."""
        for _ in range(TRIES_MAX):
            reply = self.repeat_last_turn()
            if "would take longer" not in self._pair.log[-1]:  # as it may seem where others use this machine, too
                break
        return reply

    def repeat_until_refused(self) -> Reply:
        """Repeat the last turn until a restore from disk was tried and refused."""
        before = count_log_lines(self._pair, REFUSED)
        for _ in range(TRIES_MAX):
            reply = self.repeat_last_turn()
            if count_log_lines(self._pair, REFUSED) > before:
                return reply
        raise AssertionError("nothing was refused")

    def repeat_last_turn(self) -> Reply:
        self._pair.forget_residents()
        reply = self._pair.chat(self.messages[:-1], **ANSWER)
        assert reply.text == self.messages[-1]["content"]
        return self._wait_for_log(reply)

    def _wait_for_log(self, reply: Reply) -> Reply:
        """Wait until the pair's log has all lines of this reply."""
        self._pair.settle()
        self._pair.perf_line(reply)
        return reply


def fetch_text(pair: Pair, path: str) -> str:
    with urllib.request.urlopen(pair.url + path) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def read_persistence(pair: Pair) -> str:
    """Read the persistence of /health, /metrics and the status report, which must agree."""
    for _ in range(TRIES_MAX):
        state = str(pair.proxy_status()["persistence"])
        health = json.loads(fetch_text(pair, "/health"))
        metrics = fetch_text(pair, "/metrics")
        if pair.proxy_status()["persistence"] == state:  # else it changed between the three: records are written later
            break
    assert (health["status"], health["persistence"]) == ("ok", state)
    assert f"warmline_persistent {float(state == 'ok')}" in metrics
    return state


def wait_until_saved(pair: Pair) -> None:
    """Wait until saving works and all KV in memory is on disk."""
    limit = time.monotonic() + LIMIT_S
    while (status := pair.proxy_status())["persistence"] != "ok" or status["unsaved"]:
        assert time.monotonic() < limit, status
        time.sleep(POLL_S)


def count_log_lines(pair: Pair, words: str) -> int:
    return sum(words in line for line in pair.log)


@pytest.fixture(scope="module")
def planted() -> Iterator[FaultControl]:
    with FaultControl(retry_interval_s=0.3) as planted:
        yield planted


@pytest.fixture(scope="module")
def pair(planted: FaultControl, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("home") / "h"
    with Pair(home, tiny_folder("llama"), *SLOW, environment=planted.environment) as pair:
        yield pair
        assert pair.cachectl("verify", "--deep")["findings"] == []


@pytest.mark.parametrize(
    ("process", "code", "steps"),
    [
        ("backend", "ENOSPC", ["write"]),
        ("backend", "EIO", ["sync"]),
        ("backend", "EROFS", WRITES),
        ("proxy", "ENOSPC", ["run_lmdb"]),
        ("proxy", "EROFS", CHANGES),
    ],
)
def test_serving_continues_without_persistence(
    pair: Pair, planted: FaultControl, process: str, code: str, steps: list[str]
) -> None:
    begin_count, end_count = count_log_lines(pair, BEGINS), count_log_lines(pair, ENDS)
    talk = CheckedConversation(pair, f"{process} {code}")
    talk.send_turn("first")
    saved = talk.repeat_from_disk().cached
    assert saved, pair.log[-1]
    assert read_persistence(pair) == "ok"
    planted.fail_disk(process, code, steps)
    try:
        assert talk.send_turn("second").cached >= saved
        assert code in read_persistence(pair)
        assert talk.send_turn("third").cached > saved, "in memory the conversation is warm"
        CheckedConversation(pair, "another").send_turn("first")
        assert code in read_persistence(pair)
        assert f'warmline_save_failures_total{{reason="{code}"}}' in fetch_text(pair, "/metrics")
    finally:
        planted.restore_disk(process)
    wait_until_saved(pair)
    assert talk.repeat_from_disk().cached > saved, "what could not be saved then is saved now"
    assert count_log_lines(pair, ENDS) - end_count == 1
    assert 1 <= count_log_lines(pair, BEGINS) - begin_count <= 2, "one line a part that fails, not one a request"


def test_full_disk_evicts_below_budget(pair: Pair, planted: FaultControl) -> None:
    sacrificed = CheckedConversation(pair, "of little use")
    sacrificed.send_turn("first")
    talk = CheckedConversation(pair, "of more use")
    begin_count, full_count = count_log_lines(pair, BEGINS), count_log_lines(pair, "the disk is full")
    planted.fail_disk("backend", "ENOSPC", ["write"], times=1)
    try:
        talk.send_turn("first")
    finally:
        planted.restore_disk("backend")
    assert read_persistence(pair) == "ok" and count_log_lines(pair, BEGINS) == begin_count
    assert talk.repeat_from_disk().cached
    assert count_log_lines(pair, "the disk is full") == full_count + 1


def test_unreadable_files_are_kept(pair: Pair, planted: FaultControl) -> None:
    talk = CheckedConversation(pair, "unreadable")
    talk.send_turn("first")
    saved = talk.repeat_from_disk().cached
    planted.fail_disk("backend", "EIO", ["open_to_read"], under="segments")
    try:
        assert talk.repeat_until_refused().cached < SHARED_TOKENS_MAX
    finally:
        planted.restore_disk("backend")
    assert talk.repeat_from_disk().cached == saved > SHARED_TOKENS_MAX


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_manually_deleted_segment_is_a_miss(pair: Pair, planted: FaultControl, nth: int) -> None:
    """Before it is looked for (0); when a restore opens it, to look at its header (1) or to read it (2)."""
    talk = CheckedConversation(pair, f"deleted {nth}")
    before = set(pair.home.segments.rglob("*.safetensors"))
    talk.send_turn("first")
    (path,) = set(pair.home.segments.rglob("*.safetensors")) - before
    if nth:
        planted.lose_file("backend", nth)
    else:
        path.unlink()
    assert talk.repeat_until_refused().cached < SHARED_TOKENS_MAX
    planted.restore_disk("backend")
    assert not path.exists()
    assert talk.repeat_from_disk().cached > SHARED_TOKENS_MAX, "it was saved anew"
    assert pair.cachectl("verify", "--deep")["findings"] == []


def test_second_pair_on_home_is_refused(pair: Pair, tiny_folder: FolderOf) -> None:
    ports = ["--port", str(free_port()), "--backend-port", str(free_port())]
    arguments = [WARMLINE, "serve", "--home", str(pair.home.root), "--model", str(tiny_folder("llama")), *ports]
    second = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode != 0
    output = second.stdout + second.stderr
    assert any(f"in use by process {pair.pid(process)}" in output for process in ("proxy", "backend"))
    assert CheckedConversation(pair, "still here").send_turn("first").text


def test_read_only_home_at_start(tiny_folder: FolderOf, tmp_path: Path) -> None:
    with FaultControl(retry_interval_s=0.3) as planted:
        pair = Pair(tmp_path / "h", tiny_folder("llama"), *SLOW, environment=planted.environment)
        talk = CheckedConversation(pair, "read only")
        with pair:
            talk.send_turn("first")
        for process in ("proxy", "backend"):
            planted.fail_disk(process, "EROFS", CHANGES)
        with pair:
            assert "EROFS" in read_persistence(pair)
            saved = talk.repeat_from_disk().cached
            assert saved, "what is stored is used"
            assert talk.send_turn("second").cached >= saved
            for process in ("backend", "proxy"):
                planted.restore_disk(process)
            wait_until_saved(pair)
            assert talk.repeat_from_disk().cached > saved
            assert pair.cachectl("verify", "--deep")["findings"] == []


def test_index_outgrows_map(tiny_folder: FolderOf, tmp_path: Path) -> None:
    with FaultControl(map_bytes=1 << 18, retry_interval_s=0.3) as planted:
        pair = Pair(tmp_path / "h", tiny_folder("llama"), *SLOW, environment=planted.environment)
        with pair:
            planted.fail_disk("proxy", "ENOMEM", ["run_lmdb"], under="grow")
            turns = 0
            while read_persistence(pair) == "ok":
                turns += 1
                assert turns < 60
                pair.chat([{"role": "user", "content": f"talk {turns} " * 250}], **ANSWER)
                pair.settle()
            assert "index" in read_persistence(pair)
            talk = CheckedConversation(pair, "the last")
            talk.send_turn("first")
            planted.restore_disk("proxy")
            wait_until_saved(pair)
            assert talk.repeat_from_disk().cached
            assert count_log_lines(pair, "the map of the index grew")
            assert pair.cachectl("verify", "--deep")["findings"] == []
