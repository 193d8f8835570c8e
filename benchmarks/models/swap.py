"""The first token after a swap of models, beside the weights' load, a restore, and a turn in session.

Two models of one shape, `first` and `second`, are served with memory for one.  A conversation with the first model
goes on, and each round measures

  after a swap     a turn after the other model was used: that one is unloaded, and the first one is loaded again
  load             of the first model, where there is memory for it: asked for by its owner after an unload, as the
                   keeper measures it
  load within      of the first model in the swap, once the other one's memory was free; its process was prepared before
  unload           of the other model within it: from the request's arrival until its process is gone
  restore          of the same conversation in a pair of the first model alone that was killed and started again
  turn             the next turn in that pair, with everything in memory
  mlx_lm.server    a turn after the other model was used there, with one request and with a dozen: it loads the model
                   that a request names into its own process, and keeps the KV of ten prompts, of whatever model

The first token is to come within load + 1.1 x restore + turn.  "left over" is what it took beyond load, restore and
turn; "unload" is a part of it.  The files are in the page cache in all cases.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/models/swap.py [--tokens 4000 12000] [--repeats 5]
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.results import format_quartiles, format_table, make_parser, print_results, write_json
from common.servers import (
    BenchServer,
    Message,
    TimedAnswer,
    get_status,
    is_alive,
    make_conversation,
    make_text,
    request_completion,
    run_mlx_lm_server,
    run_warmline,
    tiny_models,
    wait_until,
)
from common.sides import NO_AUDITS, make_next_turn

FIRST, SECOND = "first", "second"  # names of the models and of their folders
SEEDS = {FIRST: 3, SECOND: 4}
PEER = "mlx_lm.server"
RESTORE_FACTOR = 1.1
MEMORY_SHARE = 0.95  # of what both models need at least: room for one, and for a conversation of 12,000 tokens
OTHERS = 12  # requests for the other model after which mlx_lm.server, with its default of ten caches, has let go of KV
WATCH_S = 0.002
PAUSE_S = 6.0  # until the keeper has a process ahead of the next load; model_stay_s is 20 by default
HEADINGS = (
    "tokens",
    "after a swap",
    "load",
    "load within",
    "unload",
    "restore",
    "turn",
    "after a swap / (load + 1.1 x restore + turn)",
    "left over",
    PEER,
    f"{PEER}, {OTHERS} others",
    "reused by each",
)
PART_HEADINGS = (
    "tokens",
    "unload",
    "load",
    "other waiting for the load",
    "waiting for the backend",
    "render",
    "plan",
    "restore",
    "prefill",
    "first step",
    "other waiting",
    "client",
)


@dataclass(frozen=True)
class SwapTurn:
    """Turn of the pair of two models, and its parts as its record has them."""

    ttft_s: float
    load_s: float
    alone_load_s: float  # with nothing to wait for
    unload_s: float
    cached_tokens: int
    prompt_tokens: int
    waits: dict[str, float]  # seconds by reason; "load" is for unload and load
    parts: dict[str, float]  # of the proxy's time to the first token, in seconds by name


@dataclass(frozen=True)
class LoneTurns:
    """Turns of the pair of one model: the first after a restart, and the next one."""

    after_restart_s: float
    restore_s: float
    turn_s: float


@dataclass(frozen=True)
class Round:
    tokens: int
    swap: SwapTurn
    lone: LoneTurns
    peer: list[dict[str, float]]  # after a swap, and after one with more requests for the other model

    @property
    def bound_s(self) -> float:
        return self.swap.alone_load_s + RESTORE_FACTOR * self.lone.restore_s + self.lone.turn_s

    @property
    def ratio(self) -> float:
        return self.swap.ttft_s / self.bound_s

    @property
    def left_over_s(self) -> float:
        return self.swap.ttft_s - self.swap.alone_load_s - self.lone.restore_s - self.lone.turn_s


@dataclass
class Side:
    """Server with a conversation that goes on.  `models`: what it calls both models."""

    server: BenchServer
    home: Path
    models: dict[str, str]
    messages: list[Message]
    turns: int = 0

    def begin(self, tokens: int) -> None:
        self.messages, self.turns = make_conversation(tokens, f"swap {tokens}"), 0
        self.take_turn()

    def take_turn(self) -> TimedAnswer:
        """The next turn with the first model; all of it is saved when this returns."""
        answer = request_completion(self.server, self.messages, model=self.models[FIRST])
        self.turns += 1
        self.messages = make_next_turn(self.messages, answer.text, f"And what is number {self.turns}?")
        self.server.wait_until_saved()
        return answer

    def ask_small(self, name: str, number: int = 0) -> None:
        small: list[Message] = [{"role": "user", "content": make_text(40, ("small", name, self.turns, number))}]
        request_completion(self.server, small, 4, model=self.models[name])
        self.server.wait_until_saved()

    def find_record(self, answer: TimedAnswer) -> Any:
        """Record of the turn that was taken last; records are written with a delay."""

        def read_last() -> Any:
            return next(iter(self.read("/warmline/requests?count=1")["requests"]), {})

        wait_until(lambda: read_last().get("prompt_tokens") == answer.prompt_tokens, "the turn's record is written")
        return read_last()

    def post(self, path: str) -> Any:
        """Reply of the owner's API to a POST."""
        url, headers = f"http://127.0.0.1:{self.server.port}{path}", read_owner_headers(self.home)
        with urllib.request.urlopen(urllib.request.Request(url, b"{}", headers, method="POST")) as response:
            return json.load(response)

    def read(self, path: str) -> Any:
        """Reply of the owner's API."""
        status, body = get_status(self.server.port, path, read_owner_headers(self.home))
        if status != 200:
            raise SystemExit(f"GET {path} answered {status}: {body[:500].decode(errors='replace')}")
        return json.loads(body)


def read_owner_headers(home: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {(home / 'secret').read_text().strip()}"}


@contextmanager
def watch_end(pid: int) -> Iterator[list[float]]:
    """Note when a process is gone, in seconds from the beginning of the block; it has to end within the block."""
    began, ended = time.perf_counter(), list[float]()

    def watch() -> None:
        while is_alive(pid):  # no event tells of another's child
            time.sleep(WATCH_S)
        ended.append(time.perf_counter() - began)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield ended
    thread.join()


def measure_swap(side: Side) -> SwapTurn:
    side.ask_small(SECOND)
    time.sleep(PAUSE_S)
    pid = int((side.home / "run" / f"backend-{SECOND}.pid").read_text())
    with watch_end(pid) as ended:
        answer = side.take_turn()
    record = side.find_record(answer)
    load_s = find_load_s(side.read("/warmline/models"))
    side.post(f"/warmline/models/{FIRST}/unload")
    time.sleep(PAUSE_S)
    alone_load_s = find_load_s(side.post(f"/warmline/models/{FIRST}/load"))
    return SwapTurn(
        ttft_s=answer.ttft_s,
        load_s=load_s,
        alone_load_s=alone_load_s,
        unload_s=ended[0],
        cached_tokens=answer.cached_tokens,
        prompt_tokens=answer.prompt_tokens,
        waits=record["waits"],
        parts=record["ttft_parts"],
    )


def find_load_s(reply: Any) -> float:
    """Duration of the first model's last load, in a reply of the owner's API."""
    return float(next(each["load_s"] for each in reply["models"] if each["name"] == FIRST))


def measure_lone(side: Side) -> LoneTurns:
    side.server.kill_and_start()
    side.ask_small(FIRST)
    after_restart = side.take_turn()
    restore_s = side.find_record(after_restart)["restore_s"]
    turn_s = side.take_turn().ttft_s
    # A device that computes faster than it reads restores nothing: then being warm again costs what it computes.
    return LoneTurns(after_restart.ttft_s, restore_s or max(0.0, after_restart.ttft_s - turn_s), turn_s)


def measure_peer(side: Side) -> list[dict[str, float]]:
    figures = []
    for count in (1, OTHERS):
        for number in range(count):
            side.ask_small(SECOND, number)
        figures.append(side.take_turn().list_figures())
    return figures


def measure_rounds(sides: Sequence[Side], tokens: int, repeats: int) -> list[Round]:
    """Rounds of one conversation; `sides`: two models, the first model alone, and the peer, if there is one."""
    measures = [partial(measure, side) for measure, side in zip(MEASURES, sides, strict=False)]
    rounds = []
    for side in sides:
        side.begin(tokens)
    for number in range(repeats):
        found: dict[int, Any] = {}
        for index in range(len(measures))[:: 1 if number % 2 == 0 else -1]:
            found[index] = measures[index]()
        rounds.append(Round(tokens, found[0], found[1], found.get(2, [])))
    return rounds


MEASURES = (measure_swap, measure_lone, measure_peer)


@contextmanager
def run_two_models(folders: dict[str, Path], folder: Path) -> Iterator[Side]:
    """A pair with both models and memory for one of them."""
    home, log = folder / "two models", folder / "two models.log"
    flags = (*NO_AUDITS, "--model", str(folders[SECOND]), "--model-stay-s", "0")
    side = Side(BenchServer("Warmline", 0), home, {name: name for name in folders}, [])
    with run_warmline(folders[FIRST], home, log, *flags) as (side.server, _):
        wait_until(lambda: all(find_needs(side)), "the models' sizes are known")
        memory_gb = MEMORY_SHARE * sum(find_needs(side)) / 1e9
    with run_warmline(folders[FIRST], home, log, *flags, "--models-memory-gb", f"{memory_gb:.4f}") as (side.server, _):
        yield side


def find_needs(side: Side) -> list[int]:
    return [model["need_bytes"] for model in side.read("/warmline/models")["models"]]


@contextmanager
def run_sides(folders: dict[str, Path], folder: Path, has_peer: bool) -> Iterator[list[Side]]:
    """All sides at once; two are idle while one is measured."""
    home, names = folder / "one model", {name: name for name in folders}
    with ExitStack() as stack:
        sides = [stack.enter_context(run_two_models(folders, folder))]
        lone, _ = stack.enter_context(run_warmline(folders[FIRST], home, folder / "one model.log", *NO_AUDITS))
        sides.append(Side(lone, home, names, []))
        if has_peer:
            peer = stack.enter_context(run_mlx_lm_server(folders[FIRST], folder / "mlx_lm.log"))
            sides.append(Side(peer, folder, {name: str(path) for name, path in folders.items()}, []))
        yield sides


def format_row(rounds: Sequence[Round]) -> list[str]:
    swaps, lone = [each.swap for each in rounds], [each.lone for each in rounds]
    peers = list(zip(*(each.peer for each in rounds), strict=True)) or [(), ()]
    last = rounds[-1]
    reused = [last.swap.cached_tokens, *(figures["cached_tokens"] for figures in last.peer)]
    return [
        f"{rounds[0].tokens:,}, n = {len(rounds)}",
        format_quartiles([each.ttft_s for each in swaps], " s"),
        format_quartiles([each.alone_load_s for each in swaps], " s"),
        format_quartiles([each.load_s for each in swaps], " s"),
        format_quartiles([each.unload_s for each in swaps], " ms", 1e3, 0),
        format_quartiles([each.restore_s for each in lone], " ms", 1e3, 0),
        format_quartiles([each.turn_s for each in lone], " ms", 1e3, 0),
        format_quartiles([each.ratio for each in rounds]),
        format_quartiles([each.left_over_s for each in rounds], " ms", 1e3, 0),
        *(format_quartiles([each["ttft_s"] for each in side], " s") if side else "" for side in peers),
        f"{', '.join(f'{count:,}' for count in reused)} of {last.swap.prompt_tokens:,}",
    ]


def list_parts(swap: SwapTurn) -> dict[str, float]:
    """Seconds of the first token after a swap, which add up to it; clocks of several processes took them."""
    load_wait_s, backend_s = (swap.waits.get(reason, 0.0) for reason in ("load", "backend"))
    named = {name: swap.parts[f"{name}_s"] for name in ("render", "plan", "restore", "prefill", "first_step")}
    return {
        "unload": swap.unload_s,
        "load": swap.load_s,
        "load_wait": load_wait_s - swap.unload_s - swap.load_s,
        "backend_wait": backend_s,
        **named,
        "wait": swap.parts["wait_s"] - load_wait_s - backend_s,
        "client": swap.ttft_s - sum(swap.parts.values()),
    }


def format_parts_row(rounds: Sequence[Round]) -> list[str]:
    parts = [list_parts(each.swap) for each in rounds]
    cells = (format_quartiles([each[name] for each in parts], " ms", 1e3, 0) for name in parts[0])
    return [f"{rounds[0].tokens:,}", *cells]


def main() -> None:
    parser = make_parser(__doc__, has_model=False)
    parser.add_argument("--models", type=Path, nargs=2, metavar="FOLDER", help="two models of your own")
    parser.add_argument("--family", default="bench", choices=sorted(tiny_models.FAMILIES), help="of small models")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 12000])
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each length")
    options = parser.parse_args()
    if options.quick:
        options.family, options.tokens, options.repeats = "llama", [1000], 1
    print_and_write(options, measure(options))


def measure(options: argparse.Namespace) -> list[list[Round]]:
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        folders = prepare_models(options, folder)
        with run_sides(folders, folder, has_peer=not options.no_peer) as sides:
            return [measure_rounds(sides, tokens, options.repeats) for tokens in options.tokens]


def prepare_models(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Folders of both models, named as the models are to be called."""
    folders = {name: folder / name for name in SEEDS}
    for (name, path), own in zip(folders.items(), options.models or (None, None), strict=True):
        if own:
            path.symlink_to(own.resolve())
        else:
            tiny_models.build(options.family, path, seed=SEEDS[name])
    return folders


def print_and_write(options: argparse.Namespace, measured: Sequence[Sequence[Round]]) -> None:
    rows = [
        {**asdict(each), "bound_s": each.bound_s, "ratio": each.ratio, "left_over_s": each.left_over_s}
        for rounds in measured
        for each in rounds
    ]
    write_json(options.json, rows)
    title = "Time to the first token after a swap of models"
    parts = format_table(PART_HEADINGS, [format_parts_row(rounds) for rounds in measured])
    notes = f"Medians, with quartiles. Parts of the first token after a swap:\n\n{parts}\n\n"
    print_results(title, HEADINGS, [format_row(rounds) for rounds in measured], notes)


if __name__ == "__main__":
    main()
