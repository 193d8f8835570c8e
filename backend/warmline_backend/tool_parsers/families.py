"""Parsers of calls with a family's own words and brackets around JSON or a similar notation."""

import ast
import re
from typing import Any

from warmline_backend.tool_parsers import base
from warmline_backend.tool_parsers.base import ParsedItems, RawToolCall, list_text, normalize_name, require_calls
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError, parse_lenient_json

PYTHON_CHARS_MAX = 65_536  # a parser's tree weighs many times its text

_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_GEMMA_HEAD = re.compile(r"\s*(?:call:\s*)?(?P<name>[\w.-]+)\s*(?=\{)")
_PYTHON_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*)\s*\(")
_PYTHON_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w*)\s*=\s*")
_BUILT_IN = re.compile(r"\s*(?P<name>[\w.]+?)(?:\.call)?\(")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse_mistral(text: str, cut: bool) -> ParsedItems:
    """Parse a list of objects, or a header and an object a call; the rest is text."""
    stripped = text.lstrip()
    if stripped[:1] in ("[", "{"):
        _, end = base.parse_value(stripped, 0, cut)
        items = base.parse_json_calls(stripped[:end], cut)
        return [*items, *list_text(stripped[end:])]
    items, position = [], 0
    while head := _MISTRAL_HEAD.match(text, position):
        arguments, position = base.parse_value(text, head.end(), cut)
        items.append(RawToolCall(normalize_name(head["name"]), arguments))
    return [*require_calls(items), *list_text(text[position:])]


def parse_sections(tokens: tuple[str, str, str], text: str, cut: bool) -> ParsedItems:
    """Parse calls of a name and an object, with `tokens` before, between and after them.

    Kimi writes functions.NAME:NUMBER.  Older DeepSeek models write the kind first, and the object in a code fence.
    """
    begin, separator, end = tokens
    between, *calls = text.split(begin)
    items = list_text(between)
    for call in calls:
        try:
            items += _parse_section(call, separator, end)
        except ToolCallParseError as error:
            if error.cut:
                raise
            items.append(begin + call)
    return require_calls(items)


def _parse_section(call: str, separator: str, end: str) -> ParsedItems:
    head, marker, body = call.partition(separator)
    if not marker:
        raise ToolCallParseError("a call without arguments")
    if head.strip() == "function" and "\n" in body and not body.lstrip().startswith("{"):
        head, _, body = body.lstrip().partition("\n")
    body, closed, after = body.rpartition(end)  # the last one: arguments may hold others
    if not closed:
        body, after = after, ""
    return [
        RawToolCall(normalize_name(re.sub(r":\d+$", "", head.strip())), base.parse_arguments(body)),
        *list_text(after),
    ]


def parse_gemma(quote: str, text: str, cut: bool) -> ParsedItems:
    """Parse call:NAME{key:value}, with bare keys, and strings between `quote`s."""
    items: ParsedItems = []
    position = 0
    while head := _GEMMA_HEAD.match(text, position):
        arguments, position = parse_lenient_json(text, head.end(), quote=quote)
        items.append(RawToolCall(normalize_name(head["name"]), arguments))
    if not items or text[position:].strip("} \n"):
        raise ToolCallParseError("no call")
    return items


def parse_pythonic(text: str, cut: bool) -> ParsedItems:
    """Parse [name(key=value), ...]: Python, but for JSON's words within containers."""
    text = text.strip()
    if len(text) > PYTHON_CHARS_MAX:
        return _parse_lenient_python(text)
    try:
        parsed = ast.parse(text, mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        items: ParsedItems = [_parse_python_call(call) for call in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _parse_lenient_python(text)
    return require_calls(items)


def _parse_python_call(node: ast.expr) -> RawToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("no named argument")
        arguments[keyword.arg] = _convert_python_value(ast.literal_eval(_JsonNameReplacer().visit(keyword.value)))
    return RawToolCall(normalize_name(ast.unparse(node.func)), arguments)


class _JsonNameReplacer(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node) if node.id in _JSON_NAMES else node


def _convert_python_value(value: Any) -> Any:
    """Convert Python's containers to JSON's.  Raises ValueError for others."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be strings")
        return {key: _convert_python_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_python_value(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    raise ValueError(f"{type(value).__name__} is no JSON")


def _parse_lenient_python(text: str) -> ParsedItems:
    """Parse invalid Python: strings over several lines, a missing bracket at the end."""
    items: ParsedItems = []
    position = 1 if text.startswith("[") else 0
    while head := _PYTHON_HEAD.match(text, position):
        arguments, position = _parse_lenient_arguments(text, head.end())
        items.append(RawToolCall(normalize_name(head["name"]), arguments))
        position = len(text) - len(text[position:].lstrip(" ,\n"))
    if not items or text[position:].strip("] \n"):
        raise ToolCallParseError("no call")
    return items


def _parse_lenient_arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    arguments = {}
    while key := _PYTHON_KEY.match(text, position):
        arguments[key["key"]], position = parse_lenient_json(text, key.end())
        rest = text[position:].lstrip()
        position = len(text) - len(rest) + rest.startswith(",")
        if not rest.startswith(","):
            break
    rest = text[position:].lstrip()
    if rest and not rest.startswith(")"):
        raise ToolCallParseError("text among the arguments")
    return arguments, len(text) - len(rest) + rest.startswith(")")


# ---- calls without markers

_FIRST_KEYS = ("type", "name", "parameters", "arguments", "function", "id")
_FIRST_KEY = re.compile(r"\s*\{\s*(?:\"(?P<key>\w*)(?P<end>\")?)?")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


def can_be_bare_call(text: str) -> bool | None:
    """True for the beginning of an answer for `parse_llama3`; None while its first key is incomplete."""
    match = _FIRST_KEY.match(text)
    if match is None:
        return False if text.strip() else None
    key = match["key"]
    if match["end"]:
        return key in _FIRST_KEYS
    if match.end() < len(text):
        return False
    return None if any(word.startswith(key or "") for word in _FIRST_KEYS) else False


def parse_llama3(text: str, cut: bool) -> ParsedItems:
    """Parse {"name": ..., "parameters": ...}, one or several; the rest is text."""
    items: ParsedItems = []
    position = 0
    while text[position:].lstrip().startswith("{"):
        value, after = base.parse_value(text, position, cut)
        if not isinstance(value, dict) or set(value) - {*_FIRST_KEYS} or not {"parameters", "arguments"} & set(value):
            break
        items += base.parse_json_calls(text[position:after], cut)
        position = _BETWEEN_CALLS.match(text, after).end()  # type: ignore[union-attr]
    return [*require_calls(items), *list_text(text[position:])]


def parse_python_tag(text: str, cut: bool) -> ParsedItems:
    """Parse the text after Llama's tag: the same JSON, or tool.call(query="...")."""
    if text.lstrip().startswith("{"):
        return parse_llama3(text, cut)
    head = _BUILT_IN.match(text)
    if head is None:
        raise ToolCallParseError("no call")
    arguments, position = _parse_lenient_arguments(text, head.end())
    if not arguments or text[position:].strip():
        raise ToolCallParseError("no call")
    return [RawToolCall(normalize_name(head["name"]), arguments)]
