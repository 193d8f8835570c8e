"""The number of times one prompt of many clients is computed, and the time when the last has its first token.

On a small model with random weights (2 layers, 64 wide), chunks of 2,048 tokens, Warmline's pair and `mlx_lm.server` in
turn:

  at once          8 identical prompts at the same moment
  other ends       8 prompts that differ in their last message only
  behind a chunk   3 identical prompts, 0.3 s apart, while another, longer prompt is computed
  leaving          13 identical prompts, of which 12 clients leave, one after the other, in the time of a cold prefill
  after a restart  16 identical prompts, stored before all processes were killed and started again

"Prompts computed" is what the pair's `warmline_prompt_tokens_total{source="computed"}` grew by, divided by one prompt.
mlx_lm.server has no such counter, so its column is time alone.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/herd.py [--tokens 4096] [--repeats 3]
"""

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import (
    BenchServer,
    Message,
    TimedAnswer,
    make_conversation,
    make_text,
    open_connection,
    request_completion,
    send_completion,
    tiny_models,
)
from common.sides import call_together, read_computed_tokens, request_together, run_both

ANSWER_TOKENS = 2
SPACING_S = 0.3
PEER_TIMEOUT_S = 120.0  # for one that has stopped to answer
HEADINGS = ("", "prompts computed", "last first token", "mlx_lm.server: last first token")


@dataclass(frozen=True)
class HerdMeasurement:
    prompts_computed: float  # nan where the server does not count them
    last_ttft_s: float  # nan where it did not answer


@dataclass(frozen=True)
class BurstResult:
    answers: list[TimedAnswer]
    other_tokens: int = 0  # computed for other prompts


Burst = Callable[[], BurstResult]


def make_prompt(tokens: int, *seed: object) -> list[Message]:
    return make_conversation(tokens, seed)


def request_answer(server: BenchServer, messages: list[Message]) -> TimedAnswer:
    return request_completion(server, messages, ANSWER_TOKENS)


def prepare_at_once(server: BenchServer, tokens: int, seed: object) -> Burst:
    prompt = make_prompt(tokens, server.name, seed, "at once")
    return lambda: BurstResult(request_together(server, [prompt] * 8, ANSWER_TOKENS))


def prepare_other_ends(server: BenchServer, tokens: int, seed: object) -> Burst:
    system = make_prompt(tokens, server.name, seed, "other ends")[0]
    prompts = [[system, {"role": "user", "content": f"Part {number}, please."}] for number in range(8)]
    return lambda: BurstResult(request_together(server, prompts, ANSWER_TOKENS))


def prepare_behind_chunk(server: BenchServer, tokens: int, seed: object) -> Burst:
    """The longer prompt has three times the tokens, and about half of its time has passed when the others are sent."""
    half_s = request_answer(server, make_prompt(3 * tokens, server.name, seed, "measured")).ttft_s / 2
    prompt = make_prompt(tokens, server.name, seed, "behind a chunk")

    def request_later(number: int) -> TimedAnswer:
        time.sleep(half_s + number * SPACING_S)
        return request_answer(server, prompt)

    def send() -> BurstResult:
        longer = partial(request_answer, server, make_prompt(3 * tokens, server.name, seed, "longer"))
        calls: list[Callable[[], TimedAnswer]] = [longer, *(partial(request_later, number) for number in range(3))]
        first, *answers = call_together(calls)
        return BurstResult(answers, first.prompt_tokens - first.cached_tokens)

    return send


def prepare_leaving(server: BenchServer, tokens: int, seed: object) -> Burst:
    cold_s = request_answer(server, make_prompt(tokens, server.name, seed, "measured")).ttft_s
    prompt = make_prompt(tokens, server.name, seed, "leaving")

    def leave(number: int) -> None:
        connection = open_connection(server)
        send_completion(server, connection, prompt, ANSWER_TOKENS)
        time.sleep(cold_s * (number + 1) / 13)
        connection.close()

    def send() -> BurstResult:
        calls: list[Callable[[], TimedAnswer | None]] = [partial(leave, number) for number in range(12)]
        answers = call_together([*calls, partial(request_answer, server, prompt)])
        return BurstResult([answer for answer in answers if answer])

    return send


def prepare_after_restart(server: BenchServer, tokens: int, seed: object) -> Burst:
    prompt = make_prompt(tokens, server.name, seed, "after a restart")
    request_answer(server, prompt)
    server.wait_until_saved()
    server.kill_and_start()
    request_answer(server, [{"role": "user", "content": make_text(40, seed)}])
    return lambda: BurstResult(request_together(server, [prompt] * 16, ANSWER_TOKENS))


CASES = {
    "8 at once": prepare_at_once,
    "8 with other ends": prepare_other_ends,
    "3 behind a chunk, 0.3 s apart": prepare_behind_chunk,
    "13, of which 12 leave": prepare_leaving,
    "16 after a restart": prepare_after_restart,
}


def measure_pair(pair: BenchServer, case: str, tokens: int, seed: object) -> HerdMeasurement:
    send = CASES[case](pair, tokens, seed)
    before = read_computed_tokens(pair)
    result = send()
    computed = read_computed_tokens(pair) - before - result.other_tokens
    return HerdMeasurement(computed / result.answers[0].prompt_tokens, max(each.ttft_s for each in result.answers))


def measure_peer(peer: BenchServer, case: str, tokens: int, seed: object) -> HerdMeasurement:
    """Time alone; a case that it does not survive counts as failed, and it is started again."""
    try:
        last_s = max(each.ttft_s for each in CASES[case](peer, tokens, seed)().answers)
    except (OSError, HTTPException, SystemExit) as error:
        print(f"{peer.name}, {case}: {error!r}", file=sys.stderr)
        peer.kill_and_start()
        last_s = math.nan
    return HerdMeasurement(math.nan, last_s)


def measure(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, list[HerdMeasurement]]]:
    """Measurements by case and server."""
    measured: dict[str, dict[str, list[HerdMeasurement]]] = {case: defaultdict(list) for case in CASES}
    with run_both(model, folder, has_peer=not options.no_peer) as sides:
        if sides.peer:
            sides.peer.timeout_s = PEER_TIMEOUT_S
        for repeat in range(options.repeats):
            for case, by_server in measured.items():
                for server in sides.take_turns(repeat):
                    measure_side = measure_pair if server is sides.pair else measure_peer
                    by_server[server.name].append(measure_side(server, case, options.tokens, repeat))
    return measured


def format_rows(measured: dict[str, dict[str, list[HerdMeasurement]]]) -> list[list[str]]:
    rows = []
    for case, by_server in measured.items():
        own, peer = by_server["Warmline"], by_server.get("mlx_lm.server", [])
        rows.append(
            [
                case,
                format_quartiles([each.prompts_computed for each in own]),
                format_quartiles([each.last_ttft_s for each in own], " s"),
                format_quartiles([each.last_ttft_s for each in peer], " s") if peer else "",
            ]
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.repeats = 1024, 1
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        model = options.model or tiny_models.build("llama", folder / "model")
        measured = measure(model, folder, options)
    figures = {
        case: {side: [asdict(each) for each in found] for side, found in by_server.items()}
        for case, by_server in measured.items()
    }
    write_json(options.json, {"tokens": options.tokens, "cases": figures})
    title = f"The same prompt of {options.tokens:,} tokens from many clients, {options.repeats} times"
    print_results(title, HEADINGS, format_rows(measured), "Medians, with quartiles.")


if __name__ == "__main__":
    main()
