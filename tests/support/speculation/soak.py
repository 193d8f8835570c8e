"""Long comparison of answers with drafts and without, in every cache family: any difference that is no near tie fails.

Greedy answers, a part of the tokens for each way to draft: tokens seen earlier of which some are replaced at random, a
prediction of which some are wrong, a text of three words that repeats itself, and a form.  With --draft-models: those
of draft models, an inexact copy of the model and models of other families.

Usage: PYTHONPATH=tests .venv/bin/python tests/support/speculation/soak.py [--tokens 20000] [--families llama,gemma3]
           [--draft-models inexact,gemma3]
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support import tiny_models
from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import load_family, make_prompt
from support.speculation.draft_models import load_drafted, make_eager_speculation
from support.speculation.drafts import EagerSpeculation, EarlierTokens, FixedSpeculation
from warmline_backend.generation.events import TokenEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.speculation.speculation import Speculation
from warmline_backend.structured_output.compiler import GrammarCompiler

FAMILIES = (
    *("llama", "qwen3_5", "gemma3", "deepseek_v32", "glm_moe_dsa", "quantized", "quantized_apart"),
    *("falcon_h1", "baichuan_m1", "mamba2"),
)
ANSWER_TOKENS = 500
NEAR_TIE = 1e-4  # log-probability between the two likeliest; 32-bit passes of other widths differ by 2e-5 at most
CHEAP = PassCosts({1: 1.0, 32: 1.01})
FORM = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]},
    "minItems": 12,
}


@dataclass
class SourceTally:
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    near_ties: int = 0
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A prompt, the speculation that foresees its answer as soon as that is known, and parameters."""

    prompt: list[int]
    make_speculation: Callable[[list[int]], Speculation]
    make_prediction: Callable[[list[int]], list[int]] = lambda answer: []
    params: dict[str, Any] = field(default_factory=dict)
    form: dict[str, Any] | None = None
    drafted: ServedModel | None = None  # the model with its draft model


def iter_cases(chance: random.Random) -> Iterator[tuple[str, Case]]:
    """Cases of each way to draft, in turn, without end."""

    def corrupt(answer: list[int]) -> list[int]:
        return [chance.randrange(250) if chance.random() < 0.05 else token for token in answer]

    def foresee(share: float) -> Callable[[list[int]], Speculation]:
        def make(text: list[int]) -> Speculation:
            earlier = EarlierTokens()
            earlier.learn(text)
            return EagerSpeculation(earlier, corruption=share, seed=chance.randrange(1 << 30))

        return make

    for number in itertools.count(1):
        prompt = make_prompt(chance.randrange(5, 200), seed=number)
        words = tuple(chance.sample(range(33, 120), 3))
        yield "earlier tokens, 10 % wrong", Case(prompt, foresee(0.1))
        yield "earlier tokens, half wrong", Case(prompt[1:], foresee(0.5))
        yield "prediction", Case(prompt[2:], lambda _: FixedSpeculation(CHEAP), corrupt)
        yield "prompt lookup", Case(prompt[3:], lambda _: FixedSpeculation(CHEAP), params={"allowed_token_ids": words})
        yield "grammar", Case(prompt[4:], lambda _: FixedSpeculation(CHEAP), form=FORM, params={"ignore_eos": False})


def iter_model_cases(drafted: dict[str, ServedModel], chance: random.Random) -> Iterator[tuple[str, Case]]:
    """Cases of each draft model, in turn, without end."""
    for number in itertools.count(1):
        prompt = make_prompt(chance.randrange(5, 200), seed=number)
        for name, served in drafted.items():
            speculation = make_eager_speculation(served, chance.randrange(1 << 30))
            yield f"draft model {name}", Case(prompt, partial(_give, speculation), drafted=served)


def _give(speculation: Speculation, _: list[int]) -> Speculation:
    return speculation


def run_case(served: ServedModel, case: Case, grammars: GrammarCompiler, tally: SourceTally) -> int:
    """Compare one answer; returns its tokens."""
    plain = _run(served, case, grammars, None, [])
    answer = plain.tokens
    speculation = case.make_speculation([*case.prompt, *answer])
    drafted = _run(case.drafted or served, case, grammars, speculation, case.make_prediction(answer))
    other = drafted.tokens
    tally.tokens += len(answer)
    timings = drafted.result.timings
    tally.passes += timings.passes
    for count in timings.drafts.values():
        tally.drafted, tally.accepted = tally.drafted + count.drafted, tally.accepted + count.accepted
    if answer != other:
        place = next(n for n, pair in enumerate(itertools.zip_longest(answer, other)) if pair[0] != pair[1])
        margin = _find_margin(plain, place)
        if margin <= NEAR_TIE:
            tally.near_ties += 1
        else:
            tally.differences.append(f"token {place} of {case.prompt[:4]}...: margin {margin:.1e}")
    return len(answer)


def _run(
    served: ServedModel,
    case: Case,
    grammars: GrammarCompiler,
    speculation: Speculation | None,
    prediction: list[int],
) -> EventLog:
    driver = SchedulerDriver(served, speculation=speculation)
    params = {"top_logprobs": 2, "logprobs": True, **case.params}
    if case.form is None:
        return driver.run(case.prompt, ANSWER_TOKENS, prediction=prediction, **params)
    constraint = grammars.build_constraint("completion", {"structured_outputs": {"json": case.form}}, None, "")
    assert constraint is not None
    log, wanted = EventLog(), GenerationParams(max_tokens=ANSWER_TOKENS, **params)
    request = GenerationRequest(
        "form", case.prompt, wanted, log.events.append, matcher=grammars.create_matcher(constraint)
    )
    driver.scheduler.submit(request)
    driver.run_until(lambda: log.is_ended)
    return log


def _find_margin(log: EventLog, place: int) -> float:
    """Distance of the two likeliest tokens at a place; infinite behind the end."""
    events = [event for event in log.events if isinstance(event, TokenEvent)]
    if place >= len(events) or (logprobs := events[place].logprobs) is None:
        return float("inf")
    (_, first), (_, second) = logprobs.top
    return first - second


def load(family: str, root: Path) -> ServedModel:
    if family == "deepseek_v32":
        return load_served_model(str(tiny_models.build(family, root / family)), family)
    return load_family(family, root)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each family")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--draft-models", default="", help="inexact, or families")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families.split(","):
            served = load(family, Path(folder))
            grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
            tallies: dict[str, SourceTally] = {}
            left, chance = options.tokens, random.Random(options.seed)
            names = [name for name in options.draft_models.split(",") if name]
            drafted = {name: load_drafted(family, name, Path(folder)) for name in names}
            for source, case in iter_model_cases(drafted, chance) if drafted else iter_cases(chance):
                left -= run_case(served, case, grammars, tallies.setdefault(source, SourceTally()))
                if left <= 0:
                    break
            for source, tally in tallies.items():
                counts = f"{tally.tokens:6} tokens, {tally.passes:6} passes, {tally.drafted:6} drafted"
                found = f"{tally.near_ties} near ties, {len(tally.differences)} differences"
                print(f"{family:13} {source:27} {counts}, {tally.accepted:6} accepted, {found}", flush=True)
                for difference in tally.differences:
                    print(f"    {difference}")
                has_failed = has_failed or bool(tally.differences)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
