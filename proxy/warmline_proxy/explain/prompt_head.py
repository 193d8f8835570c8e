"""Head of a prompt, its tools and leading system texts: description of changes between two heads, and stabilizing.

Stabilizing by configured rules replaces volatile text and sorts tools.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from warmline_common.process.redaction import is_field_name
from warmline_common.protocol.tokens import count_common_chars
from warmline_proxy.api.base import Fields
from warmline_proxy.api.chat_messages import decode_as, decode_elements, extract_texts
from warmline_proxy.explain.volatile import (
    BILLING,
    DATES,
    IDS,
    TEXT_CHARS_MAX,
    TIMES,
    find_replaced_span,
    stabilize_text,
)

TOOL_ORDER = "tool-order"
RULES = (TIMES, DATES, IDS, BILLING, TOOL_ORDER)
HEADS_MAX = 64
TOOLS_BYTES_MAX = 1 << 20  # of all tools as JSON; more are left out
INSTRUCTION_ROLES = ("system", "developer")


@dataclass(frozen=True)
class PromptHead:
    """System texts, joined by blank lines, at most TEXT_CHARS_MAX; tools as canonical JSON, in order."""

    system: str
    tools: tuple[bytes, ...]


def extract_head(fields: Mapping[str, Any]) -> PromptHead:
    """Extract the head of a chat body; malformed parts, which the backend refuses anyway, are left out."""
    system = []
    for message in decode_elements(fields.get("messages")):
        if (read := decode_as(message, dict)) is None or read.get("role") not in INSTRUCTION_ROLES:
            break
        system.append("\n".join(extract_texts(read.get("content"))))
    return PromptHead("\n\n".join(system)[:TEXT_CHARS_MAX], _extract_tools(fields.get("tools")))


def _extract_tools(value: Any) -> tuple[bytes, ...]:
    if isinstance(value, msgspec.Raw) and len(memoryview(value)) > TOOLS_BYTES_MAX:
        return ()
    tools = decode_as(value, list) or ()
    known = tuple(msgspec.json.encode(tool, order="sorted") for tool in tools if isinstance(tool, dict))
    return known if sum(map(len, known)) <= TOOLS_BYTES_MAX else ()


def describe_changes(old: PromptHead, new: PromptHead) -> str:
    """Describe accidental changes, such as "a time in line 3 of the system text is new"; "" for none.  Pure."""
    changes = [_describe_tool_changes(old.tools, new.tools)]
    at = count_common_chars(old.system, new.system)
    if old.system != new.system and (span := find_replaced_span(old.system, new.system, at)):
        line = new.system.count("\n", 0, span.start) + 1
        changes.append(f"{span.description} in line {line} of the system text is new")
    return " and ".join(filter(None, changes))


def _describe_tool_changes(old: tuple[bytes, ...], new: tuple[bytes, ...]) -> str:
    if old == new or not old or not new:
        return ""
    if Counter(old) == Counter(new):
        return "the tools come in another order"
    removed, added = _tool_names(Counter(old) - Counter(new)), _tool_names(Counter(new) - Counter(old))
    if len(removed | added) > len(_tool_names(old) & _tool_names(new)):
        return ""  # another agent's tools, rather than the same ones changed
    changed = sorted(removed & added)
    labelled = [("changed", changed), ("new", sorted(added - removed)), ("gone", sorted(removed - added))]
    return "tools: " + "; ".join(f"{', '.join(names)} {label}" for label, names in labelled if names)


def _tool_names(tools: Iterable[bytes]) -> set[str]:
    functions = [msgspec.json.decode(tool).get("function") for tool in tools]
    names = [each.get("name") if isinstance(each, dict) else None for each in functions]
    return {name if isinstance(name, str) and is_field_name(name) else "an unnamed tool" for name in names}


class PromptHeadCache:
    """Last HEADS_MAX heads, by namespace, so that no tenant sees another's tools.  Event loop thread."""

    def __init__(self) -> None:
        self._heads: OrderedDict[tuple[bytes, PromptHead], None] = OrderedDict()

    def add(self, root: bytes, head: PromptHead) -> None:
        self._heads[root, head] = None
        self._heads.move_to_end((root, head))
        while len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)

    def clear(self) -> None:
        self._heads.clear()

    def explain_change(self, root: bytes, head: PromptHead) -> str:
        """Describe the changes from the most similar earlier head of the namespace; "" for none."""

        def similarity(other: PromptHead) -> tuple[int, int]:
            return len(set(other.tools) & set(head.tools)), count_common_chars(other.system, head.system)

        if (root, head) in self._heads:
            return ""
        own = [each for each_root, each in self._heads if each_root == root]
        return describe_changes(max(own, key=similarity), head) if own else ""


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
        return [_stabilize_content(part, rules, counts) if isinstance(part, dict | str) else part for part in content]
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return {**content, "text": _stabilize_content(content["text"], rules, counts)}
    return content
