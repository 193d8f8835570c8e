"""Conversations made such that the model's template shows them whole: pure, by what `traits` found.

What is changed is changed the same way each time, so a conversation's next turn begins as the last one did.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from warmline_backend.prompt.template_traits import REASONING_FIELDS, SHORT_ID_CHARS, Message, Traits

INSTRUCTING = ("system", "developer")
TOLD_LATE = "<system-reminder>\n{}\n</system-reminder>"  # what instructs in a user's name
CALL_TEXT = "<tool_call>\n{}\n</tool_call>"  # in templates that know of no calls, as most models have seen them
RESULT_TEXT = "<tool_response>\n{}\n</tool_response>"
TOOLS_TEXT = """# Tools

You may call these functions, each described by a line of JSON:
{}

To call one, answer with its name and arguments as JSON between tags, for each call anew:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
What a function gives back comes between <tool_response> and </tool_response>."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What an assistant's message said, as its client sent it."""

    content: str = ""
    ids: tuple[str, ...] = ()  # of its calls
    names: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()  # JSON values, or text that is no JSON


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A message for the template."""

    message: Message
    number: int  # of the client's message that ends here, from 1; 0 for what the client did not send
    said: Said = Said()

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def instructs(self) -> bool:
        return self.role in INSTRUCTING

    def changed(self, **fields: Any) -> "Item":
        return msgspec.structs.replace(self, message={**self.message, **fields})


def fit(
    items: list[Item], tools: list[dict[str, Any]] | None, traits: Traits
) -> tuple[list[Item], list[dict[str, Any]] | None]:
    """The messages for the template, and the tools that it is given."""
    items = _named_results(items)
    if not traits.developer:
        items = [item.changed(role="system") if item.role == "developer" else item for item in items]
    if not traits.calls:
        items = [_calls_as_text(item) for item in items]
    if not traits.results:
        items = [_result_as_text(item) for item in items]
    if tools and not traits.tools:
        items, tools = _told_of(items, tools), None
    items = _instructed(items, traits)
    if traits.alternates:
        turns = ("user", "assistant")
        items = _merged(items, lambda run, item: run[0].role == item.role in turns and not _calls(run[-1]))
    if not traits.user_after_results:
        items = _merged(items, lambda run, item: (run[0].role, item.role) == ("tool", "user"))
    if traits.json_arguments:
        items = [_with_json_arguments(item) for item in items]
    if traits.ids != "any":
        items = _renamed(items, _short if traits.ids == "short" else None)
    return [_with_reasoning(item, traits) for item in items], tools


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _calls(item: Item) -> list[Any]:
    calls: list[Any] = item.message.get("tool_calls", [])
    return calls


def _named_results(items: Iterable[Item]) -> list[Item]:
    """Results say whose they are: clients send the call's id alone, some templates show the name."""
    names: dict[str, str] = {}
    named = []
    for item in items:
        names.update(zip(item.said.ids, item.said.names, strict=True))
        name = names.get(str(item.message.get("tool_call_id", ""))) if item.role == "tool" else None
        named.append(item.changed(name=name) if name and "name" not in item.message else item)
    return named


# ---- templates that know of no tools


def _told_of(items: list[Item], tools: list[dict[str, Any]]) -> list[Item]:
    at = _leading(items)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = Item(message={"role": "system", "content": TOOLS_TEXT.format(lines)}, number=at)
    return [*items[:at], told, *items[at:]]


def _calls_as_text(item: Item) -> Item:
    if not _calls(item):
        return item
    calls = [
        CALL_TEXT.format(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
        for name, arguments in zip(item.said.names, item.said.arguments, strict=True)
    ]
    message = {key: value for key, value in item.message.items() if key != "tool_calls"}
    return msgspec.structs.replace(item, message=message | {"content": "\n".join([*_some(item), *calls])})


def _some(item: Item) -> list[str]:
    return [item.message["content"]] if item.message["content"] else []


def _result_as_text(item: Item) -> Item:
    if item.role != "tool":
        return item
    return item.changed(role="user", content=RESULT_TEXT.format(item.message["content"]))


# ---- what instructs


def _leading(items: list[Item]) -> int:
    return next((at for at, item in enumerate(items) if not item.instructs), len(items))


def _instructed(items: list[Item], traits: Traits) -> list[Item]:
    at = _leading(items)
    first, later = items[:at], items[at:]
    if not traits.late_system:
        later = [_told_late(item) if item.instructs else item for item in later]
    if traits.systems != "any":
        first = _merged(first, lambda run, item: True)
    if traits.systems == "none" and first:
        told = first[0].changed(role="user")
        return [_as_one([told, later[0]]), *later[1:]] if later and later[0].role == "user" else [told, *later]
    return [*first, *later]


def _told_late(item: Item) -> Item:
    return item.changed(role="user", content=TOLD_LATE.format(item.message["content"]))


def _merged(items: Iterable[Item], belong: Callable[[list[Item], Item], bool]) -> list[Item]:
    """Each run of items that belong together as one."""
    runs: list[list[Item]] = []
    for item in items:
        if runs and belong(runs[-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return [_as_one(run) if len(run) > 1 else run[0] for run in runs]


def _as_one(run: list[Item]) -> Item:
    """The first one, with the text, the calls and the reasoning of all."""
    calls = [call for item in run for call in _calls(item)]
    thoughts = [item.message["reasoning_content"] for item in run if "reasoning_content" in item.message]
    whole = run[0].changed(
        content=_joined(*(item.message["content"] for item in run)),
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": _joined(*thoughts)} if thoughts else {}),
    )
    return msgspec.structs.replace(whole, number=run[-1].number, said=Said())


# ---- calls


def _with_json_arguments(item: Item) -> Item:
    calls = []
    for call in _calls(item):
        function = call["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return item.changed(tool_calls=calls) if calls else item


def _short(call_id: str) -> str:
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_CHARS]


def _renamed(items: list[Item], short: Callable[[str], str] | None) -> list[Item]:
    """Calls and their results under ids that the template takes: shortened, or else name and number of the call."""
    new: dict[str, str] = {}
    number = 0
    renamed = []
    for item in items:
        calls = []
        for call in _calls(item):
            old = str(call.get("id", ""))
            new[old] = short(old) if short else f"functions.{call['function']['name']}:{number}"
            calls.append({**call, "id": new[old]})
            number += 1
        item = item.changed(tool_calls=calls) if calls else item
        if item.role == "tool" and (old := str(item.message.get("tool_call_id", ""))):
            item = item.changed(tool_call_id=new.get(old) or (short(old) if short else old))
        renamed.append(item)
    return renamed


# ---- reasoning


def _with_reasoning(item: Item, traits: Traits) -> Item:
    """Under the names that the template reads."""
    reasoning = item.message.get("reasoning_content", "")
    if not reasoning:
        return item
    if traits.one_thought and _calls(item):
        reasoning = _joined(reasoning, item.message["content"])
        item = item.changed(content="")
    return item.changed(**dict.fromkeys(("reasoning_content", *traits.reasoning_fields), reasoning))


def reasoning_in(message: dict[str, Any]) -> str:
    """What a client's message has in a field of its own; "" where it has none."""
    found = (message.get(field) for field in REASONING_FIELDS)
    return next((text for text in found if isinstance(text, str) and text.strip()), "")
