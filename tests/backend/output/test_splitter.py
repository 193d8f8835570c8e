"""Parts of an answer: independent of tokenization, with nothing lost."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.small_tokenizers import make_byte_level_tokenizer
from support.backend.tool_families import BY_NAME, HARMONY, TOOLS
from warmline_backend.output.dialect import Dialect, detect_dialect
from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser, make_splitter

CALL = '<tool_call>\n{"name": "now", "arguments": {"a": "b"}}\n</tool_call>'
MARKED = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    CALL[:30],
    "<thi",
    "</",
    "a",
    " ",
    "\n",
    '{"',
    '"}',
    "é",
]
QWEN = ["<function=now>", "<parameter=a>", "</parameter>", "</function>", "\n"]
LLAMA = ['{"name": "now", ', '"parameters": {}}', "; ", "<|python_tag|>", "{", "a", "\n"]
HEADED = [*HARMONY.markers, "analysis", "final", "commentary", " to=functions.now", "assistant", "{}", "a", " "]


@pytest.fixture(scope="module")
def dialects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dialect]:
    folder = tmp_path_factory.mktemp("splitting")
    families = [BY_NAME["json_tools"], BY_NAME["qwen3_coder"], BY_NAME["llama3"], HARMONY]
    return {family.name: detect_dialect(family.tokenizer(folder)) for family in families}


def merge_parts(parts: list[Part]) -> list[Part]:
    """Merge adjacent pieces of text, and of reasoning."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + part.text)
        else:
            out.append(part)
    return out


def split_pieces(dialect: Dialect, pieces: list[str], expected: ExpectedOutput, natural: bool) -> list[Part]:
    splitter, parts = make_splitter(dialect, expected), []
    for piece in pieces:
        if not splitter.is_done:
            parts += splitter.feed(piece)
    return parts if splitter.is_done else [*parts, *splitter.finish(natural)]


def check_offsets(text: str, parts: list[Part]) -> None:
    """Content and reasoning stand in the text where their parts say, each in order.

    Spaces at the beginning of the content may come after the reasoning that follows them.
    """
    for kind in (Text, Reasoning):
        end = 0
        for part in parts:
            if isinstance(part, kind):
                assert part.start >= end and text.startswith(part.text, part.start), (text, part)
                end = part.start + len(part.text)


def list_names_and_texts(parts: list[Part]) -> list[tuple[str, str]]:
    return [
        (part.name, part.arguments) if isinstance(part, ToolCall) else (type(part).__name__, part.text)
        for part in merge_parts(parts)
    ]


@pytest.mark.parametrize("pieces", ["whole", "letters"])
def test_constrained_content_may_contain_markers(dialects: dict[str, Dialect], pieces: str) -> None:
    form = json.dumps({"why": "<think>no</think>", "then": CALL})
    for before, reasoning in (("", []), ("<think>\nHm.\n</think>\n\n", [("Reasoning", "Hm.")])):
        answer = list(before + form) if pieces == "letters" else [before + form]
        for tools in (None, TOOLS):
            parts = split_pieces(
                dialects["json_tools"], answer, ExpectedOutput(has_parts=True, tools=tools, is_constrained=True), True
            )
            assert list_names_and_texts(parts) == [*reasoning, ("Text", form)]
    called = split_pieces(
        dialects["json_tools"], [CALL], ExpectedOutput(has_parts=True, tools=TOOLS, is_constrained=True), True
    )
    assert [part.name for part in called if isinstance(part, ToolCall)] == ["now"]


def test_text_after_unopened_call_is_the_models_own(dialects: dict[str, Dialect]) -> None:
    text = "<function=now><function=now><think>"
    parts = split_pieces(dialects["qwen3_coder"], [text], ExpectedOutput(has_parts=True, tools=TOOLS), True)
    assert list_names_and_texts(parts) == [("now", "{}"), ("Text", "<function=now><think>")]
    check_offsets(text, parts)


@given(
    family=st.sampled_from(
        [("json_tools", MARKED), ("qwen3_coder", MARKED + QWEN), ("llama3", LLAMA), ("harmony", HEADED)]
    ),
    data=st.data(),
    tail=st.sampled_from(["", "<think>\n", "<|start|>assistant"]),
    natural=st.booleans(),
    parallel=st.booleans(),
)
def test_parts_are_independent_of_tokenization(
    dialects: dict[str, Dialect],
    family: tuple[str, list[str]],
    data: st.DataObject,
    tail: str,
    natural: bool,
    parallel: bool,
) -> None:
    name, words = family
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    pieces = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    expected = ExpectedOutput(has_parts=True, tail=tail, tools=TOOLS, parallel=parallel)
    whole = split_pieces(dialects[name], [text], expected, natural)
    cut = split_pieces(dialects[name], pieces, expected, natural)
    assert list_names_and_texts(cut) == list_names_and_texts(whole)
    check_offsets(text, whole)
    check_offsets(text, cut)
    assert list_names_and_texts(split_pieces(dialects[name], [*text], expected, natural)) == list_names_and_texts(whole)


def split_letters(text: str) -> str:
    return "".join(text.split())


@given(
    words=st.lists(st.sampled_from(MARKED), max_size=12), tail=st.sampled_from(["", "<think>\n"]), natural=st.booleans()
)
def test_only_markers_and_calls_are_removed_from_text(
    dialects: dict[str, Dialect], words: list[str], tail: str, natural: bool
) -> None:
    text = "".join(words)
    parts = split_pieces(
        dialects["json_tools"], [text], ExpectedOutput(has_parts=True, tail=tail, tools=TOOLS), natural
    )
    letters = split_letters("".join(part.text for part in parts if not isinstance(part, ToolCall)))
    calls = sum(isinstance(part, ToolCall) for part in parts)
    rest = split_letters(text)
    for part in letters:
        assert part in rest
    for marker in ("<think>", "</think>", "</tool_call>"):
        rest, letters = rest.replace(marker, ""), letters.replace(marker, "")
    assert calls <= text.count('{"name": "now", "arguments": {"a": "b"}}')
    for _ in range(calls):
        rest = rest.replace(split_letters(CALL).replace("</tool_call>", ""), "", 1)
    assert sorted(letters) == sorted(rest)


@given(text=st.text("the <think></>\n", max_size=40), stop=st.sampled_from([(), ("th",), ("\n",), ("<th", "k>")]))
def test_stop_word_applies_to_content_only(bpe: TokenizerWrapper, text: str, stop: tuple[str, ...]) -> None:
    stream = OutputParser(bpe, stop, ExpectedOutput(has_parts=True))
    parts = [part for token in bpe.encode(f"<think>{text}", add_special_tokens=False) for part in stream.add(token)]
    parts = parts if stream.is_stopped else [*parts, *stream.finish()]
    answer = "".join(part.text for part in parts if isinstance(part, Text))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    reasoning, end, content = text.partition("</think>")
    assert thought.startswith(reasoning.strip("\n").replace("<think>", "", reasoning.startswith("<think>"))[:3])
    assert not any(word in answer for word in stop)
    if not any(word in content for word in stop) and "<think>" not in content and "</think>" not in content:
        assert answer == (content.lstrip("\n") if end else "")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_byte_level_tokenizer(tmp_path_factory.mktemp("bpe"))


def test_call_is_emitted_once_complete(dialects: dict[str, Dialect]) -> None:
    splitter = make_splitter(dialects["json_tools"], ExpectedOutput(has_parts=True, tools=TOOLS))
    assert splitter.feed(CALL[:-1]) == []
    (call,) = splitter.feed(">")
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == {"a": "b"}


def test_text_is_emitted_at_once(dialects: dict[str, Dialect]) -> None:
    splitter = make_splitter(dialects["json_tools"], ExpectedOutput(has_parts=True, tools=TOOLS))
    assert [splitter.feed(text) for text in ("A ", "b <", "c", " <tool", "s>")] == [
        [Text("A")],
        [Text(" b")],
        [Text(" <c")],
        [],
        [Text(" <tools>")],
    ]
