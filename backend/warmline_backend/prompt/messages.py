"""Chat bodies checked and made to fit templates: text parts joined, nulls dropped, tool arguments as objects.  Pure."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from warmline_backend.config import RESERVED_TEMPLATE_ARGS
from warmline_backend.prompt.template_compat import ConversationItem, OriginalMessage, find_reasoning, fit_conversation
from warmline_backend.prompt.template_traits import REASONING_FIELDS, Message, TemplateTraits
from warmline_backend.request.params import BadRequestError, Fields, format_json_type, format_value
from warmline_backend.request.reasoning_effort import make_template_arguments, parse_reasoning_options

ROLES = ("system", "developer", "user", "assistant", "tool")
# What SDKs send back of an answer, and no template reads; reasoning goes on under the names that the template knows.
_IGNORED_FIELDS = frozenset({"annotations", "audio", "function_call", "refusal", *REASONING_FIELDS})


class ChatConversation(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a template."""

    items: list[ConversationItem]
    tools: list[dict[str, Any]] | None  # for the template
    offered_tools: list[dict[str, Any]] | None = None  # in the prompt, by the template or in a system message
    kwargs: dict[str, Any]
    generation_prompt: bool  # end with the assistant's header
    continue_final: bool  # leave the last message open, for the model to go on with

    @property
    def messages(self) -> list[Message]:
        return [item.message for item in self.items]

    @property
    def complete_items(self) -> list[ConversationItem]:
        """All items but one that the model is to continue."""
        return self.items[:-1] if self.continue_final else self.items

    @property
    def user_indices(self) -> list[int]:
        """Indices of users' messages."""
        return [index for index, item in enumerate(self.items) if item.role == "user"]

    @property
    def system_count(self) -> int:
        """Number of instructions that the conversation begins with."""
        return next((index for index, item in enumerate(self.items) if not item.is_instruction), len(self.items))


def extract_reasoning(message: Message, think_start: str, think_end: str) -> str:
    """Reasoning of a message, in a field of its own or before its content; "" for none."""
    if reasoning := find_reasoning(message):
        return reasoning.strip()
    before, end, _ = message["content"].partition(think_end)
    return str(before.rpartition(think_start)[2].strip()) if end else ""


def parse_conversation(
    body: dict[str, Any], *, traits: TemplateTraits, source: str = "", template_args: Mapping[str, Any] | None = None
) -> ChatConversation:
    """Check a chat body, and fit it to a template of these `traits` with the text `source`.  Raises BadRequestError.

    `template_args` are arguments of the template that the body does not set; null is a value, too.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("'messages' must be a list of at least one message", "messages")
    fields = Fields(body)
    continue_final = fields.get_boolean("continue_final_message")
    generation_prompt = fields.get_optional_boolean("add_generation_prompt") is not False
    if continue_final and generation_prompt:
        raise BadRequestError(
            "'continue_final_message' needs 'add_generation_prompt' to be false; they can't both be on",
            "continue_final_message",
        )
    offered = _parse_tools(body)
    items, tools = fit_conversation(
        [_parse_item(message, index) for index, message in enumerate(messages)], offered, traits
    )
    asked = make_template_arguments(parse_reasoning_options(fields), traits.variable_names, source)
    return ChatConversation(
        items=items,
        tools=tools,
        offered_tools=offered,
        kwargs={**(template_args or {}), **asked, **_parse_template_kwargs(body)},
        generation_prompt=generation_prompt,
        continue_final=continue_final,
    )


def _parse_item(message: object, index: int) -> ConversationItem:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BadRequestError(f"'{where}' must be an object with a role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequestError(f"'{where}.role' must be a string such as \"user\"", f"{where}.role")
    _refuse_function_messages(role, message, where)
    content = message.get("content")
    refused = message.get("refusal")
    if content is None and role in ROLES and role != "assistant":
        raise BadRequestError(f"'{where}.content' must be a string or a list of text parts", f"{where}.content")
    given = {key: value for key, value in message.items() if value is not None and key not in _IGNORED_FIELDS}
    spoken = refused if content is None and isinstance(refused, str) else content
    given["content"] = _parse_content(spoken, f"{where}.content")
    if reasoning := find_reasoning(message):
        given["reasoning_content"] = reasoning
    calls = _parse_tool_calls(given.pop("tool_calls", []), f"{where}.tool_calls")
    if calls:
        given["tool_calls"] = calls
    functions = [call["function"] for call in calls]
    original = OriginalMessage(
        content=given["content"],
        call_ids=tuple(str(call.get("id", "")) for call in calls),
        call_names=tuple(function["name"] for function in functions),
        call_arguments=tuple(function["arguments"] for function in functions),
    )
    return ConversationItem(message=given, number=index + 1, original=original)


def _refuse_function_messages(role: str, message: dict[str, Any], where: str) -> None:
    """Refuse the predecessors of tools."""
    if role == "function":
        hint = "send the role tool, with the 'tool_call_id' of the call"
        raise BadRequestError(f"'{where}.role' is \"function\", which is not supported: {hint}", f"{where}.role")
    if message.get("function_call"):
        field = f"{where}.function_call"
        raise BadRequestError(f"'{field}' is not supported: send 'tool_calls'", field)


def _parse_content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"'{where}' must be a string, null, or a list of text parts", where)
    return "".join(_parse_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _parse_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise BadRequestError(f"'{where}' must be an object with a type", where)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise BadRequestError(f"'{where}' is of type \"{str(kind)[:40]}\"; this model reads only text parts", where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise BadRequestError(f"'{where}.{kind}' must be a string", f"{where}.{kind}")
    return text


def _parse_tool_calls(calls: object, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRequestError(f"'{where}' must be a list of objects", where)
    return [_parse_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _parse_tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Decode arguments: templates iterate over them, OpenAI sends them as JSON in a string.

    An agent also replays a call that its model garbled: arguments that can't be parsed stay text.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"'{where}.function' must be an object with a name", f"{where}.function")
    return {**call, "function": {**function, "arguments": _parse_arguments(function.get("arguments"))}}


def _parse_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _parse_tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if not tools and (tools is None or isinstance(tools, list)):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequestError("'tools' must be a list of objects", "tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return tools


def _check_tool(tool: dict[str, Any], where: str) -> None:
    kind, function = tool.get("type"), tool.get("function")
    if kind not in (None, "function"):
        raise BadRequestError(f"'{where}.type' must be \"function\", not {format_value(kind)}", f"{where}.type")
    if not isinstance(function, dict):
        what = f"'{where}.function' must be an object with a name, not {format_json_type(function)}"
        raise BadRequestError(f"{what}; what describes a function stands in there", f"{where}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        field = f"{where}.function.name"
        raise BadRequestError(f"'{field}' must be a string that is not empty, not {format_value(name)}", field)
    if not isinstance(parameters, dict | None):
        field = f"{where}.function.parameters"
        raise BadRequestError(f"'{field}' must be a JSON schema (an object), not {format_value(parameters)}", field)


def _parse_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise BadRequestError("'chat_template_kwargs' must be an object", "chat_template_kwargs")
    if reserved := sorted(RESERVED_TEMPLATE_ARGS & kwargs.keys()):
        raise BadRequestError(f"'chat_template_kwargs' may not set {', '.join(reserved)}", "chat_template_kwargs")
    return kwargs
