"""States of a matcher: reasoning, the line break after it, markers of several tokens, padding, limits."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from support.backend.grammar_cases import (
    EOS,
    PADDING,
    THINKS,
    is_accepted,
    make_compiler,
    make_tokenizer,
    sample_tokens,
)
from support.backend.small_tokenizers import make_sentence_piece_tokenizer
from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.compiler import SLOW_TOKENIZER_MESSAGE, GrammarCompiler
from warmline_backend.structured_output.matcher import GrammarDeadEndError, Matcher

YES_OR_NO = {"structured_outputs": {"choice": ["yes", "no"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def thinking(folder: Path) -> tuple[TokenizerWrapper, GrammarCompiler]:
    tokenizer = make_tokenizer(folder / "thinking", (), thinks=True)
    return tokenizer, make_compiler(tokenizer)


def make_matcher(grammars: GrammarCompiler, tail: str = "", **body: Any) -> Matcher:
    constraint = grammars.build_constraint("chat", body or YES_OR_NO, None, tail)
    assert constraint is not None
    return grammars.create_matcher(constraint)


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def list_allowed(tokenizer: TokenizerWrapper, matcher: Matcher) -> set[str]:
    return {tokenizer.decode([token]) for token in matcher.compute_allowed().nonzero()[0].tolist()}


@pytest.mark.parametrize(
    ("tail", "answer", "fits"),
    [
        ("<think>\n", "hm, <b> {</think>yes" + EOS, True),
        ("<think>\n", "hm</think>\nno" + EOS, True),
        ("<think>\n", "hm</think>\n\nno" + EOS, False),  # two tokens here: one break is enough
        ("<think>\n", "hm</think> maybe", False),
        ("<think>\n\n</think>\n\n", "yes" + EOS, True),
        ("<think>\n\n</think>\n\n", "<think>", False),
        ("<think>\n\n</think>\n\n", "\nyes", False),
        ("", "yes" + EOS, True),
        ("", "<think>hm</think>yes" + EOS, True),
        ("", "<think>hm</think><think>", False),
        ("", "hm", False),
        ("", "yes<think>", False),
    ],
)
def test_form_begins_after_reasoning(thinking: Any, tail: str, answer: str, fits: bool) -> None:
    tokenizer, grammars = thinking
    matcher = make_matcher(grammars, tail)
    assert is_accepted(matcher, encode_text(tokenizer, answer)) == fits
    assert matcher.is_complete == (fits and answer.endswith(EOS))


def test_completions_have_no_reasoning(thinking: Any) -> None:
    tokenizer, grammars = thinking
    constraint = grammars.build_constraint("completion", YES_OR_NO, None, "")
    assert not is_accepted(grammars.create_matcher(constraint), encode_text(tokenizer, THINKS[0]))


def test_think_start_may_share_tokens_with_form(folder: Path) -> None:
    markers = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    tokenizer = make_tokenizer(folder / "xtml", markers)
    grammars = make_compiler(tokenizer)
    for answer, fits in (
        ("<|open|>think<|sep|>hm<|close|>think<|sep|>yes" + EOS, True),
        ("<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>no<|close|>response<|sep|>", True),
        ("<|open|>response<|sep|>no<|close|>response<|sep|><|close|>message<|sep|>" + EOS, True),
        ("yes" + EOS, True),
        ("<|open|>thing", False),
        ("<|open|>tools", False),
        ("<|open|>response<|sep|>maybe", False),
    ):
        assert is_accepted(make_matcher(grammars), encode_text(tokenizer, answer)) == fits, answer


def test_channels_are_part_of_grammar(folder: Path) -> None:
    tokenizer = make_tokenizer(
        folder / "channels", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
    )
    grammars = make_compiler(tokenizer)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for answer, fits in (
        ("<|channel|>final<|message|>yes" + EOS, True),
        (thought + "<|channel|>final <|constrain|>json<|message|>no" + EOS, True),
        (thought + thought + "<|channel|>final<|message|>maybe", False),
        ("yes", False),
    ):
        assert is_accepted(make_matcher(grammars, "<|start|>assistant"), encode_text(tokenizer, answer)) == fits, answer


def test_text_like_markers_is_not_a_marker(thinking: Any) -> None:
    tokenizer, grammars = thinking
    matcher = make_matcher(grammars, "</think>", structured_outputs={"json": {"const": "a<think>" + EOS}})
    tokens = sample_tokens(matcher, 1)
    assert tokenizer.decode(tokens) == f'"a<think>{EOS}"'
    assert all(token < 256 for token in tokens)


def test_padding_logits_are_masked(thinking: Any) -> None:
    tokenizer, grammars = thinking
    matcher = make_matcher(grammars, "</think>", guided_regex="(?s:.*)")
    mask = matcher.compute_allowed()
    assert mask.shape == (len(tokenizer) + PADDING,)
    assert mask[:256].any() and not mask[-PADDING:].any()
    assert {token for token in mask.nonzero()[0].tolist() if token >= 256} == {tokenizer.eos_token_id}


def test_matcher_masks_as_logits_processor(thinking: Any) -> None:
    tokenizer, grammars = thinking
    width = len(tokenizer) + PADDING
    matcher = make_matcher(grammars, "<think>")
    logits, prompt = mx.zeros((1, width), mx.bfloat16), [65] * 5

    def step(*answer: str) -> set[int]:
        tokens = [token for word in answer for token in encode_text(tokenizer, word)]
        made = matcher(mx.array(prompt + tokens), logits)
        assert made.dtype == mx.bfloat16 and made.shape == (1, width)
        return {token for token, value in enumerate(made[0].tolist()) if value == 0}

    assert step() == set(range(width)) - {tokenizer.eos_token_id}, "an answer can't end before it has its form"
    assert len(step("x")) == width - 1
    assert step("x", "</think>") == {*encode_text(tokenizer, "yn\n")}
    assert step("x", "</think>", "y") == {*encode_text(tokenizer, "e")}
    matcher.set_sampled(mx.array([0, encode_text(tokenizer, "e")[0], 0]), 1)  # what is said so goes before the context
    assert step("x", "</think>", "y", "?") == {*encode_text(tokenizer, "s")}


def test_only_eos_follows_complete_answer(thinking: Any) -> None:
    tokenizer, grammars = thinking
    matcher = make_matcher(grammars, "</think>")
    assert is_accepted(matcher, encode_text(tokenizer, "yes"))
    assert matcher.compute_allowed().nonzero()[0].tolist() == [tokenizer.eos_token_id]
    matcher.advance(tokenizer.eos_token_id)
    matcher.advance(tokenizer.eos_token_id)
    assert matcher.is_complete


def test_token_outside_grammar_raises(thinking: Any) -> None:
    tokenizer, grammars = thinking
    matcher = make_matcher(grammars, "</think>")
    with pytest.raises(GrammarDeadEndError, match="can't go on in the form asked for"):
        matcher.advance(encode_text(tokenizer, "?")[0])


def test_matchers_of_one_constraint_are_independent(thinking: Any) -> None:
    tokenizer, grammars = thinking
    constraint = grammars.build_constraint("chat", YES_OR_NO, None, "</think>")
    one, other = grammars.create_matcher(constraint), grammars.create_matcher(constraint)
    assert is_accepted(one, encode_text(tokenizer, "ye"))
    assert list_allowed(tokenizer, one) == {"s"} and list_allowed(tokenizer, other) == {"y", "n"}


@pytest.mark.parametrize(
    ("tail", "answer"),
    [
        ("<think>\n", "hm</think>\nyes" + EOS),
        ("", "<think>hm</think>yes" + EOS),
        ("", "yes" + EOS),
    ],
)
def test_rewound_matcher_equals_new_one(thinking: Any, tail: str, answer: str) -> None:
    tokenizer, grammars = thinking
    tokens, matcher = encode_text(tokenizer, answer), make_matcher(grammars, tail)
    assert is_accepted(matcher, tokens)
    for count in range(len(tokens), -1, -1):
        matcher.rewind(count)
        other = make_matcher(grammars, tail)
        assert is_accepted(other, tokens[:count])
        assert (matcher.state, matcher.is_complete) == (other.state, other.is_complete)
        if matcher.state != "reasoning":
            assert list_allowed(tokenizer, matcher) == list_allowed(tokenizer, other)
        assert is_accepted(matcher, tokens[count:]) and matcher.is_complete


def test_sentencepiece_tokens_are_matched_as_bytes(tmp_path: Path) -> None:
    tokenizer = make_sentence_piece_tokenizer(tmp_path)
    grammars = make_compiler(tokenizer)
    for seed in range(3):
        matcher = make_matcher(grammars, structured_outputs={"json": {"const": {"the": "hé"}}})
        assert tokenizer.decode(sample_tokens(matcher, seed)).strip() == '{"the": "hé"}'


def test_slow_tokenizer_is_refused(thinking: Any) -> None:
    class Slow:
        _tokenizer = object()
        eos_token_ids = (1,)

    assert not isinstance(Slow._tokenizer, PreTrainedTokenizerFast)
    grammars = GrammarCompiler(Slow(), 10)  # type: ignore[arg-type]
    grammars.prepare_tokenizer()
    with pytest.raises(BadRequestError, match=SLOW_TOKENIZER_MESSAGE):
        grammars.build_constraint("chat", YES_OR_NO, None, "")
    assert grammars.build_constraint("chat", {}, None, "") is None


def make_strict_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"structured_outputs": {"json": {"not": {}}}}, "'not' allows no value"),
        ({"structured_outputs": {"json": {"enum": []}}}, "no value is listed"),
        (make_strict_form({"$ref": "https://example.com/x"}), "is no part of the schema"),
        (make_strict_form({"type": "string", "pattern": "("}), "no regular expression"),
        ({"structured_outputs": {"json": {"const": "\ud83d"}}}, "lone surrogate"),
        ({"guided_regex": "(?=a)b"}, "can't be used"),
        ({"guided_regex": "ab[c"}, r"'guided_regex' can't be used: it has a '\[' without an end \(at character 3\)"),
        ({"structured_outputs": {"regex": "(?<=a)b"}}, "it has a lookbehind, which no grammar has"),
        ({"guided_regex": r"(a)\1"}, "it has a reference to a group, which no grammar has"),
        ({"guided_regex": r"\bfoo\b"}, "it has a word boundary, which no grammar has"),
        ({"guided_regex": "a(?=b)b"}, "it has a lookahead that is not at its start"),
        ({"guided_regex": "(^a){2}"}, "it has a '\\^' or '\\$' within a repetition"),
        ({"guided_regex": r"(?i)\p{Lu}"}, "it has a property of characters where case is ignored"),
        ({"guided_regex": "[[:alpha:]]"}, "it has a POSIX class"),
        ({"guided_regex": "[]"}, "no text can match it"),
        ({"guided_grammar": "start: start"}, "no text can match it"),
        ({"guided_grammar": "start: missing"}, "unknown name"),
        ({"guided_grammar": "{{{{"}, "can't be read as a grammar"),
        ({**YES_OR_NO, "continue_final_message": True}, "can't be combined"),
    ],
)
def test_invalid_grammar_is_refused(thinking: Any, body: dict[str, Any], words: str) -> None:
    for _ in range(2):  # the second time from what is remembered
        with pytest.raises(BadRequestError, match=words) as caught:
            thinking[1].build_constraint("chat", body, None, "")
        assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("expression", "matching", "other"),
    [
        (r"\d\w+", ["1a"], ["\u0661a", "1é", "1a.", "x1a"]),
        ("a|bc", ["a", "bc"], ["abc", "ac"]),
        ("^a|bc$", ["a", "bc"], ["ax"]),
        (r"(?=.*\d)(?!admin)[a-z\d]{3,}", ["ab1"], ["abc", "admin1"]),
        (r"[^a]/[^\x20]\/\P{L}", ['\x1f/"/\\', '"/\x1f/\n'], ["a/b/1", "b/ /1", "b/b/b"]),
        ("(?:a*)", ["", "aa"], ["b"]),
        ("(?i)k", ["K", "\u212a"], ["l"]),
    ],
)
def test_regular_expressions_match_whole_texts(
    thinking: Any, expression: str, matching: list[str], other: list[str]
) -> None:
    tokenizer, grammars = thinking
    for text in (*matching, *other):
        matcher = make_matcher(grammars, "</think>", guided_regex=expression)
        assert is_accepted(matcher, encode_text(tokenizer, text + EOS)) == (text in matching), text


def test_compiled_grammars_are_bounded(thinking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, grammars = thinking
    constraints = [
        grammars.build_constraint("chat", {"guided_choice": [word]}, None, "</think>") for word in ("ab", "cd", "ef")
    ]
    monkeypatch.setattr("warmline_backend.structured_output.prototypes.IDLE_COUNT_MAX", 2)
    compile_times: list[float] = []
    bounded = GrammarCompiler(tokenizer, len(tokenizer), compile_times.append)
    for constraint, word in [*zip(constraints, ("ab", "cd", "ef"), strict=True)] * 2:
        for _ in range(2):
            matcher = bounded.create_matcher(constraint)
            assert is_accepted(matcher, encode_text(tokenizer, word + EOS))
            matcher.release()
    assert len(compile_times) == 6  # each was evicted before its next turn, and found in between
