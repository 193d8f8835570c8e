"""How a model family writes tool calls, by what its tokenizer and template say."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.tool_parsers import families as worded
from warmline_backend.tool_parsers import xml_style as tagged
from warmline_backend.tool_parsers.base import CallParser, ParsedItems, RawToolCall, normalize_name, parse_json_calls
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError


@dataclass(frozen=True)
class CallMarkers:
    """Where calls begin and end in the text, and how what stands between is read."""

    start: str  # "" where nothing marks it
    end: str  # "" where the end of the answer is the call's, or the next one's start
    parse: CallParser


@dataclass(frozen=True)
class ToolFormat(CallMarkers):
    name: str  # as mlx-lm names its parser, or one of ours
    special_tokens: tuple[str, ...] | None = ()  # special tokens that stand within a call; None where that is not known
    alternatives: tuple[CallMarkers, ...] = ()  # further ways to begin
    # Where an answer may be a call without any marker: whether one that begins so is; None where more must come first.
    can_be_bare: Callable[[str], bool | None] | None = None


def _make_format(name: str, start: str, end: str, parse: CallParser, **fields: Any) -> ToolFormat:
    return ToolFormat(start=start, end=end, parse=parse, name=name, **fields)


def _parse_unopened_function(text: str, cut: bool) -> ParsedItems:
    """Qwen's call where the model has left out the marker before it."""
    return tagged.parse_tagged(tagged.QWEN, f"<function={text}</function>", cut)


_DSML = "｜DSML｜"  # noqa: RUF001
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DEEPSEEK_TOKENS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
_KIMI_TOKENS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

_parse_glm = partial(tagged.parse_tagged, tagged.make_key_value_tags())
_PARSERS: dict[str, CallParser] = {  # by mlx-lm's names, whose markers are taken
    "json_tools": parse_json_calls,
    "qwen3_coder": partial(tagged.parse_tagged, tagged.QWEN),
    "glm47": _parse_glm,
    "laguna": _parse_glm,
    "longcat": partial(tagged.parse_tagged, tagged.make_key_value_tags("longcat_")),
    "minimax_m2": partial(tagged.parse_tagged, tagged.make_invoke_tags()),
    "muse_spark": partial(tagged.parse_tagged, tagged.make_invoke_tags("atem:")),
    "minicpm5": partial(tagged.parse_tagged, tagged.MINICPM),
    "kimi_k3": tagged.parse_kimi_k3,
    "kimi_k2": worded.parse_kimi_k2,
    "mistral": worded.parse_mistral,
    "pythonic": worded.parse_pythonic,
    "gemma4": partial(worded.parse_gemma, '<|"|>'),
    "function_gemma": partial(worded.parse_gemma, "<escape>"),
}
_GLM_TOKENS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_SPECIAL_TOKENS: dict[str, tuple[str, ...]] = {
    "glm47": _GLM_TOKENS,
    "laguna": _GLM_TOKENS,
    "longcat": tuple(word.replace("arg_", "longcat_arg_") for word in _GLM_TOKENS),
    "kimi_k2": _KIMI_TOKENS,
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
}
_ALTERNATIVES = {"qwen3_coder": (CallMarkers("<function=", "</function>", _parse_unopened_function),)}

_HARMONY = _make_format("harmony", "<|channel|>commentary to=functions.", "<|call|>", parse_json_calls)
_LLAMA3 = _make_format(
    "llama3",
    "",
    "",
    worded.parse_llama3,
    alternatives=(CallMarkers("<|python_tag|>", "", worded.parse_python_tag),),
    can_be_bare=worded.can_be_bare_call,
)
# Families that mlx-lm has no parser for, by words that stand in their templates.
_TEMPLATE_FORMATS: tuple[tuple[str, ToolFormat], ...] = (
    (
        _DSML,
        _make_format(
            "deepseek_v32",
            f"<{_DSML}function_calls>",
            f"</{_DSML}function_calls>",
            partial(tagged.parse_tagged, tagged.make_invoke_tags(_DSML, "string")),
            special_tokens=(_DSML,),
        ),
    ),
    (_DEEPSEEK[0], _make_format("deepseek_v3", *_DEEPSEEK, worded.parse_deepseek, special_tokens=_DEEPSEEK_TOKENS)),
    (
        "<seed:tool_call>",
        _make_format("seed_oss", "<seed:tool_call>", "</seed:tool_call>", partial(tagged.parse_tagged, tagged.QWEN)),
    ),
    ("<|START_ACTION|>", _make_format("command_a", "<|START_ACTION|>", "<|END_ACTION|>", parse_json_calls)),
    ("<|/tool_call|>", _make_format("phi4", "<|tool_call|>", "<|/tool_call|>", parse_json_calls)),
    ("<|tool_call|>", _make_format("granite", "<|tool_call|>", "", worded.parse_mistral)),
    ("<tool_call>", _make_format("json_tools", "<tool_call>", "</tool_call>", parse_json_calls)),
)


@lru_cache(maxsize=8)
def detect_tool_format(tokenizer: TokenizerWrapper) -> ToolFormat | None:
    """None where there is no chat template.  One without tools has them told by `fitting`, in the plainest way."""
    if tokenizer.has_tool_calling:
        return _make_mlx_format(tokenizer)
    vocabulary = tokenizer.get_vocab()
    if is_harmony(vocabulary):
        return _HARMONY
    template = _get_template(tokenizer)
    if "<|python_tag|>" in vocabulary and '"parameters"' in template:
        return _LLAMA3
    return next(
        (ours for word, ours in _TEMPLATE_FORMATS if word in template), _TEMPLATE_FORMATS[-1][1] if template else None
    )


def is_harmony(vocabulary: dict[str, int]) -> bool:
    return {"<|start|>", "<|channel|>", "<|message|>"} <= vocabulary.keys()


def _get_template(tokenizer: TokenizerWrapper) -> str:
    """Jinja, or what stands for a template that is a program."""
    if tokenizer.init_kwargs.get("chat_template_type") == "deepseek_v32":
        return _DSML
    return str(tokenizer.chat_template or "")


def _make_mlx_format(tokenizer: TokenizerWrapper) -> ToolFormat:
    name = str(tokenizer.init_kwargs.get("tool_parser_type") or "")
    read = _PARSERS.get(name)
    words = _SPECIAL_TOKENS.get(name, ()) if read else None
    read = read or partial(_parse_with_mlx_lm, tokenizer.tool_parser)
    start, end = str(tokenizer.tool_call_start), str(tokenizer.tool_call_end)
    return _make_format(name, start, end, read, special_tokens=words, alternatives=_ALTERNATIVES.get(name, ()))


def _parse_with_mlx_lm(mlx_parser: Callable[[str], Any], text: str, cut: bool) -> ParsedItems:
    """A family that is new to us."""
    try:
        parsed = mlx_parser(text)
        calls = parsed if isinstance(parsed, list) else [parsed]
        written = [RawToolCall(normalize_name(call["name"]), call["arguments"]) for call in calls]
    except Exception as error:  # parsers raise whatever they like
        raise ToolCallParseError(str(error)) from error
    if not written or not all(isinstance(call.arguments, dict) for call in written):
        raise ToolCallParseError("no call")
    return [*written]
