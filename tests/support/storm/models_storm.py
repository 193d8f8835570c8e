"""Storm over several models: conversations in random order, room for some of the models, and SIGKILLs.

    python tests/support/storm/models_storm.py --turns 210 --seed 7       (`make models-chaos`)

A client sends a request that was cut, or refused for a while, again, as SDKs do.  The seed decides conversations, their
order and the kills, not the order in which the machine runs them.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.pair.answers import WITH_LOGPROBS
from support.pair.clients import ClientRequest
from support.pair.models_pair import KEEPER, PROXY, UNREACHABLE_ERRORS, ModelsPair, PairModel, list_parents
from support.pair.pair import WARMLINE, Message, Reply
from support.storm.log import StormLog
from support.storm.models_watch import ModelsWatch, TalkTail
from support.storm.prompts import StormPrompt, make_text

CACHECTL = str(Path(WARMLINE).with_name("cachectl"))
FAMILIES = ("llama", "qwen3_5", "gemma3")
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 400, 40, 12
PREFILL_STEP = 256
FLAGS = ("--prefill-step-size", str(PREFILL_STEP), "--drain-timeout-s", "2")
MEMORY_GB_REFERENCE = 3.0  # room for all, while the expected answers are computed
CACHED_SHARE_MIN = 0.95
CLIENTS = 10
TRY_MAX_S = 120.0
TURN_MAX_S = 240.0
RETRY_PAUSE_S = 0.3
RETRIED_STATUSES = (408, 409, 429)


@dataclass(eq=False)
class Conversation:
    """Turns of one model, each prompt with its cold answer, and the state of the last answered one."""

    model: str
    turns: list[StormPrompt]
    tail: TalkTail = field(default_factory=TalkTail)
    asked: int = 0
    is_busy: bool = False


@dataclass(frozen=True)
class Reuse:
    """Cached tokens of a turn, and those of the turn before it, by the id of its request."""

    model: str
    request: str
    cached: int
    expected: int

    def count_stored(self, perf_line: str) -> int:
        """Tokens that were there: a prompt that is computed sooner than restored is computed."""
        left = re.search(r'miss="restoring (\d+) tokens would take longer', perf_line)
        return max(self.cached, int(left.group(1)) if left else 0)


@dataclass
class ModelsStormReport:
    """Findings of a storm."""

    seed: int
    pinned: str
    log: StormLog
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    near_ties: int = 0
    unclean: list[str] = field(default_factory=list)
    reuses: list[Reuse] = field(default_factory=list)
    stored_share_min: dict[str, float] = field(default_factory=dict)
    watch: ModelsWatch | None = None
    printed: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [*self.log.problems, *self.wrong, *self.unclean]

    @property
    def load_count(self) -> int:
        return sum(" is loaded" in line for line in self.printed)

    def format_table(self) -> str:
        assert self.watch is not None
        rows = [
            ("seed", self.seed),
            ("pinned", self.pinned or "none"),
            ("seconds", round(self.seconds)),
            *((outcome, count) for outcome, count in sorted(self.log.counts.items())),
            *((f"kill: {fault}", count) for fault, count in sorted(self.log.faults.items())),
            ("loads", self.load_count),
            ("closed for another model", sum("takes no new requests" in line for line in self.printed)),
            ("near ties", self.near_ties),
            ("wrong", len(self.wrong)),
            ("turns that had to find the one before", len(self.reuses)),
            *((f"least share found, {model}", f"{share:.3f}") for model, share in self.stored_share_min.items()),
            ("samples of the memory", self.watch.samples),
            ("largest share of the memory held", f"{self.watch.memory_share_max:.3f}"),
            ("largest share of a KV budget used", f"{self.watch.kv_share_max:.3f}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class ConversationQueue:
    """Random order of all turns; those of one conversation one after the other."""

    def __init__(self, conversations: Sequence[Conversation], rng: random.Random) -> None:
        self._conversations, self._rng, self._moved = conversations, rng, threading.Condition()
        self.done = 0
        self.total = sum(len(each.turns) for each in conversations)

    def take(self) -> Conversation | None:
        """Next conversation, whose turn `asked` is to be asked; None once there is none left."""
        with self._moved:
            while left := [each for each in self._conversations if each.asked < len(each.turns)]:
                if idle := [each for each in left if not each.is_busy]:
                    chosen = self._rng.choice(idle)
                    chosen.is_busy = True
                    return chosen
                self._moved.wait()
        return None

    def finish(self, conversation: Conversation) -> None:
        with self._moved:
            conversation.asked += 1
            conversation.is_busy = False
            self.done += 1
            self._moved.notify_all()

    def wait_for(self, done: int) -> None:
        """Wait until so many turns are done."""
        with self._moved:
            self._moved.wait_for(lambda: self.done >= done)


def run_models_storm(
    pair: ModelsPair, seed: int, conversations: int, turns: int, kills: Sequence[str]
) -> ModelsStormReport:
    """Run a storm over a new pair with memory for the two largest of its models.  `turns`: of all conversations.

    `kills`: "keeper", "proxy" or "backend", spread over the turns.
    """
    rng = random.Random(seed)
    with pair:
        pair.load_all()
        talks = make_conversations(pair, rng, conversations, turns)
        pair.memory_gb = pair.find_memory_gb(2)
    pinned = next((model.name for model in pair.models if model.pinned), "")
    report, began = ModelsStormReport(seed, pinned, StormLog()), time.monotonic()
    with pair:
        watch = ModelsWatch(pair, report.log, [talk.tail for talk in talks], pair.read_step_bytes())
        report.watch = watch
        watch.start()
        run_clients(pair, ConversationQueue(talks, rng), watch, report, Killer(pair, watch, report.log, rng, kills))
        pair.settle()
        report.log.released.set()
        watch.join()
        check_processes(pair, watch, report)
        check_home(pair, report)
        watch.seen_pids |= pair.list_descendants()
    report.printed, report.seconds = pair.read_output(), time.monotonic() - began
    check_reuses(report)
    report.unclean += [f"process {pid} is left" for pid in watch.seen_pids & set(list_parents())]
    return report


def make_conversations(pair: ModelsPair, rng: random.Random, count: int, turns: int) -> list[Conversation]:
    """Conversations of all models in turn; each answer in them is the cold one of its model alone."""
    return [
        make_conversation(pair, rng, pair.models[number % len(pair.models)].name, turns // count)
        for number in range(count)
    ]


def make_conversation(pair: ModelsPair, rng: random.Random, model: str, turns: int) -> Conversation:
    messages: list[Message] = [{"role": "system", "content": make_text(SYSTEM_TOKENS, rng)}]
    prompts = []
    for _ in range(turns):
        messages = [*messages, {"role": "user", "content": make_text(QUESTION_TOKENS, rng)}]
        options = {"model": model, "max_tokens": ANSWER_TOKENS, **WITH_LOGPROBS}
        prompts.append(StormPrompt(messages, options, pair.ask_cold(model, messages, **options)))
        messages = [*messages, {"role": "assistant", "content": prompts[-1].cold.text}]
    return Conversation(model, prompts)


# ---- clients


def run_clients(
    pair: ModelsPair, queue: ConversationQueue, watch: ModelsWatch, report: ModelsStormReport, killer: "Killer"
) -> None:
    clients = [ModelsClient(pair, queue, watch, report, random.Random(f"{report.seed} {n}")) for n in range(CLIENTS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    killer.run(queue)
    for thread in threads:
        thread.join()


@dataclass
class ModelsClient:
    """Client of one thread, one turn after the other."""

    pair: ModelsPair
    queue: ConversationQueue
    watch: ModelsWatch
    report: ModelsStormReport
    rng: random.Random

    def run(self) -> None:
        while (talk := self.queue.take()) is not None:
            try:
                self._ask_turn(talk)
            except Exception as error:  # noqa: BLE001  an unreadable answer is a problem
                self.report.log.add_problem(f"{talk.model}: {error!r}")
            finally:
                self.queue.finish(talk)

    def _ask_turn(self, talk: Conversation) -> None:
        prompt, limit = talk.turns[talk.asked], time.monotonic() + TURN_MAX_S
        pid_before = talk.tail.pid
        while (request := self._ask_once(prompt)) is None:
            self.report.log.count("sent again")
            if time.monotonic() > limit:
                self.report.log.add_problem(f"a turn of {talk.model} is not answered in {TURN_MAX_S:g} s")
                return
            time.sleep(self.rng.uniform(0, 2 * RETRY_PAUSE_S))  # as SDKs do
        reply, pid = request.reply, self.watch.pids.get(talk.model, 0)
        expected = self.watch.count_expected_tokens(talk.tail)
        with self.watch.lock:
            tail = talk.tail
            tail.answered_tokens, tail.answered_at, tail.pid = reply.prompt_tokens, request.last_byte_at, pid
        self._check(talk, prompt, reply, expected, is_reloaded=bool(pid_before) and pid not in (0, pid_before))

    def _ask_once(self, prompt: StormPrompt) -> ClientRequest | None:
        """Answered request; None where the request is to be sent again."""
        log = self.report.log
        try:
            request = ClientRequest(self.pair, prompt.messages, stream=self.rng.random() < 0.5, **prompt.options)
        except OSError:
            log.count("sent again: no connection")
            return None
        if not request.wait_while_bytes_come(TRY_MAX_S):
            request.disconnect()
            log.add_problem(f"a request of {prompt.options['model']} hangs: {request.summary}")
            return None
        if request.is_complete and not request.error:
            log.count("answered")
            return request
        if 400 <= request.status < 500 and request.status not in RETRIED_STATUSES:
            log.add_problem(f"a good request was refused: {request.summary}")
        log.count(f"sent again: {request.status or 'cut'}" + (" after content" if request.text else ""))
        return None

    def _check(self, talk: Conversation, prompt: StormPrompt, reply: Reply, expected: int, is_reloaded: bool) -> None:
        log, model = self.report.log, talk.model
        if reply.json["model"] != model:
            log.add_problem(f"{reply.json['model']} has answered for {model}")
        if fault := prompt.find_difference(reply):
            self.report.wrong.append(f"{model}: {fault}")
        self.report.near_ties += prompt.is_near_tie(reply)
        if is_reloaded:
            log.count("turns after a reload" + ("" if expected else ", the one before unsaved"))
        if expected:
            reuse = Reuse(model, reply.headers["x-warmline-request"], reply.cached, expected)
            with self.watch.lock:
                self.report.reuses.append(reuse)


# ---- kills


@dataclass
class Killer:
    """Kills of processes, spread over the turns."""

    pair: ModelsPair
    watch: ModelsWatch
    log: StormLog
    rng: random.Random
    kills: Sequence[str]

    def run(self, queue: ConversationQueue) -> None:
        order = self.rng.sample(self.kills, len(self.kills))
        for number, what in enumerate(order, 1):
            queue.wait_for(queue.total * number // (len(order) + 1))
            self._kill(what)

    def _kill(self, what: str) -> None:
        """Kill a process, and wait until another one is ready."""
        with self.watch.disturbed():
            try:
                pid, name = self._choose(what)
            except UNREACHABLE_ERRORS:
                pid, name = 0, what
            if not pid:
                self.log.count("kills without a process")
                return
            with self.log.record_disturbance(name), suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.pair.wait_until_recovered(pid)

    def _choose(self, what: str) -> tuple[int, str]:
        """Pid, and name for the table."""
        if what in (KEEPER, PROXY):
            return self.pair.process_pids().get(what, 0), what
        reply = self.pair.fetch_models()
        running = [model for model in reply.models if model.pid]
        if not running:
            return 0, what
        chosen = self.rng.choice(running)
        self.watch.record_kill(reply.boot, chosen.name)
        return chosen.pid, f"backend of {chosen.name}"


# ---- checks at the end


def check_processes(pair: ModelsPair, watch: ModelsWatch, report: ModelsStormReport) -> None:
    """Check that each backend that was seen is gone, or one of the running serve."""
    orphans = (watch.seen_pids & set(list_parents())) - pair.list_descendants()
    report.unclean += [f"process {pid} is an orphan" for pid in orphans]


def check_home(pair: ModelsPair, report: ModelsStormReport) -> None:
    verify = [CACHECTL, "verify", "--deep", "--home", str(pair.home.root)]
    done = subprocess.run(verify, capture_output=True, text=True)
    if done.returncode:
        report.unclean.append(done.stdout + done.stderr)
    report.unclean += [f"a draft is left: {path}" for path in pair.home.segments.rglob(".*.tmp")]


def check_reuses(report: ModelsStormReport) -> None:
    """Check how much of the turn before each turn was found.

    A proxy that was killed just after an answer has printed no line for it: whether its prompt was computed because
    that is sooner is not known then.  At most one answer a client is that late.
    """
    lines = {match.group(1): line for line in report.printed if (match := re.search(r"PERF request=(\S+) ", line))}
    unprinted_count = sum(reuse.request not in lines for reuse in report.reuses)
    if unprinted_count > CLIENTS * report.log.faults[PROXY]:
        report.log.add_problem(f"{unprinted_count} answered requests have no PERF line")
    for reuse in report.reuses:
        if reuse.request not in lines and reuse.cached < reuse.expected:
            report.log.count("cold, by a proxy that was killed before it said why")
            continue
        stored = reuse.count_stored(lines.get(reuse.request, ""))
        if reuse.cached < stored:
            report.log.count("computed, since restoring takes longer")
        share = min(1.0, stored / reuse.expected)
        report.stored_share_min[reuse.model] = min(share, report.stored_share_min.get(reuse.model, 1.0))
        if share < CACHED_SHARE_MIN:
            report.log.add_problem(f"{share:.3f} of the turn before was found: {reuse}")


def list_kills(keepers: int, proxies: int, backends: int) -> list[str]:
    return [KEEPER] * keepers + [PROXY] * proxies + ["backend"] * backends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=210)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--pinned", default="", choices=("", *FAMILIES), help="model that stays loaded")
    parser.add_argument("--log", type=Path, help="write what the pair prints to this file")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    from support.tiny_models import build

    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        root = Path(folder)
        models = [PairModel(each, build(each, root / each), pinned=each == given.pinned) for each in FAMILIES]
        pair = ModelsPair(root / "home", models, *FLAGS, memory_gb=MEMORY_GB_REFERENCE)
        report = run_models_storm(pair, given.seed, given.conversations, given.turns, list_kills(3, 2, 4))
    if given.log:
        given.log.write_text("\n".join(report.printed))
    print(report.format_table())
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
