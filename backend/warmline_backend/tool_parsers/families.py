"""Calls with words and brackets of a family's own around JSON, or something like it."""

import ast
import re
from typing import Any

from warmline_backend.tool_parsers.base import Items, Written, plain_name, read_arguments, read_json_calls, read_value
from warmline_backend.tool_parsers.lenient_json import Unreadable, read_leniently

PYTHON_CHARS_MAX = 65_536  # a parser's tree weighs many times its text

_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_GEMMA_HEAD = re.compile(r"\s*(?:call:\s*)?(?P<name>[\w.-]+)\s*(?=\{)")
_PYTHON_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*\(")
_PYTHON_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=\s*")
_BUILT_IN = re.compile(r"\s*(?P<name>[\w.]+?)(?:\.call)?\(")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_mistral(text: str, cut: bool) -> Items:
    """A list of objects, or a header and an object a call; what comes after them is text."""
    stripped = text.lstrip()
    if stripped[:1] in ("[", "{"):
        _, end = read_value(stripped, 0, cut)
        items = read_json_calls(stripped[:end], cut)
        return [*items, *_rest(stripped[end:])]
    items, at = [], 0
    while head := _MISTRAL_HEAD.match(text, at):
        arguments, at = read_value(text, head.end(), cut)
        items.append(Written(plain_name(head["name"]), arguments))
    if not items:
        raise Unreadable("no call")
    return [*items, *_rest(text[at:])]


def _rest(text: str) -> Items:
    return [text] if text.strip() else []


def read_kimi_k2(text: str, cut: bool) -> Items:
    """functions.NAME:NUMBER, a marker and an object, each call between markers of its own."""
    return _sectioned(text, _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END)


def read_deepseek(text: str, cut: bool) -> Items:
    """The name, a marker and an object; older ones write the kind first, and the object in a code fence."""
    return _sectioned(text, _DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END)


def _sectioned(text: str, begin: str, separator: str, end: str) -> Items:
    items: Items = []
    between, *calls = text.split(begin)
    items += _rest(between)
    for call in calls:
        try:
            items += _call_in_section(call, separator, end)
        except Unreadable as error:
            if error.cut:
                raise
            items.append(begin + call)
    if not any(isinstance(item, Written) for item in items):
        raise Unreadable("no call")
    return items


def _call_in_section(call: str, separator: str, end: str) -> Items:
    head, found, body = call.partition(separator)
    if not found:
        raise Unreadable("a call without arguments")
    if head.strip() == "function" and "\n" in body and not body.lstrip().startswith("{"):
        head, _, body = body.lstrip().partition("\n")
    body, closed, after = body.rpartition(end)  # the last one: arguments may hold others
    if not closed:
        body, after = after, ""
    return [Written(plain_name(re.sub(r":\d+$", "", head.strip())), read_arguments(body)), *_rest(after)]


def read_gemma(quote: str, text: str, cut: bool) -> Items:
    """call:NAME{key:value}: bare keys, and strings between `quote`s."""
    items: Items = []
    at = 0
    while head := _GEMMA_HEAD.match(text, at):
        arguments, at = read_leniently(text, head.end(), quote=quote)
        items.append(Written(plain_name(head["name"]), arguments))
    if not items or text[at:].strip("} \n"):
        raise Unreadable("no call")
    return items


def read_pythonic(text: str, cut: bool) -> Items:
    """[name(key=value), ...]: Python, but for JSON's words within containers."""
    text = text.strip()
    if len(text) > PYTHON_CHARS_MAX:
        return _read_loosely(text)
    try:
        parsed = ast.parse(text, mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        items: Items = [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _read_loosely(text)
    if not items:
        raise Unreadable("no call")
    return items


def _python_call(node: ast.expr) -> Written:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("no named argument")
        arguments[keyword.arg] = _plain(ast.literal_eval(_JsonNames().visit(keyword.value)))
    return Written(plain_name(ast.unparse(node.func)), arguments)


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node) if node.id in _JSON_NAMES else node


def _plain(value: Any) -> Any:
    """Python's containers as JSON has them.  Raises ValueError where it has none."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be strings")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    raise ValueError(f"{type(value).__name__} is no JSON")


def _read_loosely(text: str) -> Items:
    """Where it is no Python: strings over several lines, a bracket that is missing at the end."""
    items: Items = []
    at = 1 if text.startswith("[") else 0
    while head := _PYTHON_HEAD.match(text, at):
        arguments, at = _loose_arguments(text, head.end())
        items.append(Written(plain_name(head["name"]), arguments))
        at = len(text) - len(text[at:].lstrip(" ,\n"))
    if not items or text[at:].strip("] \n"):
        raise Unreadable("no call")
    return items


def _loose_arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    arguments = {}
    while key := _PYTHON_KEY.match(text, at):
        arguments[key["key"]], at = read_leniently(text, key.end())
        rest = text[at:].lstrip()
        at = len(text) - len(rest) + rest.startswith(",")
        if not rest.startswith(","):
            break
    rest = text[at:].lstrip()
    if rest and not rest.startswith(")"):
        raise Unreadable("text among the arguments")
    return arguments, len(text) - len(rest) + rest.startswith(")")


# ---- answers that are calls without any marker

_FIRST_KEYS = ("type", "name", "parameters", "arguments", "function", "id")
_FIRST_KEY = re.compile(r"\s*\{\s*(?:\"(?P<key>\w*)(?P<end>\")?)?")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


def may_be_bare_call(text: str) -> bool | None:
    """Whether an answer that begins so is to be read by `read_llama3`; None where its first key is not known yet."""
    match = _FIRST_KEY.match(text)
    if match is None:
        return False if text.strip() else None
    key = match["key"]
    if match["end"]:
        return key in _FIRST_KEYS
    if match.end() < len(text):
        return False
    return None if any(word.startswith(key or "") for word in _FIRST_KEYS) else False


def read_llama3(text: str, cut: bool) -> Items:
    """{"name": ..., "parameters": ...}, one or several; what comes after them is text."""
    items: Items = []
    at = 0
    while text[at:].lstrip().startswith("{"):
        value, after = read_value(text, at, cut)
        if not isinstance(value, dict) or set(value) - {*_FIRST_KEYS} or not {"parameters", "arguments"} & set(value):
            break
        items += read_json_calls(text[at:after], cut)
        at = _BETWEEN_CALLS.match(text, after).end()  # type: ignore[union-attr]
    if not items:
        raise Unreadable("no call")
    return [*items, *_rest(text[at:])]


def read_python_tag(text: str, cut: bool) -> Items:
    """What follows Llama's tag: the same JSON, or tool.call(query="...")."""
    if text.lstrip().startswith("{"):
        return read_llama3(text, cut)
    head = _BUILT_IN.match(text)
    if head is None:
        raise Unreadable("no call")
    arguments, at = _loose_arguments(text, head.end())
    if not arguments or text[at:].strip():
        raise Unreadable("no call")
    return [Written(plain_name(head["name"]), arguments)]
