"""Copies of a parser: each goes on by itself, from any token; and the tokens that characters lie in."""

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.parsed_output import encode_text
from support.backend.tool_families import FAMILIES, HARMONY, TOOLS, Family
from warmline_backend.output.events import Part, Text
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


def finish(parser: OutputParser, tokens: list[int]) -> list[Part]:
    return [*(part for token in tokens for part in parser.add(token)), *parser.finish()]


def check_copies(tokenizer: TokenizerWrapper, text: str, tail: str = "", stop: tuple[str, ...] = ()) -> None:
    expected = ExpectedOutput(has_parts=True, tools=TOOLS, tail=tail)
    tokens, parser = encode_text(tokenizer, text), OutputParser(tokenizer, stop, expected)
    whole, parts = finish(OutputParser(tokenizer, stop, expected), tokens), list[Part]()
    for index, token in enumerate(tokens):
        if index % 7 == 0:
            finish(parser.copy(), encode_text(tokenizer, ' "é<'))
            assert [*parts, *finish(parser.copy(), tokens[index:])] == whole
        parts += parser.add(token)
    assert [*parts, *parser.finish()] == whole


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_copies_within_calls(folder: Path, family: Family) -> None:
    tokenizer, (start, end) = family.tokenizer(folder), family.think
    check_copies(tokenizer, f"{start}\nhm{end}\n\n{family.calls}" if start else family.calls)
    check_copies(tokenizer, f"hm{family.calls}", tail=start)


def test_copies_of_messages_and_stop_words(folder: Path) -> None:
    tokenizer = HARMONY.tokenizer(folder)
    comment = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.run <|constrain|>json<|message|>{"limit": 1}'
    check_copies(tokenizer, comment + call, "<|start|>assistant")
    check_copies(tokenizer, "<|channel|>final<|message|>é se se set", "<|start|>assistant", ("see", "sex", "set"))


def test_tokens_of_characters(folder: Path) -> None:
    tokenizer = FAMILIES[0].tokenizer(folder)
    parser = OutputParser(tokenizer, expected=ExpectedOutput(has_parts=True))
    tokens = encode_text(tokenizer, "<think>a</think>é\u20acb")
    parts = [part for token in tokens for part in parser.add(token)]
    texts = [part for part in parts if isinstance(part, Text)]
    assert "".join(part.text for part in texts) == "é\u20acb"
    assert [parser.find_token(part.offset) for part in texts] == [3, 5, 8]  # two bytes, three, one
    assert parser.find_token(texts[-1].offset + 1) == len(tokens)
    parser.add(encode_text(tokenizer, "é")[0])
    assert parser.find_token(texts[-1].offset + 1) == len(tokens)  # the first half of the next character
