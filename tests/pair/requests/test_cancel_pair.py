"""Whoever leaves, or is cancelled, costs the engine at most the step under way; and what it computed is computed once.

Every step waits at a gate until the test lets it pass, so nothing here depends on how fast anything is.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.clients import Asked
from support.pair.pair import FolderOf, Message, Pair, Reply, ask
from support.pair.waiting import until, wait_until_idle, wait_until_prefilling
from support.planted.faults import Gate, Planted

STEP = 64
SHARED_MAX = 16  # the template's first tokens and a digit or two
ENDLESS = {"max_tokens": 90_000, "ignore_eos": True}
NAME = "X-Warmline-Request"


@pytest.fixture(scope="module")
def planted() -> Iterator[Planted]:
    with Planted() as planted:
        yield planted


@pytest.fixture(scope="module")
def pair(planted: Planted, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("cancelling")
    flags = ("--prefill-step-size", str(STEP))
    with Pair(home, tiny_folder("llama"), *flags, environment=planted.environment) as pair:
        yield pair


def prompt(words: str, tokens: int) -> list[Message]:
    """A conversation with nothing in common with others but the template's first tokens."""
    own = hashlib.sha256(words.encode()).hexdigest()
    return [{"role": "user", "content": f"{own} {words}: ".ljust(tokens, "x")}]


def is_just(tokens: int, computed: int) -> bool:
    """True where these are the computed tokens, and perhaps the few that all prompts share."""
    return computed <= tokens < computed + SHARED_MAX


def is_idle(pair: Pair) -> bool:
    status = pair.status()
    return status.running + status.queued == 0


def prefilled(pair: Pair, model: str, requests: int) -> int:
    """Tokens, over the requests that asked for this model name."""
    lines = pair.perf_lines(model, requests)
    return sum(int(re.findall(r" prefilled=(\d+) ", line)[0]) for line in lines)


# ---- ways to go


class Departure:
    """Somebody who goes; `check` looks, after the engine has let go, at what they were told."""

    def __init__(self, pair: Pair, asked: Asked, name: str) -> None:
        self.pair, self.asked, self.name = pair, asked, name

    def go(self) -> None:
        self.asked.leave()

    def check(self) -> None: ...


class Reset(Departure):
    def go(self) -> None:
        self.asked.leave("rst")


class Deletion(Departure):
    """Another connection cancels it by its name, and hears of that once the engine has let go."""

    def go(self) -> None:
        self.answer: list[Reply] = []
        self._waits = threading.Thread(target=lambda: self.answer.append(delete(self.pair, self.name)))
        self._waits.start()

    def check(self) -> None:
        self._waits.join()
        assert self.answer[0].status == 200, self.answer[0].raw
        assert not self.asked.wait_until_over().done


def delete(pair: Pair, name: str) -> Reply:
    return ask(f"{pair.url}/v1/requests/{name}", None, {}, "DELETE")


DEPARTURES = [Departure, Reset, Deletion]


def leave_in_the_midst_of_a_step(pair: Pair, gate: Gate, going: Departure, held: Callable[[], bool]) -> None:
    """`held` lets the step pass that is under way.  Nothing is computed for who goes after it."""
    gate.forget_commands()
    going.go()
    gate.wait_for_command("cancel")
    begun = gate.begun
    assert held()
    until(lambda: is_idle(pair), "the engine goes on for nobody")
    assert gate.begun == begun
    going.check()


@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_prefill_keeps_prefill(
    pair: Pair, planted: Planted, departure: type[Departure], stream: bool
) -> None:
    name = f"prefill-{departure.__name__}-{stream}"
    messages = prompt(name, 500)
    with planted.gate() as gate:
        asked = Asked(pair, messages, headers={NAME: name}, stream=stream, max_tokens=4)
        assert gate.wait_for("prefill").let_pass()
        step = gate.wait_for("prefill")
        leave_in_the_midst_of_a_step(pair, gate, departure(pair, asked, name), step.let_pass)
    wait_until_idle(pair)
    cached = pair.chat(messages, max_tokens=4).cached
    assert is_just(cached, 2 * STEP), "both chunks are kept, and there was no third"


@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_decode_keeps_tokens(
    pair: Pair, planted: Planted, departure: type[Departure], stream: bool
) -> None:
    name = f"decode-{departure.__name__}-{stream}"
    messages = prompt(name, 100)
    with planted.gate() as gate:
        asked = Asked(pair, messages, headers={NAME: name}, stream=stream, **ENDLESS)
        for _ in range(3):
            assert gate.wait_for("decode").let_pass()
        step = gate.wait_for("decode")
        leave_in_the_midst_of_a_step(pair, gate, departure(pair, asked, name), step.let_pass)
    wait_until_idle(pair)
    retry = pair.chat(messages, max_tokens=8, **WITH_LOGPROBS)
    assert retry.cached == retry.prompt_tokens - 1
    assert explain_difference(pair.direct(messages, max_tokens=8, **WITH_LOGPROBS), retry) == ""


@pytest.mark.parametrize("departure", DEPARTURES)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_queue_frees_place(
    pair: Pair, planted: Planted, departure: type[Departure], stream: bool
) -> None:
    name = f"queue-{departure.__name__}-{stream}"
    with planted.gate() as gate:
        first = Asked(pair, prompt(f"before {name}", 300), max_tokens=4)
        gate.wait_for_command("submit")  # told after it was obeyed: else it would be taken for the next one's
        step = gate.wait_for("prefill")
        (running,) = step.requests
        asked = Asked(pair, prompt(name, 300), headers={NAME: name}, stream=stream, max_tokens=4)
        gate.wait_for_command("submit")
        going = departure(pair, asked, name)
        going.go()
        gate.wait_for_command("cancel")
        while not first.over:
            assert step.requests == [running], "nothing is computed for who left before its turn"
            step.let_pass()
            if (following := gate.next_step_unless(lambda: first.over)) is None:
                break
            step = following
        going.check()
        assert first.done
    wait_until_idle(pair)


def test_cancel_unknown_id_returns_404(pair: Pair) -> None:
    assert delete(pair, "nobody").status == 404


def test_disconnect_of_json_client_frees_engine(
    planted: Planted, tiny_folder: FolderOf, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--prefill-step-size", str(STEP), "--running-count-max", "1")
    home = tmp_path_factory.mktemp("one")
    with Pair(home, tiny_folder("llama"), *flags, environment=planted.environment) as one, planted.gate() as gate:
        asked = Asked(one, prompt("waiting for JSON", 100), **ENDLESS)
        step = gate.wait_for("decode")
        following = Asked(one, prompt("waiting in line", 100), max_tokens=2)
        gate.forget_commands()
        asked.leave()
        gate.wait_for_command("cancel")
        step.let_pass()
        newcomer = gate.next_step()
        assert newcomer.requests != step.requests
        newcomer.let_pass()
        gate.open()
        assert following.wait_until_over().done


def test_prompt_cancelled_three_times_is_prefilled_once(pair: Pair, planted: Planted) -> None:
    messages, answer = prompt("cut three times", 1000), {"model": "cut", "max_tokens": 4}
    for _ in range(3):
        with planted.gate() as gate:
            asked = Asked(pair, messages, **answer)
            for _ in range(3):
                assert gate.wait_for("prefill").let_pass()
            step = gate.wait_for("prefill")
            leave_in_the_midst_of_a_step(pair, gate, Departure(pair, asked, ""), step.let_pass)
    reply = pair.chat(messages, **answer)
    assert is_just(reply.cached, 3 * 4 * STEP)
    assert is_just(reply.prompt_tokens, prefilled(pair, "cut", 4)), "each token once"
    assert reply.text == pair.direct(messages, max_tokens=4).text


@pytest.mark.parametrize("streams", [(True, True), (False, False), (True, False)])
def test_two_identical_requests_share_one_prefill(pair: Pair, planted: Planted, streams: tuple[bool, bool]) -> None:
    model = f"twice-{streams[0]}-{streams[1]}"
    messages, answer = prompt(model, 600), {"max_tokens": 8, **WITH_LOGPROBS}
    with planted.gate() as gate:
        first = Asked(pair, messages, model=model, stream=streams[0], **answer)
        gate.wait_for_command("submit")
        step = gate.wait_for("prefill")
        second = Asked(pair, messages, model=model, stream=streams[1], **answer)
        gate.wait_for_command("submit")
        assert step.let_pass()
    replies = [asked.wait_until_over().reply for asked in (first, second)]
    # One token more: each computes the prompt's last one itself, for its own first answer.
    assert is_just(replies[0].prompt_tokens + 1, prefilled(pair, model, 2))
    assert replies[1].cached == replies[1].prompt_tokens - 1
    cold = pair.direct(messages, **answer)
    assert [explain_difference(cold, reply) for reply in replies] == ["", ""]


def test_finish_prefill_continues_and_retry_joins(
    planted: Planted, tiny_folder: FolderOf, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--prefill-step-size", str(STEP), "--on-disconnect", "finish-prefill")
    home = tmp_path_factory.mktemp("finishing")
    with Pair(home, tiny_folder("llama"), *flags, environment=planted.environment) as finishing:
        check_joining(finishing, planted)
        check_finishing_alone(finishing, planted)


def check_joining(pair: Pair, planted: Planted) -> None:
    messages, answer = prompt("finish this", 1000), {"model": "joined", "stream": True, "max_tokens": 4}
    with planted.gate() as gate:
        asked = Asked(pair, messages, **answer)
        gate.wait_for_command("submit")
        step = gate.wait_for("prefill")
        leader = step.requests
        wait_until_prefilling(pair)
        asked.leave()
        for _ in range(4):  # it goes on
            assert step.let_pass()
            step = gate.next_step()
            assert (step.phase, step.requests) == ("prefill", leader)
        retry = Asked(pair, messages, **answer)
        gate.wait_for_command("submit")
        assert step.let_pass()
    reply = retry.wait_until_over().reply
    assert reply.cached == reply.prompt_tokens - 1
    assert is_just(reply.prompt_tokens, prefilled(pair, "joined", 2)), "in sum once"
    assert reply.text == pair.direct(messages, max_tokens=4).text


def check_finishing_alone(pair: Pair, planted: Planted) -> None:
    """A request without a retry during its prefill leaves the whole prompt to a later one."""
    messages = prompt("finish that", 1000)
    with planted.gate() as gate:
        asked = Asked(pair, messages, max_tokens=4)
        gate.wait_for("prefill")
        wait_until_prefilling(pair)
        asked.leave()
    wait_until_idle(pair)
    later = pair.chat(messages, max_tokens=4)
    assert later.cached == later.prompt_tokens - 1
