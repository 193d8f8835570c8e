"""Damaged index: a start rebuilds it from the files, and a running pair repairs itself on request."""

from collections.abc import Iterator

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.pair import FolderOf, Message, Pair, Reply

TOKENS = 8


class RepairedConversation:
    def __init__(self, pair: Pair, opening: str) -> None:
        self.pair = pair
        self.messages: list[Message] = [{"role": "system", "content": opening * 20}]

    def send_turn(self, words: str) -> Reply:
        """Send a turn; its answer equals a cold one, and its tail is on disk on return."""
        self.messages.append({"role": "user", "content": words})
        reply = self.pair.chat(self.messages, max_tokens=TOKENS, **WITH_LOGPROBS)
        cold = self.pair.ask_backend(self.messages, max_tokens=TOKENS, **WITH_LOGPROBS)
        assert explain_difference(cold, reply) == ""
        self.messages.append({"role": "assistant", "content": reply.text})
        self.pair.settle()
        return reply


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def pair(
    request: pytest.FixtureRequest, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("repair"), tiny_folder(request.param)) as pair:
        yield pair


def test_damaged_index_loses_nothing(pair: Pair) -> None:
    talk = RepairedConversation(pair, "You answer. ")
    talk.send_turn("Hello, who are you?")
    before = talk.send_turn("Tell me about the sea.")
    stored = pair.cachectl("inspect")["sessions"][0]["tokens"]
    pair.stop()
    (data,) = pair.home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 10_000)
    pair.start()
    (session,) = pair.cachectl("inspect")["sessions"]
    assert session["tokens"] == stored and session["model"]
    warm = talk.send_turn("And about the mountains?")
    assert warm.cached == stored >= before.prompt_tokens
    assert len(pair.cachectl("inspect")["sessions"]) == 1
    assert pair.cachectl("verify", "--deep")["findings"] == []


def test_running_pair_repairs_index(pair: Pair) -> None:
    earlier = {row["id"] for row in pair.cachectl("inspect")["sessions"]}
    talk = RepairedConversation(pair, "You sing. ")
    talk.send_turn("Hello, who are you?")
    talk.send_turn("Tell me about the sea.")
    (session,) = {row["id"] for row in pair.cachectl("inspect")["sessions"]} - earlier
    leaf = pair.cachectl("inspect", session)["path"][-1]["id"]
    path = pair.home.segment_file(leaf)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    path.chmod(0o644)
    done = pair.cachectl("verify", "--repair")
    assert done["findings"] == [] and {each["what"] for each in done["did"]} >= {"mode", "quarantined"}
    talk.send_turn("And about the mountains?")
    assert pair.cachectl("verify", "--deep")["findings"] == []
