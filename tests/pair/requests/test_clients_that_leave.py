"""Clients that disconnect, and many concurrent ones."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.clients import ClientRequest
from support.pair.pair import FolderOf, Message, Pair, Reply
from support.pair.waiting import LIMIT_S, wait_until, wait_until_idle

ENDLESS = {"max_tokens": 90_000, "ignore_eos": True}
CLIENTS, TURNS = 6, 2


class DisconnectingClient:
    """Request on a connection that can be closed at any moment."""

    def __init__(self, pair: Pair, messages: list[Message], **options: object) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", pair.port, timeout=LIMIT_S)
        body = json.dumps({"messages": messages, **options}).encode()
        self._connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        self.response: http.client.HTTPResponse | None = None

    def read_until(self, word: bytes) -> bytes:
        self.response = self.response or self._connection.getresponse()
        for line in self.response:
            if word in line:
                return bytes(line)
        raise AssertionError(f"the stream ended without {word!r}")

    def disconnect(self) -> None:
        if self.response:
            self.response.close()
        self._connection.close()


def test_disconnect_during_stream(warm_pair: Pair) -> None:
    messages: list[Message] = [{"role": "user", "content": "Tell me everything, streamed."}]
    client = DisconnectingClient(warm_pair, messages, stream=True, **ENDLESS)
    client.read_until(b'"content":"')
    assert warm_pair.status().running == 1
    client.disconnect()
    wait_until_idle(warm_pair)
    check_retry(warm_pair, messages)


def test_disconnect_before_json_answer(warm_pair: Pair) -> None:
    messages: list[Message] = [{"role": "user", "content": "Now everything at once."}]
    client = DisconnectingClient(warm_pair, messages, **ENDLESS)
    wait_until(lambda: warm_pair.status().running_bytes > 400 * get_row_bytes(warm_pair), "the answer does not begin")
    client.disconnect()
    wait_until_idle(warm_pair)
    check_retry(warm_pair, messages)


def test_immediate_retry_continues_prefill(warm_pair: Pair) -> None:
    messages: list[Message] = [{"role": "user", "content": "Read this. " + "A long story. " * 500}]
    client = DisconnectingClient(warm_pair, messages, stream=True, **ENDLESS)
    client.read_until(b": prefill")  # that it begins
    done, total = map(int, client.read_until(b": prefill").split()[-1].split(b"/"))
    assert 1000 < done < total
    client.disconnect()
    assert done <= warm_pair.chat(messages, max_tokens=2).cached < total
    wait_until_idle(warm_pair)


def test_immediate_retry_prefills_nothing_twice(warm_pair: Pair) -> None:
    messages: list[Message] = [{"role": "user", "content": "Tell me a story as long as this one. " * 5}]
    client = DisconnectingClient(warm_pair, messages, stream=True, **ENDLESS)
    client.read_until(b'"content":"')
    client.disconnect()
    check_retry(warm_pair, messages)
    wait_until_idle(warm_pair)


def get_row_bytes(pair: Pair) -> int:
    layout = pair.status().layout
    assert layout is not None
    return layout.row_bytes


def check_retry(pair: Pair, messages: list[Message]) -> None:
    retry = pair.chat(messages, max_tokens=8, **WITH_LOGPROBS)
    assert retry.cached == retry.prompt_tokens - 1, "prefill that was done is kept"
    assert explain_difference(pair.ask_backend(messages, max_tokens=8, **WITH_LOGPROBS), retry) == ""


def test_concurrent_answers_equal_sequential_ones(warm_pair: Pair) -> None:
    start = threading.Barrier(CLIENTS)

    def talk(number: int) -> list[tuple[list[Message], Reply]]:
        # Of lengths that share no batch, and of lengths that do.
        messages: list[Message] = [{"role": "system", "content": f"You are number {number}. " * 4 ** (number % 4)}]
        replies = []
        start.wait(LIMIT_S)
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Turn {turn}, please."})
            reply = warm_pair.chat(messages, max_tokens=24, **WITH_LOGPROBS)
            replies.append((list(messages), reply))
            messages.append({"role": "assistant", "content": reply.text})
        return replies

    with ThreadPoolExecutor(CLIENTS) as pool:
        talks = list(pool.map(talk, range(CLIENTS)))
    for replies in talks:
        for messages, reply in replies:
            alone = warm_pair.ask_backend(messages, max_tokens=24, **WITH_LOGPROBS)
            assert explain_difference(alone, reply) == ""
        first, second = (reply for _, reply in replies)
        assert second.cached == first.prompt_tokens + 24
    warm_pair.settle()
    assert warm_pair.cachectl("verify", "--deep")["findings"] == []


@pytest.fixture(scope="module")
def rotating_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("rotating"), tiny_folder("gemma3")) as pair:
        yield pair


def test_rotating_model_waits_for_save(rotating_pair: Pair) -> None:
    """Its resident goes on only at its end: a regenerate at once, or a second branch, starts from disk."""
    messages: list[Message] = [{"role": "user", "content": "Tell me of the sea. " * 150}]
    first = rotating_pair.chat(messages, max_tokens=20)
    again = rotating_pair.chat(messages, max_tokens=20)
    assert again.cached == again.prompt_tokens - 1 and again.text == first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
    rotating_pair.chat(messages, max_tokens=5)
    other = rotating_pair.chat([*messages[:-1], {"role": "user", "content": "But?"}], max_tokens=5)
    assert other.cached >= first.prompt_tokens + 20


def test_branch_beyond_window_starts_from_unsaved_rows(rotating_pair: Pair) -> None:
    reply = check_divergent_prompt(rotating_pair, "shared")
    assert reply.prompt_tokens - reply.cached < 40, "up to the word that differs"


def test_branch_starts_from_last_checkpoint(tiny_folder: FolderOf, tmp_path: Path) -> None:
    with Pair(tmp_path / "home", tiny_folder("qwen3_5")) as pair:
        check_divergent_prompt(pair, "shared")


def check_divergent_prompt(pair: Pair, source: str) -> Reply:
    messages: list[Message] = [{"role": "user", "content": "And what of the hills? " * 13}]
    first = pair.chat(messages, max_tokens=8)
    pair.settle()
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And of the hills. " * 20},
    ]
    request = ClientRequest(pair, messages, stream=True, **ENDLESS)
    request.wait_for_text()
    divergent: list[Message] = [*messages[:-1], {"role": "user", "content": "And of the hills. " * 10 + "No more."}]
    reply = pair.chat(divergent, max_tokens=4, **WITH_LOGPROBS)
    request.disconnect()
    line = pair.perf_line(reply)
    assert f" source={source} " in line and f" cached={reply.cached} " in line
    assert first.prompt_tokens <= reply.cached < reply.prompt_tokens
    assert explain_difference(pair.ask_backend(divergent, max_tokens=4, **WITH_LOGPROBS), reply) == ""
    return reply


def test_large_concurrent_conversations_are_all_saved(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """Memory for one and a half of them: each is saved before the next one pushes it out, and all turns are warm."""
    with Pair(tmp_path / "home", tiny_folder("llama"), "--memory-budget-gb", "0.0025") as pair:

        def talk(number: int) -> list[Reply]:
            messages: list[Message] = [{"role": "user", "content": f"{number} " + "x" * 3000}]
            replies = []
            for _ in range(3):
                replies.append(pair.chat(messages, max_tokens=10))
                messages += [{"role": "assistant", "content": replies[-1].text}, {"role": "user", "content": "Go on."}]
            return replies

        with ThreadPoolExecutor(3) as pool:
            for first, *later in pool.map(talk, range(3)):
                assert all(reply.cached > first.prompt_tokens for reply in later)
