"""A prompt's head, all that stands before the first message that talks, and what two heads differ in."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from warmline_common.process.redaction import is_name
from warmline_common.protocol.tokens import common_chars
from warmline_proxy.explain.volatile import TEXT_CHARS_MAX, replaced_at

HEADS_KEPT_MAX = 64
TOOLS_BYTES_MAX = 1 << 20  # of all of them as JSON; more are not looked into
INSTRUCTING = ("system", "developer")


@dataclass(frozen=True)
class Head:
    """System texts, joined by blank lines and cut where they are long; tools as canonical JSON, in their order."""

    system: str
    tools: tuple[bytes, ...]


def head_of(fields: Mapping[str, Any]) -> Head:
    """The head of a chat body; what is malformed in it is left out, for the backend refuses it anyway."""
    system = []
    for message in elements(fields.get("messages")):
        if (read := decoded(message, dict)) is None or read.get("role") not in INSTRUCTING:
            break
        system.append("\n".join(texts_of(read.get("content"))))
    return Head("\n\n".join(system)[:TEXT_CHARS_MAX], _tools_of(fields.get("tools")))


def _tools_of(value: Any) -> tuple[bytes, ...]:
    if isinstance(value, msgspec.Raw) and len(memoryview(value)) > TOOLS_BYTES_MAX:
        return ()
    tools = decoded(value, list) or ()
    known = tuple(msgspec.json.encode(tool, order="sorted") for tool in tools if isinstance(tool, dict))
    return known if sum(map(len, known)) <= TOOLS_BYTES_MAX else ()


def elements(value: Any) -> list[Any]:
    """A list's elements, as bytes where it came as bytes: of a transcript only the head is looked into."""
    return decoded(value, list[msgspec.Raw] if isinstance(value, msgspec.Raw) else list) or []


def decoded(value: Any, kind: Any) -> Any:
    """A value of that kind, or None where it is another, or no JSON."""
    try:
        return msgspec.json.decode(value, type=kind) if isinstance(value, msgspec.Raw) else msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def texts_of(content: Any) -> list[str]:
    """A message's text, as a string or as parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def what_changed(old: Head, new: Head) -> str:
    """Why two heads that could be one are not: "a time in line 3 of the system text is new"; "" where they should.

    Pure.
    """
    changes = [_tools_changed(old.tools, new.tools), _system_changed(old.system, new.system)]
    return " and ".join(filter(None, changes))


def _tools_changed(old: tuple[bytes, ...], new: tuple[bytes, ...]) -> str:
    if old == new or not old or not new:
        return ""
    if Counter(old) == Counter(new):
        return "the tools come in another order"
    gone, come = _names(Counter(old) - Counter(new)), _names(Counter(new) - Counter(old))
    if len(gone | come) > len(_names(Counter(old)) & _names(Counter(new))):
        return ""  # another agent's tools, rather than the same ones changed
    changed = sorted(gone & come)
    told = [("changed", changed), ("new", sorted(come - gone)), ("gone", sorted(gone - come))]
    return "tools: " + "; ".join(f"{', '.join(names)} {what}" for what, names in told if names)


def _names(tools: Counter[bytes]) -> set[str]:
    return {_name(tool) for tool in tools}


def _name(tool: bytes) -> str:
    function = msgspec.json.decode(tool).get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and is_name(name) else "one whose name is none"


def _system_changed(old: str, new: str) -> str:
    at = common_chars(old, new)
    if at == len(old) == len(new):
        return ""
    span = replaced_at(old, new, at)
    if span is None:
        return ""
    return f"{span.what} in line {new.count(chr(10), 0, span.start) + 1} of the system text is new"


class Heads:
    """The last heads that were seen, each under its prompt's namespace: nobody's is told of another's tools.

    Event loop thread.
    """

    def __init__(self) -> None:
        self._heads: OrderedDict[tuple[bytes, Head], None] = OrderedDict()

    def add(self, root: bytes, head: Head) -> None:
        self._heads[root, head] = None
        self._heads.move_to_end((root, head))
        while len(self._heads) > HEADS_KEPT_MAX:
            self._heads.popitem(last=False)

    def forget(self) -> None:
        self._heads.clear()

    def why_new(self, root: bytes, head: Head) -> str:
        """What tells it from the most similar earlier one, where that is not what it is about; else ""."""
        if (root, head) in self._heads:
            return ""
        own = (each for of, each in self._heads if of == root)
        alike = max(own, key=lambda each: _likeness(each, head), default=None)
        return what_changed(alike, head) if alike is not None else ""


def _likeness(a: Head, b: Head) -> tuple[int, int]:
    return len(set(a.tools) & set(b.tools)), common_chars(a.system, b.system)
