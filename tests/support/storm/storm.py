"""Storm over a real pair: all kinds of clients at once, while processes are killed and faults planted.

    python tests/support/storm/storm.py --seconds 600 --seed 7       (`make chaos`)

The seed decides requests and faults, not the order in which the machine runs them.  In the last quarter nothing is
killed, so that leaks of the last processes have time to show.
"""

import argparse
import http.client
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.pair.clients import ClientRequest
from support.pair.pair import WARMLINE, Pair
from support.planted.faults import FaultControl
from support.storm.clients import CLIENT_THREADS, StormClient, wait_for_end
from support.storm.events import FaultInjector
from support.storm.log import Latency, StormLog, quantile
from support.storm.prompts import LONG, StormPrompts, ask_cold
from warmline_common.protocol.messages import ProcessStats

CACHECTL = str(Path(WARMLINE).with_name("cachectl"))
FLAGS = (
    *("--prefill-step-size", "128", "--partial-save-tokens", "512"),
    *("--disk-budget-gb", "0.25", "--running-count-max", "8", "--queue-count-max", "32"),
    *("--wedge-timeout-s", "3", "--stall-timeout-s", "30"),
    *("--receive-timeout-s", "3", "--send-timeout-s", "3", "--drain-timeout-s", "2"),
)
MEMORY_GB_PER_TOKEN = 0.08 / 3_500  # of the longest prompt: memory for three, so that residents are dropped
RESTART_DELAY_S = 0.3
DISTURBED_SHARE = 0.75
PROBE_INTERVAL_S = 0.25
REST_MAX_S = 0.3  # between two encounters of one client
IDLE_MAX_S = 60.0
POLL_S = 0.1
# Permitted growth: threads of pools (backend: 1 that writes, 4 that read, 4 that restore, 2 that render, helpers),
# connections kept for the next request.
SLACK = ProcessStats(tasks=0, threads=14, descriptors=4, bytes_unaccounted=1 << 20)


@dataclass
class StormReport:
    """Findings of a storm."""

    seed: int
    seconds: float
    log: StormLog
    wrong: list[str] = field(default_factory=list)
    near_ties: int = 0
    leaks: Counter[str] = field(default_factory=Counter)  # beyond SLACK
    unclean: list[str] = field(default_factory=list)  # inconsistencies of the home
    printed: list[str] = field(default_factory=list)  # lines of the pair

    @property
    def failures(self) -> list[str]:
        leaks = [f"leaked {count} {what}" for what, count in self.leaks.items() if count]
        return [*self.log.problems, *self.wrong, *leaks, *self.unclean]

    def format_table(self) -> str:
        counts = self.log.counts
        rows = [
            ("seed", self.seed),
            ("seconds", round(self.seconds)),
            ("answered", counts["answered"]),
            *((outcome, count) for outcome, count in sorted(counts.items()) if outcome != "answered"),
            *((f"fault: {fault}", count) for fault, count in sorted(self.log.faults.items())),
            ("backend started again", self._count_lines("the backend ", "starting it again")),
            ("proxy started again", self._count_lines("the proxy ", "starting it again")),
            ("killed as wedged", self._count_lines("is wedged and is killed")),
            ("answered after being sent again", self._count_lines("PERF ", "outcome=ok", "dispatches=")),
            ("near ties", self.near_ties),
            ("wrong", len(self.wrong)),
            ("hung", counts["hung"]),
            *((f"leaked {what}", count) for what, count in self.leaks.items()),
            *(
                row
                for beside in ("none", "part of a prefill", "a prefill", "a recovery")
                for row in self._format_latency(beside)
            ),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _count_lines(self, *words: str) -> int:
        return sum(all(word in line for word in words) for line in self.printed)

    def _format_latency(self, beside: str) -> list[tuple[str, str]]:
        found = [latency.seconds for latency in self.log.latencies if latency.beside == beside]
        what = f"small request beside {beside}"
        return [(f"{what}, p50 p99", f"{quantile(found, 0.5):.3f} s  {quantile(found, 0.99):.3f} s  (n={len(found)})")]


def run_storm(seconds: float, seed: int, home: Path, model: Path, long: Sequence[int] = LONG) -> StormReport:
    """Run a storm over a new pair, and check answers, leaks and the home; takes a minute longer than `seconds`.

    `long`: lengths of long prompts, about, in tokens.
    """
    report = StormReport(seed, seconds, StormLog())
    memory = ("--memory-budget-gb", f"{MEMORY_GB_PER_TOKEN * max(long):.4f}")
    with FaultControl(RESTART_DELAY_S) as planted:
        pair = Pair(home, model, *FLAGS, *memory, environment=planted.environment)
        with pair:
            prompts = ask_cold(pair, random.Random(seed), long)
            baseline = warm_up(pair, prompts)
            run_threads(pair, planted, prompts, report)
            planted.withdraw_fault()
            check_leaks(pair, baseline, report)
            check_home(pair, report)
        report.printed = pair.read_output()
    compare_replies(report)
    return report


def warm_up(pair: Pair, prompts: StormPrompts) -> dict[str, ProcessStats]:
    """Run each encounter once, without faults; the processes' resources after it are the baseline."""
    warm_up_log = StormLog()
    run_each_once(pair, prompts, warm_up_log)
    warm_up_log.released.set()
    wait_until_idle(pair)
    return read_stats(pair)


def run_each_once(pair: Pair, prompts: StormPrompts, log: StormLog) -> None:
    encounters = list(dict.fromkeys(encounter for kinds in CLIENT_THREADS for encounter in kinds))
    clients = [StormClient(pair, prompts, log, random.Random(number)) for number in range(len(encounters))]
    threads = [threading.Thread(target=one, args=(client,)) for one, client in zip(encounters, clients, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_threads(pair: Pair, planted: FaultControl, prompts: StormPrompts, report: StormReport) -> None:
    log, end = report.log, time.monotonic() + report.seconds
    threads = [
        threading.Thread(
            target=run_client, args=(StormClient(pair, prompts, log, make_rng(report.seed, number)), kinds)
        )
        for number, kinds in enumerate(CLIENT_THREADS)
    ]
    threads.append(threading.Thread(target=probe_latency, args=(pair, prompts, log)))
    for thread in threads:
        thread.start()
    injector = FaultInjector(pair, planted, log, make_rng(report.seed, -1))
    while time.monotonic() < end - (1 - DISTURBED_SHARE) * report.seconds:
        injector.inject()
    log.released.wait(max(0.0, end - time.monotonic()))
    log.released.set()
    for thread in threads:
        thread.join()


def make_rng(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed} {number}")


def run_client(client: StormClient, kinds: list[Callable[[StormClient], None]]) -> None:
    while not client.log.released.is_set():
        began, kind = time.monotonic(), client.rng.choice(kinds)
        try:
            kind(client)
        except OSError as error:
            client.log.count("no connection")
            if not client.log.is_disturbed_since(began):
                client.log.add_problem(f"{kind.__name__}: {error!r}")
        except Exception as error:  # noqa: BLE001  an unreadable answer is a problem
            client.log.add_problem(f"{kind.__name__}: {error!r}")
        client.log.released.wait(client.rng.uniform(0, REST_MAX_S))


def probe_latency(pair: Pair, prompts: StormPrompts, log: StormLog) -> None:
    """Measure the latency of a small request again and again, with and without a concurrent prefill."""
    prompt = prompts.small[0]
    while not log.released.wait(PROBE_INTERVAL_S):
        began, prefilling = time.monotonic(), log.has_long_prefill()
        try:
            request = ClientRequest(pair, prompt.messages, **prompt.options)
        except OSError:
            continue
        wait_for_end(request)
        seconds = time.monotonic() - began
        if log.record_end(request, prompt):
            beside = {(True, True): "a prefill", (False, False): "none"}.get(
                (prefilling, log.has_long_prefill()), "part of a prefill"
            )
            log.latencies.append(Latency(seconds, "a recovery" if log.is_disturbed_since(began) else beside))


# ---- checks at the end


def wait_until_idle(pair: Pair) -> None:
    limit = time.monotonic() + IDLE_MAX_S
    while not is_idle(pair) and time.monotonic() < limit:
        time.sleep(POLL_S)


def is_idle(pair: Pair) -> bool:
    try:
        proxy, backend = pair.proxy_status(), pair.status()
    except (OSError, http.client.HTTPException, KeyError):
        return False
    held = proxy["lives"] + proxy["running"] + proxy["queued"] + proxy["settling"]
    return backend.ready and not (held + backend.running + backend.queued)


def read_stats(pair: Pair) -> dict[str, ProcessStats]:
    return {"proxy": ProcessStats(**pair.proxy_status()["vitals"]), "backend": pair.status().vitals}


def check_leaks(pair: Pair, baseline: dict[str, ProcessStats], report: StormReport) -> None:
    """Wait until no leak is left, since kept connections are closed after a while, or IDLE_MAX_S."""
    wait_until_idle(pair)
    limit = time.monotonic() + IDLE_MAX_S
    while True:
        report.leaks = count_leaks(pair, baseline)
        if not report.leaks.total() or time.monotonic() > limit:
            return
        time.sleep(POLL_S)


def count_leaks(pair: Pair, baseline: dict[str, ProcessStats]) -> "Counter[str]":
    found, proxy, backend = Counter[str](), pair.proxy_status(), pair.status()
    found["requests"] = proxy["lives"] + proxy["running"] + proxy["queued"] + backend.running + backend.queued
    for process, now in read_stats(pair).items():
        for name, what in (("tasks",) * 2, ("threads",) * 2, ("descriptors",) * 2, ("bytes_unaccounted", "bytes")):
            more = getattr(now, name) - getattr(baseline[process], name)
            found[f"{what} ({process})"] = max(0, more - getattr(SLACK, name))
    return found


def check_home(pair: Pair, report: StormReport) -> None:
    verify = [CACHECTL, "verify", "--deep", "--home", str(pair.home.root)]
    done = subprocess.run(verify, capture_output=True, text=True)
    if done.returncode:
        report.unclean.append(done.stdout + done.stderr)
    report.unclean += [f"a draft is left: {path}" for path in pair.home.segments.rglob(".*.tmp")]


def compare_replies(report: StormReport) -> None:
    for prompt, reply in report.log.replies:
        if fault := prompt.find_difference(reply):
            report.wrong.append(f"{fault}; {prompt.messages[0]['content'][:40]!r} gave {reply.text[:80]!r}")
        report.near_ties += prompt.is_near_tie(reply)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--log", type=Path, help="write what the pair prints to this file")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    from support.tiny_models import build

    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        report = run_storm(given.seconds, given.seed, Path(folder) / "home", build("bench", Path(folder) / "bench"))
    if given.log:
        given.log.write_text("\n".join(report.printed))
    print(report.format_table())
    for failure in report.failures:
        print(f"FAILED: {failure}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
