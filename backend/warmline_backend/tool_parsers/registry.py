"""How a model family writes tool calls, by what its tokenizer and template say."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.tool_parsers import families as worded
from warmline_backend.tool_parsers import xml_style as tagged
from warmline_backend.tool_parsers.base import Items, Reader, Written, plain_name, read_json_calls
from warmline_backend.tool_parsers.lenient_json import Unreadable


@dataclass(frozen=True)
class Opening:
    """Where calls begin and end in the text, and how what stands between is read."""

    start: str  # "" where nothing marks it
    end: str  # "" where the end of the answer is the call's, or the next one's start
    read: Reader


@dataclass(frozen=True)
class ToolFormat(Opening):
    name: str  # as mlx-lm names its parser, or one of ours
    words: tuple[str, ...] | None = ()  # special tokens that stand within a call; None where that is not known
    others: tuple[Opening, ...] = ()  # further ways to begin
    # Where an answer may be a call without any marker: whether one that begins so is; None where more must come first.
    may_be_bare: Callable[[str], bool | None] | None = None


def _made(name: str, start: str, end: str, read: Reader, **fields: Any) -> ToolFormat:
    return ToolFormat(start=start, end=end, read=read, name=name, **fields)


def _whole_function(text: str, cut: bool) -> Items:
    """Qwen's call where the model has left out the marker before it."""
    return tagged.read_tagged(tagged.QWEN, f"<function={text}</function>", cut)


_DSML = "｜DSML｜"  # noqa: RUF001
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DEEPSEEK_WORDS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
_KIMI_WORDS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

_GLM = partial(tagged.read_tagged, tagged.keyed())
_READERS: dict[str, Reader] = {  # by mlx-lm's names, whose markers are taken
    "json_tools": read_json_calls,
    "qwen3_coder": partial(tagged.read_tagged, tagged.QWEN),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": partial(tagged.read_tagged, tagged.keyed("longcat_")),
    "minimax_m2": partial(tagged.read_tagged, tagged.invoked()),
    "muse_spark": partial(tagged.read_tagged, tagged.invoked("atem:")),
    "minicpm5": partial(tagged.read_tagged, tagged.MINICPM),
    "kimi_k3": tagged.read_kimi_k3,
    "kimi_k2": worded.read_kimi_k2,
    "mistral": worded.read_mistral,
    "pythonic": worded.read_pythonic,
    "gemma4": partial(worded.read_gemma, '<|"|>'),
    "function_gemma": partial(worded.read_gemma, "<escape>"),
}
_GLM_WORDS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_WORDS: dict[str, tuple[str, ...]] = {
    "glm47": _GLM_WORDS,
    "laguna": _GLM_WORDS,
    "longcat": tuple(word.replace("arg_", "longcat_arg_") for word in _GLM_WORDS),
    "kimi_k2": _KIMI_WORDS,
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
}
_OTHERS = {"qwen3_coder": (Opening("<function=", "</function>", _whole_function),)}

_HARMONY = _made("harmony", "<|channel|>commentary to=functions.", "<|call|>", read_json_calls)
_LLAMA3 = _made(
    "llama3",
    "",
    "",
    worded.read_llama3,
    others=(Opening("<|python_tag|>", "", worded.read_python_tag),),
    may_be_bare=worded.may_be_bare_call,
)
# Families that mlx-lm has no parser for, by words that stand in their templates.
_OURS: tuple[tuple[str, ToolFormat], ...] = (
    (
        _DSML,
        _made(
            "deepseek_v32",
            f"<{_DSML}function_calls>",
            f"</{_DSML}function_calls>",
            partial(tagged.read_tagged, tagged.invoked(_DSML, "string")),
            words=(_DSML,),
        ),
    ),
    (_DEEPSEEK[0], _made("deepseek_v3", *_DEEPSEEK, worded.read_deepseek, words=_DEEPSEEK_WORDS)),
    (
        "<seed:tool_call>",
        _made("seed_oss", "<seed:tool_call>", "</seed:tool_call>", partial(tagged.read_tagged, tagged.QWEN)),
    ),
    ("<|START_ACTION|>", _made("command_a", "<|START_ACTION|>", "<|END_ACTION|>", read_json_calls)),
    ("<|/tool_call|>", _made("phi4", "<|tool_call|>", "<|/tool_call|>", read_json_calls)),
    ("<|tool_call|>", _made("granite", "<|tool_call|>", "", worded.read_mistral)),
    ("<tool_call>", _made("json_tools", "<tool_call>", "</tool_call>", read_json_calls)),
)


@lru_cache(maxsize=8)
def tool_format(tokenizer: TokenizerWrapper) -> ToolFormat | None:
    """None where there is no chat template.  One without tools has them told by `fitting`, in the plainest way."""
    if tokenizer.has_tool_calling:
        return _mlx_lms(tokenizer)
    vocabulary = tokenizer.get_vocab()
    if is_harmony(vocabulary):
        return _HARMONY
    template = _template(tokenizer)
    if "<|python_tag|>" in vocabulary and '"parameters"' in template:
        return _LLAMA3
    return next((ours for word, ours in _OURS if word in template), _OURS[-1][1] if template else None)


def is_harmony(vocabulary: dict[str, int]) -> bool:
    return {"<|start|>", "<|channel|>", "<|message|>"} <= vocabulary.keys()


def _template(tokenizer: TokenizerWrapper) -> str:
    """Jinja, or what stands for a template that is a program."""
    if tokenizer.init_kwargs.get("chat_template_type") == "deepseek_v32":
        return _DSML
    return str(tokenizer.chat_template or "")


def _mlx_lms(tokenizer: TokenizerWrapper) -> ToolFormat:
    name = str(tokenizer.init_kwargs.get("tool_parser_type") or "")
    read = _READERS.get(name)
    words = _WORDS.get(name, ()) if read else None
    read = read or partial(_read_as_mlx_lm, tokenizer.tool_parser)
    start, end = str(tokenizer.tool_call_start), str(tokenizer.tool_call_end)
    return _made(name, start, end, read, words=words, others=_OTHERS.get(name, ()))


def _read_as_mlx_lm(parse: Callable[[str], Any], text: str, cut: bool) -> Items:
    """A family that is new to us."""
    try:
        parsed = parse(text)
        calls = parsed if isinstance(parsed, list) else [parsed]
        written = [Written(plain_name(call["name"]), call["arguments"]) for call in calls]
    except Exception as error:  # parsers raise whatever they like
        raise Unreadable(str(error)) from error
    if not written or not all(isinstance(call.arguments, dict) for call in written):
        raise Unreadable("no call")
    return [*written]
