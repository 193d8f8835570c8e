"""Tools of OpenAI's Responses as chat's functions, and the model's calls as items.  Pure.

function    chat's, in a flat shape
custom      takes free text; for the model a function with one string, `input`
namespace   a group of functions; for the model each is NAMESPACE__NAME
others      run on OpenAI's servers (web_search, ...); left out, since they can't be run here
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from warmline_proxy.api.custom_tools import JsonObject, build_function
from warmline_proxy.errors import bad_request

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}
TOOL_CHOICE_MODES = ("auto", "none", "required")


@dataclass(frozen=True)
class ResponsesTool:
    """A tool that the model may call."""

    kind: str  # "function" or "custom"
    name: str  # the client's
    namespace: str  # "" without one
    definition: JsonObject  # chat's `function`
    field: str = ""  # its place in the body, such as "tools[0]"

    @property
    def function_name(self) -> str:
        return qualify_name(self.namespace, self.name)


@dataclass(frozen=True)
class Toolbox:
    """Tools of a request, by their function names."""

    tools: dict[str, ResponsesTool] = field(default_factory=dict)

    def resolve(self, function_name: str) -> ResponsesTool:
        """Tool of a function name; for a name that the model made up, a function of that name."""
        return self.tools.get(function_name) or ResponsesTool("function", function_name, "", {})

    def find(self, kind: str, name: str) -> ResponsesTool | None:
        """Tool by its function name or the client's."""
        tools = (tool for tool in self.tools.values() if tool.kind == kind)
        return next((tool for tool in tools if name in (tool.function_name, tool.name)), None)


def qualify_name(namespace: object, name: str) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(value: object) -> Toolbox:
    """Raises ClientError 400."""
    if value is None:
        return Toolbox()
    if not isinstance(value, list):
        raise bad_request("'tools' must be a list of objects.", param="tools")
    tools = (tool for place, entry in enumerate(value) for tool in _read_tool(entry, f"tools[{place}]", ""))
    return Toolbox({tool.function_name: tool for tool in tools})


def _read_tool(entry: object, where: str, namespace: str) -> Iterable[ResponsesTool]:
    if not isinstance(entry, dict):
        raise bad_request(f"'{where}' must be an object with a type.", param=where)
    kind = entry.get("type")
    if kind == "namespace" and not namespace:
        return _read_namespace(entry, where)
    if kind in ("function", "custom"):
        name = _read_name(entry, where)
        convert = _convert_function if kind == "function" else _convert_custom
        return [ResponsesTool(kind, name, namespace, convert(entry, qualify_name(namespace, name)), where)]
    if not isinstance(kind, str):
        raise bad_request(f"'{where}.type' must be a string such as \"function\".", param=f"{where}.type")
    return []


def _read_namespace(entry: JsonObject, where: str) -> Iterable[ResponsesTool]:
    name, tools = _read_name(entry, where), entry.get("tools") or []
    if not isinstance(tools, list):
        raise bad_request(f"'{where}.tools' must be a list.", param=f"{where}.tools")
    return [tool for place, each in enumerate(tools) for tool in _read_tool(each, f"{where}.tools[{place}]", name)]


def _read_name(entry: JsonObject, where: str) -> str:
    if isinstance(name := entry.get("name"), str) and name:
        return name
    raise bad_request(f"'{where}.name' must be a string.", param=f"{where}.name")


def _convert_function(entry: JsonObject, function_name: str) -> JsonObject:
    """Chat's definition, keys in chat's usual order, so that both APIs render one prompt."""
    definition: JsonObject = {"name": function_name}
    if entry.get("description") is not None:
        definition["description"] = entry["description"]
    definition["parameters"] = NO_PARAMETERS if entry.get("parameters") is None else entry["parameters"]
    if entry.get("strict") is True:
        definition["strict"] = True
    return definition


def _convert_custom(entry: JsonObject, function_name: str) -> JsonObject:
    form = entry.get("format")
    grammar = form if isinstance(form, dict) and form.get("type") == "grammar" else None
    return build_function(function_name, entry.get("description"), grammar)


# ---- tool_choice


def read_tool_choice(choice: object, toolbox: Toolbox) -> tuple[Any, Toolbox]:
    """Chat's `tool_choice`, None for its default, and the tools for the model.  Raises ClientError 400.

    With `allowed_tools` the other tools are left out, so that the model can't call them.
    """
    if choice is None:
        return None, toolbox
    if isinstance(choice, str):
        return _check_mode(choice, "tool_choice"), toolbox
    if not isinstance(choice, dict):
        raise bad_request("'tool_choice' must be a string or an object.", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        return _restrict_tools(choice, toolbox)
    tool = _resolve_choice(choice, toolbox, "tool_choice")
    return {"type": "function", "function": {"name": tool.function_name}}, toolbox


def _check_mode(mode: object, where: str) -> Any:
    if mode not in TOOL_CHOICE_MODES:
        raise bad_request(f"'{where}' must be one of {', '.join(TOOL_CHOICE_MODES)}, or an object.", param=where)
    return mode


def _resolve_choice(choice: object, toolbox: Toolbox, where: str) -> ResponsesTool:
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind not in ("function", "custom"):
        shown = str(kind)[:40]
        message = f"'{where}' names a tool of type \"{shown}\"; only function and custom tools can be called here."
        raise bad_request(message, param=where)
    if not isinstance(name, str) or (tool := toolbox.find(kind, name)) is None:
        raise bad_request(f"'{where}' names a tool that is not among 'tools'.", param=where)
    return tool


def _restrict_tools(choice: JsonObject, toolbox: Toolbox) -> tuple[Any, Toolbox]:
    where, listed = "tool_choice.tools", choice.get("tools")
    if not isinstance(listed, list):
        raise bad_request(f"'{where}' must be a list of tools.", param=where)
    callable_tools = [each for each in listed if isinstance(each, dict) and each.get("type") in ("function", "custom")]
    names = {_resolve_choice(each, toolbox, where).function_name for each in callable_tools}
    allowed = {name: tool for name, tool in toolbox.tools.items() if name in names}
    return _check_mode(choice.get("mode") or "auto", "tool_choice.mode"), Toolbox(allowed)
