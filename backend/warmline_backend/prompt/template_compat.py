"""Conversations changed so that the model's template shows them whole, by its traits.  Pure.

Changes are the same each time, so a conversation's next turn begins as the last one did.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from typing import Any

import msgspec

from warmline_backend.prompt.template_traits import REASONING_FIELDS, SHORT_ID_CHARS, Message, TemplateTraits
from warmline_backend.request.params import Tools

INSTRUCTION_ROLES = ("system", "developer")
LATE_SYSTEM_TEXT = "<system-reminder>\n{}\n</system-reminder>"  # an instruction in a user's name
USER_TEXT = "Continue."  # a user's message before the conversation, where there is none
TEXT_ARGUMENT = "arguments"  # name of malformed arguments, in templates that accept nothing but an object
CALL_TEXT = "<tool_call>\n{}\n</tool_call>"  # in templates without calls, as most models have seen them
NO_RESULT_TEXT = "[no result]"  # of a call that was not answered, in templates that require a result
RESULT_TEXT = "<tool_response>\n{}\n</tool_response>"
TOOLS_TEXT = """# Tools

You may call these functions, each described by a line of JSON:
{}

To call one, answer with its name and arguments as JSON between tags, for each call anew:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
What a function gives back comes between <tool_response> and </tool_response>."""


class OriginalMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant's message as its client sent it."""

    content: str = ""
    call_ids: tuple[str, ...] = ()  # of its calls
    call_names: tuple[str, ...] = ()
    call_arguments: tuple[Any, ...] = ()  # JSON values, or text that is no JSON


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message for the template."""

    message: Message
    number: int  # of the client's message that ends here, from 1; 0 for messages that are added
    original: OriginalMessage = OriginalMessage()

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def is_instruction(self) -> bool:
        return self.role in INSTRUCTION_ROLES

    @property
    def calls(self) -> list[Any]:
        calls: list[Any] = self.message.get("tool_calls", [])
        return calls

    def replace(self, **fields: Any) -> "ConversationItem":
        return msgspec.structs.replace(self, message={**self.message, **fields})


Items = list[ConversationItem]


def fit_conversation(items: Items, tools: Tools, traits: TemplateTraits) -> tuple[Items, Tools]:
    """Messages for the template, and the tools that it is given."""
    items = _add_result_names(items)
    if not traits.supports_developer_role:
        items = [item.replace(role="system") if item.role == "developer" else item for item in items]
    if not traits.supports_tool_calls:
        items = [_render_calls(item) for item in items]
    if not traits.supports_tool_results:
        items = [_render_as_user(item, RESULT_TEXT) if item.role == "tool" else item for item in items]
    if tools and not traits.supports_tools:
        items, tools = _insert_tools_message(items, tools), None
    items = _fit_instructions(items, traits)
    if not traits.supports_orphan_results:
        items = _render_orphan_results(items)
    if not traits.supports_missing_results:
        items = _insert_missing_results(items)
    if traits.requires_leading_user:
        items = _insert_user_message(items)
    if not traits.supports_parallel_calls:
        items = _split_calls(items)
    if traits.requires_alternation:
        turns = ("user", "assistant")
        items = _merge_runs(items, lambda run, item: run[0].role == item.role in turns and not run[-1].calls)
    if not traits.supports_user_after_results:
        items = _merge_runs(items, lambda run, item: (run[0].role, item.role) == ("tool", "user"))
    items = [_fit_arguments(item, traits) for item in items]
    if traits.call_id_format != "any":
        items = _rewrite_call_ids(items, are_short=traits.call_id_format == "short")
    return [_copy_reasoning(item, traits) for item in items], tools


def _join_texts(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _render_as_user(item: ConversationItem, text: str) -> ConversationItem:
    return item.replace(role="user", content=text.format(item.message["content"]))


def _add_result_names(items: Items) -> Items:
    """Add names of functions to results: clients send the call's id alone, some templates show the name."""
    names: dict[str, str] = {}
    call_names: Iterator[str] = iter(())  # of the calls whose results may come next
    named = []
    for item in items:
        names.update(zip(item.original.call_ids, item.original.call_names, strict=True))
        name = None
        if item.role == "tool":
            next_name = next(call_names, None)
            name = names.get(str(item.message.get("tool_call_id", "")), next_name)
        else:
            call_names = iter(item.original.call_names)
        named.append(item.replace(name=name) if name and "name" not in item.message else item)
    return named


# ---- templates without tools


def _insert_tools_message(items: Items, tools: list[dict[str, Any]]) -> Items:
    index = count_leading_instructions(items)
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    message = ConversationItem(message={"role": "system", "content": TOOLS_TEXT.format(lines)}, number=index)
    return [*items[:index], message, *items[index:]]


def _render_calls(item: ConversationItem) -> ConversationItem:
    functions = zip(item.original.call_names, item.original.call_arguments, strict=True)
    calls = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in functions]
    content = "\n".join(filter(None, [item.message["content"], *map(CALL_TEXT.format, calls)]))
    message = {key: value for key, value in item.message.items() if key != "tool_calls"}
    return msgspec.structs.replace(item, message=message | {"content": content})


# ---- instructions


def count_leading_instructions(items: Items) -> int:
    return next((index for index, item in enumerate(items) if not item.is_instruction), len(items))


def _fit_instructions(items: Items, traits: TemplateTraits) -> Items:
    index = count_leading_instructions(items)
    first, later = items[:index], items[index:]
    if not traits.supports_late_system:
        later = [_render_as_user(item, LATE_SYSTEM_TEXT) if item.is_instruction else item for item in later]
    if traits.system_messages != "any":
        first = _merge_runs(first, lambda run, item: True)
    if traits.system_messages == "none" and first:
        first = [first[0].replace(role="user")]
        if later and later[0].role == "user":
            return [_merge_run([*first, later[0]]), *later[1:]]
    return [*first, *later]


def _insert_user_message(items: Items) -> Items:
    """Insert a user's message before a conversation that has none at its beginning.

    It is inserted even where one follows later: the prompt must begin as the last turn's did.
    """
    index = count_leading_instructions(items)
    if items[index:] and items[index].role == "user":
        return items
    number = items[index - 1].number if index else 0
    message = ConversationItem(message={"role": "user", "content": USER_TEXT}, number=number)
    return [*items[:index], message, *items[index:]]


def _merge_runs(items: Items, is_same_run: Callable[[Items, ConversationItem], bool]) -> Items:
    """Merge each run of items that belong together."""
    runs: list[Items] = []
    for item in items:
        if runs and is_same_run(runs[-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return [_merge_run(run) if len(run) > 1 else run[0] for run in runs]


def _merge_run(run: Items) -> ConversationItem:
    """The first item, with the text, the calls and the reasoning of all."""
    calls = [call for item in run for call in item.calls]
    thoughts = [item.message["reasoning_content"] for item in run if "reasoning_content" in item.message]
    whole = run[0].replace(
        content=_join_texts(*(item.message["content"] for item in run)),
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": _join_texts(*thoughts)} if thoughts else {}),
    )
    return msgspec.structs.replace(whole, number=run[-1].number, original=OriginalMessage())


# ---- calls and results


def _fit_arguments(item: ConversationItem, traits: TemplateTraits) -> ConversationItem:
    calls = []
    for call in item.calls:
        arguments = _fit_argument_type(call["function"]["arguments"], traits)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return item.replace(tool_calls=calls) if calls else item


def _fit_argument_type(arguments: Any, traits: TemplateTraits) -> Any:
    """Arguments in a form that the template shows: a model may have written something else than an object."""
    if traits.requires_json_arguments:
        return _format_json(arguments)
    if isinstance(arguments, dict) or traits.argument_types == "any":
        return arguments
    text = _format_json(arguments)
    return text if traits.argument_types == "text" else {TEXT_ARGUMENT: text}


def _format_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _render_orphan_results(items: Items) -> Items:
    """Render results without a call before them as a user's messages: a client's compaction may remove the call."""
    new_items: Items = []
    follows_calls = False
    for item in items:
        is_result = item.role == "tool"
        new_items.append(_render_as_user(item, RESULT_TEXT) if is_result and not follows_calls else item)
        follows_calls = bool(item.calls) or (is_result and follows_calls)
    return new_items


def _insert_missing_results(items: Items) -> Items:
    """Insert results after calls that another message than a result follows: a user may have interrupted them."""
    new_items: Items = []
    for item, next_item in zip_longest(items, items[1:]):
        new_items.append(item)
        if next_item is None or next_item.role == "tool":
            continue
        for call in item.calls:
            result = {"role": "tool", "tool_call_id": str(call.get("id", "")), "name": call["function"]["name"]}
            new_items.append(ConversationItem(message={**result, "content": NO_RESULT_TEXT}, number=item.number))
    return new_items


def _split_calls(items: Items) -> Items:
    """Split messages of several calls: each call becomes a message before its results."""
    new_items: Items = []
    start = 0
    while start < len(items):
        end = start + 1
        while end < len(items) and items[end].role == "tool":
            end += 1
        is_split = len(items[start].calls) > 1
        new_items += _split_message(items[start], items[start + 1 : end]) if is_split else items[start:end]
        start = end
    return new_items


def _split_message(item: ConversationItem, results: Items) -> Items:
    """Messages of one call each; results without a call's id follow the last one."""
    call_ids = {str(call.get("id", "")) for call in item.calls}
    results_by_id: dict[str | None, Items] = {}
    for result in results:
        result_id = str(result.message.get("tool_call_id", ""))
        results_by_id.setdefault(result_id if result_id in call_ids else None, []).append(result)
    first = {key: value for key, value in item.message.items() if key != "tool_calls"}
    later = {"role": item.role, "content": ""}
    new_items: Items = []
    for index, call in enumerate(item.calls):
        message = {**(later if index else first), "tool_calls": [call]}
        new_items.append(ConversationItem(message=message, number=item.number))
        new_items += results_by_id.pop(str(call.get("id", "")), [])
    return new_items + results_by_id.pop(None, [])


def _shorten_id(call_id: str) -> str:
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_CHARS]


def _rewrite_call_ids(items: Items, are_short: bool) -> Items:
    """Rewrite ids of calls and results for the template: shortened, or else name and number of the call."""
    new_ids: dict[str, str] = {}
    numbers = count()
    rewritten = []
    for item in items:
        calls = []
        for call in item.calls:
            old = str(call.get("id", ""))
            new_ids[old] = _shorten_id(old) if are_short else f"functions.{call['function']['name']}:{next(numbers)}"
            calls.append({**call, "id": new_ids[old]})
        item = item.replace(tool_calls=calls) if calls else item
        if item.role == "tool" and (old := str(item.message.get("tool_call_id", ""))):
            item = item.replace(tool_call_id=new_ids.get(old) or (_shorten_id(old) if are_short else old))
        rewritten.append(item)
    return rewritten


# ---- reasoning


def _copy_reasoning(item: ConversationItem, traits: TemplateTraits) -> ConversationItem:
    """Copy reasoning to the fields that the template reads."""
    if not (reasoning := item.message.get("reasoning_content", "")):
        return item
    if traits.has_exclusive_reasoning and item.calls:
        reasoning = _join_texts(reasoning, item.message["content"])
        item = item.replace(content="")
    return item.replace(**dict.fromkeys(("reasoning_content", *traits.reasoning_fields), reasoning))


def find_reasoning(message: dict[str, Any]) -> str:
    """Reasoning in a field of a client's message; "" for none."""
    values = (message.get(field) for field in REASONING_FIELDS)
    return next((text for text in values if isinstance(text, str) and text.strip()), "")
