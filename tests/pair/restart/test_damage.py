"""Damaged, foreign and missing files: a miss with a reason, a quarantined file, a right answer."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.pair import FolderOf, Message, Pair, Reply
from warmline_common.storage.segment_file import read_header

TOKENS = 8
UNTOUCHED = "untouched"
Damage = Callable[[Path, Path], None]  # (the file, another conversation's file of the same kind)


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def flip_row(path: Path, other: Path) -> None:
    tensors = read_header(path).tensors
    name = next(name for name in sorted(tensors) if name not in ("tokens", "checksums"))
    flip_bit(path, tensors[name].offset + tensors[name].bytes_count // 2)


def flip_token(path: Path, other: Path) -> None:
    flip_bit(path, read_header(path).tensors["tokens"].offset)


def flip_header_length(path: Path, other: Path) -> None:
    flip_bit(path, 2)


def truncate(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)


def replace_fingerprint(path: Path, other: Path) -> None:
    """Rewrite the file as a model of the same shape would have written it."""
    mark = read_header(path).meta.fingerprint.encode()
    path.write_bytes(path.read_bytes().replace(mark, b"0" * len(mark), 1))


def copy_other_file(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def delete(path: Path, other: Path) -> None:
    path.unlink()


@dataclass(frozen=True)
class Case:
    damage: Damage
    file: int  # which of the conversation's; segment 0 is the root that all share
    reason: str  # why it is in quarantine afterwards
    kind: str = "segment"
    aside: bool = True  # what was deleted can't be
    miss: str = ""  # what the miss is put down to, where not to that reason


SEGMENTS = {
    "a row": Case(flip_row, 2, "checksum"),
    "a token": Case(flip_token, 2, "checksum"),
    "the header's length": Case(flip_header_length, 2, "truncated"),
    "the first of two": Case(flip_row, 1, "checksum"),
    "truncated": Case(truncate, 2, "truncated"),
    "another model's": Case(replace_fingerprint, 2, "foreign"),
    "another conversation's": Case(copy_other_file, 2, "foreign"),
    "deleted": Case(delete, 2, "missing", aside=False),
}
CHECKPOINTS = {
    "a state": Case(flip_row, -1, "checksum", "checkpoint"),
    "a truncated state": Case(truncate, -1, "truncated", "checkpoint", miss="no checkpoint after"),
    "another model's state": Case(replace_fingerprint, -1, "foreign", "checkpoint"),
    "a deleted state": Case(delete, -1, "missing", "checkpoint", aside=False, miss="no checkpoint after"),
}
FAMILIES = {
    "llama": SEGMENTS,
    "qwen3_5": {"a row": SEGMENTS["a row"], "the first of two": SEGMENTS["the first of two"], **CHECKPOINTS},
}


@dataclass
class DamagedConversation:
    """Conversation, and the outcome of its third turn, after the damage."""

    name: str
    messages: list[Message]
    path: list[dict[str, Any]] = field(default_factory=list)  # as cachectl shows it before the damage
    damaged: str = ""
    warm: Reply | None = None
    cold: Reply | None = None
    perf: str = ""

    def send_turn(self, pair: Pair, words: str) -> Reply:
        self.messages.append({"role": "user", "content": words})
        reply = pair.chat(self.messages, max_tokens=TOKENS, session_id=self.name, **WITH_LOGPROBS)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply

    def list_files(self, kind: str) -> list[str]:
        if kind == "segment":
            return [row["id"] for row in self.path]
        return [state["id"] for row in self.path for state in row["checkpoints"]]

    def list_starts(self) -> list[int]:
        """List the positions at which the conversation can continue: its checkpoints, or else its segments' ends."""
        states = [state["position"] for row in self.path for state in row["checkpoints"]]
        return states or [row["start"] for row in self.path[1:]] + [self.path[-1]["end"]]


@dataclass
class Aftermath:
    pair: Pair
    cases: dict[str, Case]
    talks: dict[str, DamagedConversation]


def make_conversation(number: int, name: str) -> DamagedConversation:
    """Make a conversation; all have one length, different beginnings, and too many words for a merge of segments."""
    return DamagedConversation(
        name, [{"role": "system", "content": f"{chr(ord('A') + number)} {name:24}: you answer. " * 30}]
    )


def read_paths(pair: Pair, talks: dict[str, DamagedConversation]) -> None:
    for session in pair.cachectl("inspect")["sessions"]:
        if session["client"] in talks:
            talks[session["client"]].path = pair.cachectl("inspect", session["id"])["path"]


@pytest.fixture(scope="module", params=FAMILIES)
def aftermath(
    request: pytest.FixtureRequest, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Aftermath]:
    """Conversations of two turns, all but one damaged while nothing runs, and their third turns."""
    cases = FAMILIES[request.param]
    pair = Pair(tmp_path_factory.mktemp("damage"), tiny_folder(request.param))
    talks = {name: make_conversation(number, name) for number, name in enumerate((*cases, UNTOUCHED))}
    with pair:
        DamagedConversation("root", [{"role": "system", "content": "Short."}]).send_turn(pair, "Hello?")
        pair.settle()
        for talk in talks.values():
            talk.send_turn(pair, "Hello, who are you?")
            pair.settle()
            talk.send_turn(pair, "Tell me about the sea.")
        pair.settle()
        read_paths(pair, talks)
    for name, case in cases.items():
        talk = talks[name]
        talk.damaged = talk.list_files(case.kind)[case.file]
        other = talks[UNTOUCHED].list_files(case.kind)[case.file]
        case.damage(pair.home.segment_file(talk.damaged), pair.home.segment_file(other))
    with pair:
        for talk in talks.values():
            talk.warm = talk.send_turn(pair, "And about ships?")
            talk.perf = pair.perf_line(talk.warm)
            talk.cold = pair.ask_backend(talk.messages[:-1], max_tokens=TOKENS, **WITH_LOGPROBS)
        yield Aftermath(pair, cases, talks)


def test_answer_after_damage_is_right(aftermath: Aftermath) -> None:
    for talk in aftermath.talks.values():
        assert talk.warm and talk.cold and talk.cold.status == 200
        assert explain_difference(talk.cold, talk.warm) == "", talk.name


def test_prefix_before_damage_is_reused(aftermath: Aftermath) -> None:
    untouched = aftermath.talks[UNTOUCHED]
    assert untouched.warm and untouched.warm.cached == untouched.list_starts()[-1]
    for name, case in aftermath.cases.items():
        talk = aftermath.talks[name]
        assert talk.warm and talk.warm.cached == find_last_good_start(talk, case) < talk.list_starts()[-1], name
        source, reused = talk.warm.headers["X-Warmline-Cache"].split()
        assert int(reused) == talk.warm.cached
        assert source == "restored" or talk.warm.cached <= talk.path[0]["end"], name


def find_last_good_start(talk: DamagedConversation, case: Case) -> int:
    """Find the last position before the damage at which the conversation can continue."""
    if case.kind == "checkpoint":
        return talk.list_starts()[case.file - 1]
    start = talk.path[case.file]["start"]
    return max((at for at in talk.list_starts() if at <= start), default=0)


def test_damage_is_reported_and_quarantined(aftermath: Aftermath) -> None:
    aside = {row["id"]: row["reason"] for row in aftermath.pair.cachectl("inspect")["quarantined"]}
    for name, case in aftermath.cases.items():
        talk = aftermath.talks[name]
        miss = json.loads(talk.perf.split(" miss=")[1].split(' model="')[0])
        assert (case.miss or case.reason) in miss, name
        assert aside.get(talk.damaged) == (case.reason if case.aside else None), name
        assert not aftermath.pair.home.segment_file(talk.damaged).exists(), name


def test_next_turn_after_damage_is_warm(aftermath: Aftermath) -> None:
    pair = aftermath.pair
    pair.settle()
    read_paths(pair, aftermath.talks)
    for talk in aftermath.talks.values():
        assert talk.warm
        stored = talk.warm.prompt_tokens + TOKENS
        assert talk.path[-1]["end"] == stored, "what was computed anew is on disk again"
        assert talk.send_turn(pair, "Thanks.").cached == stored, talk.name
    pair.settle()
    assert pair.cachectl("verify", "--deep")["findings"] == []


def test_file_deleted_at_runtime_is_a_miss(aftermath: Aftermath) -> None:
    """Nothing that was read once is trusted: files are looked at whenever they are needed."""
    pair, talk = aftermath.pair, make_conversation(len(aftermath.talks), "vanishing")
    talk.send_turn(pair, "Hello, who are you?")
    pair.settle()
    read_paths(pair, {**aftermath.talks, "vanishing": talk})
    pair.home.segment_file(talk.path[0]["id"]).unlink()
    pair.forget_residents()
    talk.warm = talk.send_turn(pair, "Tell me about the sea.")
    assert talk.warm.cached == 0 and "missing" in pair.perf_line(talk.warm)
    cold = pair.ask_backend(talk.messages[:-1], max_tokens=TOKENS, **WITH_LOGPROBS)
    assert explain_difference(cold, talk.warm) == ""
    pair.settle()
    assert pair.cachectl("verify", "--deep")["findings"] == []
