"""Answers with drafts that are often right and often wrong: the same as those of single steps, in each cache family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import FAMILIES, get_tolerance, load_family, make_prompt
from support.speculation.drafts import EagerSpeculation, EarlierTokens, FixedSpeculation, check_cancelled_answer
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher

ALL = [*FAMILIES, "quantized_apart", "baichuan_m1", "mamba2"]
PROMPT = make_prompt(50)
ANSWER = 66  # longer than the windows of 32
CHEAP = PassCosts({1: 0.0015, 32: 0.0016})  # seconds


@pytest.fixture(scope="module")
def served(root: Path) -> ServedModel:
    return load_family("llama", root)


def run_both(
    served: ServedModel, prompt: list[int] = PROMPT, tokens: int = ANSWER, **params: Any
) -> tuple[EventLog, EventLog, SchedulerDriver]:
    """An answer of single steps, and the same with drafts that foresee it, but for a tenth of its tokens."""
    plain = SchedulerDriver(served).run(prompt, tokens, **params)
    earlier = EarlierTokens()
    earlier.learn([*prompt, *plain.tokens])
    driver = SchedulerDriver(served, speculation=EagerSpeculation(earlier))
    return plain, driver.run(prompt, tokens, **params), driver


def check_equal(plain: EventLog, drafted: EventLog, tolerance: float = 1e-3) -> None:
    assert drafted.tokens == plain.tokens and drafted.text == plain.text
    assert drafted.result.finish == plain.result.finish and drafted.generated == plain.generated
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=tolerance)
    (count,) = drafted.result.timings.drafts.values()
    assert 0 < count.accepted < count.drafted
    assert drafted.result.timings.passes < plain.result.timings.passes


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ALL)
def test_answer_and_next_turn_are_those_of_single_steps(family: str, params: dict[str, Any], root: Path) -> None:
    served = load_family(family, root)
    plain, drafted, driver = run_both(served, logprobs=True, **params)
    check_equal(plain, drafted, get_tolerance(family))
    # Its rows and states are those of its tokens: the next turn continues them.
    kv = driver.scheduler.residents.find_kv(drafted.result.resident)
    assert kv is not None and kv.tokens == [*PROMPT, *drafted.generated] and kv.can_continue_at(kv.length)
    following = [*PROMPT, *drafted.generated, *make_prompt(9, seed=4)]
    reuse = len(PROMPT) + ANSWER
    warm = driver.run(following, 12, resident=drafted.result.resident, reuse=reuse, logprobs=True)
    cold = SchedulerDriver(served).run(following, 12, logprobs=True)
    assert warm.reused == reuse and warm.tokens == cold.tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=get_tolerance(family))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"temperature": 1.2, "seed": 6, "top_k": 7, "min_p": 0.02},
        {"repetition_penalty": 1.4, "repetition_context_size": 30},
        {"logit_bias": {65: 9.0, 66: -100.0}, "min_tokens": 20},
        {"allowed_token_ids": tuple(range(40, 90)), "temperature": 1.0, "seed": 7},
    ],
    ids=["penalties", "filters", "repetition", "bias", "allowed"],
)
def test_parameters_hold_inside_a_draft(served: ServedModel, params: dict[str, Any]) -> None:
    plain, drafted, _ = run_both(served, logprobs=True, **params)
    check_equal(plain, drafted)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_answer_ends_inside_a_draft_with_the_rows_of_its_tokens(family: str, root: Path) -> None:
    served = load_family(family, root)
    whole = SchedulerDriver(served).run(PROMPT, ANSWER)
    tokens = whole.tokens
    ends: list[dict[str, Any]] = [{"stop": (whole.text[at : at + 3],)} for at in (10, 21, 40)]
    ends += [{"stop_token_ids": (tokens[at],)} for at in (15, 33)] + [{"tokens": count} for count in (1, 2, 17)]
    for end in ends:
        plain, drafted, driver = run_both(served, **end)
        assert drafted.tokens == plain.tokens and drafted.text == plain.text
        assert drafted.generated == plain.generated and drafted.result.finish == plain.result.finish
        kv = driver.scheduler.residents.find_kv(drafted.result.resident)
        assert kv is not None and kv.tokens == [*PROMPT, *plain.generated]


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_cancelled_answer_keeps_rows_of_its_tokens(family: str, root: Path) -> None:
    served = load_family(family, root)
    plain = SchedulerDriver(served).run(PROMPT, ANSWER)
    earlier = EarlierTokens()
    earlier.learn([*PROMPT, *plain.tokens])
    for steps in range(3, 12):
        check_cancelled_answer(served, served, PROMPT, plain.tokens, EagerSpeculation(earlier, seed=steps), steps)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_drafting_sequence_joins_and_leaves_a_batch(family: str, root: Path) -> None:
    served = load_family(family, root)
    prompts = [make_prompt(50, seed) for seed in range(1, 4)]
    lengths = [80, 30, 50]
    plain = [SchedulerDriver(served).run(prompt, tokens) for prompt, tokens in zip(prompts, lengths, strict=True)]
    earlier = EarlierTokens()
    for prompt, log in zip(prompts, plain, strict=True):
        earlier.learn([*prompt, *log.tokens])
    driver, logs = SchedulerDriver(served, speculation=EagerSpeculation(earlier)), []
    for prompt, tokens in zip(prompts, lengths, strict=True):
        logs.append(driver.submit(prompt, tokens)[1])
        for _ in range(4):
            driver.step()
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert [log.tokens for log in logs] == [log.tokens for log in plain]
    assert logs[0].result.timings.shared_passes and logs[0].result.timings.drafts


def test_prompt_that_is_written_again_takes_fewer_passes(served: ServedModel) -> None:
    """The tiny model repeats nothing by itself: a bias has it write the prompt's tokens in their order."""
    for prediction, prompt in (([], PROMPT), (SchedulerDriver(served).run(PROMPT, 60).tokens, PROMPT)):
        driver = SchedulerDriver(served, speculation=FixedSpeculation(CHEAP))
        log = driver.run(prompt, 60, prediction=prediction)
        timings = log.result.timings
        assert log.tokens == SchedulerDriver(served).run(prompt, 60).tokens
        if prediction:
            assert timings.predicted == 60 and timings.passes <= 5
            assert timings.drafts["prediction"].accepted >= 50


def test_right_tokens_behind_the_end_of_an_answer_are_not_counted(served: ServedModel) -> None:
    """A stop word ends it inside a draft."""
    plain = SchedulerDriver(served).run(PROMPT, 60)
    stop = plain.text[25:28]
    for speculation in (FixedSpeculation(CHEAP), None):
        driver = SchedulerDriver(served, speculation=speculation)
        timings = driver.run(PROMPT, 60, prediction=plain.tokens, stop=(stop,)).result.timings
        if speculation is None:
            assert timings.predicted is None and not timings.drafts, "nothing was compared"
        else:
            accepted, decoded = timings.drafts["prediction"].accepted, timings.decoded
            assert decoded - timings.passes <= accepted < decoded < 40 and timings.predicted == decoded


def submit_guided(driver: SchedulerDriver, matcher: Matcher, **params: Any) -> EventLog:
    log = EventLog()
    wanted = GenerationParams(**{"max_tokens": 300, **params})
    driver.scheduler.submit(GenerationRequest("g", PROMPT, wanted, log.events.append, matcher=matcher))
    driver.run_until(lambda: log.is_ended)
    return log


FORM = {
    "type": "object",
    "properties": {
        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
        "measurements": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 2, "maxItems": 4},
        "station": {"type": "string", "maxLength": 6},
    },
    "required": ["temperature_unit", "measurements", "station"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def make_matcher(served: ServedModel) -> Callable[[], Matcher]:
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)

    def make() -> Matcher:
        constraint = grammars.build_constraint("completion", {"structured_outputs": {"json": FORM}}, None, "")
        assert constraint is not None
        return grammars.create_matcher(constraint)

    return make


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "sampled"])
def test_form_is_the_same_and_forced_text_is_drafted(
    served: ServedModel, make_matcher: Callable[[], Matcher], params: dict[str, Any]
) -> None:
    plain = submit_guided(SchedulerDriver(served), make_matcher(), logprobs=True, **params)
    drafted = submit_guided(
        SchedulerDriver(served, speculation=FixedSpeculation(CHEAP)), make_matcher(), logprobs=True, **params
    )
    check_forms(plain, drafted)
    assert drafted.result.timings.decoded >= 1.3 * drafted.result.timings.passes
    assert drafted.result.timings.drafts["grammar"].accepted > 20
    earlier = EarlierTokens()
    earlier.learn([*PROMPT, *plain.tokens])
    for seed in range(4):
        eager = SchedulerDriver(served, speculation=EagerSpeculation(earlier, corruption=0.3, seed=seed))
        check_forms(plain, submit_guided(eager, make_matcher(), logprobs=True, **params))


def check_forms(plain: EventLog, drafted: EventLog) -> None:
    assert drafted.text == plain.text and drafted.tokens == plain.tokens
    assert drafted.result.finish == plain.result.finish == "stop"
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-3)


def test_result_says_why_nothing_was_drafted(served: ServedModel) -> None:
    off = SchedulerDriver(served).run(PROMPT, 9).result.timings
    assert off.no_drafts == "speculation is off" and off.passes == 9 and not off.drafts
    driver = SchedulerDriver(served, speculation=FixedSpeculation(PassCosts({1: 1.0})))
    costly = driver.run(PROMPT * 3, 9).result.timings
    assert costly.no_drafts == "nothing repeated that was worth the time"
    driver = SchedulerDriver(served, speculation=FixedSpeculation(PassCosts({1: 1.0})))
    logs = [driver.submit(make_prompt(50, seed), 30)[1] for seed in (1, 2)]
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert logs[0].result.timings.no_drafts == "it was decoded in one batch with others"


def test_wrong_draft_after_leaving_a_batch_concerns_its_own_sequence(root: Path) -> None:
    """Some tokens of a recurrent model have to be computed again: those of the sequence that has left."""
    served = load_family("qwen3_5", root)
    prompts = [make_prompt(50, seed) for seed in (1, 2, 3)]
    plain = [SchedulerDriver(served).run(prompt, 120).tokens for prompt in prompts]
    prediction = [(token + 1) % 250 if n % 25 == 24 else token for n, token in enumerate(plain[0][20:])]
    driver = SchedulerDriver(served, speculation=FixedSpeculation(CHEAP))
    logs = [driver.submit(prompt, 120, prediction=[] if n else prediction)[1] for n, prompt in enumerate(prompts)]
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert [log.tokens for log in logs] == plain and [log.generated for log in logs] == plain
    count = logs[0].result.timings.drafts["prediction"]
    assert 0 < count.accepted < count.drafted and logs[0].result.timings.shared_passes


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_sequence_leaves_its_batch_for_drafts_and_comes_back(family: str, root: Path) -> None:
    """The prediction foresees the middle of one answer."""
    served = load_family(family, root)
    prompts = [make_prompt(50, seed) for seed in (1, 2, 3)]
    plain = [SchedulerDriver(served).run(prompt, 160, logprobs=True) for prompt in prompts]
    driver = SchedulerDriver(served, speculation=FixedSpeculation(CHEAP))
    predictions = [plain[0].tokens[30:110], [], []]
    logs = [
        driver.submit(prompt, 160, prediction=prediction, logprobs=True)[1]
        for prompt, prediction in zip(prompts, predictions, strict=True)
    ]
    sizes = set()
    while not all(log.is_ended for log in logs):
        driver.step()
        sizes.add(tuple(sorted(len(group.sequences) for group in driver.scheduler._queues.groups)))
    assert {(3,), (1, 2)} <= sizes
    for log, alone in zip(logs, plain, strict=True):
        assert log.tokens == alone.tokens and log.generated == alone.generated
        assert log.logprobs == pytest.approx(alone.logprobs, abs=get_tolerance(family))
    timings = logs[0].result.timings
    assert timings.drafts["prediction"].accepted > 40 and timings.shared_passes > 0
    assert logs[1].result.timings.shared_passes > 40 and logs[2].result.timings.shared_passes > 40
