"""The tools of OpenAI's Responses: told to the model as chat's functions, and its calls told back as items.  Pure.

function    chat's own, in a flat shape
custom      takes free text: the model is shown a function with one string, `input`
namespace   a group of functions; the model knows each as NAMESPACE__NAME
others      run on OpenAI's servers (web_search, ...): nobody runs them here, so the model isn't told of them
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from warmline_proxy.errors import bad_request

Object = dict[str, Any]

NO_PARAMETERS: Object = {"type": "object", "properties": {}}
INPUT = "input"  # a custom tool's only argument
MODES = ("auto", "none", "required")


@dataclass(frozen=True)
class Tool:
    """One that the model may call."""

    kind: str  # "function" or "custom"
    name: str  # as its client knows it
    namespace: str  # "" outside of any
    definition: Object  # chat's `function`

    @property
    def told_name(self) -> str:
        return told_name(self.namespace, self.name)

    @property
    def chat(self) -> Object:
        return {"type": "function", "function": self.definition}


@dataclass(frozen=True)
class Toolbox:
    """A request's tools, by the names that the model knows them by."""

    tools: dict[str, Tool] = field(default_factory=dict)

    @property
    def chat(self) -> list[Object]:
        return [tool.chat for tool in self.tools.values()]

    def called(self, told: str) -> Tool:
        """Of a name that the model has made up: a function of that name."""
        return self.tools.get(told) or Tool("function", told, "", {})

    def find(self, kind: str, name: str) -> Tool | None:
        """By either of its names."""
        named = (tool for tool in self.tools.values() if tool.kind == kind and name in (tool.told_name, tool.name))
        return next(named, None)


def told_name(namespace: object, name: str) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(value: object) -> Toolbox:
    """Raises ClientError 400."""
    if value is None:
        return Toolbox()
    if not isinstance(value, list):
        raise bad_request("'tools' must be a list of objects.", param="tools")
    tools = (tool for place, entry in enumerate(value) for tool in _read(entry, f"tools[{place}]", ""))
    return Toolbox({tool.told_name: tool for tool in tools})


def _read(entry: object, where: str, namespace: str) -> Iterable[Tool]:
    if not isinstance(entry, dict):
        raise bad_request(f"'{where}' must be an object with a type.", param=where)
    kind = entry.get("type")
    if kind == "namespace" and not namespace:
        return _of_namespace(entry, where)
    if kind == "function":
        return [Tool("function", name := _name(entry, where), namespace, _function(entry, name, namespace))]
    if kind == "custom":
        return [Tool("custom", name := _name(entry, where), namespace, _custom(entry, name, namespace))]
    if not isinstance(kind, str):
        raise bad_request(f"'{where}.type' must be a string such as \"function\".", param=f"{where}.type")
    return []


def _of_namespace(entry: Object, where: str) -> Iterable[Tool]:
    name, tools = _name(entry, where), entry.get("tools") or []
    if not isinstance(tools, list):
        raise bad_request(f"'{where}.tools' must be a list.", param=f"{where}.tools")
    return [tool for place, each in enumerate(tools) for tool in _read(each, f"{where}.tools[{place}]", name)]


def _name(entry: Object, where: str) -> str:
    if isinstance(name := entry.get("name"), str) and name:
        return name
    raise bad_request(f"'{where}.name' must be a string.", param=f"{where}.name")


def _function(entry: Object, name: str, namespace: str) -> Object:
    """Keys in chat's usual order, so that both APIs render one prompt."""
    definition: Object = {"name": told_name(namespace, name)}
    if entry.get("description") is not None:
        definition["description"] = entry["description"]
    definition["parameters"] = NO_PARAMETERS if entry.get("parameters") is None else entry["parameters"]
    if entry.get("strict") is True:
        definition["strict"] = True
    return definition


def _custom(entry: Object, name: str, namespace: str) -> Object:
    form = entry.get("format")
    text: Object = {"type": "string", "description": "The tool's input, as plain text."}
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    parts = [entry.get("description"), _grammar(form) if isinstance(form, dict) else ""]
    description = "\n\n".join(part for part in parts if isinstance(part, str) and part)
    return {"name": told_name(namespace, name), "description": description, "parameters": parameters}


def _grammar(form: Object) -> str:
    if form.get("type") != "grammar" or not isinstance(form.get("definition"), str):
        return ""
    return f"'{INPUT}' must follow this {form.get('syntax') or 'lark'} grammar:\n{form['definition']}"


# ---- tool_choice


def choose(choice: object, toolbox: Toolbox) -> tuple[Any, Toolbox]:
    """Chat's `tool_choice`, None for its default, and the tools that the model is told of.  Raises ClientError 400.

    Of `allowed_tools` it is told of no others: what it doesn't know it can't call.
    """
    if choice is None:
        return None, toolbox
    if isinstance(choice, str):
        return _mode(choice, "tool_choice"), toolbox
    if not isinstance(choice, dict):
        raise bad_request("'tool_choice' must be a string or an object.", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, toolbox)
    tool = _chosen(choice, toolbox, "tool_choice")
    return {"type": "function", "function": {"name": tool.told_name}}, toolbox


def _mode(mode: object, where: str) -> Any:
    if mode not in MODES:
        raise bad_request(f"'{where}' must be one of {', '.join(MODES)}, or an object.", param=where)
    return mode


def _chosen(choice: object, toolbox: Toolbox, where: str) -> Tool:
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind not in ("function", "custom"):
        raise bad_request(
            f"'{where}' names a tool of type \"{str(kind)[:40]}\"; only function and custom tools can be called here.",
            param=where,
        )
    if not isinstance(name, str) or (tool := toolbox.find(kind, name)) is None:
        raise bad_request(f"'{where}' names a tool that is not among 'tools'.", param=where)
    return tool


def _allowed(choice: Object, toolbox: Toolbox) -> tuple[Any, Toolbox]:
    where, listed = "tool_choice.tools", choice.get("tools")
    if not isinstance(listed, list):
        raise bad_request(f"'{where}' must be a list of tools.", param=where)
    served = [each for each in listed if isinstance(each, dict) and each.get("type") in ("function", "custom")]
    names = {_chosen(each, toolbox, where).told_name for each in served}
    kept = {name: tool for name, tool in toolbox.tools.items() if name in names}
    return _mode(choice.get("mode") or "auto", "tool_choice.mode"), Toolbox(kept)


# ---- calls


def arguments_of(text: str) -> str:
    """A custom tool's input as the arguments that the model gave, or would have given."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """A custom tool's input out of what the model has called it with; all of it where that is something else."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return given[INPUT] if isinstance(given, dict) and isinstance(given.get(INPUT), str) else arguments
