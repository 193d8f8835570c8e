"""What a body asks of the answer's form: response_format, structured_outputs, json_schema, tool_choice ...  Pure.

Every function raises BadRequest, which names the field, what was wrong with it and what is taken.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmline_backend.request.params import BadRequest, Fields, parallel_tool_calls, shown, tool_choice_mode

CHOICES_MAX = 1000
FORM_BYTES_MAX = 1 << 18  # of a schema, a regular expression, a grammar
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar")
# What says it by itself: vLLM's older fields, and llama.cpp's, of which an empty grammar is none.
LONE_FIELDS = {f"guided_{kind}": kind for kind in STRUCTURED_KINDS} | {"grammar": "grammar", "json_schema": "json"}


@dataclass(frozen=True)
class Form:
    """What the text must be."""

    kind: str  # one of STRUCTURED_KINDS
    value: Any  # a JSON schema, an expression, the choices, a grammar's text
    field: str  # that asked for it


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Any  # a JSON schema; None where it takes nothing
    strict: bool  # its arguments are promised to follow the schema
    field: str


@dataclass(frozen=True)
class Asked:
    form: Form | None = None
    choice: str = "auto"  # or "none", or "required"
    tools: tuple[Tool, ...] = ()  # that may be called
    several: bool = True  # calls in one answer
    narrowed: bool = False  # the model was told of more tools than may be called

    @property
    def anything(self) -> bool:
        """Nothing is asked of the answer's form."""
        free = self.choice == "auto" and not self.narrowed and not any(tool.strict for tool in self.tools)
        return self.form is None and (free or (self.choice == "none" and not self.tools))


def asks_for_a_form(body: Mapping[str, Any]) -> bool:
    """Whether to look closer: cheap, and true too often rather than too seldom."""
    names = ("response_format", "structured_outputs", "tool_choice", "tools", *LONE_FIELDS)
    return any(body.get(name) is not None for name in names)


def read_asked(endpoint: str, body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> Asked:
    """`tools` are those that the model was told of, as the body has them: functions, as `conversation` checks."""
    form = form_of(body)
    if endpoint != "chat":
        return Asked(form=form)
    fields = Fields(body)
    choice = tool_choice_mode(fields)
    told = tuple(_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools or ()))
    if choice == "required" and not told:
        raise BadRequest("'tool_choice' asks for a call, but there are no 'tools' to call; send some", "tool_choice")
    allowed = _allowed(body.get("tool_choice"), told)
    return Asked(form, choice, allowed, parallel_tool_calls(fields), narrowed=len(allowed) < len(told))


# ---- tools


def _tool(tool: Mapping[str, Any], field: str) -> Tool:
    function = tool["function"]
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise BadRequest(f"'{field}.function.strict' must be true or false, not {shown(strict)}", field)
    return Tool(function["name"], function.get("parameters"), bool(strict), f"{field}.function.parameters")


def _allowed(choice: object, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Those that `tool_choice` lets be called, where it names any."""
    if not isinstance(choice, Mapping):
        return tools
    if choice.get("type") == "function":
        names = {_named(choice, "tool_choice")}
    else:
        named = Fields(choice.get("allowed_tools"), "tool_choice.allowed_tools").get("tools")
        if not isinstance(named, list) or not named:
            raise BadRequest("'tool_choice.allowed_tools.tools' must be a list of functions", "tool_choice")
        names = {_named(tool, f"tool_choice.allowed_tools.tools[{place}]") for place, tool in enumerate(named)}
    if missing := sorted(names - {tool.name for tool in tools}):
        raise BadRequest(f"'tool_choice' names {shown(missing[0])}, which is not among 'tools'", "tool_choice")
    return tuple(tool for tool in tools if tool.name in names)


def _named(choice: object, field: str) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"'{field}.function.name' must be the name of one of 'tools'", "tool_choice")
    return name


# ---- forms


def form_of(body: Mapping[str, Any]) -> Form | None:
    forms = [form for form in (_response_format(body), *_structured(body), *_lone(body)) if form is not None]
    if len(forms) > 1:
        fields = " and ".join(f"'{form.field}'" for form in forms[:2])
        raise BadRequest(f"{fields} both say what the answer must be; send one of them", forms[1].field)
    return forms[0] if forms else None


def _response_format(body: Mapping[str, Any]) -> Form | None:
    if (asked := body.get("response_format")) is None:
        return None
    fields = Fields(asked, "response_format")
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json(fields.get("schema") or {"type": "object"}, "response_format.schema")
    if kind == "json_schema":
        return _json_schema(fields)
    raise fields.refuse("type", '"text", "json_object" or "json_schema"', kind)


def _json_schema(fields: Fields) -> Form:
    inner = Fields(fields.get("json_schema"), "response_format.json_schema")
    name = inner.get("name")
    if name is not None and not isinstance(name, str):
        raise inner.refuse("name", "a string", name)
    inner.boolean("strict")
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise inner.refuse("schema", "a JSON schema (an object)", schema)
    return _json(schema, "response_format.json_schema.schema")


def _structured(body: Mapping[str, Any]) -> list[Form | None]:
    if (asked := body.get("structured_outputs")) is None:
        return []
    fields = Fields(asked, "structured_outputs")
    forms = [_of_kind(kind, fields.get(kind), f"structured_outputs.{kind}") for kind in STRUCTURED_KINDS]
    if fields.boolean("json_object"):
        forms.append(_json({"type": "object"}, "structured_outputs.json_object"))
    if fields.get("structural_tag") is not None:
        raise BadRequest("'structured_outputs.structural_tag' is not supported; send 'tools'", "structured_outputs")
    if not any(forms):
        raise BadRequest(
            '\'structured_outputs\' must have one of "json", "regex", "choice", "grammar"', "structured_outputs"
        )
    return forms


def _lone(body: Mapping[str, Any]) -> list[Form | None]:
    asked = {field: body.get(field) for field in LONE_FIELDS}
    asked["grammar"] = asked["grammar"] or None
    return [_of_kind(LONE_FIELDS[field], value, field) for field, value in asked.items()]


def _of_kind(kind: str, value: object, field: str) -> Form | None:
    if value is None:
        return None
    if kind == "json":
        return _json(_parsed(value, field), field)
    if kind == "choice":
        return _choices(value, field)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"'{field}' must be a string that is not empty, not {shown(value)}", field)
    _check_size(len(value), field)
    return Form(kind, value, field)


def _parsed(value: object, field: str) -> object:
    """A schema may come as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRequest(f"'{field}' must be a JSON schema; this string is no JSON", field) from None


def _json(schema: object, field: str) -> Form:
    if not isinstance(schema, Mapping):
        raise BadRequest(f"'{field}' must be a JSON schema (an object), not {shown(schema)}", field)
    return Form("json", schema, field)


def _choices(value: object, field: str) -> Form:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        raise BadRequest(f"'{field}' must be a list of strings, none empty", field)
    if len(value) > CHOICES_MAX:
        raise BadRequest(f"'{field}' has {len(value)} choices; {CHOICES_MAX} are the most", field)
    _check_size(sum(map(len, value)), field)
    return Form("choice", value, field)


def _check_size(size: int, field: str) -> None:
    if size > FORM_BYTES_MAX:
        raise BadRequest(f"'{field}' is {size} characters long; {FORM_BYTES_MAX} are the most", field)
