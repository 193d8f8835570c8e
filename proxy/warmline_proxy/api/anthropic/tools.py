"""Tools and their choice, from Anthropic's form to OpenAI's.  Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from warmline_proxy.api.base import Fields
from warmline_proxy.errors import ClientError, bad_request

CUSTOM_TYPES = (None, "custom")
# Run by the client, but known by their names alone to Anthropic's own models.
CLIENT_TOOL_PREFIXES = ("bash_", "text_editor_", "computer_", "memory_")
MISSING_SCHEMA = (
    """Field required: a JSON schema of the tool's arguments, such as {"type": "object", "properties": {}}"""
)


class ToolSpec(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def convert_tools(tools: Sequence[ToolSpec], choice: ToolChoice | None) -> Fields:
    """Raises ClientError 400."""
    functions = [_convert_tool(tool, f"tools.{i}") for i, tool in enumerate(tools) if _is_supported(tool, f"tools.{i}")]
    fields: Fields = {"tools": functions} if functions else {}
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use and functions:
        fields["parallel_tool_calls"] = False
    return fields | _convert_choice(choice, {tool["function"]["name"] for tool in functions})


def _is_supported(tool: ToolSpec, where: str) -> bool:
    """Whether the model is told of it; False for one that runs at Anthropic, which nobody could answer here."""
    if tool.type in CUSTOM_TYPES or tool.input_schema is not None:
        return True
    if tool.type == "function":
        message = f"{where}: this is a function as OpenAI has them; send its name, description and input_schema alone"
        raise bad_request(message, param="tools")
    if tool.type.startswith(CLIENT_TOOL_PREFIXES):
        message = f"{where}: {tool.type} is known to Anthropic's models alone; send it with an input_schema"
        raise bad_request(message, param="tools")
    return False


def _convert_tool(tool: ToolSpec, where: str) -> dict[str, Any]:
    if not tool.name:
        raise bad_request(f"{where}.name: Field required", param="tools")
    if tool.input_schema is None:  # with an empty one in its place, the model would make arguments up
        raise bad_request(f"{where}.input_schema: {MISSING_SCHEMA}", param="tools")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _convert_choice(choice: ToolChoice, names: set[str]) -> Fields:
    if choice.type == "tool":
        if choice.name not in names:
            raise _missing_tool_error(f"{choice.name!r} is none of the tools that can be called here")
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.type == "any":
        if not names:
            raise _missing_tool_error("there is no tool that can be called here")
        return {"tool_choice": "required"}
    if choice.type in ("auto", "none"):
        return {"tool_choice": choice.type} if names else {}
    raise bad_request("tool_choice.type: must be auto, any, tool or none", param="tool_choice")


def _missing_tool_error(why: str) -> ClientError:
    return bad_request(f"tool_choice: {why}; tools that run at Anthropic don't run here", param="tool_choice")
