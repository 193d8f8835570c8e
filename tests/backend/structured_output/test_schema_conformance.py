"""JSON sampled by a random model under a schema is valid; without the grammar it would never be."""

import json
from typing import Any

import jsonschema
import pytest

from support import tiny_models
from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.nasty_schemas import is_endless, make_schema
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_backend.request.params import GenerationParams
from warmline_backend.structured_output.compiler import GrammarCompiler

SCHEMAS = 200
LEVELS = 5
TOKENS_MAX = 1500
TOGETHER = 40
THOUGHT = "<think></think>"  # the prompt has closed the reasoning


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tiny_models.build("llama", tmp_path_factory.mktemp("model"), stops=True)
    return load_served_model(str(folder), "tiny")


@pytest.fixture(scope="module")
def grammars(served: ServedModel) -> GrammarCompiler:
    return GrammarCompiler(served.tokenizer, served.vocabulary_size)


def sample_answers(
    served: ServedModel, grammars: GrammarCompiler, schemas: dict[int, dict[str, Any]], temperature: float
) -> dict[int, EventLog]:
    """Sample all answers at once, one row each."""
    driver, log = SchedulerDriver(served, places=TOGETHER), {seed: EventLog() for seed in schemas}
    for seed, schema in schemas.items():
        constraint = grammars.build_constraint("chat", {"structured_outputs": {"json": schema}}, None, THOUGHT)
        assert constraint is not None
        nulls = {served.tokenizer.encode("n")[0]: 8.0} if is_endless(schema) else {}  # so that lists come to an end
        params = GenerationParams(max_tokens=TOKENS_MAX, temperature=temperature, seed=seed, logit_bias=nulls)
        prompt = [33 + seed % 90] * 8
        driver.scheduler.submit(
            GenerationRequest(
                f"{seed}", prompt, params, log[seed].events.append, matcher=grammars.create_matcher(constraint)
            )
        )
    driver.run_until(lambda: all(one.is_ended for one in log.values()))
    return log


def check_answer(served: ServedModel, schema: dict[str, Any], log: EventLog) -> None:
    assert log.result.finish == "stop", (log.result.error, log.text[-200:], schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(log.text))


@pytest.mark.parametrize("level", range(LEVELS))
def test_sampled_answers_conform_to_schemas(level: int, served: ServedModel, grammars: GrammarCompiler) -> None:
    seeds = range(level * SCHEMAS // LEVELS, (level + 1) * SCHEMAS // LEVELS)
    schemas = {seed: make_schema(seed, level) for seed in seeds}
    for seed, one in sample_answers(served, grammars, schemas, temperature=1.0).items():
        check_answer(served, schemas[seed], one)


def test_greedy_answers_conform_to_schemas(served: ServedModel, grammars: GrammarCompiler) -> None:
    schemas = {seed: make_schema(seed, seed % 4) for seed in range(SCHEMAS, SCHEMAS + 32)}
    for seed, one in sample_answers(served, grammars, schemas, temperature=0.0).items():
        check_answer(served, schemas[seed], one)
