"""A clock at the top of each prompt: the miss names it, and a stabilize rule neutralizes it."""

from collections.abc import Iterator

import pytest

from support.pair.pair import FolderOf, Message, Pair

RULES = "times,tool-order"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("walk", "look")
]


def make_messages(clock: str, *more: str) -> list[Message]:
    system = "You watch a harbour and write down which ships come and go.\nThe clock shows " + clock + "."
    texts = ("Which ship came first this morning, and from where?", *more)
    talk = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *talk]


@pytest.fixture(scope="module")
def steady_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("steady"), tiny_folder("llama"), "--stabilize", RULES) as pair:
        yield pair


def test_miss_names_the_clock_line(warm_pair: Pair) -> None:
    warm_pair.chat(make_messages("14:22:33"), max_tokens=4)
    cold = warm_pair.chat(make_messages("14:25:01"), max_tokens=4)
    cause = "in message 1 (system): a time of day in line 2 of the system text is new"
    assert cause in warm_pair.perf_line(cold)


def test_stabilize_rule_keeps_next_turn_warm(steady_pair: Pair) -> None:
    first = steady_pair.chat(make_messages("14:22:33"), max_tokens=4, tools=TOOLS)
    more = make_messages("14:25:01", first.text, "And after that?")
    second = steady_pair.chat(more, max_tokens=4, tools=TOOLS[::-1])
    assert first.headers["X-Warmline-Stabilized"] == "times=1, tool-order=1"
    assert second.headers["X-Warmline-Stabilized"] == "times=1"
    assert second.cached >= first.prompt_tokens - 1
    assert steady_pair.wait_for_log_line(
        f"{second.headers['X-Warmline-Request']}: stabilized in the head of its prompt: times=1"
    )


def test_stabilize_rule_leaves_user_messages_unchanged(steady_pair: Pair) -> None:
    sent = [{"role": "user", "content": "It is 14:22:33, what now?"}]
    reply = steady_pair.chat(sent, max_tokens=1)
    assert "X-Warmline-Stabilized" not in reply.headers
    assert reply.prompt_tokens == steady_pair.ask_backend(sent, max_tokens=1).prompt_tokens
