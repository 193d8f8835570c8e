"""Recovery of the backend: requests without content never notice, others get an error, and all is warm afterwards.

The faults are real ones, in the process that `warmline serve` runs; the gate makes sure of what each request has seen.
"""

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.oracle.duel import wait_for_new_process
from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.clients import ClientRequest
from support.pair.pair import FolderOf, Message, Pair, Reply, send_request
from support.pair.waiting import wait_until, wait_until_idle
from support.planted.faults import FAULTS, WEDGES, FaultControl, Gate, HeldStep
from warmline_common.protocol.messages import ProcessStats

STEP, PART = 32, 256  # steps so small that restoring is far sooner than computing, on a busy machine too
SHARED_MAX = 16  # the template's first tokens and a digit or two, which prompts have in common
FLAGS = ("--prefill-step-size", str(STEP), "--partial-save-tokens", str(PART))
NAME = "X-Warmline-Request"
ANSWER = {"max_tokens": 12, **WITH_LOGPROBS}
LONG_ANSWER = {"max_tokens": 120, "ignore_eos": True, **WITH_LOGPROBS}
SPEAKING_TOKENS = 5000  # of an answer that a fault ends; a busy machine decodes hundreds before the others arrive
ARRIVAL_S = 0.5  # of a request at the place where it waits for others
SAVE_COMMANDS = ("_find_kv", "choose_slice_bytes")  # names in the commands of a save, in order; a step lies between
THREADS_MORE_MAX = 8  # of pools that had not started all of theirs


@pytest.fixture(scope="module")
def planted() -> Iterator[FaultControl]:
    with FaultControl(restart_delay_s=0.1) as planted:
        yield planted


@pytest.fixture(scope="module")
def pair(planted: FaultControl, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("recovery")
    with Pair(home, tiny_folder("llama"), *FLAGS, environment=planted.environment) as pair:
        yield pair


@pytest.fixture(scope="module")
def stats_before(pair: Pair) -> ProcessStats:
    """Resources of the proxy before any request."""
    pair.chat(make_prompt("a first one", 50), **ANSWER)
    wait_until_idle(pair)
    return read_proxy_stats(pair)


def read_proxy_stats(pair: Pair) -> ProcessStats:
    return ProcessStats(**pair.proxy_status()["vitals"])


def make_prompt(words: str, tokens: int) -> list[Message]:
    own = hashlib.sha256(words.encode()).hexdigest()
    return [{"role": "user", "content": f"{own} {words}: ".ljust(tokens, "x")}]


def is_ready(pair: Pair) -> bool:
    return send_request(f"{pair.url}/ready", None, {}, "GET").status == 200


class StagedRequests:
    """Four requests, each at another stage, with the current step held at the gate."""

    def __init__(self, pair: Pair, gate: Gate, words: str, speaking_tokens: int = 120) -> None:
        self._pair, self._gate, self._words = pair, gate, words
        self.speaking = self._ask("speaking", 80, stream=True, **{**LONG_ANSWER, "max_tokens": speaking_tokens})
        self._let_pass_until("decode", "speaking")
        while not self.speaking.text:
            gate.next_step().let_pass()
        self.collecting = self._ask("collecting", 80, **LONG_ANSWER)  # whoever waits for JSON gets nothing before it
        self._let_pass_until("decode", "collecting")
        self.reading = []
        for stream in (False, True):  # the streamed one last: nobody is waited for while it might begin to speak
            self.reading.append(self._ask(f"reading-{stream}", 400, stream=stream, **ANSWER))
            self._let_pass_until("prefill", f"reading-{stream}")

    def make_name(self, word: str) -> str:
        return f"{self._words}-{word}"

    def wait_for_held_step(self, phase: str, word: str) -> HeldStep:
        """Wait for the next step of this phase and request, which is held."""
        return self._gate.wait_for_step(phase, self.make_name(word))

    @property
    def silent_requests(self) -> list[ClientRequest]:
        """Requests that have been sent no content."""
        return [self.collecting, *self.reading]

    def check_answer(self, request: ClientRequest) -> None:
        """Check a good end, with the answer of an undisturbed run."""
        reply = request.wait_until_ended().reply
        assert explain_difference(self._pair.ask_backend(request.messages, **request.options), reply) == ""

    def _ask(self, word: str, tokens: int, **options: object) -> ClientRequest:
        messages = make_prompt(f"{self._words} {word}", tokens)
        return ClientRequest(self._pair, messages, headers={NAME: self.make_name(word)}, **options)

    def _let_pass_until(self, phase: str, word: str) -> None:
        assert self.wait_for_held_step(phase, word).let_pass()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in WEDGES])
def test_fault_while_decoding(fault: str, pair: Pair, planted: FaultControl, stats_before: ProcessStats) -> None:
    check_fault_while_decoding(fault, pair, planted)


def test_wedge_while_decoding(planted: FaultControl, tiny_folder: FolderOf, tmp_path: Path) -> None:
    """Nothing moves, or not even the process answers: it is killed, and the rest is as after any other end."""
    flags = (*FLAGS, "--wedge-timeout-s", "2")
    with Pair(tmp_path / "home", tiny_folder("llama"), *flags, environment=planted.environment) as pair:
        for number, fault in enumerate(WEDGES, start=1):
            check_fault_while_decoding(fault, pair, planted)
            assert pair.proxy_status()["backend_kills"] == number


def check_fault_while_decoding(fault: str, pair: Pair, planted: FaultControl) -> None:
    earlier = make_prompt(f"earlier {fault}", 1000)
    reply = pair.chat(earlier, **ANSWER)
    pair.settle()
    boot = pair.status().boot
    with planted.make_gate() as gate:
        requests = StagedRequests(pair, gate, fault, SPEAKING_TOKENS)
        step = requests.wait_for_held_step("decode", "speaking")
        planted.plant_fault(fault, "decode")
        step.start()
        planted.wait_until_taken()
    for request in requests.silent_requests:
        requests.check_answer(request)
    stream = requests.speaking.wait_until_ended()
    assert stream.text and stream.error and not stream.is_complete, "who has heard a part is told that no more comes"
    assert is_ready(pair)
    assert (pair.status().boot == boot) == (fault == "raise"), "only an exception is survived"
    check_next_turn(pair, earlier, reply.text, reply.prompt_tokens)
    check_ended(pair)


def check_next_turn(pair: Pair, earlier: list[Message], answer: str, tokens: int) -> None:
    """Check that saved KV is used after a restart, unless so small a model computes it faster."""
    messages = [*earlier, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    following = pair.chat(messages, **ANSWER)
    if following.cached < tokens + len(answer):
        assert "would take longer" in pair.perf_line(following)
    assert explain_difference(pair.ask_backend(messages, **ANSWER), following) == ""


def check_ended(pair: Pair) -> None:
    wait_until_idle(pair)
    proxy = pair.proxy_status()
    assert (proxy["lives"], proxy["running"], proxy["queued"]) == (0, 0, 0)
    wait_until(lambda: abs(count_unaccounted_bytes(pair)) < (1 << 20), "memory that nobody accounts for")


def count_unaccounted_bytes(pair: Pair) -> int:
    """Count them now: an idle engine measures its memory only when asked for something."""
    pair.as_owner("PUT", f"{pair.backend_url}/kv/residents/order", b'{"drop_first": []}')
    return pair.status().vitals.bytes_unaccounted


def test_exception_during_prefill(pair: Pair, planted: FaultControl, stats_before: ProcessStats) -> None:
    with planted.make_gate() as gate:
        requests = StagedRequests(pair, gate, "reading")
        step = requests.wait_for_held_step("prefill", "reading-True")
        planted.plant_fault("raise", "prefill")
        step.start()
        planted.wait_until_taken()
    for request in (*requests.silent_requests, requests.speaking):  # another batch's fault is not its own
        requests.check_answer(request)
    check_ended(pair)


# ---- killed in a long prefill


def count_saved_tokens(pair: Pair) -> int:
    return int(pair.cachectl("stats")["stored"]["tokens"])


def test_backend_killed_in_long_prefill(pair: Pair, planted: FaultControl, stats_before: ProcessStats) -> None:
    """At most a part, a chunk, and the tokens computed while the part before was saved are lost."""
    messages = make_prompt("killed backend", 2000)
    with planted.make_gate() as gate:
        request = ClientRequest(pair, messages, stream=True, **ANSWER)
        done = prefill_parts(pair, gate)
        os.kill(pair.pid("backend"), signal.SIGKILL)
    check_continuation(pair, messages, done, request.wait_until_ended().reply)
    check_ended(pair)


def test_proxy_leaks_nothing_after_faults(pair: Pair, stats_before: ProcessStats) -> None:
    wait_until(lambda: read_proxy_stats(pair).tasks <= stats_before.tasks, "tasks are left")
    wait_until(lambda: read_proxy_stats(pair).descriptors <= stats_before.descriptors, "descriptors are left")
    assert read_proxy_stats(pair).threads <= stats_before.threads + THREADS_MORE_MAX
    assert pair.cachectl("verify", "--deep")["findings"] == []


def test_pair_killed_in_long_prefill(pair: Pair, planted: FaultControl) -> None:
    messages = make_prompt("killed pair", 2000)
    with planted.make_gate() as gate:
        request = ClientRequest(pair, messages, stream=True, **ANSWER)
        done = prefill_parts(pair, gate)
        pair.kill()
    request.wait_until_ended()
    pair.start()
    check_continuation(pair, messages, done, pair.chat(messages, **ANSWER))
    assert pair.cachectl("verify", "--deep")["findings"] == []


def test_retry_after_proxy_died_continues_running_step(pair: Pair, planted: FaultControl) -> None:
    """The step that the engine computed when the proxy died is not computed again."""
    messages, pid = make_prompt("killed proxy", 400), pair.pid("proxy")
    with planted.make_gate() as gate:
        first = ClientRequest(pair, messages, **ANSWER)
        assert gate.wait_for_step("prefill").let_pass()
        step = gate.wait_for_step("prefill")
        os.kill(pid, signal.SIGKILL)
        first.wait_until_ended()
        wait_until(lambda: pair.status().releasing == 1, "the backend does not notice that the proxy is gone")
        wait_for_new_process(pair, "proxy", pid)
        retry = ClientRequest(pair, messages, **ANSWER)
        wait_until(lambda: pair.proxy_status()["lives"] == 1, "the retry does not arrive")
        time.sleep(ARRIVAL_S)
        step.start()
    reply = retry.wait_until_ended().reply
    assert reply.cached >= 2 * STEP
    assert explain_difference(pair.ask_backend(messages, **ANSWER), reply) == ""


def prefill_parts(pair: Pair, gate: Gate) -> int:
    """Prefill two parts until they are saved, a third, and one chunk more that is under way; the computed tokens."""
    before = count_saved_tokens(pair)
    done = sum(prefill_a_part(pair, gate, part, before) for part in (1, 2))
    while done < 3 * PART:
        assert gate.wait_for_step("prefill").let_pass()
        done += STEP
    gate.wait_for_step("prefill")
    return done


def prefill_a_part(pair: Pair, gate: Gate, part: int, before: int) -> int:
    """Prefill a part, and the chunks during which it is read out and saved; the computed tokens."""
    began = len(SAVE_COMMANDS) * STEP if part > 1 else 0  # while the part before was saved
    done = began
    gate.forget_commands()
    while done < PART:
        assert gate.wait_for_step("prefill").let_pass()
        done += STEP
    for command in SAVE_COMMANDS:
        gate.wait_for_command(command)
        assert gate.wait_for_step("prefill").let_pass()
        done += STEP
    wait_until(lambda: count_saved_tokens(pair) >= before + part * PART - SHARED_MAX, "the part is not saved")
    return done - began


def check_continuation(pair: Pair, messages: list[Message], done: int, reply: Reply) -> None:
    assert done - reply.cached <= PART + (1 + len(SAVE_COMMANDS)) * STEP
    assert explain_difference(pair.ask_backend(messages, **ANSWER), reply) == ""
