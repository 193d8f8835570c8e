"""SIGKILL of keeper, proxy or a backend during a load, a drain and a swap: nothing is lost, no process is left.

Each is killed once, in another phase; TESTS_KILLS=all kills each of them in each phase.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from support.pair.clients import ClientRequest
from support.pair.models_pair import KEEPER, PROXY, ModelsPair, PairModel, list_parents
from support.pair.pair import FolderOf, Message, Reply
from support.pair.waiting import wait_until
from support.planted.faults import FaultControl, Gate, HeldStep
from warmline_common.protocol.keeper import ModelStage

OLD, NEW = "old", "new"  # loaded at first, and the one that a request waits for
BACKEND = "backend"
IS_WHOLE = os.environ.get("TESTS_KILLS") == "all"
MEMORY_GB = 0.04  # for one of the models
ANSWER = {"max_tokens": 12, "ignore_eos": True}
LONG_ANSWER = {"max_tokens": 200, "ignore_eos": True}
DRAINED_ANSWER = {"max_tokens": 100, "ignore_eos": True}  # done well within a drain
LONG_PROMPT: list[Message] = [{"role": "user", "content": "a long answer, please"}]
RESTART_DELAY_S = 0.2
TRIES_MAX = 100
TRY_PAUSE_S = 0.2
ARRIVAL_S = 0.02  # of a step's content at the client, so that few steps pass without it
ENDED_MAX_S = 60.0
SWAPS_MAX = 4  # a process may end before it is seen, or killed


@dataclass
class SavedTalk:
    """Conversation with one turn that is on disk, and the cold answer of its second one."""

    model: str
    messages: list[Message]
    saved_tokens: int
    cold: Reply

    def check_restored(self, pair: ModelsPair) -> None:
        warm = ask_until_answered(pair, self.model, self.messages).reply
        assert warm.text == self.cold.text
        assert warm.cached >= self.saved_tokens


@dataclass
class Answer:
    reply: Reply
    tries: int


@dataclass
class KillScene:
    """Pair with room for one model, and what has to be true after each kill."""

    pair: ModelsPair
    planted: FaultControl
    bystander: int  # pid of a process that isn't ours
    talks: list[SavedTalk] = field(default_factory=list)
    long_cold: str = ""
    seen: set[int] = field(default_factory=set)

    def reset(self) -> None:
        """Have the old model loaded, and no request."""
        ask_until_answered(self.pair, OLD, [{"role": "user", "content": "come back"}])
        self.pair.wait_for_stage(OLD, ModelStage.LOADED)
        self.pair.settle()

    def kill(self, victim: str, backend_pid: int) -> bool:
        """Kill keeper, proxy or this backend, after files with pids were made to name the bystander.

        False where the process was gone already.
        """
        pid = {KEEPER: self.pair.keeper_pid(), PROXY: self.pair.pid(PROXY)}.get(victim, backend_pid)
        self.seen |= self.pair.list_descendants()
        for file in [*self.pair.home.run.glob("backend-*.pid"), self.pair.home.pid_file(BACKEND)]:
            file.write_text(f"{self.bystander}\n")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def check_recovered(self) -> None:
        """Check that the pair is ready by itself, nothing is lost, and only processes of this serve are left."""
        wait_until(lambda: self.pair.is_ready, "not ready again", ENDED_MAX_S)
        for talk in reversed(self.talks):  # the new model is loaded, and the next test begins with the old one
            talk.check_restored(self.pair)
        self.check_processes()

    def check_processes(self) -> None:
        self.seen |= self.pair.list_descendants()
        wait_until(self._has_no_orphan, "a process is left", ENDED_MAX_S)
        assert self.bystander in list_parents()

    def _has_no_orphan(self) -> bool:
        return not (self.seen & set(list_parents())) - self.pair.list_descendants()


def ask_until_answered(pair: ModelsPair, model: str, messages: list[Message], **options: object) -> Answer:
    """Ask, and again where the request was cut or refused for a while, as SDKs do."""
    for tries in range(1, TRIES_MAX + 1):
        with contextlib.suppress(OSError):
            request = ClientRequest(pair, messages, model=model, **{**ANSWER, **options}).wait_until_ended()
            if request.is_complete and not request.error:
                return Answer(request.reply, tries)
            assert request.status not in (400, 401, 404), request.summary
        time.sleep(TRY_PAUSE_S)
    raise AssertionError(f"no answer of {model}")


@pytest.fixture(scope="module")
def scene(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillScene]:
    models = [PairModel(OLD, tiny_folder("llama")), PairModel(NEW, tiny_folder("gemma3"))]
    home = tmp_path_factory.mktemp("kills") / "home"
    bystander = subprocess.Popen(["sleep", "1000"])
    with FaultControl(RESTART_DELAY_S, hold_loads=True) as planted:
        flags = ("--drain-timeout-s", "2", "--prefill-step-size", "256")
        pair = ModelsPair(home, models, *flags, memory_gb=MEMORY_GB, stay_s=0, environment=planted.environment)
        with pair:
            pair.check_room(1)
            made = KillScene(pair, planted, bystander.pid)
            prepare_talks(made)
            yield made
        wait_until(lambda: not made.seen & set(list_parents()), "a process has outlived serve", ENDED_MAX_S)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def prepare_talks(scene: KillScene) -> None:
    pair = scene.pair
    for model in (NEW, OLD):
        messages: list[Message] = [{"role": "user", "content": f"remember this for {model}: " + "x1y2 " * 500}]
        first = pair.chat(messages, model=model, **ANSWER)  # loads it
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
        cold = pair.ask_cold(model, messages, **ANSWER)
        scene.talks.insert(0, SavedTalk(model, messages, first.prompt_tokens, cold))
    scene.long_cold = pair.ask_cold(OLD, LONG_PROMPT, **LONG_ANSWER).text
    pair.settle()


@contextlib.contextmanager
def waiting_request(scene: KillScene) -> Iterator["Future[Answer]"]:
    """Client of the new model, in a thread; its request begins now."""
    talk = scene.talks[1]
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask_until_answered, scene.pair, NEW, talk.messages)


def check_answer(scene: KillScene, answer: Answer, victim: str) -> None:
    """Check a request without content: it is answered all the same, unless its proxy was killed."""
    assert answer.reply.text == scene.talks[1].cold.text
    assert victim == PROXY or answer.tries == 1


def kill(victim: str) -> pytest.MarkDecorator:
    """Parameter `victim`: this one, or each one."""
    return pytest.mark.parametrize("victim", [KEEPER, PROXY, BACKEND] if IS_WHOLE else [victim])


@kill(BACKEND)
def test_kill_during_a_load(victim: str, scene: KillScene) -> None:
    scene.reset()
    with scene.planted.make_gate() as gate, waiting_request(scene) as waiting:
        load = gate.wait_for_step("load")
        assert scene.kill(victim, load.process)
        gate.open_for_all()
        check_answer(scene, waiting.result(), victim)
    scene.check_recovered()


@kill(PROXY)
def test_kill_during_a_drain(victim: str, scene: KillScene) -> None:
    scene.reset()
    with scene.planted.make_gate() as gate:
        long = ClientRequest(scene.pair, LONG_PROMPT, model=OLD, stream=True, **LONG_ANSWER)
        step = hold_after_content(gate, long)
        with waiting_request(scene) as waiting:
            scene.pair.wait_for_log_line(f"model {OLD} takes no new requests")
            assert scene.kill(victim, step.process)
            gate.open_for_all()
            check_answer(scene, waiting.result(), victim)
        check_long_answer(scene, long.wait_until_ended())
    scene.check_recovered()


def test_answer_drained_by_a_killed_keeper_is_saved(scene: KillScene) -> None:
    """Its backend ends by itself then, but not before the answer is on disk."""
    prompt: list[Message] = [{"role": "user", "content": "this drains while the keeper dies: " + "z9y8 " * 60}]
    scene.reset()
    with scene.planted.make_gate() as gate:
        drained = ClientRequest(scene.pair, prompt, model=OLD, stream=True, **DRAINED_ANSWER)
        hold_after_content(gate, drained)
        with waiting_request(scene) as waiting:
            scene.pair.wait_for_log_line(f"model {OLD} takes no new requests")
            assert scene.kill(KEEPER, 0)
            gate.open_for_all()
            reply = drained.wait_until_ended().reply
            check_answer(scene, waiting.result(), KEEPER)
    scene.check_recovered()
    name = reply.headers["x-warmline-request"]
    (record,) = [each for each in scene.pair.requests() if each["id"] == name]
    assert record["saved_tokens"] > 0, record
    following = [*prompt, {"role": "assistant", "content": reply.text}, {"role": "user", "content": "go on"}]
    assert ask_until_answered(scene.pair, OLD, following).reply.cached >= reply.prompt_tokens


def hold_after_content(gate: Gate, request: ClientRequest) -> HeldStep:
    """A decode step, held once the client has some content."""
    for step in gate.iter_steps("decode"):
        if request.text:
            return step
        step.let_pass()
        time.sleep(ARRIVAL_S)
    raise AssertionError("the gate is closed")


def check_long_answer(scene: KillScene, request: ClientRequest) -> None:
    """Check that the streamed answer is whole, or a part of it that ends with an error or with the connection."""
    if not (request.is_complete and not request.error):
        assert request.error or request.failure, request.summary
        assert scene.long_cold.startswith(request.text)
        again = ask_until_answered(scene.pair, OLD, LONG_PROMPT, **LONG_ANSWER)
        assert again.reply.text == scene.long_cold
    else:
        assert request.text == scene.long_cold


@kill(KEEPER)
def test_kill_during_a_swap(victim: str, scene: KillScene) -> None:
    """The old model's process is stopping, and the new one's is to be started."""
    for _ in range(SWAPS_MAX):
        scene.reset()
        with waiting_request(scene) as waiting:
            stopping = scene.pair.find_stage(OLD, ModelStage.STOPPING, waiting.done)
            was_met = stopping is not None and scene.kill(victim, stopping.pid)
            check_answer(scene, waiting.result(), victim)
        scene.check_recovered()
        if was_met:
            return
    raise AssertionError("the process ended each time before it was killed")
