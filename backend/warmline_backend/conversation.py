"""A chat body as templates want it: checked, text parts joined, nulls gone, tool arguments as objects.

Reads the client's body and leaves it untouched.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from warmline_backend.params import BadRequest

Message = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning")  # what clients call it, besides putting it into the content

# What the renderer itself passes to a template; nobody may replace the template or the conversation.
RESERVED_KWARGS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"}
    | {"max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is rendered with."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    generation_prompt: bool  # end with the assistant's header
    continue_final: bool  # leave the last message open, for the model to go on with

    @property
    def turns(self) -> list[int]:
        """Where its users speak: indices of their messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "user"]

    @property
    def system_messages(self) -> int:
        """How many messages the conversation opens with that instruct rather than talk."""
        for count, message in enumerate(self.messages):
            if message["role"] not in ("system", "developer"):
                return count
        return len(self.messages)


def reasoning_of(message: Message, think_start: str, think_end: str) -> str:
    """The reasoning that a message brings along, in a field of its own or before its content; "" where it has none."""
    for field in REASONING_FIELDS:
        if isinstance(reasoning := message.get(field), str) and reasoning.strip():
            return reasoning.strip()
    before, end, _ = message["content"].partition(think_end)
    return str(before.rpartition(think_start)[2].strip()) if end else ""


def read_conversation(
    body: dict[str, Any], *, keeps_developer: bool, template_args: Mapping[str, Any] | None = None
) -> Conversation:
    """Check a chat body.  Raises BadRequest.  Where the template doesn't know the developer role it becomes system.

    `template_args` go to the template where the body's own don't name them; null is a value, too.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a list of at least one message", "messages")
    continue_final = _switch(body, "continue_final_message", False)
    generation_prompt = _switch(body, "add_generation_prompt", True)
    if continue_final and generation_prompt:
        raise BadRequest(
            "'continue_final_message' needs 'add_generation_prompt' to be false; they can't both be on",
            "continue_final_message",
        )
    return Conversation(
        messages=[_message(message, f"messages[{i}]", keeps_developer) for i, message in enumerate(messages)],
        tools=_tools(body),
        kwargs={**(template_args or {}), **_template_kwargs(body)},
        generation_prompt=generation_prompt,
        continue_final=continue_final,
    )


def _switch(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"'{name}' must be true or false", name)
    return value


def _message(message: object, where: str, keeps_developer: bool) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"'{where}' must be an object with a role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"'{where}.role' must be a string such as \"user\"", f"{where}.role")
    given = {key: value for key, value in message.items() if value is not None}
    given["role"] = "system" if role == "developer" and not keeps_developer else role
    given["content"] = _content(message.get("content"), f"{where}.content")
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(given["tool_calls"], f"{where}.tool_calls")
    return given


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"'{where}' must be a string, null, or a list of text parts", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise BadRequest(f"'{where}' must be an object with a type", where)
    if part.get("type") != "text":
        kind = str(part.get("type"))[:40]
        raise BadRequest(f"'{where}' is of type \"{kind}\"; this model reads only text parts", where)
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"'{where}.text' must be a string", f"{where}.text")
    return text


def _tool_calls(calls: object, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRequest(f"'{where}' must be a list of objects", where)
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates iterate over arguments, OpenAI sends them as JSON in a string.

    An agent also replays a call that its model garbled: arguments that don't parse, or nest without end, are left as
    they are.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    if not tools and (tools is None or isinstance(tools, list)):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("'tools' must be a list of objects", "tools")
    return tools


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise BadRequest("'chat_template_kwargs' must be an object", "chat_template_kwargs")
    if reserved := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise BadRequest(f"'chat_template_kwargs' may not set {', '.join(reserved)}", "chat_template_kwargs")
    return kwargs
