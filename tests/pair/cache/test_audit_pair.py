"""Audits over a real pair: intact files agree with a cold run, false files with valid checksums are quarantined."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pair.pair import POLL_S, SETTLE_TIMEOUT_S, FolderOf, Message, Pair, Reply
from warmline_backend.kv_cache.segment_io import RawTensor, write_segment_file
from warmline_common.storage.segment_file import read_header, read_tokens

MODES = {"fast": "llama", "exact": "qwen3_5"}
STEP = 32
AGREES = {"fast": ("equal", "within"), "exact": ("equal",)}
WORDS = "The harbour lies in the fog, the ships wait for the tide, and nobody on the pier says a word. "
# What a turn is made of: enough to be sooner read from disk than computed, and in exact mode to reach over the grid.
REPEATED = {"fast": 8, "exact": 3}


@pytest.fixture(params=MODES, scope="module")
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(mode: str, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    flags = ["--reuse", mode, "--prefill-step-size", str(STEP), "--audit-fraction", "1", "--audit-quiet-s", "0"]
    with Pair(tmp_path_factory.mktemp(mode), tiny_folder(MODES[mode]), *flags) as pair:
        pair.warm_up_restores()
        yield pair


class AuditedConversation:
    """Conversation whose turns are answered, saved and evicted, so that the next one starts from disk."""

    def __init__(self, pair: Pair, mode: str, name: str) -> None:
        self.pair, self.name, self._words = pair, name, WORDS * REPEATED[mode]
        self.messages: list[Message] = []

    def send_turn(self) -> Reply:
        self.messages.append({"role": "user", "content": f"{self.name} {len(self.messages)}: {self._words}"})
        reply = self.pair.chat(self.messages, max_tokens=6, session_id=self.name)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.pair.settle()
        return reply

    def wait_for_audit(self, reply: Reply) -> str:
        """Wait for the audit of a reply; its verdict."""
        limit, name = time.monotonic() + SETTLE_TIMEOUT_S, reply.headers["X-Warmline-Request"]
        while not (found := "".join(each["audit"] for each in self.pair.requests() if each["id"] == name)):
            assert time.monotonic() < limit, "no audit"
            time.sleep(POLL_S)
        return found

    @property
    def session(self) -> str:
        return next(row["id"] for row in self.pair.cachectl("inspect")["sessions"] if row["client"] == self.name)

    def falsify_last_segment(self) -> None:
        """Falsify the values of the last segment (or checkpoint, for models with states) under valid checksums."""
        last = self.pair.cachectl("inspect", self.session)["path"][-1]
        falsify_file(self.pair.home.segment_file([last, *last["checkpoints"]][-1]["id"]))
        self.pair.forget_residents()


def falsify_file(path: Path) -> None:
    """Negate every number."""
    header = read_header(path)
    data = path.read_bytes()
    tensors = {}
    for name, place in header.select_kv_tensors().items():
        turned = bytearray(data[place.offset : place.offset + place.bytes_count])
        turned[3::4] = bytes(byte ^ 0x80 for byte in turned[3::4])
        assert place.dtype == "F32"
        tensors[name] = RawTensor(place.dtype, place.shape, memoryview(turned))
    write_segment_file(path, header.meta, tensors, read_tokens(path) if header.meta.kind == "segment" else b"")


def test_audit_of_intact_files_agrees(pair: Pair, mode: str) -> None:
    talk = AuditedConversation(pair, mode, "whole")
    talk.send_turn()
    in_memory = talk.send_turn()
    assert in_memory.headers["X-Warmline-Cache"].startswith("resident") and in_memory.cached >= STEP
    assert talk.wait_for_audit(in_memory) in AGREES[mode]
    pair.forget_residents()
    from_disk = talk.send_turn()
    assert from_disk.headers["X-Warmline-Cache"].startswith("restored") and from_disk.cached >= STEP
    assert talk.wait_for_audit(from_disk) in AGREES[mode]
    (replay,) = pair.cachectl("verify", "--replay", talk.session)["replays"]
    assert replay["outcome"] in AGREES[mode] and replay["reused"] >= STEP
    assert not pair.cachectl("inspect")["quarantined"]


def test_audit_detects_false_file(pair: Pair, mode: str) -> None:
    talk = AuditedConversation(pair, mode, "lies")
    talk.send_turn()
    talk.falsify_last_segment()
    wrong = talk.send_turn()
    assert wrong.headers["X-Warmline-Cache"].startswith("restored"), "or it proves nothing"
    assert talk.wait_for_audit(wrong) == "differs"
    assert "ERROR" in pair.wait_for_log_line(f"AUDIT request={wrong.headers['X-Warmline-Request']} differs: ")
    assert "ERROR" in pair.wait_for_log_line(f"AUDIT request={wrong.headers['X-Warmline-Request']}: .* quarantined")
    assert any(row["reason"] == "suspect" for row in pair.cachectl("inspect")["quarantined"])
    talk.messages.append({"role": "user", "content": "And now?"})
    again = pair.chat(talk.messages, max_tokens=6)
    assert again.headers["X-Warmline-Cache"] == "cold 0"
    assert again.text == pair.ask_backend(talk.messages, max_tokens=6).text
    pair.settle()
    assert not pair.cachectl("verify", "--deep")["findings"]


def test_shared_segments_survive_quarantine(pair: Pair, mode: str) -> None:
    one, other = AuditedConversation(pair, mode, "one"), AuditedConversation(pair, mode, "other")
    shared = one.send_turn().prompt_tokens
    other.messages = list(one.messages)
    other.send_turn()
    one.send_turn()
    one.falsify_last_segment()
    wrong = one.send_turn()
    assert wrong.cached > shared and one.wait_for_audit(wrong) == "differs"
    pair.forget_residents()
    untouched = other.send_turn()
    assert untouched.cached > shared, "nothing of it is lost"
    assert other.wait_for_audit(untouched) in AGREES[mode]
    pair.forget_residents()
    again = one.send_turn()
    assert again.headers["X-Warmline-Cache"].startswith("restored") and again.cached < wrong.cached
    assert one.wait_for_audit(again) in AGREES[mode]
    assert not pair.cachectl("verify", "--deep")["findings"]


def test_replay_detects_false_file(pair: Pair, mode: str) -> None:
    talk = AuditedConversation(pair, mode, "replayed")
    talk.send_turn()
    talk.falsify_last_segment()
    (replay,) = pair.cachectl("verify", "--replay", talk.session, code=1)["replays"]
    assert replay["outcome"] == "differs" and replay["quarantined"] and replay["difference"] > replay["tolerance"]
    talk.messages.append({"role": "user", "content": "And now?"})
    assert pair.chat(talk.messages, max_tokens=6).headers["X-Warmline-Cache"] == "cold 0"
