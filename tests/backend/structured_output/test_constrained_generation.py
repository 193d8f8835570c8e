"""Constrained sequences among others: batches, seeds, cuts, faults, warm starts, and the way through the service."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import tiny_models
from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.live_backend import LiveBackend, with_backend
from warmline_backend.generation.events import TokenEvent
from warmline_backend.generation.sampling import LOGPROB_MIN
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_backend.request.params import BadRequestError, GenerationParams
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import GrammarDeadEndError, Matcher
from warmline_common.protocol.messages import PromptRequest

PEOPLE = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
FIXED = {"const": {"a": [1, True, None], "b": "ü"}}
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_served_model(str(tiny_models.build("llama", tmp_path_factory.mktemp("model"), stops=True)), "tiny")


@pytest.fixture(scope="module")
def grammars(served: ServedModel) -> GrammarCompiler:
    return GrammarCompiler(served.tokenizer, served.vocabulary_size)


def make_matcher(grammars: GrammarCompiler, schema: dict[str, Any]) -> Matcher:
    constraint = grammars.build_constraint("completion", {"structured_outputs": {"json": schema}}, None, "")
    assert constraint is not None
    return grammars.create_matcher(constraint)


def submit_constrained(
    driver: SchedulerDriver, guided: Matcher | None, prompt: list[int] = PROMPT, **params: Any
) -> EventLog:
    log, count = EventLog(), driver.scheduler.running_count + driver.scheduler.queued_count
    wanted = GenerationParams(**{"max_tokens": 200, **params})
    driver.scheduler.submit(GenerationRequest(f"g{count}", prompt, wanted, log.events.append, matcher=guided))
    return log


def generate_alone(served: ServedModel, guided: Matcher | None, prompt: list[int] = PROMPT, **params: Any) -> EventLog:
    driver = SchedulerDriver(served)
    log = submit_constrained(driver, guided, prompt, **params)
    driver.run_until(lambda: log.is_ended)
    return log


MIXED: list[tuple[dict[str, Any] | None, dict[str, Any]]] = [
    (PEOPLE, {}),
    (None, {"ignore_eos": True, "max_tokens": 60}),
    (PEOPLE, {"temperature": 1.0, "seed": 5}),
    (PEOPLE, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 1.0, "presence_penalty": 0.5}),
    (FIXED, {"logit_bias": {65: 50.0, 66: -100.0}, "repetition_penalty": 1.3}),
    (None, {"temperature": 1.0, "seed": 7, "max_tokens": 60}),
    (PEOPLE, {"temperature": 1.0, "seed": 8, "top_k": 5, "min_p": 0.01}),
]


@pytest.mark.parametrize("turns_between", [0, 1])
def test_constrained_and_free_sequences_share_batch(
    served: ServedModel, grammars: GrammarCompiler, turns_between: int
) -> None:
    def guided(schema: dict[str, Any] | None) -> Matcher | None:
        return None if schema is None else make_matcher(grammars, schema)

    driver, prompts = SchedulerDriver(served), [[*PROMPT[:-1], 90 + n] for n in range(len(MIXED))]
    log = []
    for (schema, params), prompt in zip(MIXED, prompts, strict=True):
        log.append(submit_constrained(driver, guided(schema), prompt, **params))
        for _ in range(turns_between):
            driver.step()
    driver.run_until(lambda: max((len(group.sequences) for group in driver.scheduler._queues.groups), default=0) > 4)
    driver.run_until(lambda: all(one.is_ended for one in log))
    for (schema, params), prompt, one in zip(MIXED, prompts, log, strict=True):
        by_itself = generate_alone(served, guided(schema), prompt, **params)
        assert (one.text, one.result.finish) == (by_itself.text, by_itself.result.finish)
        if schema is not None:
            assert one.result.finish == "stop"
            read = json.loads(one.text)
            assert read == FIXED["const"] if schema is FIXED else len(read) in (2, 3)


def test_cut_answer_finishes_with_length(served: ServedModel, grammars: GrammarCompiler) -> None:
    whole = generate_alone(served, make_matcher(grammars, PEOPLE)).text
    cut = generate_alone(served, make_matcher(grammars, PEOPLE), max_tokens=20)
    assert (cut.result.finish, cut.text) == ("length", whole[:20])
    endless = generate_alone(served, make_matcher(grammars, {"type": "string", "minLength": 500}), max_tokens=30)
    assert endless.result.finish == "length" and endless.text.startswith('"') and '"' not in endless.text[1:]


def test_complete_form_ends_answer_despite_ignore_eos(served: ServedModel, grammars: GrammarCompiler) -> None:
    ended = generate_alone(served, make_matcher(grammars, FIXED), ignore_eos=True)
    assert ended.result.finish == "stop" and json.loads(ended.text) == FIXED["const"]


def test_complete_form_ends_answer_before_min_tokens(served: ServedModel, grammars: GrammarCompiler) -> None:
    ended = generate_alone(served, make_matcher(grammars, FIXED), min_tokens=150, stop_token_ids=(5,))
    assert ended.result.finish == "stop" and json.loads(ended.text) == FIXED["const"]


def test_min_tokens_holds_without_form(served: ServedModel) -> None:
    eos = min(served.tokenizer.eos_token_ids)
    wants_to_end = {"logit_bias": {eos: 100.0}, "max_tokens": 20}
    assert generate_alone(served, None, **wants_to_end).generated == [eos]
    for sampling in ({}, {"temperature": 1.0, "seed": 4}):
        held = generate_alone(served, None, min_tokens=6, **wants_to_end, **sampling)
        assert held.result.finish == "stop" and len(held.generated) == 7
        assert held.generated.index(eos) == 6


def test_stop_token_ends_answer_without_text(served: ServedModel) -> None:
    whole = generate_alone(served, None, max_tokens=20, ignore_eos=True)
    stop = whole.generated[4]
    at = whole.generated.index(stop)
    cut = generate_alone(served, None, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    assert (cut.result.finish, cut.generated, cut.text) == ("stop", whole.generated[: at + 1], whole.text[:at])
    late = generate_alone(served, None, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,), min_tokens=10)
    assert stop not in late.generated[:10]


def test_allowed_token_ids_limit_sampling(served: ServedModel) -> None:
    log = generate_alone(served, None, max_tokens=12, temperature=1.0, seed=1, allowed_token_ids=(65, 66))
    assert set(log.generated) == {65, 66} and log.result.finish == "length"


def test_allowed_token_ids_with_form_are_refused(grammars: GrammarCompiler) -> None:
    with pytest.raises(BadRequestError, match="can't be combined") as refused:
        grammars.build_constraint("completion", {"grammar": 'root ::= "a"', "allowed_token_ids": [65]}, None, "")
    assert refused.value.param == "allowed_token_ids"


def test_gbnf_grammar_is_followed(served: ServedModel, grammars: GrammarCompiler) -> None:
    constraint = grammars.build_constraint("completion", {"grammar": 'root ::= "ab" [0-9] "c"'}, None, "")
    assert constraint is not None
    assert re.fullmatch("ab[0-9]c", generate_alone(served, grammars.create_matcher(constraint)).text)


def test_logprobs_have_no_infinity(served: ServedModel, grammars: GrammarCompiler) -> None:
    log = generate_alone(served, make_matcher(grammars, FIXED), logprobs=True, top_logprobs=5)
    logprobs = [event.logprobs for event in log.events if isinstance(event, TokenEvent) and event.logprobs]
    assert len(logprobs) == len(log.text.encode())
    for one in logprobs:
        assert one.logprob == pytest.approx(0.0, abs=1e-5)
        assert [value for _, value in one.top[1:]] == [LOGPROB_MIN] * 4


def test_first_logits_are_unmasked(served: ServedModel, grammars: GrammarCompiler) -> None:
    free, guided = (
        generate_alone(served, None, max_tokens=2),
        generate_alone(served, make_matcher(grammars, FIXED), max_tokens=2),
    )
    assert free.result.first == guided.result.first is not None


def test_warm_start_equals_cold_answer(served: ServedModel, grammars: GrammarCompiler) -> None:
    driver = SchedulerDriver(served)
    first = driver.run(PROMPT, 4)
    resident = driver.mark_saved(first)
    prompt = PROMPT + first.generated + [70, 71, 72]
    log, wanted = EventLog(), GenerationParams(max_tokens=200, temperature=1.0, seed=3)
    driver.scheduler.submit(
        GenerationRequest(
            "warm",
            prompt,
            wanted,
            log.events.append,
            matcher=make_matcher(grammars, PEOPLE),
            resident_id=resident,
            reuse_tokens=len(PROMPT),
        )
    )
    driver.run_until(lambda: log.is_ended)
    assert log.reused == len(PROMPT)
    assert log.text == generate_alone(served, make_matcher(grammars, PEOPLE), prompt, temperature=1.0, seed=3).text


@pytest.mark.parametrize(("error", "finish"), [(GrammarDeadEndError, "length"), (RuntimeError, "error")])
def test_failing_matcher_ends_its_request_only(
    served: ServedModel,
    grammars: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    finish: str,
) -> None:
    def fails() -> None:
        raise error("a limit was met")

    driver, broken = SchedulerDriver(served), make_matcher(grammars, PEOPLE)
    failed, other = submit_constrained(driver, broken), submit_constrained(driver, make_matcher(grammars, FIXED))
    driver.run_until(lambda: len(failed.text) >= 2)
    monkeypatch.setattr(broken, "compute_allowed", fails)
    driver.run_until(lambda: failed.is_ended and other.is_ended)
    assert failed.result.finish == finish
    assert "a limit was met" in (failed.result.error if finish == "error" else failed.stop_reason)
    assert other.result.finish == "stop" and json.loads(other.text) == FIXED["const"]


def test_limit_within_answer_cuts_it(served: ServedModel, grammars: GrammarCompiler) -> None:
    costly = 'start: /[a-z]{10,20}/ ": " WORDS\nWORDS: /(?:[^ ]+ +){0,49}[^ ]+/ & /(?s:.{0,1000})/'
    driver = SchedulerDriver(served)
    constraint = grammars.build_constraint("completion", {"guided_grammar": costly}, None, "")
    assert constraint is not None
    logs = [
        submit_constrained(driver, grammars.create_matcher(constraint), temperature=1.0, seed=seed, max_tokens=400)
        for seed in range(4)
    ]
    driver.run_until(lambda: all(log.is_ended for log in logs))
    for log in logs:
        assert log.result.finish == "length" and "too many expressions" in log.stop_reason
        assert re.fullmatch("[a-z]{10,20}: .*", log.text, re.DOTALL)
        assert log.generated == [event.token for event in log.events if isinstance(event, TokenEvent)]


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
        },
    },
}
THINK = 256 + tiny_models.SPECIAL_TOKENS.index("<think>")
ASKS = {
    "messages": [{"role": "user", "content": "hello"}],
    "add_generation_prompt": False,  # which would open the reasoning
    "logit_bias": {str(THINK): -100},  # and so might the model
    "temperature": 1.0,
    "max_tokens": 300,
}


def test_service_follows_forms_and_required_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_models.build("llama", tmp_path / "model", stops=True, tools=True)

    async def work(live: LiveBackend) -> None:
        bodies = [
            {**ASKS, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {**ASKS, "structured_outputs": {"regex": "ab{3}"}, "temprature": 0.1},
        ]
        for body in bodies:
            prompt = await live.render_prompt(body)
            async with live.start_generation("r", prompt) as response:
                text = (await response.read()).decode()
            if "tools" in body:
                assert '"finish_reason":"tool_calls"' in text and '"name":"add"' in text
            else:
                assert '"finish_reason":"stop"' in text
        async with live.start_generation("c", await live.render_prompt({**bodies[0], "max_tokens": 12})) as response:
            cut = (await response.read()).decode()
        assert '"finish_reason":"length"' in cut and '"tool_calls"' not in cut and '"content":"' in cut
        slips = [record.getMessage() for record in caplog.records if "did you mean" in record.getMessage()]
        assert len(slips) == 1 and "'temprature'" in slips[0] and "0.1" not in slips[0]
        wrong = PromptRequest(request_id="p", endpoint="chat", body={**ASKS, "guided_regex": "("})
        status, reply = await live.request_json("POST", "/kv/prompts", wrong)
        assert status == 400 and "'guided_regex' can't be used" in reply["error"]["message"]
        assert reply["error"]["param"] == "guided_regex"

    with_backend(model, tmp_path, work)
