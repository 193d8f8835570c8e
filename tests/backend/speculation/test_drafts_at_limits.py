"""Drafts where something ends: the reasoning, a vocabulary, a memory budget, a sequence while another one joins."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import load_family, make_prompt
from support.speculation.drafts import EagerSpeculation, EarlierTokens, FixedSpeculation
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.speculation.speculation import Speculation
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher
from warmline_common.protocol.tokens import TokenArray

CHEAP = PassCosts({1: 1.0, 32: 1.1})
THINK_START, THINK_END = 201, 200  # ids that stand for such markers


@pytest.fixture(scope="module")
def served(root: Path) -> ServedModel:
    return load_family("llama", root)


def run_words(
    served: ServedModel,
    speculation: Speculation | None,
    prompt: list[int],
    prediction: list[int],
    *,
    thinks: bool = False,
    **params: Any,
) -> EventLog:
    """An answer of some words of three letters, after reasoning if it `thinks`."""
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    form = {"structured_outputs": {"regex": r"([a-c]{3} ){9}"}}
    constraint = grammars.build_constraint("completion", form, None, "")
    assert constraint is not None
    if thinks:
        constraint = replace(constraint, reasoning="open", think_start=(THINK_START,), think_end=(THINK_END,))
    matcher: Matcher = grammars.create_matcher(constraint)
    driver, log = SchedulerDriver(served, speculation=speculation), EventLog()
    wanted = GenerationParams(**{"max_tokens": 100, **params})
    driver.scheduler.submit(
        GenerationRequest("words", prompt, wanted, log.events.append, matcher, prediction=TokenArray(prediction))
    )
    driver.run_until(lambda: log.is_ended)
    return log


def test_draft_goes_on_behind_the_end_of_the_reasoning(served: ServedModel) -> None:
    """The token after it is one that a matcher takes by itself, so that a pass may compute more than is checked."""
    for seed in range(1, 5):
        params = {"logit_bias": {THINK_END: 9.0}, "temperature": 1.0, "seed": seed}
        prompt = make_prompt(50, seed)
        plain = run_words(served, None, prompt, [], thinks=True, **params)
        drafted = run_words(served, FixedSpeculation(CHEAP), prompt, plain.tokens, thinks=True, **params)
        assert THINK_END in plain.tokens and drafted.tokens == plain.tokens
        assert drafted.result.finish == plain.result.finish == "stop"
        assert drafted.result.timings.passes < plain.result.timings.passes / 4


def test_draft_with_an_id_that_the_tokenizer_lacks_breaks_no_form(served: ServedModel) -> None:
    plain = run_words(served, None, make_prompt(40), [])
    answer = plain.tokens
    for missing in (served.vocabulary_size, served.vocabulary_size + 100):
        prediction = [*answer[:12], missing, *answer[12:]]
        drafted = run_words(served, FixedSpeculation(CHEAP), make_prompt(40), prediction)
        assert drafted.tokens == answer and drafted.result.finish == "stop"


def test_known_token_is_not_drafted_again_by_the_grammar(served: ServedModel) -> None:
    plain = run_words(served, None, make_prompt(40), [])
    timings = run_words(served, FixedSpeculation(CHEAP), make_prompt(40), plain.tokens).result.timings
    assert timings.drafts["prediction"].accepted == timings.drafts["prediction"].drafted
    assert timings.passes <= 4


def test_host_that_ends_as_another_joins_keeps_the_order_of_its_tokens(root: Path) -> None:
    """On a recurrent model some tokens wait to be computed again; one more is read before the groups would merge."""
    served = load_family("qwen3_5", root)
    prompt, tried = make_prompt(50, 1), 0
    plain = SchedulerDriver(served).run(prompt, 60).tokens
    earlier = EarlierTokens()
    earlier.learn([*prompt, *plain])
    for end in range(20, 60, 4):
        expected = plain[: plain.index(plain[end]) + 1]
        driver = SchedulerDriver(served, speculation=EagerSpeculation(earlier, corruption=0.3, seed=end))
        name, log = driver.submit(prompt, 60, stop_token_ids=(plain[end],))
        scheduler = driver.scheduler
        while not log.is_ended:
            driver.step()
            group = next((group for group in scheduler._queues.groups if len(group.sequences) == 1), None)
            if group and group.batch.uncomputed and group.batch.next_tokens == [plain[end]]:
                tried += 1
                other = driver.submit(make_prompt(52, 8), 10)[1]
                scheduler._admit()
                for _ in scheduler._prefill_next():  # before the next step of the host
                    pass
                driver.run_until(lambda other=other: other.is_ended)  # type: ignore[misc]
        assert name and log.generated == log.tokens == expected
    assert tried


def test_budget_is_checked_by_tokens(served: ServedModel) -> None:
    """Passes of many tokens add as many rows before a check as single steps, and those of one pass."""
    prompt = make_prompt(60)
    plain = SchedulerDriver(served).run(prompt, 900).tokens
    driver = SchedulerDriver(served, speculation=FixedSpeculation(CHEAP))
    checked: list[int] = []
    enforce = driver.scheduler.admission.enforce_budget

    def record() -> None:
        checked.append(sum(len(each.kv.tokens) for each in driver.scheduler._queues.running))
        enforce()

    driver.scheduler.admission.enforce_budget = record  # type: ignore[method-assign]
    log = driver.run(prompt, 900, prediction=plain)
    assert log.tokens == plain and log.result.timings.passes < 60
    distances = [later - earlier for earlier, later in itertools.pairwise(checked)]
    assert max(distances) <= 64 and len(checked) >= 900 // 64
