"""Parser of calls whose arguments stand one by one between tags."""

import re
from dataclasses import dataclass
from typing import Any

from warmline_backend.tool_parsers import base
from warmline_backend.tool_parsers.argument_types import BareText
from warmline_backend.tool_parsers.base import ParsedItems, RawToolCall, list_text, normalize_name, require_calls
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError, parse_lenient_json

BROKEN_MAX = 32  # calls of one text: each is looked for to the text's end

_NO_SPACE = re.compile(r"\S")


@dataclass(frozen=True)
class TagFormat:
    """Tags of one family's call."""

    call_start: re.Pattern[str]  # of a call; group "name"
    call_end: str  # of a call; "" where only the format's end marker closes it: one call between two markers
    argument_start: re.Pattern[str]  # before a value; groups "key" and, in some, "kind"
    argument_end: str
    has_multiline_values: bool = False  # each value stands on lines of its own, whose breaks are not part of it
    accepts_json: bool = False  # some models of the family write JSON instead


def parse_tagged(tags: TagFormat, text: str, cut: bool) -> ParsedItems:
    """Parse every call in `text`.  Raises ToolCallParseError for none, or for too many broken ones."""
    position = _skip_space(text, 0)
    if tags.accepts_json and text[position : position + 1] in ("{", "["):
        return base.parse_json_calls(text, cut)
    if not tags.call_end:
        return [_parse_single_call(tags, text, position)]
    items: ParsedItems = []
    position = broken = 0
    while opening := tags.call_start.search(text, position):
        items += list_text(text[position : opening.start()])
        item, position = _parse_tagged_call(tags, text, opening)
        items.append(item)
        broken += isinstance(item, str)
        if broken > BROKEN_MAX:
            raise ToolCallParseError("broken calls")
    items += list_text(text[position:])
    return require_calls(items)


def _parse_tagged_call(tags: TagFormat, text: str, opening: re.Match[str]) -> tuple[RawToolCall | str, int]:
    """Parse one call, or return its text where it is broken, and the position of the next one."""
    try:
        arguments, position = _parse_tagged_arguments(tags, text, opening.end())
        return RawToolCall(normalize_name(opening["name"]), arguments), _find_call_end(tags, text, position)
    except ToolCallParseError as error:
        if error.cut:
            raise
    following = tags.call_start.search(text, opening.end())
    end = following.start() if following else len(text)
    return text[opening.start() : end], end


def _parse_single_call(tags: TagFormat, text: str, position: int) -> RawToolCall:
    opening = tags.call_start.match(text, position)
    if opening is None:
        raise ToolCallParseError("no call")
    name, position = normalize_name(opening["name"]), opening.end()
    if tags.accepts_json and text.startswith("{", position):
        return RawToolCall(name, base.parse_arguments(text[position:]))
    arguments, position = _parse_tagged_arguments(tags, text, position)
    if text[position:].strip():
        raise ToolCallParseError("text among the arguments")
    return RawToolCall(name, arguments)


def _skip_space(text: str, position: int) -> int:
    """Position of the next character that is no space."""
    match = _NO_SPACE.search(text, position)
    return match.start() if match else len(text)


def _find_call_end(tags: TagFormat, text: str, position: int) -> int:
    """End of the call whose last argument ended at `position`.  The closing tag may lack before the next."""
    position = _skip_space(text, position)
    if text.startswith(tags.call_end, position):
        return position + len(tags.call_end)
    if position < len(text) and not tags.call_start.match(text, position):
        raise ToolCallParseError("text among the arguments")
    return position


def _parse_tagged_arguments(tags: TagFormat, text: str, position: int) -> tuple[dict[str, Any], int]:
    """Parse arguments from `position` on; returns them and the last one's end."""
    arguments: dict[str, Any] = {}
    while opening := tags.argument_start.match(text, _skip_space(text, position)):
        start = opening.end()
        end, position = _find_value_end(tags, text, start)
        value = text[start:end]
        if tags.has_multiline_values:
            value = value.removeprefix("\n").removesuffix("\n")
        kind = opening["kind"] if "kind" in tags.argument_start.groupindex else None
        arguments[opening["key"].strip()] = _parse_tagged_value(value, kind)
    return arguments, position


def _find_value_end(tags: TagFormat, text: str, start: int) -> tuple[int, int]:
    """End of a value, and of its closing tag.

    A closing tag counts where the next argument or the call's end follows: text may hold the tag itself.
    """
    end, passed = text.find(tags.argument_end, start), -1
    while end >= 0:
        after = end + len(tags.argument_end)
        if _can_follow(tags, text, _skip_space(text, after)):
            break
        passed = after if passed < 0 else passed
        end = text.find(tags.argument_end, after)
    if passed >= 0 and tags.argument_start.search(text, passed, max(end, 0)):
        raise ToolCallParseError("text among the arguments")
    if passed < 0 and (lacking := _find_unclosed_end(tags, text, start, end)) >= 0:
        return lacking, lacking
    if end < 0:
        raise ToolCallParseError("a value does not end", cut=True)
    return end, end + len(tags.argument_end)


def _can_follow(tags: TagFormat, text: str, position: int) -> bool:
    """True for a position at which an argument may have ended."""
    return (
        position == len(text)
        or bool(tags.argument_start.match(text, position))
        or bool(tags.call_end and (text.startswith(tags.call_end, position) or tags.call_start.match(text, position)))
    )


def _find_unclosed_end(tags: TagFormat, text: str, start: int, end: int) -> int:
    """End of a value without its closing tag: before a line that begins the next argument or ends the call."""
    limit = end if end >= 0 else len(text)
    if not tags.has_multiline_values:
        return -1
    following = tags.argument_start.search(text, start, limit)
    if following and text[: following.start()].endswith("\n"):
        return following.start()
    return text.find(tags.call_end, start, limit) if end < 0 else -1


def _parse_tagged_value(text: str, kind: str | None) -> Any:
    """Parse a value; `kind` is the tag's statement of its type, if any."""
    if kind in ("true", "string"):  # as in string="true" and in type="string"
        return text
    if kind is not None:
        try:
            value, end = parse_lenient_json(text)
        except ToolCallParseError:
            return BareText(text)
        return BareText(text) if text[end:].strip() else value
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text[9:-3]
    return BareText(text)


def _make_quoted_pattern(group: str) -> str:
    """Pattern of a name in either kind of quotes, or in none; the last quote may lack."""
    return rf"\s*=\s*(?P<quote>[\"']?)(?P<{group}>[^\"'<>]{{1,256}}?)(?:(?P=quote)|(?=\s*>))\s*"


QWEN = TagFormat(
    call_start=re.compile(r"<function=(?P<name>[^<>\n]{1,256}?)\s*>"),
    call_end="</function>",
    argument_start=re.compile(r"<parameter=(?P<key>[^<>\n]{1,256}?)\s*>"),
    argument_end="</parameter>",
    has_multiline_values=True,
    accepts_json=True,
)


def make_key_value_tags(prefix: str = "") -> TagFormat:
    """Tags of a name, then keys and values in turn; `prefix` begins the tags' names."""
    return TagFormat(
        call_start=re.compile(r"(?P<name>[^\s<>{}\"']+)\s*(?=<|\{|\Z)"),
        call_end="",
        argument_start=re.compile(
            rf"<{prefix}arg_key>(?P<key>[^<>]{{1,256}})</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>"
        ),
        argument_end=f"</{prefix}arg_value>",
        accepts_json=True,
    )


def make_invoke_tags(prefix: str = "", kind: str = "") -> TagFormat:
    """Tags <invoke name="..."> around <parameter name="...">; `kind` is an attribute with a value's type."""
    attribute = rf"(?:{kind}\s*=\s*\"(?P<kind>\w+)\"\s*)?" if kind else ""
    return TagFormat(
        call_start=re.compile(rf"<{prefix}invoke\s+name{_make_quoted_pattern('name')}>"),
        call_end=f"</{prefix}invoke>",
        argument_start=re.compile(rf"<{prefix}parameter\s+name{_make_quoted_pattern('key')}{attribute}(?:\s[^<>]*)?>"),
        argument_end=f"</{prefix}parameter>",
    )


MINICPM = TagFormat(
    call_start=re.compile(r"[\"']?(?P<name>[^\s\"'<>=]+)[\"']?\s*>"),  # its start marker ends within the tag
    call_end="",
    argument_start=re.compile(rf"<param\s+name{_make_quoted_pattern('key')}>"),
    argument_end="</param>",
)

_KIMI_CALL = re.compile(r"<\|open\|>call(?P<attributes>[^<>]*)<\|sep\|>")
_KIMI_TOOL = re.compile(r"\btool=\"(?P<name>[^\"]*)\"")
_KIMI_JSON = re.compile(r"<\|open\|>json[^<>]*<\|sep\|>")
_KIMI_JSON_END, _KIMI_CALL_END = "<|close|>json<|sep|>", "<|close|>call<|sep|>"
_KIMI_TAGS = TagFormat(
    call_start=_KIMI_CALL,
    call_end=_KIMI_CALL_END,
    argument_start=re.compile(
        r"<\|open\|>argument\s+key=\"(?P<key>[^\"<>]*)\"\s*(?:type=\"(?P<kind>\w+)\"\s*)?<\|sep\|>"
    ),
    argument_end="<|close|>argument<|sep|>",
)


def parse_kimi_k3(text: str, cut: bool) -> ParsedItems:
    items: ParsedItems = []
    position = 0
    while opening := _KIMI_CALL.search(text, position):
        items += list_text(text[position : opening.start()])
        name = _KIMI_TOOL.search(opening["attributes"])
        if name is None:
            raise ToolCallParseError("a call without a name")
        arguments, position = _parse_kimi_arguments(text, opening.end())
        position = _find_call_end(_KIMI_TAGS, text, position)
        items.append(RawToolCall(normalize_name(_unescape(name["name"])), arguments))
    items += list_text(text[position:])
    return require_calls(items)


def _parse_kimi_arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    if not (opening := _KIMI_JSON.match(text, _skip_space(text, position))):
        arguments, position = _parse_tagged_arguments(_KIMI_TAGS, text, position)
        return {_unescape(key): value for key, value in arguments.items()}, position
    if (end := text.find(_KIMI_JSON_END, opening.end())) < 0:
        raise ToolCallParseError("a value does not end", cut=True)
    return base.parse_arguments(text[opening.end() : end]), end + len(_KIMI_JSON_END)


def _unescape(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")
