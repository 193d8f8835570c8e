"""Tool-call formats of all model families: one table of markers, parser and syntax, and detection by tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.tool_parsers import families, xml_style
from warmline_backend.tool_parsers.base import CallParser, ParsedItems, RawToolCall, normalize_name, parse_json_calls
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError


@dataclass(frozen=True)
class ArgumentSyntax:
    """Arguments of a call as a family writes them.  Templates as in CallSyntax; `%k` is the kind of a value.

    json: one object.  tags: text or JSON between `start` and `end`.  flagged: tags that tell strings from JSON.
    typed: tags with a value's JSON type.  cdata: tags around plain or quoted text.  python: keyword arguments.
    gemma: an object with bare keys and strings between `quote`s.
    """

    style: Literal["json", "tags", "flagged", "typed", "cdata", "python", "gemma"] = "json"
    start: str = ""
    end: str = ""
    banned: tuple[str, ...] = ()  # tags that text may not contain
    quote: str = ""


@dataclass(frozen=True)
class CallSyntax:
    """Text of an answer's calls as templates, of which structured_output writes grammars.

    %n the name, %q the name as JSON, %a the arguments, %d a number, %i a number from 1, %b an optional line break,
    %s an optional space.
    """

    call: str
    arguments: ArgumentSyntax = ArgumentSyntax()
    separator: str = ""  # between calls
    start: str = ""  # of a section that holds all calls; "" where each call has markers of its own
    end: str = ""
    empty_call: str = ""  # a call without arguments, where it is written differently
    is_single: bool = False  # a call ends the answer
    variant: "tuple[str, CallSyntax] | None" = None  # a special token, and the syntax of tokenizers that have it


@dataclass(frozen=True)
class CallMarkers:
    """Markers around calls, and the parser of the text between them."""

    start: str  # "" for none
    end: str  # "" where the end of the answer is the call's, or the next one's start
    parse: CallParser


@dataclass(frozen=True)
class ToolFormat(CallMarkers):
    """Format of one family.  Markers are "" in the table where the tokenizer names them."""

    name: str  # as mlx-lm names its parser, or one of ours
    syntax: CallSyntax | None = None  # None: no grammar can be written
    template_word: str = ""  # found in chat templates of a family that mlx-lm has no parser for
    special_tokens: tuple[str, ...] | None = ()  # special tokens that stand within a call; None where that is not known
    alternatives: tuple[CallMarkers, ...] = ()  # further ways to begin
    # Whether an answer that begins so is a call without any marker; None where more must come first.
    can_be_bare: Callable[[str], bool | None] | None = None


def _tags(start: str, end: str, banned: tuple[str, ...]) -> ArgumentSyntax:
    return ArgumentSyntax("tags", start, end, banned)


def _make_format(
    name: str, parse: CallParser, syntax: CallSyntax, markers: tuple[str, str] = ("", ""), **fields: Any
) -> ToolFormat:
    return ToolFormat(*markers, parse, name, syntax, **fields)


def _parse_tags(tags: xml_style.TagFormat) -> CallParser:
    return partial(xml_style.parse_tagged, tags)


def _parse_unopened_function(text: str, cut: bool) -> ParsedItems:
    """Parse Qwen's call where the model has left out the marker before it; text is the model's, without our tags."""
    opening, end = "<function=", xml_style.QWEN.call_end
    items = [*xml_style.parse_tagged(xml_style.QWEN, f"{opening}{text}{end}", cut)]
    if items and isinstance(items[-1], str):
        items[-1] = items[-1].removesuffix(end)
    return [item for item in items if item]


def _make_qwen_syntax(prefix: str) -> CallSyntax:
    return CallSyntax(
        f"<{prefix}tool_call>\n<function=%n>\n%a</function>\n</{prefix}tool_call>",
        _tags("<parameter=%n>\n", "\n</parameter>\n", ("</parameter>", "</function>", f"</{prefix}tool_call>")),
        separator="\n",
    )


def _make_invoke_syntax(prefix: str, section: str) -> CallSyntax:
    return CallSyntax(
        f'<{prefix}invoke name="%n">\n%a</{prefix}invoke>\n',
        _tags(f'<{prefix}parameter name="%n">', f"</{prefix}parameter>\n", (f"</{prefix}invoke>", f"</{section}>")),
        start=f"<{section}>\n",
        end=f"</{section}>",
    )


def _make_list_format(name: str, parse: CallParser, start: str, end: str = "", template_word: str = "") -> ToolFormat:
    """Format of one JSON list of all calls."""
    syntax = CallSyntax('{"name": %q, "arguments": %a}', separator=", ", start=f"{start}%s[", end=f"]{end}")
    return _make_format(name, parse, syntax, (start, end), template_word=template_word)


_DSML = "｜DSML｜"  # noqa: RUF001
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DEEPSEEK_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
_KIMI_TOKENS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_GLM_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_QWEN3_CODER = _make_format(
    "qwen3_coder",
    _parse_tags(xml_style.QWEN),
    _make_qwen_syntax(""),
    alternatives=(CallMarkers("<function=", "</function>", _parse_unopened_function),),
)
_GLM = _make_format(
    "glm47",
    _parse_tags(xml_style.make_key_value_tags()),
    CallSyntax(
        "<tool_call>%n%b%a</tool_call>",
        _tags("<arg_key>%n</arg_key>%b<arg_value>", "</arg_value>%b", ("</arg_key>", "<arg_key>", "</tool_call>")),
        separator="%b",
    ),
    special_tokens=_GLM_TOKENS,
)
_JSON_TOOLS = _make_format(
    "json_tools",
    parse_json_calls,
    CallSyntax('<tool_call>\n{"name": %q, "arguments": %a}\n</tool_call>', separator="\n"),
    ("<tool_call>", "</tool_call>"),
    template_word="<tool_call>",
)
_HARMONY = _make_format(
    "harmony",
    parse_json_calls,
    CallSyntax("<|channel|>commentary to=functions.%n <|constrain|>json<|message|>%a", is_single=True),
    ("<|channel|>commentary to=functions.", "<|call|>"),
)
_LLAMA3 = _make_format(
    "llama3",
    families.parse_llama3,
    CallSyntax('{"name": %q, "parameters": %a}', separator="; "),
    alternatives=(CallMarkers("<|python_tag|>", "", families.parse_python_tag),),
    can_be_bare=families.can_be_bare_call,
)
# All families.  Of those with a `template_word` the first one with its word in the template counts.
_FORMATS = (
    _QWEN3_CODER,
    _GLM,
    replace(_GLM, name="laguna"),
    _make_format(
        "longcat",
        _parse_tags(xml_style.make_key_value_tags("longcat_")),
        CallSyntax(
            "<longcat_tool_call>%n\n%a</longcat_tool_call>",
            _tags(
                "<longcat_arg_key>%n</longcat_arg_key>\n<longcat_arg_value>",
                "</longcat_arg_value>\n",
                ("<longcat_arg_key>", "</longcat_arg_key>", "</longcat_tool_call>"),
            ),
            separator="\n",
            empty_call='<longcat_tool_call>{"name": "%n", "arguments": {}}</longcat_tool_call>',
        ),
        special_tokens=tuple(word.replace("arg_", "longcat_arg_") for word in _GLM_TOKENS),
    ),
    _make_format("minimax_m2", _parse_tags(xml_style.make_invoke_tags()), _make_invoke_syntax("", "minimax:tool_call")),
    _make_format(
        "muse_spark",
        _parse_tags(xml_style.make_invoke_tags("atem:")),
        _make_invoke_syntax("atem:", "atem:function_calls"),
    ),
    _make_format(
        "minicpm5",
        _parse_tags(xml_style.MINICPM),
        CallSyntax(
            '<function name="%n">%a</function>',
            ArgumentSyntax("cdata", '<param name="%n">', "</param>"),
            separator="%b",
        ),
    ),
    _make_format(
        "kimi_k3",
        xml_style.parse_kimi_k3,
        CallSyntax(
            '<|open|>call tool="%n" index="%i"<|sep|>%a<|close|>call<|sep|>',
            ArgumentSyntax("typed", '<|open|>argument key="%n" type="%k"<|sep|>', "<|close|>argument<|sep|>"),
            start="<|open|>tools<|sep|>",
            end="<|close|>tools<|sep|>",
        ),
        special_tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    _make_format(
        "kimi_k2",
        partial(families.parse_sections, _KIMI_TOKENS),
        CallSyntax(
            "{}functions.%n:%d{}%a{}".format(*_KIMI_TOKENS),
            start="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
        special_tokens=_KIMI_TOKENS,
    ),
    _make_format(
        "mistral",
        families.parse_mistral,
        # Newer ones write a header a call, older ones one list.
        CallSyntax(
            '{"name": %q, "arguments": %a}',
            separator=", ",
            start="[TOOL_CALLS]%s[",
            end="]",
            variant=("[ARGS]", CallSyntax("[TOOL_CALLS]%n[ARGS]%a")),
        ),
        special_tokens=("[ARGS]", "[CALL_ID]"),
    ),
    _make_format(
        "pythonic",
        families.parse_pythonic,
        CallSyntax(
            "%n(%a)", ArgumentSyntax("python"), separator=", ", start="<|tool_call_start|>[", end="]<|tool_call_end|>"
        ),
    ),
    _make_format(
        "gemma4",
        partial(families.parse_gemma, '<|"|>'),
        CallSyntax("<|tool_call>call:%n%a<tool_call|>", ArgumentSyntax("gemma", quote='<|"|>')),
        special_tokens=('<|"|>',),
    ),
    _make_format(
        "function_gemma",
        partial(families.parse_gemma, "<escape>"),
        CallSyntax(
            "<start_function_call>call:%n%a<end_function_call>",
            ArgumentSyntax("gemma", quote="<escape>", banned=("}",)),
        ),
        special_tokens=("<escape>",),
    ),
    _HARMONY,
    _LLAMA3,
    _make_format(
        "deepseek_v32",
        _parse_tags(xml_style.make_invoke_tags(_DSML, "string")),
        CallSyntax(
            f'<{_DSML}invoke name="%n">\n%a</{_DSML}invoke>\n',
            ArgumentSyntax(
                "flagged", f'<{_DSML}parameter name="%n" string="%k">', f"</{_DSML}parameter>\n", (f"</{_DSML}invoke>",)
            ),
            start=f"<{_DSML}function_calls>\n",
            end=f"</{_DSML}function_calls>",
        ),
        (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
        template_word=_DSML,
        special_tokens=(_DSML,),
    ),
    _make_format(
        "deepseek_v3",
        partial(families.parse_sections, _DEEPSEEK_TOKENS),
        CallSyntax("{}%n{}%a{}".format(*_DEEPSEEK_TOKENS), start=_DEEPSEEK[0], end=_DEEPSEEK[1]),
        _DEEPSEEK,
        template_word=_DEEPSEEK[0],
        special_tokens=_DEEPSEEK_TOKENS,
    ),
    _make_format(
        "seed_oss",
        _QWEN3_CODER.parse,
        _make_qwen_syntax("seed:"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        template_word="<seed:tool_call>",
    ),
    _make_format(
        "command_a",
        parse_json_calls,
        CallSyntax(
            '{"tool_call_id": "%d", "tool_name": %q, "parameters": %a}',
            separator=",\n    ",
            start="<|START_ACTION|>[\n    ",
            end="\n]<|END_ACTION|>",
        ),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        template_word="<|START_ACTION|>",
    ),
    _make_list_format("phi4", parse_json_calls, "<|tool_call|>", "<|/tool_call|>", template_word="<|/tool_call|>"),
    _make_list_format("granite", families.parse_mistral, "<|tool_call|>", template_word="<|tool_call|>"),
    _JSON_TOOLS,
)
_FORMATS_BY_NAME = {family.name: family for family in _FORMATS}


@lru_cache(maxsize=8)
def detect_tool_format(tokenizer: TokenizerWrapper) -> ToolFormat | None:
    """Format of a tokenizer's calls; None where there is no chat template.

    A template without tools has them described by `prompt.template_compat`, for calls of the plainest format.
    """
    if tokenizer.has_tool_calling:
        return _detect_mlx_format(tokenizer)
    vocabulary = tokenizer.get_vocab()
    if is_harmony(vocabulary):
        return _HARMONY
    # Jinja, or the word for a template that is a program.
    is_program = tokenizer.init_kwargs.get("chat_template_type") == "deepseek_v32"
    template = _DSML if is_program else str(tokenizer.chat_template or "")
    if "<|python_tag|>" in vocabulary and '"parameters"' in template:
        return _LLAMA3
    named = (family for family in _FORMATS if family.template_word and family.template_word in template)
    return next(named, _JSON_TOOLS if template else None)


def is_harmony(vocabulary: dict[str, int]) -> bool:
    """True for a vocabulary with the markers of gpt-oss."""
    return {"<|start|>", "<|channel|>", "<|message|>"} <= vocabulary.keys()


def _detect_mlx_format(tokenizer: TokenizerWrapper) -> ToolFormat:
    name = str(tokenizer.init_kwargs.get("tool_parser_type") or "")
    start, end = str(tokenizer.tool_call_start), str(tokenizer.tool_call_end)
    if tool_format := _FORMATS_BY_NAME.get(name):
        return replace(tool_format, start=start, end=end)
    return ToolFormat(start, end, partial(_parse_with_mlx_lm, tokenizer.tool_parser), name, special_tokens=None)


def _parse_with_mlx_lm(mlx_parser: Callable[[str], Any], text: str, cut: bool) -> ParsedItems:
    """Parse calls of a family that is not in the table."""
    try:
        parsed = mlx_parser(text)
        calls = parsed if isinstance(parsed, list) else [parsed]
        raw_calls = [RawToolCall(normalize_name(call["name"]), call["arguments"]) for call in calls]
    except Exception as error:  # parsers raise whatever they like
        raise ToolCallParseError(str(error)) from error
    if not raw_calls or not all(isinstance(call.arguments, dict) for call in raw_calls):
        raise ToolCallParseError("no call")
    return [*raw_calls]
