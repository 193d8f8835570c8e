"""Greedy answers with drafts against those without, in 16-bit types: equal wherever the likeliest token is clear.

Models of a real shape with random weights, and the tests' tiny models of each cache family, cast to --type.  Drafts are
tokens seen earlier, of which a share is replaced at random, of any length that a server would draft.

A pass of another width rounds differently.  How differently is measured in the same run, without any draft: the log-
probabilities of the two likeliest tokens at each place of each answer, computed by passes of WIDTHS, of widths at
random, and of all of the answer at once, against passes of one token.  Two tokens can change places only if their log-
probabilities are at most twice the largest difference found there apart: that is the tolerance.

Where an answer with drafts differs first, the distance of the two likeliest in the plain answer says whether that is a
near tie.  It then goes on behind that place, as a new request with the plain answer so far, so that all tokens are
compared.  Random weights have closer ties than trained ones: `clear` is the share of tokens whose distance is above the
tolerance, at which a difference would fail.

Usage: PYTHONPATH=tests:backend:launchd:benchmarks .venv/bin/python benchmarks/gpu/draft_equality.py TOKENIZER-FOLDER
           [--models 8b,experts,llama,gemma3] [--tokens 4000] [--seconds 600] [--answer 200] [--wrong 0.1,0.5]
           [--type bfloat16]

A model's folder among --models is loaded as it is, and answers questions on this project's own texts.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from common.results import format_table
from drafts.models import SHAPES, make_served_model
from mlx.utils import tree_map_with_path

from support.backend.engine_driver import SchedulerDriver
from support.speculation.drafts import EagerSpeculation, EarlierTokens
from support.speculation.soak import FAMILIES, load
from warmline_backend.engine.pass_costs import WIDTHS as PASS_WIDTHS
from warmline_backend.generation.events import TokenEvent
from warmline_backend.model.cuda_graphs import set_graph_defaults
from warmline_backend.model.model import ServedModel, load_served_model, measure_kv, run_probe
from warmline_common.protocol.messages import Timings

TYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
WIDTHS = (2, 4, 8, 16, 32)
# Of drafts.  On CUDA a pass has no other width in a server, either: each takes long at first.
DRAFT_WIDTHS = tuple(PASS_WIDTHS[: PASS_WIDTHS.index(32) + 1]) if mx.cuda.is_available() else tuple(range(1, 33))
PROMPT_TOKENS_MAX = 200
VOCABULARY_MAX = 250  # of the prompts: all models have these tokens
SEED = 1
TEXTS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
HEADINGS = ("model", "type", "tokens", "passes", "drafted", "accepted", "tolerance", "clear", "near ties")
MORE_HEADINGS = ("largest distance at one", "differences", "distinct")


@dataclass(frozen=True)
class Answer:
    """A plain answer, with the two likeliest tokens at each place and their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    likeliest: list[tuple[int, int]]
    logprobs: list[tuple[float, float]]

    @property
    def distances(self) -> list[float]:
        return [first - second for first, second in self.logprobs]


@dataclass
class Tally:
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    rounding: float = 0.0  # largest difference of a log-probability between widths
    distances: list[float] = field(default_factory=list)  # of the two likeliest at each place
    differing: list[tuple[float, str]] = field(default_factory=list)  # distances where answers differed, and the places
    runs: set[tuple[int, ...]] = field(default_factory=set)  # of three tokens

    @property
    def tolerance(self) -> float:
        return 2 * self.rounding

    @property
    def differences(self) -> list[str]:
        return [f"{place}: distance {distance:.2g}" for distance, place in self.differing if distance > self.tolerance]

    def record_draft(self, timings: Timings) -> None:
        self.passes += timings.passes
        for count in timings.drafts.values():
            self.drafted, self.accepted = self.drafted + count.drafted, self.accepted + count.accepted

    def format_cells(self) -> list[str]:
        clear = sum(distance > self.tolerance for distance in self.distances) / len(self.distances)
        ties = [distance for distance, _ in self.differing if distance <= self.tolerance]
        counts = [f"{count:,}" for count in (self.tokens, self.passes, self.drafted, self.accepted)]
        largest = f"{max(ties):.2g}" if ties else ""
        shares = [f"{self.tolerance:.2g}", f"{clear:.0%}", str(len(ties)), largest]
        return [*counts, *shares, str(len(self.differences)), f"{len(self.runs) / self.tokens:.0%}"]


def load_model(name: str, dtype: mx.Dtype, tokenizer: Path, root: Path) -> ServedModel:
    """A model of one of SHAPES or FAMILIES, all of its parameters that mlx-lm converts in `dtype`."""
    if Path(name).is_dir():
        return load_served_model(name, name)
    if name in SHAPES:
        served = make_served_model(name, tokenizer, dtype)
        served.model.update(tree_map_with_path(_sharpen_attention, served.model.parameters()))
        mx.eval(served.model.parameters())
        return served
    served = load(name, root)
    is_cast = getattr(served.model, "cast_predicate", lambda path: True)

    def cast(path: str, parameter: mx.array) -> mx.array:
        return parameter.astype(dtype) if mx.issubdtype(parameter.dtype, mx.floating) and is_cast(path) else parameter

    model: nn.Module = served.model
    model.update(tree_map_with_path(cast, model.parameters()))
    logits, layers = run_probe(model, served.layout)
    mx.eval(logits)
    return replace(served, **vars(measure_kv(served.layout, layers)))


def _sharpen_attention(path: str, parameter: mx.array) -> mx.array:
    """Doubled queries and keys: where attention is flat, an answer depends on its last token, and soon loops."""
    return parameter * 2 if path.endswith(("q_proj.weight", "k_proj.weight")) else parameter


def make_plain_answer(served: ServedModel, prompt: list[int], count: int) -> Answer:
    log = SchedulerDriver(served).run(prompt, count, logprobs=True, top_logprobs=2)
    tops = [event.logprobs.top for event in log.events if isinstance(event, TokenEvent) and event.logprobs]
    likeliest = [(first[0], second[0]) for first, second in tops]
    return Answer(prompt, log.tokens, likeliest, [(first[1], second[1]) for first, second in tops])


def measure_rounding(served: ServedModel, answer: Answer, chance: random.Random) -> float:
    """Largest difference of a log-probability of the two likeliest tokens between the steps and wider passes."""
    count = len(answer.tokens)
    mixed = [chance.choice(DRAFT_WIDTHS) for _ in range(count)]
    plain = mx.array(answer.logprobs)
    others = [cycle([width]) for width in (*WIDTHS, count)] + [iter(mixed)]
    found = [mx.abs(_compute_likeliest(served, answer, widths) - plain).max().item() for widths in others]
    return max(float(each) for each in found)


def _compute_likeliest(served: ServedModel, answer: Answer, widths: Iterator[int]) -> mx.array:
    """[tokens, 2] log-probabilities of the two likeliest, the answer computed in passes of these widths."""
    layers = served.layout.make_empty_cache()
    served.model(mx.array([answer.prompt[:-1]]), cache=layers)
    inputs = [answer.prompt[-1], *answer.tokens[:-1]]
    places = mx.array(answer.likeliest)
    parts: list[mx.array] = []
    done = 0
    while done < len(inputs):
        end = min(len(inputs), done + next(widths))
        logits = served.model(mx.array([inputs[done:end]]), cache=layers)[0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)  # as mlx-lm does, in the model's type
        parts.append(mx.take_along_axis(logprobs, places[done:end], axis=-1).astype(mx.float32))
        mx.eval(parts[-1])
        done = end
    return mx.concatenate(parts)


def compare_answer(served: ServedModel, answer: Answer, speculation: EagerSpeculation, tally: Tally) -> None:
    """Compare one answer with the one with drafts, from each difference on anew."""
    start, count = 0, len(answer.tokens)
    while start < count:
        prompt, expected = [*answer.prompt, *answer.tokens[:start]], answer.tokens[start:]
        place = find_difference(SchedulerDriver(served, speculation=speculation), prompt, expected, tally)
        if place is None:
            break
        place += start
        tally.differing.append((answer.distances[place], f"token {place} of {answer.prompt[:4]}..."))
        start = place + 1
    tally.tokens += count
    tally.distances += answer.distances
    tally.runs |= {tuple(answer.tokens[n : n + 3]) for n in range(count)}


def find_difference(driver: SchedulerDriver, prompt: list[int], expected: list[int], tally: Tally) -> int | None:
    """Answer a prompt up to the first token that is not the expected one; returns its place."""
    name, log = driver.submit(prompt, len(expected))

    def find() -> int | None:
        pairs = enumerate(zip(expected, log.tokens, strict=False))
        return next((place for place, (plain, drafted) in pairs if plain != drafted), None)

    driver.run_until(lambda: log.is_ended or find() is not None)
    result = log.result if log.is_ended else driver.scheduler.cancel(name)
    assert result is not None
    tally.record_draft(result.timings)
    return find()


def make_prompt(served: ServedModel, chance: random.Random) -> list[int]:
    """A question on a part of a text for a model with a chat template, else tokens at random."""
    if not served.tokenizer.has_chat_template or served.name in SHAPES:
        return [chance.randrange(VOCABULARY_MAX) for _ in range(chance.randrange(5, PROMPT_TOKENS_MAX))]
    paragraphs = chance.choice(TEXTS).read_text().split("\n\n")
    start = chance.randrange(max(1, len(paragraphs) - 3))
    text = "\n\n".join(paragraphs[start : start + 3])[:1500]
    question = chance.choice(["Summarize this:", "Write this again with other words:", "Explain each sentence:"])
    messages = [{"role": "user", "content": f"{question}\n\n{text}"}]
    return list(served.tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def compare_model(
    served: ServedModel, tokens: int, answer_tokens: int, shares: Sequence[float], seconds: float
) -> Tally:
    """Compare answers until there are so many tokens, or so many seconds are over."""
    tally, chance, end = Tally(), random.Random(SEED), time.monotonic() + seconds
    for share in cycle(shares):
        prompt = make_prompt(served, chance)
        answer = make_plain_answer(served, prompt, min(answer_tokens, tokens - tally.tokens))
        tally.rounding = max(tally.rounding, measure_rounding(served, answer, chance))
        earlier = EarlierTokens()
        earlier.learn([*prompt, *answer.tokens])
        seed = chance.randrange(1 << 30)
        speculation = EagerSpeculation(earlier, corruption=share, seed=seed, widths=DRAFT_WIDTHS)
        compare_answer(served, answer, speculation, tally)
        mx.clear_cache()
        print(f"    {served.name}: {' | '.join(tally.format_cells())}", flush=True)  # so far, should a limit end it
        if tally.tokens >= tokens or time.monotonic() > end:
            return tally
    raise AssertionError("no shares")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--models", default="8b,experts", help=f"of {', '.join([*SHAPES, *FAMILIES])}")
    parser.add_argument("--tokens", type=int, default=4000, help="of each model")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each model, after which no answer begins")
    parser.add_argument("--answer", type=int, default=200, help="tokens of one answer")
    parser.add_argument("--wrong", default="0.1,0.5", help="shares of drafted tokens that are replaced, in turn")
    parser.add_argument("--type", choices=TYPES, default="bfloat16")
    options = parser.parse_args()
    set_graph_defaults()
    rows, has_failed = [], False
    for name in options.models.split(","):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                served = load_model(name, TYPES[options.type], options.tokenizer, Path(folder))
                shares = [float(share) for share in options.wrong.split(",")]
                tally = compare_model(served, options.tokens, options.answer, shares, options.seconds)
            except (RuntimeError, ValueError) as error:  # mlx has no kernel for it on this device
                print(f"{name}: can't be computed: {error}", flush=True)
                continue
        kind = served.dtype.replace("mlx.core.", "")
        rows.append([Path(name).name, kind, *tally.format_cells()])
        print(" | ".join(rows[-1]), f"({time.monotonic() - began:.0f} s)", flush=True)
        for difference in tally.differences:
            print(f"    {difference}")
        has_failed = has_failed or bool(tally.differences)
        del served
        mx.clear_cache()
    print(format_table([*HEADINGS, *MORE_HEADINGS], rows))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
