"""Matchers that meet a limit of llguidance's: they end their own answer, and no other."""

import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.grammar_cases import EOS, is_accepted, make_compiler, make_tokenizer, sample_tokens
from warmline_backend.structured_output import compiler, prototypes
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.constraint import Constraint
from warmline_backend.structured_output.matcher import GrammarDeadEndError, Matcher

# A grammar is taken as it is; a schema's costly parts would be left to a check.
COSTLY = r"""start: "{\"title\": \"" /[a-z]{4,9}/ ("\", \"summary\": \"" WORDS)? "\"}"
WORDS: /(?:[^ "]+ +){0,49}[^ "]+/ & /[^"]{0,1000}/
"""
SHORT = '{"title": "short"}' + EOS
COSTLY_START = '{"title": "long", "summary": "'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bytes", ())


@pytest.fixture
def grammars(tokenizer: TokenizerWrapper) -> GrammarCompiler:
    return make_compiler(tokenizer)


def make_constraint(grammars: GrammarCompiler, form: str | dict[str, Any]) -> Constraint:
    kind = "grammar" if isinstance(form, str) else "json"
    constraint = grammars.build_constraint("completion", {"structured_outputs": {kind: form}}, None, "")
    assert constraint is not None
    return constraint


def exhaust(tokenizer: TokenizerWrapper, matcher: Matcher) -> str:
    """Draw tokens at random up to a limit; returns the error."""
    draw = np.random.default_rng(1)
    assert is_accepted(matcher, encode(tokenizer, COSTLY_START))
    with pytest.raises(GrammarDeadEndError) as caught:
        for _ in range(1000):
            matcher.advance(int(draw.choice(np.flatnonzero(matcher.compute_allowed()))))
            assert not matcher.is_complete
    return str(caught.value)


def encode(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_costly_mask_is_no_complete_answer(tokenizer: TokenizerWrapper, grammars: GrammarCompiler) -> None:
    matcher = grammars.create_matcher(make_constraint(grammars, COSTLY))
    assert "too many expressions" in exhaust(tokenizer, matcher)
    with pytest.raises(GrammarDeadEndError):
        matcher.compute_allowed()
    with pytest.raises(GrammarDeadEndError):
        matcher.advance(tokenizer.eos_token_id)
    assert not matcher.is_complete


def test_exhausted_matcher_leaves_others_alone(tokenizer: TokenizerWrapper, grammars: GrammarCompiler) -> None:
    constraint = make_constraint(grammars, COSTLY)
    failed, running = grammars.create_matcher(constraint), grammars.create_matcher(constraint)
    assert is_accepted(running, encode(tokenizer, SHORT[:12]))
    exhaust(tokenizer, failed)
    assert is_accepted(running, encode(tokenizer, SHORT[12:])) and running.is_complete
    failed.release()
    assert is_accepted(grammars.create_matcher(constraint), encode(tokenizer, SHORT))


def test_rewind_after_lexer_error_is_a_dead_end(tokenizer: TokenizerWrapper, grammars: GrammarCompiler) -> None:
    matcher = grammars.create_matcher(make_constraint(grammars, COSTLY))
    exhaust(tokenizer, matcher)
    matcher.rewind(3)
    assert matcher.dead_end and matcher.is_drawn_freely(3) and not matcher.is_drawn_freely(2)


def test_lexer_states_of_many_answers_do_not_add_up(
    tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 2, "maxItems": 4}
    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=700,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    monkeypatch.setattr(compiler, "PARSER_LIMITS", limits)
    monkeypatch.setattr(prototypes, "TOKENS_MAX", 100)
    times: list[float] = []
    grammars = GrammarCompiler(tokenizer, len(tokenizer), times.append)
    constraint = make_constraint(grammars, names)
    for seed in range(40):
        matcher = grammars.create_matcher(constraint)
        assert len(json.loads(tokenizer.decode(sample_tokens(matcher, seed)).encode("utf-8", "replace"))) >= 2
        matcher.release()
    assert 1 < len(times) < 40, "some are used again, none for ever"


def test_grammar_is_compiled_once_for_check_and_answers(tokenizer: TokenizerWrapper) -> None:
    times: list[float] = []
    grammars = GrammarCompiler(tokenizer, len(tokenizer), times.append)
    constraint = make_constraint(grammars, COSTLY)
    for _ in range(3):
        matcher = grammars.create_matcher(constraint)
        assert is_accepted(matcher, encode(tokenizer, SHORT))
        matcher.release()
        matcher.release()
    assert len(times) == 1
    running = [grammars.create_matcher(constraint) for _ in range(2)]
    assert len(times) == 2, "each answer has one to itself"
    grammars.clear()
    for matcher in running:
        matcher.release()
    grammars.create_matcher(constraint)
    assert len(times) == 3, "what was cleared does not come back"
