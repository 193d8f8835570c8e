"""A pair of one model on two checkouts: this one and an earlier one, in turn.

Both pairs are up at once, with the same model, flags and libraries, each with the packages of its own checkout; one is
idle while the other is measured, and every second round begins with the other one.

  clients       1 and 8 clients that each send new short prompts, one after the other: requests a second, first token
  warm turn     the first token of the next turn of a conversation in memory
  CPU           of the proxy and the backend, a small warm request (Linux only)

Ratios are of this checkout to the earlier one, in the same round; "1.00" is as before.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/models/one_model.py --before FOLDER [--rounds 10]
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import (
    ROOT,
    BenchServer,
    Message,
    make_conversation,
    median,
    request_completion,
    run_warmline,
    tiny_models,
)
from common.sides import NO_AUDITS, make_next_turn, measure_warm_request_ms, request_in_turns
from serving.concurrency import Load, measure_burst

BEFORE, NOW = "before", "now"
CLIENTS = (1, 8)
PROMPT_TOKENS, ANSWER_TOKENS = 40, 16
TURN_TOKENS = 2000
HEADINGS = ("", BEFORE, NOW, "ratio")

Figures = dict[str, float]  # by what is measured, its unit at the end


class TurnMeasure:
    """A conversation with one server that goes on."""

    def __init__(self, server: BenchServer, tokens: int) -> None:
        self._server, self._turns = server, 0
        self._messages: list[Message] = make_conversation(tokens, "one model")
        self.take_turn()

    def take_turn(self) -> float:
        """Seconds to the first token of the next turn."""
        answer = request_completion(self._server, self._messages)
        self._turns += 1
        self._messages = make_next_turn(self._messages, answer.text, f"And what is number {self._turns}?")
        self._server.wait_until_saved()
        return answer.ttft_s


def measure_clients(server: BenchServer, clients: int, requests: int, number: int) -> Figures:
    load = Load(clients, PROMPT_TOKENS, ANSWER_TOKENS, max(2, requests // clients))
    burst = measure_burst(server, server, load, number)
    label = f"{clients} client{'s' if clients > 1 else ''}"
    return {f"{label}, requests/s": burst.requests_per_s, f"{label}, first token, ms": 1e3 * median(burst.ttfts_s)}


def measure_cpu(server: BenchServer, requests: int) -> Figures:
    used = measure_warm_request_ms(server, server, 1, requests)
    return {f"CPU of the {process}, ms a request": value for process, value in used.items()}


def measure_side(server: BenchServer, turn: TurnMeasure, requests: int, number: int) -> Figures:
    """All figures of one side in one round."""
    figures: Figures = {}
    for clients in CLIENTS:
        figures |= measure_clients(server, clients, requests, number)
    figures["warm turn, first token, ms"] = 1e3 * turn.take_turn()
    return figures | measure_cpu(server, requests)


@contextmanager
def run_sides(checkouts: dict[str, Path], model: Path, folder: Path) -> Iterator[dict[str, BenchServer]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                run_warmline(model, folder / name, folder / f"{name}.log", *NO_AUDITS, checkout=checkout)
            )[0]
            for name, checkout in checkouts.items()
        }


def check_processes(servers: dict[str, BenchServer], checkouts: dict[str, Path]) -> None:
    """Raise SystemExit where a process that is measured was not started with its own checkout's packages."""
    for name, server in servers.items():
        for process, pid in server.find_pids().items():
            variables = Path(f"/proc/{pid}/environ")
            if variables.exists() and f"PYTHONPATH={checkouts[name]}/".encode() not in variables.read_bytes():
                raise SystemExit(f"the {process} of the side {name!r} does not run {checkouts[name]}")


def measure_rounds(servers: dict[str, BenchServer], options: argparse.Namespace) -> list[dict[str, Figures]]:
    measures: dict[str, Callable[[int], Figures]] = {}
    for name, server in servers.items():
        warm_up(server)
        turn = TurnMeasure(server, options.tokens)
        measures[name] = partial(measure_side, server, turn, options.requests)
    rounds = []
    for number in range(options.rounds):
        names = list(servers)[:: 1 if number % 2 == 0 else -1]
        rounds.append({name: measures[name](number) for name in names})
    return rounds


def warm_up(server: BenchServer) -> None:
    prompts = Load(max(CLIENTS), PROMPT_TOKENS, ANSWER_TOKENS, 2).make_prompts("warm-up")
    request_in_turns(server, prompts, ANSWER_TOKENS, max(CLIENTS))
    server.wait_until_saved()


def format_rows(rounds: Sequence[dict[str, Figures]]) -> list[list[str]]:
    rows = []
    for what in rounds[0][NOW]:
        before, now = ([each[name][what] for each in rounds] for name in (BEFORE, NOW))
        ratios = [b / a for a, b in zip(before, now, strict=True) if a]
        cells = (format_quartiles(values, digits=1) for values in (before, now))
        rows.append([what, *cells, format_quartiles(ratios) if ratios else ""])
    return rows


def main() -> None:
    parser = make_parser(__doc__, has_peer=False)
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER", help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=32, help="short requests of each kind, side and round")
    parser.add_argument("--tokens", type=int, default=TURN_TOKENS, help="of the conversation with warm turns")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.tokens = 1, 8, 500
    checkouts = {BEFORE: options.before.resolve(), NOW: ROOT}
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        model = options.model or tiny_models.build("bench", folder / "model")
        with run_sides(checkouts, model, folder) as servers:
            check_processes(servers, checkouts)
            rounds = measure_rounds(servers, options)
    write_json(options.json, rounds)
    title = f"One model, before and now, {len(rounds)} rounds"
    print_results(title, HEADINGS, format_rows(rounds), "Medians, with quartiles.")


if __name__ == "__main__":
    main()
