"""Matchers that take a draft and go back: the same states and masks as without it."""

import random
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.grammar_cases import EOS, make_compiler, make_tokenizer
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORM = {"structured_outputs": {"json": SCHEMA}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenizerWrapper, GrammarCompiler]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "thinking", (), thinks=True)
    return tokenizer, make_compiler(tokenizer)


def make_matcher(grammars: GrammarCompiler, tail: str) -> Matcher:
    constraint = grammars.build_constraint("chat", FORM, None, tail)
    assert constraint is not None
    return grammars.create_matcher(constraint)


def describe(matcher: Matcher) -> tuple[Any, ...]:
    allowed = () if matcher.state in ("reasoning", "free") else tuple(matcher.compute_allowed().nonzero()[0].tolist())
    return matcher.state, matcher.token_count, matcher.is_complete, allowed


@pytest.mark.parametrize("tail", ["", "<think>\n"])
def test_matcher_is_as_before_a_draft_that_is_taken_back(thinking: Any, tail: str) -> None:
    tokenizer, grammars = thinking
    reasoning = "I see <b>.</think>" if tail else "<think>hm</think>"
    answer = tokenizer.encode(reasoning + '{"city": "Rome"}' + EOS, add_special_tokens=False)
    plain, states = make_matcher(grammars, tail), []
    for token in answer[:-1]:
        states.append(describe(plain))
        plain.advance(token)
    chance = random.Random(4)
    for _ in range(30):
        matcher, at = make_matcher(grammars, tail), 0
        while at < len(states):
            assert describe(matcher) == states[at]
            draft = answer[at : at + chance.randrange(1, 9)]
            taken = 0
            while taken < len(draft) and at + taken < len(states) and matcher.count_valid([draft[taken]]):
                matcher.advance(draft[taken])
                taken += 1
            if not taken:  # a state ends here: no draft goes further
                matcher.advance(answer[at])
                taken = 1
            kept = chance.randrange(1, taken + 1)
            matcher.retract(at + kept)
            at += kept


def test_forced_text_and_valid_tokens(thinking: Any) -> None:
    tokenizer, grammars = thinking

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    matcher = make_matcher(grammars, "<think>\n")
    assert matcher.compute_forced() == [] and matcher.count_valid(encode("anything")) == len(encode("anything"))
    assert matcher.count_valid(encode("so</think>{")) == len(encode("so")), "a draft ends before the reasoning does"
    for token in encode("so</think>"):
        matcher.advance(token)
    assert matcher.count_valid(encode("{")) == 0, "the form begins with a token of its own"
    for token in encode('{"'):
        matcher.advance(token)
    assert tokenizer.decode(matcher.compute_forced()).startswith("city")
    assert matcher.count_valid(encode('city": "Rome"}')) == len(encode('city": "Rome"}'))
    assert matcher.count_valid(encode("town")) == 0
    for token in encode('city": "Rome"}'):
        matcher.advance(token)
    matcher.advance(tokenizer.eos_token_id)
    assert matcher.is_complete and matcher.compute_forced() == [] and matcher.count_valid(encode("x")) == 0
