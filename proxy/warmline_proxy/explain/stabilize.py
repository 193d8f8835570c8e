"""Opt-in rules that even out a prompt's head before it is rendered.  Pure; what is no head is never touched."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

from warmline_proxy.api.base import Fields
from warmline_proxy.explain.prompt_head import INSTRUCTING, decoded, elements
from warmline_proxy.explain.volatile import BILLING, DATES, IDS, TIMES, steadied

TOOL_ORDER = "tool-order"
RULES = (TIMES, DATES, IDS, BILLING, TOOL_ORDER)


def stabilized(fields: Fields, rules: Collection[str]) -> tuple[Fields, Counter[str]]:
    """A chat body whose system texts and tools repeat where its client's don't, and how often each rule had to act."""
    counts = Counter[str]()
    changed: Fields = {}
    if messages := _messages(fields.get("messages"), rules, counts):
        changed["messages"] = messages
    if TOOL_ORDER in rules and (tools := decoded(fields.get("tools"), list)):
        ordered = sorted(tools, key=lambda tool: msgspec.json.encode(tool, order="sorted"))
        if ordered != tools:
            changed["tools"] = ordered
            counts[TOOL_ORDER] = 1
    return ({**fields, **changed} if changed else fields), counts


def _messages(messages: Any, rules: Collection[str], counts: Counter[str]) -> list[Any] | None:
    """None where nothing is changed.  Messages after the head stay the bytes that came."""
    steady, before = elements(messages), counts.total()
    for index, message in enumerate(steady):
        read = decoded(message, dict)
        if read is None or read.get("role") not in INSTRUCTING:
            break
        content = _content(read.get("content"), rules, counts)
        if counts.total() > before:
            steady[index] = {**read, "content": content}
    return steady if counts.total() > before else None


def _content(content: Any, rules: Collection[str], counts: Counter[str]) -> Any:
    if isinstance(content, str):
        text, found = steadied(content, rules)
        counts.update(found)
        return text
    if isinstance(content, list):
        return [_part(part, rules, counts) for part in content]
    return content


def _part(part: Any, rules: Collection[str], counts: Counter[str]) -> Any:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return part
    return {**part, "text": _content(part["text"], rules, counts)}
