"""Calls whose arguments stand between tags, one by one, as text."""

import re
from dataclasses import dataclass
from typing import Any

from warmline_backend.tool_parsers.argument_types import Bare
from warmline_backend.tool_parsers.base import Items, Written, plain_name, read_arguments, read_json_calls
from warmline_backend.tool_parsers.lenient_json import Unreadable, read_leniently

BROKEN_MAX = 32  # calls of one text: each is looked for to the text's end

_NO_SPACE = re.compile(r"\S")


@dataclass(frozen=True)
class Tags:
    """How a family writes one call."""

    opening: re.Pattern[str]  # of a call; group "name"
    closing: str  # of a call; "" where only the format's end marker closes it: one call between two markers
    argument: re.Pattern[str]  # what stands before a value; groups "key" and, in some, "kind"
    argument_end: str
    framed: bool = False  # each value stands on lines of its own, whose breaks are not part of it
    json_too: bool = False  # some models of the family write JSON instead


def read_tagged(tags: Tags, text: str, cut: bool) -> Items:
    """Every call in `text`.  Raises Unreadable where there is none, or too many are broken."""
    at = _skip(text, 0)
    if tags.json_too and text[at : at + 1] in ("{", "["):
        return read_json_calls(text, cut)
    if not tags.closing:
        return [_call_alone(tags, text, at)]
    items: Items = []
    at = broken = 0
    while opening := tags.opening.search(text, at):
        _keep(text[at : opening.start()], items)
        item, at = _one_of_several(tags, text, opening)
        items.append(item)
        broken += isinstance(item, str)
        if broken > BROKEN_MAX:
            raise Unreadable("broken calls")
    _keep(text[at:], items)
    return _with_calls(items)


def _one_of_several(tags: Tags, text: str, opening: re.Match[str]) -> tuple[Written | str, int]:
    """The call that begins there, or its text where it is broken, and where the next may begin."""
    try:
        arguments, at = _arguments(tags, text, opening.end())
        return Written(plain_name(opening["name"]), arguments), _close(tags, text, at)
    except Unreadable as error:
        if error.cut:
            raise
    following = tags.opening.search(text, opening.end())
    end = following.start() if following else len(text)
    return text[opening.start() : end], end


def _call_alone(tags: Tags, text: str, at: int) -> Written:
    opening = tags.opening.match(text, at)
    if opening is None:
        raise Unreadable("no call")
    name, at = plain_name(opening["name"]), opening.end()
    if tags.json_too and text.startswith("{", at):
        return Written(name, read_arguments(text[at:]))
    arguments, at = _arguments(tags, text, at)
    if text[at:].strip():
        raise Unreadable("text among the arguments")
    return Written(name, arguments)


def _skip(text: str, at: int) -> int:
    """The next place that is no space."""
    found = _NO_SPACE.search(text, at)
    return found.start() if found else len(text)


def _keep(text: str, items: Items) -> None:
    if text.strip():
        items.append(text)


def _with_calls(items: Items) -> Items:
    if not any(isinstance(item, Written) for item in items):
        raise Unreadable("no call")
    return items


def _close(tags: Tags, text: str, at: int) -> int:
    """Where the call ends whose last argument ended at `at`.  A closing tag may lack where the next call begins, or
    all ends.
    """
    at = _skip(text, at)
    if text.startswith(tags.closing, at):
        return at + len(tags.closing)
    if at < len(text) and not tags.opening.match(text, at):
        raise Unreadable("text among the arguments")
    return at


def _arguments(tags: Tags, text: str, at: int) -> tuple[dict[str, Any], int]:
    """Arguments from `at` on, and where the last one ends."""
    arguments: dict[str, Any] = {}
    while opening := tags.argument.match(text, _skip(text, at)):
        start = opening.end()
        end, at = _value_end(tags, text, start)
        value = text[start:end]
        if tags.framed:
            value = value.removeprefix("\n").removesuffix("\n")
        kind = opening["kind"] if "kind" in tags.argument.groupindex else None
        arguments[opening["key"].strip()] = _value(value, kind)
    return arguments, at


def _value_end(tags: Tags, text: str, start: int) -> tuple[int, int]:
    """Where a value ends, and where its closing tag does.

    A closing tag counts where the next argument, or the call's end, follows it: text may hold the tag itself.
    """
    end, passed = text.find(tags.argument_end, start), -1
    while end >= 0:
        after = end + len(tags.argument_end)
        if _may_follow(tags, text, _skip(text, after)):
            break
        passed = after if passed < 0 else passed
        end = text.find(tags.argument_end, after)
    if passed >= 0 and tags.argument.search(text, passed, max(end, 0)):
        raise Unreadable("text among the arguments")
    if passed < 0 and (lacking := _where_one_lacks(tags, text, start, end)) >= 0:
        return lacking, lacking
    if end < 0:
        raise Unreadable("a value does not end", cut=True)
    return end, end + len(tags.argument_end)


def _may_follow(tags: Tags, text: str, at: int) -> bool:
    """Whether what stands there may follow an argument."""
    return (
        at == len(text)
        or bool(tags.argument.match(text, at))
        or bool(tags.closing and (text.startswith(tags.closing, at) or tags.opening.match(text, at)))
    )


def _where_one_lacks(tags: Tags, text: str, start: int, end: int) -> int:
    """Where a value ends without its closing tag: before a line that begins the next argument or ends the call."""
    limit = end if end >= 0 else len(text)
    if not tags.framed:
        return -1
    following = tags.argument.search(text, start, limit)
    if following and text[: following.start()].endswith("\n"):
        return following.start()
    return text.find(tags.closing, start, limit) if end < 0 else -1


def _value(text: str, kind: str | None) -> Any:
    """`kind`: what the tag says of the value's type, if anything."""
    if kind in ("true", "string"):  # as in string="true" and in type="string"
        return text
    if kind is not None:
        try:
            value, end = read_leniently(text)
        except Unreadable:
            return Bare(text)
        return Bare(text) if text[end:].strip() else value
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text[9:-3]
    return Bare(text)


def _quoted(group: str) -> str:
    """A name in either kind of quotes, or in none; the last one may lack."""
    return rf"\s*=\s*(?P<quote>[\"']?)(?P<{group}>[^\"'<>]{{1,256}}?)(?:(?P=quote)|(?=\s*>))\s*"


QWEN = Tags(
    opening=re.compile(r"<function=(?P<name>[^<>\n]{1,256}?)\s*>"),
    closing="</function>",
    argument=re.compile(r"<parameter=(?P<key>[^<>\n]{1,256}?)\s*>"),
    argument_end="</parameter>",
    framed=True,
    json_too=True,
)


def keyed(prefix: str = "") -> Tags:
    """A name, and then keys and values in turn; `prefix` begins the tags' names."""
    return Tags(
        opening=re.compile(r"(?P<name>[^\s<>{}\"']+)\s*(?=<|\{|\Z)"),
        closing="",
        argument=re.compile(
            rf"<{prefix}arg_key>(?P<key>[^<>]{{1,256}})</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>"
        ),
        argument_end=f"</{prefix}arg_value>",
        json_too=True,
    )


def invoked(prefix: str = "", kind: str = "") -> Tags:
    """<invoke name="..."> around <parameter name="...">; `kind` is an attribute that tells a value's type."""
    attribute = rf"(?:{kind}\s*=\s*\"(?P<kind>\w+)\"\s*)?" if kind else ""
    return Tags(
        opening=re.compile(rf"<{prefix}invoke\s+name{_quoted('name')}>"),
        closing=f"</{prefix}invoke>",
        argument=re.compile(rf"<{prefix}parameter\s+name{_quoted('key')}{attribute}(?:\s[^<>]*)?>"),
        argument_end=f"</{prefix}parameter>",
    )


MINICPM = Tags(
    opening=re.compile(r"[\"']?(?P<name>[^\s\"'<>=]+)[\"']?\s*>"),  # its start marker ends within the tag
    closing="",
    argument=re.compile(rf"<param\s+name{_quoted('key')}>"),
    argument_end="</param>",
)

_KIMI_CALL = re.compile(r"<\|open\|>call(?P<attributes>[^<>]*)<\|sep\|>")
_KIMI_TOOL = re.compile(r"\btool=\"(?P<name>[^\"]*)\"")
_KIMI_JSON = re.compile(r"<\|open\|>json[^<>]*<\|sep\|>")
_KIMI_JSON_END, _KIMI_CALL_END = "<|close|>json<|sep|>", "<|close|>call<|sep|>"
_KIMI_ARGUMENTS = Tags(
    opening=_KIMI_CALL,
    closing=_KIMI_CALL_END,
    argument=re.compile(r"<\|open\|>argument\s+key=\"(?P<key>[^\"<>]*)\"\s*(?:type=\"(?P<kind>\w+)\"\s*)?<\|sep\|>"),
    argument_end="<|close|>argument<|sep|>",
)


def read_kimi_k3(text: str, cut: bool) -> Items:
    items: Items = []
    at = 0
    while opening := _KIMI_CALL.search(text, at):
        _keep(text[at : opening.start()], items)
        name = _KIMI_TOOL.search(opening["attributes"])
        if name is None:
            raise Unreadable("a call without a name")
        arguments, at = _kimi_arguments(text, opening.end())
        at = _close(_KIMI_ARGUMENTS, text, at)
        items.append(Written(plain_name(_unescaped(name["name"])), arguments))
    _keep(text[at:], items)
    return _with_calls(items)


def _kimi_arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    if not (opening := _KIMI_JSON.match(text, _skip(text, at))):
        arguments, at = _arguments(_KIMI_ARGUMENTS, text, at)
        return {_unescaped(key): value for key, value in arguments.items()}, at
    if (end := text.find(_KIMI_JSON_END, opening.end())) < 0:
        raise Unreadable("a value does not end", cut=True)
    return read_arguments(text[opening.end() : end]), end + len(_KIMI_JSON_END)


def _unescaped(attribute: str) -> str:
    return attribute.replace("&quot;", '"').replace("&amp;", "&")
