"""Answers with a draft model: those of single steps, whatever cache families the two models have."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver, cut_chain, make_loader, save_segments
from support.backend.families import FAMILIES, get_tolerance, load_family, make_prompt
from support.device_memory import read_active_memory
from support.speculation.draft_models import (
    INEXACT,
    load_drafted,
    make_eager_speculation,
    make_model_speculation,
)
from support.speculation.drafts import check_cancelled_answer
from support.word_check import FixedCheck, WordCheck, repeats_word
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.kv_cache.batch_prefill import prefill_batch
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.draft import DRAFT_MODEL
from warmline_backend.speculation.speculation import Speculation
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_common.protocol.messages import DraftCount
from warmline_common.protocol.tokens import pack_tokens

GREEDY: list[tuple[str, str, dict[str, Any]]] = [
    *((family, INEXACT, {}) for family in FAMILIES if family != "falcon_h1"),
    *(("llama", "qwen3_5", {}), ("gemma3", "baichuan_m1", {})),
]
SAMPLED = [("llama", INEXACT, {"temperature": 1.0, "seed": 3}), ("qwen3_5", "llama", {"temperature": 1.0, "seed": 4})]
UNLIKE = [("llama", INEXACT), ("qwen3_5", "gemma3")]
PROMPT = make_prompt(50)
ANSWER = 46  # longer than the windows of 32


def get_count(log: EventLog) -> DraftCount:
    return log.result.timings.drafts[DRAFT_MODEL]


@pytest.mark.parametrize(("family", "draft", "params"), [*GREEDY, *SAMPLED])
def test_answer_and_next_turn_are_those_of_single_steps(
    family: str, draft: str, params: dict[str, Any], root: Path
) -> None:
    plain = SchedulerDriver(load_family(family, root)).run(PROMPT, ANSWER, logprobs=True, **params)
    served = load_drafted(family, draft, root)
    driver = SchedulerDriver(served, speculation=make_eager_speculation(served))
    drafted = driver.run(PROMPT, ANSWER, logprobs=True, **params)
    assert drafted.tokens == plain.tokens == drafted.generated
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=get_tolerance(family))
    count = get_count(drafted)
    assert count.accepted < count.drafted
    if draft == INEXACT and not params:
        assert count.accepted > 5 and drafted.result.timings.passes < ANSWER
    following = [*PROMPT, *drafted.generated, *make_prompt(9, seed=4)]
    reuse = len(PROMPT) + ANSWER
    warm = driver.run(following, 12, resident=drafted.result.resident, reuse=reuse, logprobs=True)
    cold = SchedulerDriver(load_family(family, root)).run(following, 12, logprobs=True)
    assert warm.reused == reuse and warm.tokens == cold.tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=get_tolerance(family))


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_draft_model_reads_the_rows_of_the_conversation(family: str, draft: str, root: Path) -> None:
    """After passes of all kinds, its proposals are those of a model that has read the same tokens at once."""
    served = load_drafted(family, draft, root)
    driver = SchedulerDriver(served, speculation=make_eager_speculation(served))
    log = driver.run(PROMPT, ANSWER)
    tokens = [*PROMPT, *log.generated]
    kv = driver.scheduler.residents.find_kv(log.result.resident)
    fresh = served.make_kv(journals=False)
    fresh.prefill(served.model, tokens)
    assert kv is not None and kv.tokens == tokens and served.draft is not None
    drafter = make_model_speculation(served).model
    assert drafter is not None
    proposed = [drafter.propose(each.layers, [[7]], 12) for each in (kv, fresh, kv)]
    assert proposed[0] == proposed[1] == proposed[2], "and a proposal leaves no trace"


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_cancelled_answer_keeps_rows_of_its_tokens(family: str, draft: str, root: Path) -> None:
    served, reference = load_drafted(family, draft, root), load_family(family, root)
    plain = SchedulerDriver(reference).run(PROMPT, ANSWER).tokens
    for steps in (3, 6, 9):
        check_cancelled_answer(served, reference, PROMPT, plain, make_eager_speculation(served, steps), steps)


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_sequences_join_and_leave_batches(family: str, draft: str, root: Path) -> None:
    prompts, lengths = [make_prompt(50, seed) for seed in range(1, 4)], [80, 30, 50]
    single = SchedulerDriver(load_family(family, root))
    plain = [single.run(prompt, tokens) for prompt, tokens in zip(prompts, lengths, strict=True)]
    served = load_drafted(family, draft, root)
    driver, logs = SchedulerDriver(served, speculation=make_eager_speculation(served)), []
    for prompt, tokens in zip(prompts, lengths, strict=True):
        logs.append(driver.submit(prompt, tokens)[1])
        for _ in range(4):
            driver.step()
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert [log.tokens for log in logs] == [log.tokens for log in plain]
    assert any(log.result.timings.shared_passes for log in logs) and get_count(logs[0]).drafted


def test_draft_model_drafts_for_all_of_a_batch(root: Path) -> None:
    """All layers can be cut anywhere; one sequence has a prediction."""
    prompts = [make_prompt(length, seed) for seed, length in enumerate((50, 33, 61), start=1)]
    single = SchedulerDriver(load_family("llama", root))
    plain = [single.run(prompt, ANSWER) for prompt in prompts]
    served = load_drafted("llama", INEXACT, root)
    driver = SchedulerDriver(served, speculation=make_eager_speculation(served))
    predictions = [[], [], plain[2].tokens]
    logs = [
        driver.submit(prompt, ANSWER, prediction=prediction)[1]
        for prompt, prediction in zip(prompts, predictions, strict=True)
    ]
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert [log.tokens for log in logs] == [log.tokens for log in plain]
    for log in logs[:2]:
        assert get_count(log).accepted > 5 and log.result.timings.passes < ANSWER
        assert log.result.timings.shared_passes > log.result.timings.passes / 4
    assert logs[2].result.timings.drafts["prediction"].accepted > 20
    for prompt, log in zip(prompts, logs, strict=True):
        following = [*prompt, *log.generated, 7, 8, 9]
        warm = driver.run(following, 8, resident=log.result.resident, reuse=len(following) - 3)
        assert warm.tokens == single.run(following, 8).tokens


def test_drafts_of_unlike_lengths_copy_no_rows(root: Path) -> None:
    """Beside the new rows, nothing as large as the draft model's KV is made."""
    served = load_drafted("llama", INEXACT, root)
    model = make_model_speculation(served).model
    assert model is not None and served.draft is not None
    kvs = [served.make_kv(journals=False) for _ in range(2)]
    prefill_batch(served.model, kvs, [make_prompt(40), make_prompt(31)])
    own = served.draft.select_layers(kvs[0].layers)
    for held in own:
        held.reserve_rows(1 << 16)
    mx.eval([held.state for held in own])
    mx.clear_cache()
    mx.reset_peak_memory()
    before = read_active_memory()
    proposed = model.propose(kvs[0].layers, [[5], [6]], 4)
    assert mx.get_peak_memory() - before < own[0].nbytes / 4
    assert model.propose(kvs[0].layers, [[5], [6]], 4) == proposed and own[0].lengths == (40, 31)


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_prompts_of_a_batch(family: str, draft: str, root: Path) -> None:
    prompts = [make_prompt(length, seed) for seed, length in enumerate((60, 52, 64), start=1)]
    single = SchedulerDriver(load_family(family, root))
    plain = [single.run(prompt, 20) for prompt in prompts]
    served = load_drafted(family, draft, root)
    driver = SchedulerDriver(served, speculation=make_eager_speculation(served))
    logs = [driver.submit(prompt, 20)[1] for prompt in prompts]
    driver.run_until(lambda: all(log.is_ended for log in logs))
    assert [log.tokens for log in logs] == [log.tokens for log in plain]
    turns = []
    for prompt, log in zip(prompts, logs, strict=True):
        following = [*prompt, *log.generated, 9, 8]
        turns.append((following, driver.run(following, 8, resident=log.result.resident, reuse=len(following) - 2)))
    for following, log in turns:
        assert log.reused == len(following) - 2 and log.tokens == single.run(following, 8).tokens


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_background_chunks_are_computed_layer_by_layer(family: str, draft: str, root: Path) -> None:
    served = load_drafted(family, draft, root)
    driver = SchedulerDriver(served, step=64, speculation=make_eager_speculation(served))
    whole = driver.run(make_prompt(200), 1)
    again = driver.run(make_prompt(200), 1, background=True)
    assert again.result.first == whole.result.first and again.chunks == whole.chunks


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_words_are_drawn_again(family: str, draft: str, root: Path) -> None:
    def run(served: ServedModel, speculation: Speculation | None) -> tuple[EventLog, int]:
        grammars = GrammarCompiler(served.tokenizer, served.vocabulary_size)
        body = {"structured_outputs": {"regex": r"([a-c]{3} ){7}"}}
        constraint = grammars.build_constraint("completion", body, None, "")
        assert constraint is not None
        checks: Any = FixedCheck(WordCheck(served.tokenizer, repeats_word))
        driver, log = SchedulerDriver(served, speculation=speculation), EventLog()
        wanted = GenerationParams(max_tokens=300, temperature=1.0, seed=7)
        matcher = grammars.create_matcher(replace(constraint, checks=checks))
        driver.scheduler.submit(GenerationRequest("w", PROMPT, wanted, log.events.append, matcher=matcher))
        driver.run_until(lambda: log.is_ended)
        return log, driver.scheduler.step_stats.redraws

    plain, redraws = run(load_family(family, root), None)
    served = load_drafted(family, draft, root)
    drafted, others = run(served, make_eager_speculation(served))
    assert redraws and others == redraws and drafted.text == plain.text and drafted.generated == plain.generated


@pytest.mark.parametrize(("family", "draft"), UNLIKE)
def test_restored_conversation_drafts_at_once(family: str, draft: str, root: Path, tmp_path: Path) -> None:
    served = load_drafted(family, draft, root)
    driver = SchedulerDriver(served, speculation=make_eager_speculation(served))
    log = driver.run(PROMPT, ANSWER)
    tokens = [*PROMPT, *log.generated]
    kv = driver.scheduler.save_source.find_kv(len(tokens), resident_id=log.result.resident)
    kv.capture_checkpoint()
    chain, checkpoints = save_segments(kv, tmp_path, [40, len(tokens)])
    at = next((each for each in checkpoints if each.position == len(tokens)), None)
    with ThreadPoolExecutor(2) as pool:
        read = make_loader(served, tmp_path, pool).load(
            pack_tokens(tokens), cut_chain(chain, len(tokens)), at, lambda: False
        )
    fresh = SchedulerDriver(served, speculation=make_eager_speculation(served))
    restored = fresh.scheduler.install_resident("", read.build(served.layout))
    following, reuse = [*tokens, 7, 8, 9], len(tokens)
    again = fresh.run(following, 30, resident=restored, reuse=reuse)
    held = driver.run(following, 30, resident=log.result.resident, reuse=reuse)
    assert again.reused == held.reused == reuse and again.tokens == held.tokens
    assert again.result.timings.prefilled == 3 and get_count(again).drafted
    assert draft != INEXACT or get_count(again).accepted


def test_draft_model_is_asked_where_other_sources_have_nothing(root: Path) -> None:
    served = load_drafted("llama", INEXACT, root)
    plain = SchedulerDriver(served).run(PROMPT, ANSWER)
    driver = SchedulerDriver(served, speculation=make_model_speculation(served))
    foreseen = driver.run(PROMPT, ANSWER, prediction=plain.tokens).result.timings
    assert foreseen.drafts.keys() == {"prediction"}
    assert get_count(driver.run(PROMPT, ANSWER)).accepted


def test_drafts_that_are_never_right_stop(root: Path) -> None:
    """Until a trial after a while, and fewer and fewer of those."""
    served = load_drafted("llama", "gemma3", root)
    driver = SchedulerDriver(served, speculation=make_model_speculation(served))
    first, second = (get_count(driver.run(make_prompt(50, seed), 300)).drafted for seed in (1, 2))
    assert 0 < second < first < 80


def test_nothing_is_drafted_beyond_the_context_of_the_draft_model(root: Path) -> None:
    served = load_drafted("llama", INEXACT, root)
    assert served.draft is not None
    short = replace(served, draft=replace(served.draft, context_tokens_max=90))
    driver = SchedulerDriver(short, speculation=make_eager_speculation(short))
    log = driver.run(PROMPT, ANSWER)
    assert log.tokens == SchedulerDriver(load_family("llama", root)).run(PROMPT, ANSWER).tokens
    assert 0 < get_count(log).drafted < 100 and log.result.timings.passes > ANSWER // 2
