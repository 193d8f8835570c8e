"""Duel of a pair that reuses all it can with a reference that reuses nothing: all answers are compared."""

import contextlib
import http.client
import math
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from support.oracle import steps
from support.oracle.conversations import Conversations, PendingRequest
from support.oracle.reference import STEP_TOKENS, Reference
from support.oracle.steps import LEAVE_IN_DECODE, LEAVE_IN_PREFILL, Ask, Forget, Fresh, Kill, Purge, Restart, Together
from support.oracle.verdict import Difference, ReplyComparison, compare_replies
from support.pair.clients import ClientRequest
from support.pair.pair import START_TIMEOUT_S, Pair, Reply, send_request
from support.planted.faults import FaultControl, Gate

NAME, CACHE = "X-Warmline-Request", "x-warmline-cache"
LEAVE_PHASES = {LEAVE_IN_PREFILL: ("prefill", "first"), LEAVE_IN_DECODE: ("decode",)}
FLAGS = (
    *("--prefill-step-size", str(STEP_TOKENS), "--partial-save-tokens", "128"),
    *("--audit-fraction", "0", "--drain-timeout-s", "5", "--queue-count-max", "64"),
)
SMALL_DISK = ("--disk-budget-gb", "0.003")
SMALL_MEMORY = ("--memory-budget-gb", "0.004")
FAULTS_MAX = 2  # in one process, which ends after one more (scheduler.FAILURES_MAX)
OUT_OF_MEMORY = "the memory budget is used up"
RESTART_DELAY_S = 0.1
NOISE_FACTOR = 2.0  # a warm run's largest difference in those between cold runs, in families with steps
UNREACHABLE_ERRORS = (OSError, http.client.HTTPException)
POLL_S = 0.01


MODES = ("fast", "exact")


@dataclass
class Tally:
    """Counts of steps and findings, for the table."""

    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0

    def add(self, verdict: ReplyComparison, warm: Reply) -> None:
        self.counts["answers compared"] += 1
        self.counts["numbers"] += verdict.numbers
        self.counts["near ties"] += verdict.near_tie
        self.counts["differences"] += bool(verdict.difference)
        self.counts["prompt tokens"] += warm.prompt_tokens
        self.counts["cached tokens"] += warm.cached
        self.counts[find_start(warm).split()[0]] += 1
        self.largest = max(self.largest, verdict.largest)


class Duel:
    """Tested pair and reference: `do` makes a step and raises Difference where an answer differs."""

    def __init__(self, reference: Reference, mode: str, environment: Mapping[str, str] | None = None) -> None:
        self.family, self.mode, self.tally = reference.family, mode, Tally()
        self.script: list[steps.Any] = []  # since the home was new
        self.failure: Exception | None = None
        self._reference, self._extra = reference, environment or {}
        self._tolerance = self.family.tolerance if mode == "fast" else 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="oracle-"))
        self._homes, self._talks, self._requests = 0, Conversations(), 0
        self._faults, self._small_memory = 0, False
        self._pair: Pair | None = None
        self.planted = FaultControl(RESTART_DELAY_S)

    def __enter__(self) -> "Duel":
        self.planted.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close() if kind is None else self.abandon()
        self.planted.__exit__(kind, error, at)
        shutil.rmtree(self._folder, ignore_errors=True)

    def renew(self) -> None:
        """Start again with an empty home."""
        self.close()
        shutil.rmtree(self._folder / str(self._homes), ignore_errors=True)
        self._homes += 1
        self.script, self._talks, self.failure = [], Conversations(), None
        self._start()

    def empty(self) -> None:
        """Delete everything on disk and in memory."""
        self.pair.settle()
        self.pair.cachectl("purge", "--all", "--yes")
        self.pair.forget_residents()

    def close(self) -> None:
        """Stop the pair, after checking its home."""
        if self._pair is not None:
            pair, self._pair = self._pair, None
            try:
                self._check(pair)
            finally:
                pair.stop()

    def abandon(self) -> list[str]:
        """Stop the pair without checking its home; return the lines printed since its last start."""
        pair, self._pair = self._pair, None
        if pair is None:
            return []
        if pair.is_up:
            pair.stop()
        return pair.read_output()

    @property
    def pair(self) -> Pair:
        if self._pair is None:
            self.renew()
        assert self._pair is not None
        return self._pair

    def do(self, step: steps.Any) -> None:
        """Make a step; after a failure raise that again, since later steps would prove nothing."""
        if self.failure is not None:
            raise self.failure
        try:
            self._do(step)
        except Exception as error:
            self.failure = error
            raise

    def _do(self, step: steps.Any) -> None:
        pair = self.pair
        self.script.append(step)
        self.tally.steps += 1
        self.tally.counts[type(step).__name__] += 1
        match step:
            case Fresh():
                self._talks = Conversations(step.salt)
            case Ask():
                self._ask(pair, [step])
            case Together():
                self._ask(pair, list(step.asks))
            case Forget():
                pair.settle()
                pair.forget_residents()
            case Purge():
                self._purge(pair, step)
            case Restart():
                self._restart(pair, step)
            case Kill():
                self._kill(pair, step)

    def check(self) -> None:
        """Check that `cachectl verify --deep` finds nothing."""
        self._check(self.pair)

    # ---- requests

    def _ask(self, pair: Pair, asks: list[Ask]) -> None:
        questions = [self._talks.question(each) for each in asks]
        replies = self._ask_all(pair, questions)
        for question, reply in zip(questions, replies, strict=True):
            if reply is None:
                self.tally.counts["left" if question.ask.end in LEAVE_PHASES else "failed"] += 1
                self._talks.record_answer(question, None)
            else:
                self._compare(question, reply)
                self._talks.record_answer(question, reply.text)

    def _ask_all(self, pair: Pair, questions: list[PendingRequest]) -> list[Reply | None]:
        if len(questions) == 1:
            return [self._ask_one(pair, questions[0])]
        with ThreadPoolExecutor(len(questions)) as threads:
            return list(threads.map(lambda question: self._ask_to_end(pair, question), questions))

    def _ask_one(self, pair: Pair, question: PendingRequest) -> Reply | None:
        if question.ask.end in LEAVE_PHASES:
            return self._ask_and_leave(pair, question)
        if not question.ask.fault or self._faults == FAULTS_MAX:
            return self._ask_to_end(pair, question)
        self._faults += 1
        self.planted.plant_fault("raise", question.ask.fault)
        try:
            return self._ask_to_end(pair, question)
        finally:
            self.planted.withdraw_fault()

    def _ask_to_end(self, pair: Pair, question: PendingRequest) -> Reply | None:
        if question.ask.stream:
            return self._check_end(
                ClientRequest(pair, question.messages, stream=True, **question.options).wait_until_ended(), question
            )
        reply = pair.post("/v1/chat/completions", question.body)
        if reply.status == 200:
            return reply
        return self._check_refusal(question, reply.raw.decode())

    def _check_end(self, request: ClientRequest, question: PendingRequest) -> Reply | None:
        if request.is_complete and not request.error:
            return request.reply
        return self._check_refusal(question, request.summary)

    def _check_refusal(self, question: PendingRequest, answer: str) -> None:
        """Raise Difference unless the request may fail: after content was sent, or with little memory."""
        if question.ask.fault != "decode" and not (self._small_memory and OUT_OF_MEMORY in answer):
            raise Difference(f"{question.ask} was not answered: {answer}")

    def _ask_and_leave(self, pair: Pair, question: PendingRequest) -> Reply | None:
        """Ask, and leave during the given step of the engine; None, or the answer if it ended before."""
        self._requests += 1
        name, phases = f"oracle-{self._homes}-{self._requests}", LEAVE_PHASES[question.ask.end]
        with self.planted.make_gate() as gate:
            request = ClientRequest(
                pair, question.messages, headers={NAME: name}, stream=question.ask.stream, **question.options
            )
            steps_left = question.ask.after
            while (step := gate.next_step_unless(lambda: request.is_ended)) is not None:
                if name in step.requests and step.phase in phases and (steps_left == 0 or step.phase == "first"):
                    disconnect_and_wait(request, gate)
                    step.let_pass()
                    return None
                steps_left -= name in step.requests and step.phase in phases
                step.let_pass()
        return self._check_end(request.wait_until_ended(), question)

    def _compare(self, question: PendingRequest, warm: Reply) -> None:
        verdict = compare_replies(
            self._reference.compute_cold(question.body, is_exact=self.mode == "exact"), warm, self._tolerance
        )
        if verdict.difference and self.mode == "fast" and self.family.steps:
            verdict = self._compare_with_cold_runs(question, warm)
        self.tally.add(verdict, warm)
        if verdict.difference:
            start = f"{find_start(warm)} of {warm.prompt_tokens}"
            raise Difference(f"{verdict.difference}\nwarm start: {start}; {question.ask}")
        if not 0 <= warm.cached < warm.prompt_tokens:
            raise Difference(f"{warm.cached} tokens cached of a prompt of {warm.prompt_tokens}")
        if self.mode == "exact" and warm.cached % STEP_TOKENS:
            raise Difference(f"{warm.cached} tokens cached in exact mode, which is no multiple of {STEP_TOKENS}")

    def _compare_with_cold_runs(self, question: PendingRequest, warm: Reply) -> ReplyComparison:
        """Compare with cold runs in other chunks, whose differences bound the noise; one that agrees is enough."""
        cold, *others = self._reference.compute_cold_runs(question.body, warm.cached)
        noise = max(compare_replies(cold, other, math.inf).largest for other in others)
        verdicts = [compare_replies(other, warm, self._tolerance) for other in others]
        verdicts.append(compare_replies(cold, warm, max(self._tolerance, NOISE_FACTOR * noise)))
        verdict = next((each for each in verdicts if not each.difference), verdicts[-1])
        self.tally.counts["explained by noise"] += not verdict.difference
        return verdict

    # ---- other steps

    def _purge(self, pair: Pair, step: Purge) -> None:
        sessions = pair.cachectl("inspect")["sessions"]
        if sessions:
            pair.cachectl("purge", "--session", sessions[step.which % len(sessions)]["id"], "--yes")

    def _restart(self, pair: Pair, step: Restart) -> None:
        if step.settled:
            pair.settle()
        if step.how == "softly":
            pair.stop()
            self._start(step)
        elif step.how == "-9":
            pair.kill()
            self._start(step)
        else:
            kill_and_wait(pair, step.how.removeprefix("-9 "))

    def _kill(self, pair: Pair, step: Kill) -> None:
        """Kill a process at a disk operation between a request and the end of its save, if it makes as many."""
        question, planted, pid = self._talks.question(step.ask), self.planted, pair.pid(step.process)
        planted.kill_at(step.process, step.nth, step.when)
        request = ClientRequest(pair, question.messages, **question.options).wait_until_ended()
        wait_until(lambda: planted.is_killed(step.process) or is_settled(pair), "neither killed nor settled")
        planted.restore_disk(step.process)
        if planted.is_killed(step.process):
            self.tally.counts["killed at the disk"] += 1
            wait_for_new_process(pair, step.process, pid)
        if request.is_complete:
            self._compare(question, request.reply)
        elif not planted.is_killed(step.process):
            raise Difference(f"{step} was not answered: {request.summary}")
        self._talks.record_answer(question, request.text if request.is_complete else None)

    def _start(self, step: Restart | None = None) -> None:
        flags = [*FLAGS, "--reuse", self.mode, *self.family.flags]
        flags += SMALL_DISK if step and step.small_disk else ()
        self._faults = 0
        self._small_memory = bool(step and step.small_memory)
        flags += SMALL_MEMORY if self._small_memory else ()
        home = self._folder / str(self._homes)
        environment = {**self.planted.environment, **self._extra}
        self._pair = Pair(home, self._reference.model, *flags, environment=environment).start()

    def _check(self, pair: Pair) -> None:
        pair.settle()
        try:
            pair.cachectl("verify", "--deep")
        except AssertionError as error:
            raise Difference(f"the home is not whole: {error}") from None
        if drafts := [str(path) for path in pair.home.segments.rglob(".*.tmp")]:
            raise Difference(f"drafts are left: {drafts}")


def find_start(reply: Reply) -> str:
    """Find the cache header, such as "restored 812"; unknown where heartbeats were sent before planning."""
    return next((value for name, value in reply.headers.items() if name.lower() == CACHE), "unknown")


def disconnect_and_wait(request: ClientRequest, gate: Gate) -> None:
    """Leave, and return when the cancel is in the engine's mailbox."""
    gate.forget_commands()
    request.disconnect()
    gate.wait_for_command("cancel")


def kill_and_wait(pair: Pair, process: str) -> None:
    """Kill with SIGKILL, and return when a new process is ready."""
    pid = pair.pid(process)
    os.kill(pid, signal.SIGKILL)
    wait_for_new_process(pair, process, pid)


def wait_for_new_process(pair: Pair, process: str, pid: int) -> None:
    wait_until(lambda: running_pid(pair, process) not in (0, pid), f"no other {process}")
    wait_until(lambda: is_ready(pair), f"the pair is not ready after its {process} was killed")


def is_settled(pair: Pair) -> bool:
    with contextlib.suppress(*UNREACHABLE_ERRORS, KeyError):
        return not pair.proxy_status()["settling"]
    return False


def running_pid(pair: Pair, process: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return pair.pid(process)
    return 0


def is_ready(pair: Pair) -> bool:
    with contextlib.suppress(*UNREACHABLE_ERRORS):
        return send_request(f"{pair.url}/ready", None, {}, "GET", timeout_s=5).status == 200
    return False


def wait_until(condition: Callable[[], bool], problem: str) -> None:
    limit = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > limit:
            raise Difference(problem)
        time.sleep(POLL_S)
