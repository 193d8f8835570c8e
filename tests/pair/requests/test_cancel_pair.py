"""Cancels and disconnects: the engine ends at most the step under way, and a prompt is computed only once.

Every step waits at a gate until the test lets it pass, so no test depends on speed.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.clients import ClientRequest
from support.pair.pair import FolderOf, Message, Pair, Reply, send_request
from support.pair.waiting import wait_until, wait_until_idle, wait_until_prefilling
from support.planted.faults import FaultControl, Gate

STEP = 64
SHARED_MAX = 16  # the template's first tokens and a digit or two
ENDLESS = {"max_tokens": 90_000, "ignore_eos": True}
NAME = "X-Warmline-Request"


@pytest.fixture(scope="module")
def planted() -> Iterator[FaultControl]:
    with FaultControl() as planted:
        yield planted


@pytest.fixture(scope="module")
def pair(planted: FaultControl, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("cancelling")
    flags = ("--prefill-step-size", str(STEP))
    with Pair(home, tiny_folder("llama"), *flags, environment=planted.environment) as pair:
        yield pair


def make_prompt(words: str, tokens: int) -> list[Message]:
    """Make a conversation that shares only the template's first tokens with others."""
    own = hashlib.sha256(words.encode()).hexdigest()
    return [{"role": "user", "content": f"{own} {words}: ".ljust(tokens, "x")}]


def is_only(tokens: int, computed: int) -> bool:
    """True if these are the computed tokens, or those and the few that all prompts share."""
    return computed <= tokens < computed + SHARED_MAX


def is_idle(pair: Pair) -> bool:
    status = pair.status()
    return status.running + status.queued == 0


def count_prefilled(pair: Pair, model: str, requests: int) -> int:
    """Count the prefilled tokens of the requests for this model name."""
    lines = pair.perf_lines(model, requests)
    return sum(int(re.findall(r" prefilled=(\d+) ", line)[0]) for line in lines)


# ---- ways to disconnect


class Disconnect:
    """Disconnect of a client; `check` checks its answer after the engine has ended the request."""

    def __init__(self, pair: Pair, request: ClientRequest, name: str) -> None:
        self.pair, self.request, self.name = pair, request, name

    def disconnect(self) -> None:
        self.request.disconnect()

    def check(self) -> None: ...


class Reset(Disconnect):
    def disconnect(self) -> None:
        self.request.disconnect("rst")


class Deletion(Disconnect):
    """Cancel by DELETE on another connection, answered once the engine has ended the request."""

    def disconnect(self) -> None:
        self.answer: list[Reply] = []
        self._waits = threading.Thread(target=lambda: self.answer.append(delete(self.pair, self.name)))
        self._waits.start()

    def check(self) -> None:
        self._waits.join()
        assert self.answer[0].status == 200, self.answer[0].raw
        assert not self.request.wait_until_ended().is_complete


def delete(pair: Pair, name: str) -> Reply:
    return send_request(f"{pair.url}/v1/requests/{name}", None, {}, "DELETE")


DISCONNECTS = [Disconnect, Reset, Deletion]


def disconnect_during_step(pair: Pair, gate: Gate, disconnect: Disconnect, held: Callable[[], bool]) -> None:
    """Disconnect during a step, which `held` lets pass; nothing more is computed for the request."""
    gate.forget_commands()
    disconnect.disconnect()
    gate.wait_for_command("cancel")
    step_count = gate.step_count
    assert held()
    wait_until(lambda: is_idle(pair), "the engine goes on for nobody")
    assert gate.step_count == step_count
    disconnect.check()


@pytest.mark.parametrize("disconnect_type", DISCONNECTS)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_prefill_keeps_prefill(
    pair: Pair, planted: FaultControl, disconnect_type: type[Disconnect], stream: bool
) -> None:
    name = f"prefill-{disconnect_type.__name__}-{stream}"
    messages = make_prompt(name, 500)
    with planted.make_gate() as gate:
        request = ClientRequest(pair, messages, headers={NAME: name}, stream=stream, max_tokens=4)
        assert gate.wait_for_step("prefill").let_pass()
        step = gate.wait_for_step("prefill")
        disconnect_during_step(pair, gate, disconnect_type(pair, request, name), step.let_pass)
    wait_until_idle(pair)
    cached = pair.chat(messages, max_tokens=4).cached
    assert is_only(cached, 2 * STEP), "both chunks are kept, and there was no third"


@pytest.mark.parametrize("disconnect_type", DISCONNECTS)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_decode_keeps_tokens(
    pair: Pair, planted: FaultControl, disconnect_type: type[Disconnect], stream: bool
) -> None:
    name = f"decode-{disconnect_type.__name__}-{stream}"
    messages = make_prompt(name, 100)
    with planted.make_gate() as gate:
        request = ClientRequest(pair, messages, headers={NAME: name}, stream=stream, **ENDLESS)
        for _ in range(3):
            assert gate.wait_for_step("decode").let_pass()
        step = gate.wait_for_step("decode")
        disconnect_during_step(pair, gate, disconnect_type(pair, request, name), step.let_pass)
    wait_until_idle(pair)
    retry = pair.chat(messages, max_tokens=8, **WITH_LOGPROBS)
    assert retry.cached == retry.prompt_tokens - 1
    assert explain_difference(pair.ask_backend(messages, max_tokens=8, **WITH_LOGPROBS), retry) == ""


@pytest.mark.parametrize("disconnect_type", DISCONNECTS)
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_in_queue_frees_place(
    pair: Pair, planted: FaultControl, disconnect_type: type[Disconnect], stream: bool
) -> None:
    name = f"queue-{disconnect_type.__name__}-{stream}"
    with planted.make_gate() as gate:
        first = ClientRequest(pair, make_prompt(f"before {name}", 300), max_tokens=4)
        gate.wait_for_command("submit")  # told after it was obeyed: else it would be taken for the next one's
        step = gate.wait_for_step("prefill")
        (running,) = step.requests
        request = ClientRequest(pair, make_prompt(name, 300), headers={NAME: name}, stream=stream, max_tokens=4)
        gate.wait_for_command("submit")
        disconnect = disconnect_type(pair, request, name)
        disconnect.disconnect()
        gate.wait_for_command("cancel")
        while not first.is_ended:
            assert step.requests == [running], "nothing is computed for who left before its turn"
            step.let_pass()
            if (following := gate.next_step_unless(lambda: first.is_ended)) is None:
                break
            step = following
        disconnect.check()
        assert first.is_complete
    wait_until_idle(pair)


def test_cancel_unknown_id_returns_404(pair: Pair) -> None:
    assert delete(pair, "nobody").status == 404


def test_disconnect_of_json_client_frees_engine(
    planted: FaultControl, tiny_folder: FolderOf, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--prefill-step-size", str(STEP), "--running-count-max", "1")
    home = tmp_path_factory.mktemp("one")
    with Pair(home, tiny_folder("llama"), *flags, environment=planted.environment) as one, planted.make_gate() as gate:
        request = ClientRequest(one, make_prompt("waiting for JSON", 100), **ENDLESS)
        step = gate.wait_for_step("decode")
        following = ClientRequest(one, make_prompt("waiting in line", 100), max_tokens=2)
        gate.forget_commands()
        request.disconnect()
        gate.wait_for_command("cancel")
        step.let_pass()
        newcomer = gate.next_step()
        assert newcomer.requests != step.requests
        newcomer.let_pass()
        gate.open_for_all()
        assert following.wait_until_ended().is_complete


def test_prompt_cancelled_three_times_is_prefilled_once(pair: Pair, planted: FaultControl) -> None:
    messages, answer = make_prompt("cut three times", 1000), {"model": "cut", "max_tokens": 4}
    for _ in range(3):
        with planted.make_gate() as gate:
            request = ClientRequest(pair, messages, **answer)
            for _ in range(3):
                assert gate.wait_for_step("prefill").let_pass()
            step = gate.wait_for_step("prefill")
            disconnect_during_step(pair, gate, Disconnect(pair, request, ""), step.let_pass)
    reply = pair.chat(messages, **answer)
    assert is_only(reply.cached, 3 * 4 * STEP)
    assert is_only(reply.prompt_tokens, count_prefilled(pair, "cut", 4)), "each token once"
    assert reply.text == pair.ask_backend(messages, max_tokens=4).text


@pytest.mark.parametrize("streams", [(True, True), (False, False), (True, False)])
def test_two_identical_requests_share_one_prefill(
    pair: Pair, planted: FaultControl, streams: tuple[bool, bool]
) -> None:
    model = f"twice-{streams[0]}-{streams[1]}"
    messages, answer = make_prompt(model, 600), {"max_tokens": 8, **WITH_LOGPROBS}
    with planted.make_gate() as gate:
        first = ClientRequest(pair, messages, model=model, stream=streams[0], **answer)
        gate.wait_for_command("submit")
        step = gate.wait_for_step("prefill")
        second = ClientRequest(pair, messages, model=model, stream=streams[1], **answer)
        gate.wait_for_command("submit")
        assert step.let_pass()
    replies = [request.wait_until_ended().reply for request in (first, second)]
    # One token more: each computes the prompt's last one itself, for its own first answer.
    assert is_only(replies[0].prompt_tokens + 1, count_prefilled(pair, model, 2))
    assert replies[1].cached == replies[1].prompt_tokens - 1
    cold = pair.ask_backend(messages, **answer)
    assert [explain_difference(cold, reply) for reply in replies] == ["", ""]


def test_finish_prefill_continues_and_retry_joins(
    planted: FaultControl, tiny_folder: FolderOf, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--prefill-step-size", str(STEP), "--on-disconnect", "finish-prefill")
    home = tmp_path_factory.mktemp("finishing")
    with Pair(home, tiny_folder("llama"), *flags, environment=planted.environment) as finishing:
        check_joining(finishing, planted)
        check_finishing_alone(finishing, planted)


def check_joining(pair: Pair, planted: FaultControl) -> None:
    messages, answer = make_prompt("finish this", 1000), {"model": "joined", "stream": True, "max_tokens": 4}
    with planted.make_gate() as gate:
        request = ClientRequest(pair, messages, **answer)
        gate.wait_for_command("submit")
        step = gate.wait_for_step("prefill")
        leader = step.requests
        wait_until_prefilling(pair)
        request.disconnect()
        for _ in range(4):  # it goes on
            assert step.let_pass()
            step = gate.next_step()
            assert (step.phase, step.requests) == ("prefill", leader)
        retry = ClientRequest(pair, messages, **answer)
        gate.wait_for_command("submit")
        assert step.let_pass()
    reply = retry.wait_until_ended().reply
    assert reply.cached == reply.prompt_tokens - 1
    assert is_only(reply.prompt_tokens, count_prefilled(pair, "joined", 2)), "in sum once"
    assert reply.text == pair.ask_backend(messages, max_tokens=4).text


def check_finishing_alone(pair: Pair, planted: FaultControl) -> None:
    """Check that a request without a retry during its prefill leaves the whole prompt to a later one."""
    messages = make_prompt("finish that", 1000)
    with planted.make_gate() as gate:
        request = ClientRequest(pair, messages, max_tokens=4)
        gate.wait_for_step("prefill")
        wait_until_prefilling(pair)
        request.disconnect()
    wait_until_idle(pair)
    later = pair.chat(messages, max_tokens=4)
    assert later.cached == later.prompt_tokens - 1
