"""Answers that go back: invalid words are drawn again, in every cache family, alone and among others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import FAMILIES, get_tolerance, load_family, make_prompt
from support.word_check import FixedCheck, WordCheck, repeats_word
from warmline_backend.generation.events import HeldEvent, TokenEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher
from warmline_backend.structured_output.redraw import TokenCheck

WORDS = r"([a-c]{3} ){7}"
PROMPT = make_prompt(40)
GRID = 16
REFUSED = "the answer can't be held to its schema"


@pytest.fixture(scope="module")
def served(root: Path) -> ServedModel:
    return load_family("llama", root)


@pytest.fixture(scope="module")
def grammars(served: ServedModel) -> GrammarCompiler:
    return GrammarCompiler(served.tokenizer, served.vocabulary_size)


def make_matcher(grammars: GrammarCompiler, check: TokenCheck | None = None, regex: str = WORDS) -> Matcher:
    constraint = grammars.build_constraint("completion", {"structured_outputs": {"regex": regex}}, None, "")
    assert constraint is not None
    checks: Any = FixedCheck(check) if check else None
    return grammars.create_matcher(replace(constraint, checks=checks))


def unique_words(served: ServedModel) -> WordCheck:
    return WordCheck(served.tokenizer, repeats_word)


def submit(
    driver: SchedulerDriver, matcher: Matcher | None, prompt: list[int] = PROMPT, name: str = "", **params: Any
) -> EventLog:
    log, running = EventLog(), driver.scheduler.running_count + driver.scheduler.queued_count
    sampling = {name: value for name, value in params.items() if name not in ("resident_id", "reuse_tokens")}
    options = {name: value for name, value in params.items() if name not in sampling}
    wanted = GenerationParams(**{"max_tokens": 300, **sampling})
    request = GenerationRequest(name or f"w{running}", prompt, wanted, log.events.append, matcher=matcher, **options)
    driver.scheduler.submit(request)
    return log


def generate(served: ServedModel, matcher: Matcher | None, prompt: list[int] = PROMPT, **params: Any) -> EventLog:
    driver = SchedulerDriver(served)
    log = submit(driver, matcher, prompt, **params)
    driver.run_until(lambda: log.is_ended)
    return log


def compute_logprobs(served: ServedModel, matcher: Matcher, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probabilities of an answer's tokens, computed at once, and masked by a new matcher."""
    logits, found = served.model(mx.array([prompt + answer]))[0].astype(mx.float32), []
    for n, token in enumerate(answer):
        row = np.array(logits[len(prompt) - 1 + n])
        row = np.where(matcher.compute_allowed()[: len(row)], row, -np.inf)
        found.append(float(row[token] - np.logaddexp.reduce(row)))
        matcher.advance(token)
    return found


# ---- every cache family


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_words_are_drawn_again(family: str, exact: bool, root: Path) -> None:
    served = load_family(family, root)
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    for temperature in (0.0, 1.0):
        driver, check = SchedulerDriver(served, exact=exact, step=GRID if exact else 2048), unique_words(served)
        matcher = make_matcher(grammars, check)
        log = submit(driver, matcher, temperature=temperature, seed=3, logprobs=True)
        driver.run_until(lambda log=log: log.is_ended)  # type: ignore[misc]
        assert log.result.finish == "stop" and check.violations
        words, answer = log.text.split(), log.tokens
        assert len(set(words)) == len(words) == 7
        assert log.result.timings.decoded == len(answer) == 29
        assert log.generated == ([] if exact else answer)
        assert driver.scheduler.step_stats.redraws == len(check.violations)
        cold = compute_logprobs(served, make_matcher(grammars), PROMPT, answer[:-1])
        pairs = zip(cold, log.logprobs, strict=True)
        differences = [abs(one - other) for n, (one, other) in enumerate(pairs) if not matcher._policy.get_bans(n)]
        assert max(differences) < 10 * get_tolerance(family), "computed from the rows of other tokens"


@pytest.mark.parametrize("family", FAMILIES)
def test_next_turn_continues_answer_that_went_back(family: str, root: Path) -> None:
    served = load_family(family, root)
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    driver = SchedulerDriver(served)
    first = submit(driver, make_matcher(grammars, unique_words(served)), temperature=1.0, seed=4)
    driver.run_until(lambda: first.is_ended)
    assert driver.scheduler.step_stats.redraws
    prompt, reuse = [*PROMPT, *first.tokens, 50, 51, 52], first.result.prefilled_until
    resident = driver.mark_saved(first)
    warm = submit(driver, None, prompt, resident_id=resident, reuse_tokens=reuse, logprobs=True, max_tokens=6)
    driver.run_until(lambda: warm.is_ended)
    cold = generate(served, None, prompt, logprobs=True, max_tokens=6)
    assert warm.reused == reuse == len(prompt) - 3
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=get_tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_answer_that_goes_back_equals_cold_one_in_exact_mode(family: str, root: Path) -> None:
    served = load_family(family, root)
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)

    def run(driver: SchedulerDriver, **options: Any) -> EventLog:
        matcher = make_matcher(grammars, unique_words(served))
        log = submit(driver, matcher, temperature=1.0, seed=5, logprobs=True, **options)
        driver.run_until(lambda: log.is_ended)
        return log

    driver = SchedulerDriver(served, exact=True, step=GRID)
    cold = run(driver)
    warm = run(driver, resident_id=driver.mark_saved(cold), reuse_tokens=cold.result.prefilled_until)
    assert driver.scheduler.step_stats.redraws >= 2 and warm.reused == 32
    assert (warm.text, warm.logprobs) == (cold.text, cold.logprobs)


@pytest.mark.parametrize("family", ["gemma3", "falcon_h1"])
def test_rewind_point_moves_with_sent_tokens(family: str, root: Path) -> None:
    served = load_family(family, root)
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    driver = SchedulerDriver(served)
    matcher = make_matcher(grammars, unique_words(served), r"([a-f]{3} ){40}")
    log = submit(driver, matcher, temperature=1.0, seed=1, logprobs=True)
    driver.run_until(lambda: bool(driver.scheduler._queues.groups))
    (sequence,) = driver.scheduler._queues.groups[0].sequences
    positions = set[int]()
    while not log.is_ended:
        driver.step()
        assert len(sequence.kv.rewind_points) <= 2
        positions.update(point.position for point in sequence.kv.rewind_points)
    assert log.result.finish == "stop" and driver.scheduler.step_stats.redraws > 5 and max(positions) > 150
    answer = log.tokens
    cold = compute_logprobs(served, make_matcher(grammars, regex=r"([a-f]{3} ){40}"), PROMPT, answer[:-1])
    pairs = zip(cold, log.logprobs, strict=True)
    differences = [abs(one - other) for n, (one, other) in enumerate(pairs) if not matcher._policy.get_bans(n)]
    assert max(differences) < 10 * get_tolerance(family)


# ---- among others


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_answers_that_go_back_share_batches(family: str, root: Path) -> None:
    served = load_family(family, root)
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    cases: list[tuple[bool, dict[str, Any]]] = [
        (True, {}),
        (False, {"max_tokens": 50, "ignore_eos": True}),
        (True, {"temperature": 1.0, "seed": 1, "frequency_penalty": 0.5}),
        (True, {"temperature": 0.7, "seed": 2, "top_p": 0.9, "logprobs": True}),
        (False, {"max_tokens": 50, "temperature": 1.0, "seed": 3}),
    ]
    prompts = [[*PROMPT[:-1], 90 + n] for n in range(len(cases))]

    def make(checked: bool) -> Matcher | None:
        return make_matcher(grammars, unique_words(served)) if checked else None

    driver = SchedulerDriver(served)
    together = [submit(driver, make(checked), prompt, **params) for (checked, params), prompt in zip(cases, prompts)]  # noqa: B905
    sizes = []
    while not all(log.is_ended for log in together):
        driver.step()
        sizes += [len(group.sequences) for group in driver.scheduler._queues.groups]
    assert max(sizes) >= 4 and driver.scheduler.step_stats.redraws > 3
    for (checked, params), prompt, log in zip(cases, prompts, together, strict=True):
        alone = generate(served, make(checked), prompt, **params)
        assert (log.text, log.result.finish) == (alone.text, alone.result.finish)
        assert log.logprobs == pytest.approx(alone.logprobs, abs=10 * get_tolerance(family))
        if checked:
            words = log.text.split()
            assert len(set(words)) == len(words) == 7


# ---- what is held


def test_held_tokens_are_not_sent(served: ServedModel, grammars: GrammarCompiler) -> None:
    driver = SchedulerDriver(served)
    log = submit(driver, make_matcher(grammars, unique_words(served)))
    while not log.is_ended:
        driver.step()
        *whole, open_word = log.text.split(" ")
        assert len(set(whole)) == len(whole) and not open_word, "a word is sent once it is complete and valid"
    steps = [event for event in log.events if isinstance(event, TokenEvent | HeldEvent)]
    assert sum(isinstance(event, HeldEvent) for event in steps) > 7 * 3


def test_answer_that_no_redraw_mends_is_cut(served: ServedModel, grammars: GrammarCompiler) -> None:
    check = WordCheck(served.tokenizer, lambda before, word: len(before) == 2)
    log = generate(served, make_matcher(grammars, check))
    assert log.result.finish == "length" and not log.result.error
    assert log.stop_reason.startswith(f"{REFUSED}: /2: '") and log.stop_reason.endswith("' is refused")
    assert len(log.text) == 8 and log.generated == log.tokens and log.result.timings.decoded == 8
    assert 30 < len(check.violations) <= 65


def test_answer_cut_by_length_sends_held_tokens(served: ServedModel, grammars: GrammarCompiler) -> None:
    log = generate(served, make_matcher(grammars, unique_words(served)), max_tokens=10)
    assert (log.result.finish, len(log.text), log.stop_reason) == ("length", 10, "")
    assert log.generated == log.tokens and len(log.generated) == 10


def test_violation_with_last_token_is_drawn_again(served: ServedModel, grammars: GrammarCompiler) -> None:
    whole = generate(served, make_matcher(grammars))
    third = whole.text.split()[2]
    check = WordCheck(served.tokenizer, lambda before, word: word == third)
    log = generate(served, make_matcher(grammars, check), max_tokens=12)
    assert check.violations and log.result.finish == "length" and third not in log.text and len(log.text) == 12


def test_too_short_answer_goes_on(served: ServedModel, grammars: GrammarCompiler) -> None:
    eos = min(served.tokenizer.eos_token_ids)
    for temperature in (0.0, 1.0):
        check = WordCheck(served.tokenizer, lambda before, word: False, count_min=5)
        matcher = make_matcher(grammars, check, r"([a-c]{3} ){1,9}")
        log = generate(served, matcher, logit_bias={eos: 50.0}, temperature=temperature, seed=1)
        assert log.result.finish == "stop" and len(log.text.split()) == 5
        assert [found.is_incomplete for found in check.violations] == [True] * 4


def test_stop_word_cuts_held_tokens(served: ServedModel, grammars: GrammarCompiler) -> None:
    whole = generate(served, make_matcher(grammars, unique_words(served)))
    stop = whole.text[13:15]
    at = whole.text.index(stop)
    log = generate(served, make_matcher(grammars, unique_words(served)), stop=(stop,))
    assert (log.result.finish, log.text) == ("stop", whole.text[:at])
    assert log.generated == log.tokens == whole.tokens[: at + 2]


def test_stop_token_of_client_cuts_held_tokens(served: ServedModel, grammars: GrammarCompiler) -> None:
    whole = generate(served, make_matcher(grammars, unique_words(served)))
    at = next(n for n, token in enumerate(whole.tokens) if token == whole.tokens[1])
    log = generate(served, make_matcher(grammars, unique_words(served)), stop_token_ids=(whole.tokens[1],))
    assert (log.result.finish, log.text) == ("stop", whole.text[:at])


@pytest.mark.parametrize("family", FAMILIES)
def test_cancelled_answer_keeps_sent_tokens_only(family: str, root: Path) -> None:
    served = load_family(family, root)
    grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
    driver = SchedulerDriver(served)
    never = WordCheck(served.tokenizer, lambda before, word: len(before) == 3)
    log = submit(driver, make_matcher(grammars, never), name="gone", temperature=1.0, seed=1)
    driver.run_until(lambda: len(never.violations) > 3)
    source = driver.scheduler.save_source
    driver.run_until(lambda: bool(driver.scheduler._queues.groups))
    assert source.find_kv(len(PROMPT) + 12, running_id="gone")
    with pytest.raises(RowsUnavailableError):
        source.find_kv(len(PROMPT) + 13, running_id="gone")
    sequence = driver.scheduler._queues.find("gone")
    assert sequence is not None and len(sequence.all_tokens) == len(PROMPT) + 12
    driver.scheduler.cancel("gone")
    sent = log.tokens
    assert len(sent) == 12 and log.result.resident
    assert log.generated == sent[: len(log.generated)] and log.result.prefilled_until >= len(PROMPT) - 1
    kv = driver.scheduler.residents.find_kv(log.result.resident)
    assert kv is not None and not kv.rewind_points
    assert log.generated == sent or kv.needs_rewind_points


def test_dead_end_within_held_tokens_goes_back(served: ServedModel, grammars: GrammarCompiler) -> None:
    driver, matcher = SchedulerDriver(served), make_matcher(grammars, unique_words(served))
    log = submit(driver, matcher)
    driver.run_until(lambda: bool(driver.scheduler._queues.groups))
    (sequence,) = driver.scheduler._queues.groups[0].sequences
    steps = (None for _ in iter(lambda: next(driver.scheduler.step(), None), 0))
    while sequence.answer.token_count != 6:
        next(steps)
    assert matcher._ll_matcher is not None and not matcher._ll_matcher.consume_token(260)  # as at a dead end
    driver.run_until(lambda: log.is_ended)
    assert log.result.finish == "stop" and len(set(log.text.split())) == 7


def test_dead_end_at_first_token_ends_answer(served: ServedModel, grammars: GrammarCompiler) -> None:
    for check in (None, unique_words(served)):
        matcher = make_matcher(grammars, check)
        assert matcher._ll_matcher is not None and not matcher._ll_matcher.consume_token(260)
        log = generate(served, matcher)
        assert (log.result.finish, log.text, log.tokens) == ("length", "", [])
        assert "can't go on in the form asked for" in log.stop_reason and not log.generated


def test_sampler_draws_on_after_redraw(served: ServedModel, grammars: GrammarCompiler) -> None:
    first, again = (
        generate(served, make_matcher(grammars, unique_words(served)), temperature=1.0, seed=8) for _ in range(2)
    )
    assert first.text == again.text
    other = generate(served, make_matcher(grammars, unique_words(served)), temperature=1.0, seed=9)
    assert other.text != first.text
