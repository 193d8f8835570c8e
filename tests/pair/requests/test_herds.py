"""Many requests for one prompt: it is computed once, whoever leaves, and read from disk once.

Steps wait at a gate until all requests have arrived, so no test depends on speed.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.clients import ClientRequest
from support.pair.pair import FolderOf, Message, Pair, send_request
from support.pair.waiting import wait_until, wait_until_idle
from support.planted.faults import FaultControl, Gate, HeldStep

STEP, NAME_PREFIX = 64, "herd-"
SHARED_MAX = 16  # the template's first or last tokens
FORK_DISTANCE_TOKENS_MIN = 64  # of places where a model with states is copied


@pytest.fixture(scope="module")
def planted() -> Iterator[FaultControl]:
    with FaultControl() as planted:
        yield planted


@pytest.fixture(scope="module", params=["qwen3_5", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(
    family: str, planted: FaultControl, tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    home, flags = tmp_path_factory.mktemp("herds"), ("--prefill-step-size", str(STEP))
    with Pair(home, tiny_folder(family), *flags, environment=planted.environment) as pair:
        yield pair


def make_prompt(words: str, tokens: int, end: str = "") -> list[Message]:
    """Make a conversation that shares only the template's first tokens with others of other `words`."""
    own = hashlib.sha256(words.encode()).hexdigest()
    return [{"role": "user", "content": f"{own} {words}: ".ljust(tokens, "x") + end}]


def send_behind_a_step(
    pair: Pair, gate: Gate, prompts: list[list[Message]], **options: object
) -> dict[str, ClientRequest]:
    """Send requests while a step of another one waits at the gate; it opens when all are planned or queued.

    The first step for one of them waits until all are in the engine's mailbox: a later one would be planned for what
    the first has left by then, which may be a file that takes longer to read than a tiny model to compute.
    """
    ClientRequest(pair, make_prompt(secrets.token_hex(8), 300), max_tokens=1)
    step = gate.wait_for_step("prefill")
    names = [f"{NAME_PREFIX}{secrets.token_hex(4)}" for _ in prompts]
    requests = {
        name: ClientRequest(pair, prompt, headers={"X-Warmline-Request": name}, **options)
        for name, prompt in zip(names, prompts, strict=True)
    }
    wait_until(lambda: count_waiting(pair, requests) == len(requests), "a request has not arrived")
    step.let_pass()
    first_step = wait_for_herd(gate)
    for _ in range(1 + len(requests)):
        gate.wait_for_command("submit")
    first_step.let_pass()
    return requests


def wait_for_herd(gate: Gate) -> HeldStep:
    """Wait for a chunk of a request that `send_behind_a_step` has sent; others pass."""
    while not (step := gate.wait_for_step("prefill")).requests[0].startswith(NAME_PREFIX):
        step.let_pass()
    return step


def count_waiting(pair: Pair, ids: Collection[str]) -> int:
    """Count the requests of these ids that are past their rendering."""
    live = (each for each in pair.proxy_status()["live"] if each["id"] in ids)
    return sum(each["phase"] in ("waiting", "restoring") for each in live)


def is_computed_once(pair: Pair, requests: int, model: str, tokens: int, end: int = 1) -> bool:
    """True if the requests for this model name have computed one prompt, and the others only the last tokens."""
    lines = pair.perf_lines(model, requests)
    prefilled = sum(int(line.partition(" prefilled=")[2].split()[0]) for line in lines)
    return tokens - SHARED_MAX <= prefilled <= tokens + (requests - 1) * end


@pytest.mark.parametrize("ends", ["same", "own"])
def test_requests_at_once_are_computed_once(pair: Pair, family: str, planted: FaultControl, ends: str) -> None:
    prompts = [make_prompt(ends, 600, f"{n}" * 20 if ends == "own" else "") for n in range(8)]
    answer = {"max_tokens": 8, **WITH_LOGPROBS}
    with planted.make_gate() as gate:
        requests = send_behind_a_step(pair, gate, prompts, model=ends, **answer)
    replies = [request.wait_until_ended().reply for request in requests.values()]
    end = 1 if ends == "same" else 20 + SHARED_MAX + FORK_DISTANCE_TOKENS_MIN
    assert is_computed_once(pair, 8, ends, replies[0].prompt_tokens, end)
    for prompt, reply in list(zip(prompts, replies, strict=True))[::7]:
        assert explain_difference(pair.ask_backend(prompt, **answer), reply) == ""


def test_twelve_of_thirteen_leave(pair: Pair, planted: FaultControl) -> None:
    """One after the other, each while its chunk is computed: the next one goes on from there."""
    prompt, answer = make_prompt("leaving", 1000), {"max_tokens": 8, **WITH_LOGPROBS}
    with planted.make_gate() as gate, ThreadPoolExecutor() as deletions:
        requests = send_behind_a_step(pair, gate, [prompt] * 13, model="leaving", **answer)
        for number in range(12):
            step = wait_for_herd(gate)
            gate.forget_commands()
            if number % 2:
                requests.pop(step.requests[0]).disconnect()
            else:
                deletions.submit(send_request, f"{pair.url}/v1/requests/{step.requests[0]}", None, {}, "DELETE")
                del requests[step.requests[0]]
            gate.wait_for_command("cancel")
            step.let_pass()
        gate.open_for_all()
    ((_, last),) = requests.items()
    reply = last.wait_until_ended().reply
    assert is_computed_once(pair, 13, "leaving", reply.prompt_tokens)
    assert explain_difference(pair.ask_backend(prompt, **answer), reply) == ""


def test_sixteen_after_a_restart_compute_nothing(pair: Pair) -> None:
    prompt = make_prompt("stored", 600)
    pair.chat(prompt, max_tokens=2)
    pair.settle()
    pair.kill()
    pair.start()
    requests = [ClientRequest(pair, prompt, max_tokens=2, model="stored") for _ in range(16)]
    for request in requests:
        reply = request.wait_until_ended().reply
        assert reply.prompt_tokens - reply.cached <= SHARED_MAX
    wait_until_idle(pair)
