"""Checks of content: what is wrong with an answer, from which token on, and which tokens may go to the client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.grammar_cases import make_tokenizer
from support.backend.parsed_output import encode_text
from support.backend.small_tokenizers import make_byte_level_tokenizer
from support.backend.tool_families import BY_NAME, TOOLS
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser
from warmline_backend.structured_output.checks import answer_check, value_validation
from warmline_backend.structured_output.checks.answer_check import AnswerCheck, AnswerChecks
from warmline_backend.structured_output.checks.content_check import ContentCheck
from warmline_backend.structured_output.checks.value_validation import Violation
from warmline_backend.structured_output.json_schema.validator import SchemaValidator

CONTENT = ExpectedOutput(has_parts=True, is_constrained=True)
TAGS = {"properties": {"tags": {"uniqueItems": True}, "n": {"multipleOf": 3}}}
TAG_CHECKS = ["/properties/tags", "/properties/n"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_byte_level_tokenizer(tmp_path_factory.mktemp("bpe"))


def make_check(
    tokenizer: TokenizerWrapper, schema: Any, checks: list[str], expected: ExpectedOutput = CONTENT
) -> AnswerCheck:
    content = ContentCheck(schema, checks)
    return AnswerChecks(content).create(lambda: OutputParser(tokenizer, expected=expected))


def add_all(check: AnswerCheck, tokens: list[int], eos: int | None = None) -> tuple[Violation | None, list[int]]:
    """Add tokens up to a violation; returns it, and the counts of sound tokens after each."""
    counts: list[int] = []
    for token in tokens:
        violation = check.add(token, False)
        counts.append(check.sound_count)
        if violation:
            return violation, counts
    violation = check.add(eos, True) if eos is not None else None
    return violation, [*counts, check.sound_count]


def find_violation(tokenizer: TokenizerWrapper, schema: Any, checks: list[str], text: str) -> Violation | None:
    tokens = encode_text(tokenizer, text)
    return add_all(make_check(tokenizer, schema, checks), tokens, tokenizer.eos_token_id)[0]


@pytest.mark.parametrize(
    ("text", "start", "end", "reason"),
    [
        ('{"tags": [1, 2], "n": 3}', "", "", ""),
        ('{"tags": [1, 1], "n": 3}', "1], ", "]", "/tags/1: is equal to an earlier item (uniqueItems)"),
        ('{"tags": [1, 2], "n": 4}', "4", "}", "/n: is no multiple of the required number (multipleOf)"),
        ('{"n": 4, "tags": [[], []]}', "4", ", ", "/n: is no multiple of the required number (multipleOf)"),
        ('{"a": [1, 1], "tags": "é\\"[1, 1]", "n": 6}', "", "", ""),
        (
            '{"tags": [1, 2], "tags": ["é", "\\u00e9"]}',
            '"\\u00e9',
            '"',
            "/tags/1: is equal to an earlier item (uniqueItems)",
        ),
        ('{"tags": [1.0, {"a": [1, 2]}, 1e0, 3]}', "1e0", ",", "/tags/2: is equal to an earlier item (uniqueItems)"),
        ('{"a": 1e999}', "1e999", "}", "/a: can't be read: 1e999 is too large a number"),
    ],
)
def test_values_are_checked_once_complete(bpe: TokenizerWrapper, text: str, start: str, end: str, reason: str) -> None:
    violation, counts = add_all(make_check(bpe, TAGS, TAG_CHECKS), encode_text(bpe, text), bpe.eos_token_id)
    if not reason:
        assert violation is None and counts[-1] == len(encode_text(bpe, text)) + 1
        return
    before = text.index(start)
    through = text.index(end, before + 1) + len(end)
    assert violation == Violation(len(encode_text(bpe, text[:before])), reason)
    assert len(counts) == len(encode_text(bpe, text[: before + len(text[before:through])])) - (len(end) - 1)
    assert counts[-1] <= violation.start


def test_sound_count_stops_at_checked_values(bpe: TokenizerWrapper) -> None:
    text = '{"a": 1, "tags": [1, 2], "n": 3}'
    _, counts = add_all(make_check(bpe, TAGS, TAG_CHECKS), encode_text(bpe, text))
    first, tags, number = text.index("1"), text.index("["), text.index("3")
    assert len(encode_text(bpe, text)) == len(text)  # a token a character
    behind = text.index("]") + 1
    expected = [*range(1, first + 1), first, *range(first + 2, tags + 1)]  # a number is held until its end
    expected += [*[tags] * (behind - tags - 1), *range(behind, number + 1), number, len(text)]
    assert counts == [*expected, len(text)]


def test_outermost_checked_value_is_held(bpe: TokenizerWrapper) -> None:
    schema = {"items": {"uniqueItems": True}, "not": {"maxItems": 1}}
    tokens = encode_text(bpe, " [[1], [2]]")
    violation, counts = add_all(make_check(bpe, schema, ["", "/items"]), tokens)
    assert violation is None and counts == [1] * 10 + [11, 11]
    violation, counts = add_all(make_check(bpe, schema, ["", "/items"]), encode_text(bpe, "[[1, 1]"))
    assert violation == Violation(5, "/0/1: is equal to an earlier item (uniqueItems)") and counts[-1] == 0


@pytest.mark.parametrize(
    ("schema", "text", "start", "reason", "is_incomplete"),
    [
        ({"multipleOf": 2}, "3", 0, "is no multiple of the required number (multipleOf)", False),
        ({"multipleOf": 2}, " 4", None, "", False),
        ({"minProperties": 1}, "{}", 0, "has too few properties (minProperties)", True),
        ({"not": {"const": {"a": 1}}}, '{"a": 1}', 0, "is valid under an excluded schema (not)", False),
        ({"not": {}, "type": "array"}, "[1, 2", 0, "can't be read: ", True),
        ({"maxItems": 9}, "[1 2]", 0, "can't be read: ", False),
        ({"maxItems": 9}, "[1e999]", 1, "/0: can't be read: 1e999 is too large a number", False),
        ({"maxItems": 9}, f"[{'1' * 5000}]", 1, "/0: can't be read: ", False),
        ({"maxItems": 9}, "", 0, "can't be read: ", True),
        ({"maxItems": 9}, "[" * 9000 + "]" * 9000, 0, "", False),
        ({"minProperties": 1}, '{"a": 1, "\\u0061"', 7, 'repeats the key "a"', False),
        ({"items": {"minProperties": 1}}, '[{"a": 1, "a"', 8, '/0: repeats the key "a"', False),
        ({"items": {"maximum": 3}}, '["\\ud83d", 7]', 11, "/1: is too large (maximum)", False),
        (
            {"properties": {"\n\ud83d": {"maximum": 3}}},
            '{"\\n\\ud83d": 7}',
            13,
            "/ \ufffd: is too large (maximum)",
            False,
        ),
    ],
)
def test_violations(
    bpe: TokenizerWrapper, schema: Any, text: str, start: int | None, reason: str, is_incomplete: bool
) -> None:
    check = "/items" if "items" in schema else "/properties/\n\ud83d" if "properties" in schema else ""
    violation = find_violation(bpe, schema, [check], text)
    if start is None:
        assert violation is None
        return
    assert violation is not None and violation.reason.startswith(reason) and len(violation.reason) <= 300
    assert (violation.start, violation.is_incomplete) == (start, is_incomplete)


def test_costly_checks_are_violations(bpe: TokenizerWrapper) -> None:
    definitions: dict[str, Any] = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    schema = {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": {**definitions, "a40": {"multipleOf": 7}}}
    violation = find_violation(bpe, schema, ["/$defs/a40"], '{"a": 1}')
    assert violation == Violation(6, "/a: the value takes too long to check", is_final=True)


def test_costly_patterns_of_names_are_violations(bpe: TokenizerWrapper) -> None:
    schema = {"patternProperties": {"^(a|a)*$": {"uniqueItems": True}}}
    violation = find_violation(bpe, schema, ["/patternProperties/^(a|a)*$"], '{"' + "a" * 60 + 'b": 1}')
    assert violation is None or violation.start == 66


def test_time_of_a_token_is_bounded(bpe: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_validation, "VALIDATION_TIME_MAX_S", -1.0)
    violation = find_violation(bpe, {"items": {"multipleOf": 2}}, ["/items"], "[2]")
    assert violation == Violation(1, "/0: the values that end here take too long to check", is_final=True)


def test_work_of_an_answer_is_bounded(bpe: TokenizerWrapper) -> None:
    item = {"type": "integer", "maximum": 9, "not": {"multipleOf": 11}, "allOf": [{"$ref": "#/$defs/a"}] * 2000}
    schema = {"items": item, "$defs": {"a": {"minimum": 0}}}
    tokens = encode_text(bpe, "[" + "1, " * 200)
    violation, counts = add_all(make_check(bpe, schema, ["/items"]), tokens)
    assert violation is not None and violation.is_final
    assert re.fullmatch(r"/\d+: the values take too long to check", violation.reason)
    assert 10 < len(counts) < 150  # some dozen items, of three tokens each


def test_work_of_ordinary_items_never_ends_an_answer(bpe: TokenizerWrapper) -> None:
    item = {
        "type": "integer",
        "minimum": 0,
        "maximum": 9,
        "not": {"multipleOf": 11},
        "anyOf": [{"const": 1}, {"enum": [2, 3]}],
        "allOf": [{"$ref": "#/$defs/a"}] * 6,
    }
    check = make_check(bpe, {"items": item, "$defs": {"a": {"type": "integer", "minimum": 0}}}, ["/items"])
    assert add_all(check, encode_text(bpe, "[" + "1, " * 3000 + "1]"), bpe.eos_token_id)[0] is None


def test_replayed_values_cost_no_work(bpe: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_validation, "STEPS_PER_TOKEN", 0)
    monkeypatch.setattr(value_validation, "ANSWER_STEPS", 500)
    check = make_check(bpe, {"items": {"multipleOf": 2}}, ["/items"])
    tokens = encode_text(bpe, "[" + "2, " * 50)
    assert add_all(check, tokens)[0] is None
    for _ in range(20):
        check.rewind(len(tokens) - 1)
    assert add_all(check, encode_text(bpe, " 2, 4, "))[0] is None


def test_deep_answers_are_followed(bpe: TokenizerWrapper) -> None:
    depth = 1000
    check = make_check(bpe, {"items": {"items": {"$ref": "#"}, "multipleOf": 2}}, ["/items"])
    _, counts = add_all(check, encode_text(bpe, "[" * depth))
    assert counts[-1] == 1
    violation, counts = add_all(check, encode_text(bpe, "]" * depth))
    assert violation is not None and violation.reason.startswith("/0/0/") and len(violation.reason) < 200
    assert re.search("nests too deep|takes too long|take too long|can't be read", violation.reason)
    assert counts[-1] == 1 < violation.start


def test_reasoning_is_sound(bpe: TokenizerWrapper) -> None:
    check = make_check(bpe, {"uniqueItems": True}, [""])
    assert add_all(check, encode_text(bpe, '<think>so [1, 1] "'))[1][-1] == len(encode_text(bpe, '<think>so [1, 1] "'))
    assert add_all(check, encode_text(bpe, "</think>\n\n"))[0] is None
    start = len(encode_text(bpe, '<think>so [1, 1] "</think>\n\n'))
    violation, counts = add_all(check, encode_text(bpe, "[1, 1]"))
    assert violation == Violation(start + 4, "/1: is equal to an earlier item (uniqueItems)")
    assert set(counts) == {start}


def test_text_without_parts_is_checked(bpe: TokenizerWrapper) -> None:
    check = make_check(bpe, {"uniqueItems": True}, [""], ExpectedOutput())
    assert add_all(check, encode_text(bpe, "\n[1, 4, 4]"))[0] == Violation(
        8, "/2: is equal to an earlier item (uniqueItems)"
    )


@pytest.mark.parametrize(
    ("text", "start", "added"),
    [
        ('{"a": [1, 1]}', 2, 4),
        ('{"a": [[2], [2, 2]]}', 7, 9),
        ('{"a": [12, 3]}', 5, 7),
        ('{"a": [2, 4, 5]}', 6, 8),
    ],
)
def test_value_may_begin_and_end_within_tokens(tmp_path: Path, text: str, start: int, added: int) -> None:
    tokenizer = make_tokenizer(tmp_path / "joined", ['{"', 'a": [', "], [", ", ", "]]", "]}"])
    schema = {"properties": {"a": {"uniqueItems": True, "items": {"uniqueItems": True, "multipleOf": 2}}}}
    violation, counts = add_all(
        make_check(tokenizer, schema, ["/properties/a", "/properties/a/items"]), encode_text(tokenizer, text)
    )
    assert violation is not None
    assert (violation.start, len(counts)) == (start, added)
    assert counts[-1] == 1  # the token in which the outer array begins


def test_content_between_markers(tmp_path: Path) -> None:
    tokenizer = BY_NAME["kimi_k3"].tokenizer(tmp_path)
    head = "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>"
    for tools in (None, TOOLS):
        expected = ExpectedOutput(has_parts=True, tools=tools, is_constrained=True)
        for value, is_valid in (("[1, 2]", True), ("[1, 1]", False)):
            check = make_check(tokenizer, {"uniqueItems": True}, [""], expected)
            tokens = encode_text(tokenizer, f"{head}{value}<|close|>response<|sep|>")
            violation, _ = add_all(check, tokens, tokenizer.eos_token_id)
            start = len(encode_text(tokenizer, head))
            assert violation == (
                None if is_valid else Violation(start + 4, "/1: is equal to an earlier item (uniqueItems)")
            )


SCHEMA: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "properties": {"a": {"$ref": "#/$defs/list"}, "b": {"anyOf": [{"$ref": "#/$defs/node"}, {"maximum": 1}]}},
            "patternProperties": {"^[bc]": {"not": {"const": 2}}},
            "additionalProperties": {"maxItems": 1},
            "maxProperties": 3,
        },
        "list": {
            "allOf": [{"items": {"$ref": "#/$defs/node"}}, {"prefixItems": [{"minimum": 1}]}],
            "uniqueItems": True,
        },
    },
}
ASSERTIONS = {"maximum", "minimum", "not", "maxItems", "maxProperties", "uniqueItems"}
VALUES = st.recursive(
    st.integers(0, 3) | st.sampled_from(["", 'é"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=8,
)


def list_checks(schema: Any, pointer: str = "") -> Iterator[str]:
    """Pointers of the subschemas that assert something themselves."""
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, part in parts:
        yield from list_checks(part, f"{pointer}/{key}")
    if isinstance(schema, dict) and ASSERTIONS & schema.keys():
        yield pointer


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_violations_are_those_of_whole_schema(bpe: TokenizerWrapper, value: Any) -> None:
    text, checks = json.dumps(value, ensure_ascii=False), [*list_checks(SCHEMA)]
    violation = find_violation(bpe, SCHEMA, checks, text)
    assert (violation is None) == (SchemaValidator(SCHEMA).find_error(value) is None)


@given(VALUES, st.data())
@settings(max_examples=40, deadline=None)
def test_rewound_checks_equal_new_ones(bpe: TokenizerWrapper, value: Any, data: st.DataObject) -> None:
    tokens, checks = encode_text(bpe, json.dumps(value, ensure_ascii=False)), [*list_checks(SCHEMA)]
    new = make_check(bpe, SCHEMA, checks)
    expected = add_all(new, tokens, bpe.eos_token_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_check, "SNAPSHOT_TOKENS", 3)
        patch.setattr(answer_check, "SNAPSHOTS_MAX", 4)
        check = make_check(bpe, SCHEMA, checks)
        for _ in range(3):
            done = len(add_all(check, tokens, bpe.eos_token_id)[1])
            count = data.draw(st.integers(0, min(done, len(tokens)) - 1))
            check.rewind(count)
            assert check.sound_count == (expected[1][count - 1] if count else 0)
            add_all(check, encode_text(bpe, ' "é'))  # another way to go on
            check.rewind(count)
            tail = add_all(check, tokens[count:], bpe.eos_token_id)
            assert tail == (expected[0], expected[1][count:])
            check.rewind(0)


def test_long_answers_have_few_snapshots(bpe: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_check, "SNAPSHOT_TOKENS", 4)
    check = make_check(bpe, {"items": {"multipleOf": 2}}, ["/items"])
    tokens = encode_text(bpe, "[" + "2, " * 300)
    assert add_all(check, tokens)[0] is None
    counts = [count for count, _ in check._snapshots]
    assert len(counts) <= answer_check.SNAPSHOTS_MAX and counts[0] == 0 and len(tokens) - counts[-1] < 8
    check.rewind(len(tokens) - 3)
    assert add_all(check, encode_text(bpe, "3]"))[0] == Violation(
        len(tokens) - 3, "/299: is no multiple of the required number (multipleOf)"
    )
