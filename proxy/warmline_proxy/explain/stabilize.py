"""Stabilizing of a prompt's head by configured rules: volatile text is replaced, tools are sorted.  Pure."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

from warmline_proxy.api.base import Fields
from warmline_proxy.explain.prompt_head import INSTRUCTION_ROLES, decode_as, decode_elements
from warmline_proxy.explain.volatile import BILLING, DATES, IDS, TIMES, stabilize_text

TOOL_ORDER = "tool-order"
RULES = (TIMES, DATES, IDS, BILLING, TOOL_ORDER)


def stabilize_fields(fields: Fields, rules: Collection[str]) -> tuple[Fields, Counter[str]]:
    """Apply the rules to a chat body's system texts and tools; return it with the number of changes by rule."""
    counts = Counter[str]()
    changed: Fields = {}
    if messages := _stabilize_messages(fields.get("messages"), rules, counts):
        changed["messages"] = messages
    if TOOL_ORDER in rules and (tools := decode_as(fields.get("tools"), list)):
        ordered = sorted(tools, key=lambda tool: msgspec.json.encode(tool, order="sorted"))
        if ordered != tools:
            changed["tools"] = ordered
            counts[TOOL_ORDER] = 1
    return ({**fields, **changed} if changed else fields), counts


def _stabilize_messages(messages: Any, rules: Collection[str], counts: Counter[str]) -> list[Any] | None:
    """Stabilize the leading system messages; None where nothing changed.  Later messages keep their bytes."""
    stabilized, before = decode_elements(messages), counts.total()
    for index, message in enumerate(stabilized):
        read = decode_as(message, dict)
        if read is None or read.get("role") not in INSTRUCTION_ROLES:
            break
        content = _stabilize_content(read.get("content"), rules, counts)
        if counts.total() > before:
            stabilized[index] = {**read, "content": content}
    return stabilized if counts.total() > before else None


def _stabilize_content(content: Any, rules: Collection[str], counts: Counter[str]) -> Any:
    if isinstance(content, str):
        text, found = stabilize_text(content, rules)
        counts.update(found)
        return text
    if isinstance(content, list):
        return [_stabilize_content(part, rules, counts) if isinstance(part, dict) else part for part in content]
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return {**content, "text": _stabilize_content(content["text"], rules, counts)}
    return content
