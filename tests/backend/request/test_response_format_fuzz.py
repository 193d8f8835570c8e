"""Any body is accepted or refused with a message."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.backend.grammar_cases import make_compiler, make_family_tokenizer
from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.compiler import GrammarCompiler

KEYWORDS = ["type", "json_schema", "schema", "name", "json", "regex", "choice", "grammar", "mode", "allowed_tools"]
FAMILIES = ["json_tools", "glm47", "minicpm5", "pythonic", "gemma4", "kimi_k3", "deepseek_v32"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["object", "array", "string", "integer", "#/$defs/a", "#", "a", "^a{1,3}$", "date", ""])
    | st.text(max_size=4)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=12,
)
SCHEMAS = st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=4) | ANYTHING
HOW_OFTEN = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GrammarCompiler]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {name: make_compiler(make_family_tokenizer(name, root)) for name in FAMILIES}


def assert_accepted_or_refused(grammars: GrammarCompiler, body: dict[str, Any]) -> None:
    try:
        constraint = grammars.build_constraint("chat", body, body.get("tools"), "")
    except BadRequestError as error:
        reply = json.loads(error.encode_reply())["error"]
        assert reply["message"] and len(reply["message"]) < 1000
    else:
        assert (
            constraint is None or not constraint.grammar or grammars.create_matcher(constraint).compute_allowed().any()
        )


@HOW_OFTEN
@given(SCHEMAS)
def test_any_schema_is_accepted_or_refused(families: dict[str, GrammarCompiler], schema: Any) -> None:
    assert_accepted_or_refused(families["json_tools"], {"structured_outputs": {"json": schema}})


@HOW_OFTEN
@given(st.sampled_from(FAMILIES), SCHEMAS, ANYTHING, st.booleans(), st.sampled_from(["required", "auto"]))
def test_any_tool_is_accepted_or_refused(
    families: dict[str, GrammarCompiler], family: str, parameters: Any, inner: Any, strict: bool, choice: str
) -> None:
    objects = {"type": "object", "properties": {"a": parameters, "b": inner}, "required": ["a"]}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": each, "strict": strict}}
        for each in (parameters, objects)
    ]
    assert_accepted_or_refused(families[family], {"tools": tools, "tool_choice": choice})


FIELDS = ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"]
WORDS = [
    "type",
    "json_schema",
    "schema",
    "name",
    "json",
    "regex",
    "choice",
    "grammar",
    "mode",
    "allowed_tools",
    "tools",
]
LOOSE = st.recursive(
    SCALARS | st.sampled_from(["json_object", "json_schema", "function", "allowed_tools", "required"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)


@HOW_OFTEN
@given(st.dictionaries(st.sampled_from([*FIELDS, "tool_choice", "parallel_tool_calls"]), LOOSE, max_size=3))
def test_any_body_is_accepted_or_refused(families: dict[str, GrammarCompiler], body: dict[str, Any]) -> None:
    assert_accepted_or_refused(families["json_tools"], body)
