"""Drafts of several sequences in one pass, of which each keeps another number of tokens."""

from pathlib import Path
from typing import Any

import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import get_tolerance, load_family, make_prompt
from support.speculation.drafts import EagerSpeculation, EarlierTokens, FixedSpeculation
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.speculation.speculation import Speculation
from warmline_backend.structured_output.compiler import GrammarCompiler

ROWS_FAMILIES = ["llama", "quantized", "glm_moe_dsa"]
CHEAP = PassCosts({1: 0.0015, 32: 0.0016})  # seconds
LINEAR = PassCosts({1: 0.001, 2: 0.002, 32: 0.032})
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate((50, 33, 61), 1)]
LENGTHS = [90, 60, 75]


@pytest.fixture(scope="module")
def served(root: Path) -> ServedModel:
    return load_family("llama", root)


def run_alone(served: ServedModel, **params: Any) -> list[EventLog]:
    return [
        SchedulerDriver(served).run(prompt, tokens, logprobs=True, **params)
        for prompt, tokens in zip(PROMPTS, LENGTHS, strict=True)
    ]


def learn(plain: list[EventLog]) -> EarlierTokens:
    earlier = EarlierTokens()
    for prompt, log in zip(PROMPTS, plain, strict=True):
        earlier.learn([*prompt, *log.tokens])
    return earlier


def check_next_turn(served: ServedModel, driver: SchedulerDriver, prompt: list[int], log: EventLog) -> None:
    """Its rows are those of its tokens: the next turn continues them."""
    kv = driver.scheduler.residents.find_kv(log.result.resident)
    assert kv is not None and kv.tokens == [*prompt, *log.generated]
    following = [*prompt, *log.generated, 7, 8, 9]
    warm = driver.run(following, 8, resident=log.result.resident, reuse=kv.length)
    assert warm.tokens == SchedulerDriver(served).run(following, 8).tokens


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ROWS_FAMILIES)
def test_answers_of_a_batch_are_those_of_single_steps(family: str, params: dict[str, Any], root: Path) -> None:
    served = load_family(family, root)
    plain = run_alone(served, **params)
    driver, logs = SchedulerDriver(served, speculation=EagerSpeculation(learn(plain), corruption=0.2)), []
    for prompt, tokens in zip(PROMPTS, LENGTHS, strict=True):
        logs.append(driver.submit(prompt, tokens, logprobs=True, **params)[1])
        for _ in range(2):
            driver.step()
    driver.run_until(lambda: all(log.is_ended for log in logs))
    for prompt, log, alone in zip(PROMPTS, logs, plain, strict=True):
        timings = log.result.timings
        assert log.tokens == alone.tokens and log.generated == alone.generated and log.text == alone.text
        assert log.logprobs == pytest.approx(alone.logprobs, abs=get_tolerance(family))
        (count,) = timings.drafts.values()
        assert 0 < count.accepted < count.drafted and timings.shared_passes and timings.passes < timings.decoded
        check_next_turn(served, driver, prompt, log)


def test_sequences_of_a_batch_end_and_are_cancelled_inside_drafts(served: ServedModel) -> None:
    plain = run_alone(served)
    for seed in range(6):
        driver = SchedulerDriver(served, speculation=EagerSpeculation(learn(plain), seed=seed))
        ends: list[dict[str, Any]] = [{"stop": (plain[0].text[20 + seed : 23 + seed],)}, {}, {}]
        submitted = [
            driver.submit(prompt, tokens, **end)
            for prompt, tokens, end in zip(PROMPTS, [LENGTHS[0], 20 + seed, LENGTHS[2]], ends, strict=True)
        ]
        for _ in range(5 + seed):
            driver.step()
        driver.scheduler.cancel(submitted[2][0])
        logs = [log for _, log in submitted]
        driver.run_until(lambda logs=logs: all(log.is_ended for log in logs))  # type: ignore[misc]
        for prompt, log, alone in zip(PROMPTS, logs, plain, strict=True):
            assert log.generated == alone.tokens[: len(log.generated)]
            check_next_turn(served, driver, prompt, log)
        assert logs[0].text == plain[0].text[: plain[0].text.index(ends[0]["stop"][0])]
        assert len(logs[1].tokens) == 20 + seed and logs[2].result.finish == "cancelled"


def test_grammar_penalties_and_seeds_hold_beside_each_other(served: ServedModel) -> None:
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    constraint = grammars.build_constraint(
        "completion", {"structured_outputs": {"regex": r"([a-c]{3} ){12}"}}, None, ""
    )
    assert constraint is not None
    params: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.4, "repetition_context_size": 30},
    ]

    def run(speculation: Speculation | None, rows: list[int]) -> list[EventLog]:
        driver, logs = SchedulerDriver(served, speculation=speculation), []
        for row in rows:
            log = EventLog()
            wanted = GenerationParams(max_tokens=50, logprobs=True, **params[row])
            matcher = None if row else grammars.create_matcher(constraint)
            driver.scheduler.submit(
                GenerationRequest(str(row), PROMPTS[row], wanted, log.events.append, matcher=matcher)  # type: ignore[arg-type]
            )
            logs.append(log)
        driver.run_until(lambda: all(log.is_ended for log in logs))
        return logs

    plain = [run(None, [row])[0] for row in range(3)]
    drafted = run(EagerSpeculation(learn(plain), corruption=0.2), [0, 1, 2])
    for log, alone in zip(drafted, plain, strict=True):
        assert log.tokens == alone.tokens and log.text == alone.text
        assert log.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
        assert log.result.timings.shared_passes and log.result.timings.passes < log.result.timings.decoded


def run_with_predictions(
    served: ServedModel, costs: PassCosts, plain: list[EventLog]
) -> tuple[list[EventLog], set[int]]:
    """Answers of which two are foreseen, and the sizes of the groups that they were decoded in."""
    driver, sizes = SchedulerDriver(served, speculation=FixedSpeculation(costs)), set[int]()
    logs = [
        driver.submit(prompt, 60, prediction=prediction)[1]
        for prompt, prediction in zip(PROMPTS, [plain[0].tokens, [], plain[2].tokens], strict=True)
    ]
    while not all(log.is_ended for log in logs):
        driver.step()
        sizes |= {len(group.sequences) for group in driver.scheduler._queues.groups}
    assert [log.tokens for log in logs] == [log.tokens[:60] for log in plain]
    return logs, sizes


def test_batch_drafts_together_where_wide_passes_cost_little(served: ServedModel) -> None:
    logs, sizes = run_with_predictions(served, CHEAP, run_alone(served))
    assert max(sizes) >= 2
    for log in (logs[0], logs[2]):
        assert log.result.timings.passes <= 10 and log.result.timings.drafts["prediction"].accepted > 40
    assert logs[1].result.timings.shared_passes


def test_foreseen_answer_is_decoded_apart_where_each_token_costs_a_pass(served: ServedModel) -> None:
    """Nothing is drafted there at all: neither in the batch nor alone would it gain."""
    logs, sizes = run_with_predictions(served, LINEAR, run_alone(served))
    assert 3 in sizes and all(not log.result.timings.drafts for log in logs)


def test_failing_source_takes_drafts_from_its_own_sequence_alone(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_alone(served)
    driver = SchedulerDriver(served, speculation=EagerSpeculation(learn(plain)))
    logs = [driver.submit(prompt, tokens)[1] for prompt, tokens in zip(PROMPTS, LENGTHS, strict=True)]
    driver.run_until(lambda: all(log.tokens for log in logs))
    (group,) = driver.scheduler._queues.groups
    failing, other = group.sequences[:2]
    assert failing.drafter is not None and other.drafter is not None

    def fail(*_: object) -> None:
        raise ValueError("a grammar that fails")

    monkeypatch.setattr(failing.drafter, "_find_draft", fail)
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert [log.tokens for log in logs] == [log.tokens for log in plain]
    assert failing.drafter is None
    assert other.timings.passes < other.timings.decoded - 20, "it goes on drafting"
