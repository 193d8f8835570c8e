"""Chat bodies checked and made to fit templates: text parts joined, nulls dropped, tool arguments as objects.  Pure."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from warmline_backend.config import RESERVED_TEMPLATE_ARGS
from warmline_backend.prompt import template_compat
from warmline_backend.prompt.template_compat import ConversationItem, OriginalMessage, find_reasoning
from warmline_backend.prompt.template_traits import REASONING_FIELDS, Message, TemplateTraits
from warmline_backend.request.field_names import explain_missing_field
from warmline_backend.request.params import FieldError, Fields, Tools, format_json_type, format_value
from warmline_backend.request.reasoning_effort import make_template_arguments
from warmline_common.process.redaction import quote_text
from warmline_common.protocol.json_structure import decode_json_text
from warmline_common.protocol.media_parts import describe_refusal, find_placeholder, join_parts
from warmline_common.protocol.misspelling import explain_missing

ARGUMENT_ENCODINGS_MAX = 3  # of arguments as JSON in a string
TOOLS_MAX = 2048  # each is rendered once for every message whose end is looked for
ROLES = ("system", "developer", "user", "assistant", "tool")
# What SDKs send back of an answer, and no template reads; reasoning goes on under the names that the template knows.
_IGNORED_FIELDS = frozenset({"annotations", "audio", "function_call", "refusal", *REASONING_FIELDS})


class ChatConversation(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a template."""

    items: list[ConversationItem]
    tools: Tools  # for the template
    offered_tools: Tools = None  # in the prompt, by the template or in a system message
    kwargs: dict[str, Any]
    generation_prompt: bool  # end with the assistant's header
    continue_final: bool  # leave the last message open, for the model to go on with

    @property
    def messages(self) -> list[Message]:
        return [item.message for item in self.items]

    @property
    def complete_items(self) -> list[ConversationItem]:
        """Items without the message that the model is to continue."""
        return self.items[:-1] if self.continue_final else self.items

    @property
    def user_indices(self) -> list[int]:
        """Indices of users' messages."""
        return [index for index, item in enumerate(self.items) if item.role == "user"]

    @property
    def system_count(self) -> int:
        """Number of instructions that the conversation begins with."""
        return template_compat.count_leading_instructions(self.items)


def extract_reasoning(message: Message, think_start: str, think_end: str) -> str:
    """Reasoning of a message, in a field of its own or before its content; "" for none."""
    if reasoning := find_reasoning(message):
        return reasoning.strip()
    before, end, _ = message["content"].partition(think_end)
    return str(before.rpartition(think_start)[2].strip()) if end else ""


def parse_conversation(
    body: dict[str, Any], *, traits: TemplateTraits, template_args: Mapping[str, Any] | None = None
) -> ChatConversation:
    """Check a chat body, and fit it to a template of these `traits`.  Raises BadRequestError.

    `template_args` are arguments of the template that the body does not set; null is a value, too.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        hint = explain_missing_field("messages", body) if messages is None else None
        raise FieldError("messages", hint or "must be a list of at least one message")
    fields = Fields(body)
    continue_final = fields.get_boolean("continue_final_message")
    generation_prompt = fields.get_optional_boolean("add_generation_prompt") is not False
    if continue_final and generation_prompt:
        fault = "needs 'add_generation_prompt' to be false; they can't both be on"
        raise FieldError("continue_final_message", fault)
    offered_tools = _parse_tools(body)
    items = [_parse_item(message, index) for index, message in enumerate(messages)]
    items, tools = template_compat.fit_conversation(items, offered_tools, traits)
    arguments = make_template_arguments(fields, _parse_template_kwargs(body), traits.reasoning_controls)
    return ChatConversation(
        items=items,
        tools=tools,
        offered_tools=offered_tools,
        kwargs={**(template_args or {}), **arguments},
        generation_prompt=generation_prompt,
        continue_final=continue_final,
    )


def _parse_item(message: object, index: int) -> ConversationItem:
    field = f"messages[{index}]"
    if not isinstance(message, dict):
        raise FieldError(field, "must be an object with a role and content")
    role, content, refusal = message.get("role"), message.get("content"), message.get("refusal")
    if not isinstance(role, str) or not role:
        misspelt = explain_missing("role", message, "message") if role is None else None
        raise FieldError(f"{field}.role", misspelt or 'must be a string such as "user"')
    if role == "function":  # the predecessor of tools
        hint = "send the role tool, with the 'tool_call_id' of the call"
        raise FieldError(f"{field}.role", f'is "function", which is not supported: {hint}')
    if message.get("function_call"):
        raise FieldError(f"{field}.function_call", "is not supported: send 'tool_calls'")
    if content is None and role in ROLES and role not in ("assistant", "tool"):
        misspelt = explain_missing("content", message, "message")
        raise FieldError(f"{field}.content", misspelt or "must be a string or a list of text parts")
    parsed = {key: value for key, value in message.items() if value is not None and key not in _IGNORED_FIELDS}
    text = refusal if content is None and isinstance(refusal, str) else content
    parsed["content"] = _parse_content(text, f"{field}.content", with_placeholders=role == "tool")
    if reasoning := find_reasoning(message):
        parsed["reasoning_content"] = reasoning
    calls = _check_objects(parsed.pop("tool_calls", []), f"{field}.tool_calls")
    calls = [_parse_tool_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if calls:
        parsed["tool_calls"] = calls
    functions = [call["function"] for call in calls]
    original = OriginalMessage(
        content=parsed["content"],
        call_ids=tuple(str(call.get("id", "")) for call in calls),
        call_names=tuple(function["name"] for function in functions),
        call_arguments=tuple(function["arguments"] for function in functions),
    )
    return ConversationItem(message=parsed, number=index + 1, original=original)


def _parse_content(content: object, field: str, with_placeholders: bool) -> str:
    """Joined text of a string or parts.  Images and files are refused, or become a line that says so."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise FieldError(field, "must be a string, null, or a list of text parts")
    return join_parts(_parse_part(part, f"{field}[{i}]", with_placeholders) for i, part in enumerate(content))


def _parse_part(part: object, field: str, with_placeholders: bool) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise FieldError(field, "must be an object with a type, or a string")
    kind = part.get("type")
    if kind is None and (misspelt := explain_missing("type", part, "part")):
        raise FieldError(f"{field}.type", misspelt)
    if with_placeholders and (placeholder := find_placeholder(kind)):
        return placeholder
    if kind not in ("text", "refusal"):
        raise FieldError(field, f"is {describe_refusal(kind)}")
    text = part.get(kind)
    if not isinstance(text, str):
        misspelt = explain_missing(kind, part, "part") if text is None else None
        raise FieldError(f"{field}.{kind}", misspelt or "must be a string")
    return text


def _check_objects(value: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise FieldError(field, "must be a list of objects")
    return value


def _parse_tool_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """Decode arguments: templates iterate over them, OpenAI sends them as JSON in a string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(f"{field}.function", "must be an object with a name")
    return {**call, "function": {**function, "arguments": decode_arguments(function.get("arguments"))}}


def decode_arguments(arguments: Any) -> Any:
    """Object in arguments as a client sends them: an object, or JSON in a string, perhaps encoded again; null is none.

    An agent also sends back malformed calls of its model: of other JSON the value is returned, of other text the text.
    """
    decoded = [arguments]
    with suppress(ValueError):
        while isinstance(decoded[-1], str) and len(decoded) <= ARGUMENT_ENCODINGS_MAX:
            decoded.append(decode_json_text(decoded[-1].strip() or "{}"))
    if decoded[-1] is None:
        return {}
    return decoded[-1] if isinstance(decoded[-1], dict) else decoded[:2][-1]


def _parse_tools(body: dict[str, Any]) -> Tools:
    if (value := body.get("tools")) is None:
        return None
    tools = _check_objects(value, "tools")
    if len(tools) > TOOLS_MAX:
        raise FieldError("tools", f"has {len(tools)} tools; {TOOLS_MAX} are the most")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return tools or None


def _check_tool(tool: dict[str, Any], field: str) -> None:
    kind, function = tool.get("type"), tool.get("function")
    if kind not in (None, "function"):
        raise FieldError(f"{field}.type", f'must be "function", not {format_value(kind)}')
    if not isinstance(function, dict):
        fault = f"must be an object with a name, not {format_json_type(function)}"
        raise FieldError(f"{field}.function", f"{fault}; the function's description belongs there")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise FieldError(f"{field}.function.name", f"must be a string that is not empty, not {format_value(name)}")
    if not isinstance(parameters, dict | None):
        fault = f"must be a JSON schema (an object), not {format_value(parameters)}, in the tool {quote_text(name)}"
        raise FieldError(f"{field}.function.parameters", fault)


def _parse_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    if (kwargs := body.get("chat_template_kwargs")) is None:
        return {}
    if not isinstance(kwargs, dict):
        raise FieldError("chat_template_kwargs", "must be an object")
    if reserved := sorted(RESERVED_TEMPLATE_ARGS & kwargs.keys()):
        raise FieldError("chat_template_kwargs", f"may not set {', '.join(reserved)}")
    return kwargs
