"""Format of the answer that a body asks for: response_format, structured_outputs, tools, tool_choice.  Pure.

Every function raises BadRequestError, which names the field, the fault and the accepted values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warmline_backend.request import params
from warmline_backend.request.params import FieldError, Fields, Tools, format_value
from warmline_common.protocol.json_structure import decode_json_text

CHOICES_MAX = 1000
FORMAT_BYTES_MAX = 1 << 18  # of a regular expression, a grammar
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar")
# vLLM's older fields, and llama.cpp's, of which an empty grammar is none.
LEGACY_FIELDS = {f"guided_{kind}": kind for kind in STRUCTURED_KINDS} | {"grammar": "grammar", "json_schema": "json"}


@dataclass(frozen=True)
class TextFormat:
    """Format of the answer's text."""

    kind: str  # one of STRUCTURED_KINDS
    value: Any  # a JSON schema, an expression, the choices, a grammar's text
    field: str  # that asked for it
    strict: bool = False  # of a JSON schema: what can be neither forced nor checked is refused


@dataclass(frozen=True)
class CallableTool:
    """A function that the model may call."""

    name: str
    parameters: Any  # a JSON schema; None where it takes nothing
    strict: bool  # its arguments are promised to follow the schema
    field: str


@dataclass(frozen=True)
class ResponseFormat:
    text_format: TextFormat | None = None
    tool_choice: str = "auto"  # or "none", or "required"
    tools: tuple[CallableTool, ...] = ()  # that may be called
    parallel: bool = True  # calls in one answer
    has_restricted_tools: bool = False  # the prompt has more tools than may be called

    @property
    def is_unconstrained(self) -> bool:
        """True for any format of the answer."""
        if self.text_format is not None:
            return False
        if self.tool_choice == "none":
            return not self.tools
        return self.tool_choice == "auto" and not (self.has_restricted_tools or any(tool.strict for tool in self.tools))


def has_format_fields(body: Mapping[str, Any]) -> bool:
    """Cheap check for fields of this module; may be true for an unconstrained answer, never false for another."""
    names = ("response_format", "structured_outputs", "tool_choice", "tools", *LEGACY_FIELDS)
    return any(body.get(name) is not None for name in names)


def parse_response_format(endpoint: str, body: Mapping[str, Any], tools: Tools) -> ResponseFormat:
    """Parse a body's format; `tools` are those in the prompt, checked by `prompt.messages`."""
    form = parse_text_format(body)
    if endpoint != "chat":
        return ResponseFormat(form)
    fields = Fields(body)
    choice = params.parse_tool_choice(fields)
    offered = tuple(_parse_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if choice == "required" and not offered:
        raise FieldError("tool_choice", "asks for a call, but there are no 'tools' to call; send some")
    allowed = _filter_allowed_tools(body.get("tool_choice"), offered)
    parallel = params.parse_parallel_tool_calls(fields)
    return ResponseFormat(form, choice, allowed, parallel, has_restricted_tools=len(allowed) < len(offered))


# ---- tools


def _parse_tool(tool: Mapping[str, Any], field: str) -> CallableTool:
    function = tool["function"]
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise FieldError(f"{field}.function.strict", f"must be true or false, not {format_value(strict)}", field)
    return CallableTool(function["name"], function.get("parameters"), bool(strict), f"{field}.function.parameters")


def _filter_allowed_tools(choice: object, tools: tuple[CallableTool, ...]) -> tuple[CallableTool, ...]:
    """Filter by the names in `tool_choice`, if any."""
    if not isinstance(choice, Mapping):
        return tools
    if choice.get("type") == "function":
        names = {_parse_function_name(choice, "tool_choice")}
    else:
        field = "tool_choice.allowed_tools.tools"
        allowed = Fields(choice.get("allowed_tools"), "tool_choice.allowed_tools").get("tools")
        if not isinstance(allowed, list) or not allowed:
            raise FieldError(field, "must be a list of functions", "tool_choice")
        names = {_parse_function_name(tool, f"{field}[{i}]") for i, tool in enumerate(allowed)}
    if missing := sorted(names - {tool.name for tool in tools}):
        raise FieldError("tool_choice", f"names {format_value(missing[0])}, which is not among 'tools'")
    return tuple(tool for tool in tools if tool.name in names)


def _parse_function_name(choice: object, field: str) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise FieldError(f"{field}.function.name", "must be the name of one of 'tools'", "tool_choice")
    return name


# ---- text formats


def parse_text_format(body: Mapping[str, Any]) -> TextFormat | None:
    parsed = (_parse_format_field(body), *_parse_structured_outputs(body), *_parse_legacy_fields(body))
    forms = [form for form in parsed if form is not None]
    if len(forms) > 1:
        fault = f"and '{forms[1].field}' both say what the answer must be; send one of them"
        raise FieldError(forms[0].field, fault, forms[1].field)
    return forms[0] if forms else None


def _parse_format_field(body: Mapping[str, Any]) -> TextFormat | None:
    if (value := body.get("response_format")) is None:
        return None
    fields = Fields(value, "response_format")
    kind = fields.get("type")
    if kind == "text" or not any(each is not None for each in value.values()):  # {} asks for nothing
        return None
    if kind == "json_object":
        if not (schema := fields.get("schema")):
            return _make_json_format({"type": "object"}, "response_format")
        return _make_json_format(schema, "response_format.schema")
    if kind == "json_schema":
        if fields.get("json_schema") is None and fields.get("schema") is not None:
            fault = "is missing; 'response_format.schema' belongs into it: send 'response_format.json_schema.schema'"
            raise FieldError("response_format.json_schema", fault)
        return _parse_json_schema(Fields(fields.get("json_schema"), "response_format.json_schema"))
    raise fields.make_error("type", '"text", "json_object" or "json_schema"', kind)


def _parse_json_schema(fields: Fields) -> TextFormat:
    if not isinstance(name := fields.get("name"), str | None):
        raise fields.make_error("name", "a string", name)
    strict = fields.get_boolean("strict")
    return _make_json_format(fields.get("schema"), "response_format.json_schema.schema", bool(strict))


def _parse_structured_outputs(body: Mapping[str, Any]) -> list[TextFormat | None]:
    if (value := body.get("structured_outputs")) is None:
        return []
    fields = Fields(value, "structured_outputs")
    forms = [_make_text_format(kind, fields.get(kind), f"structured_outputs.{kind}") for kind in STRUCTURED_KINDS]
    if fields.get_boolean("json_object"):
        forms.append(_make_json_format({"type": "object"}, "structured_outputs.json_object"))
    if fields.get("structural_tag") is not None:
        raise FieldError("structured_outputs.structural_tag", "is not supported; send 'tools'", "structured_outputs")
    if not any(forms):
        known = (*STRUCTURED_KINDS, "json_object")
        unknown = next((name for name in value if name not in known), None)
        found = "" if unknown is None else f"; it has {format_value(unknown)}, which is none of them"
        raise FieldError("structured_outputs", f'must have one of "json", "regex", "choice", "grammar"{found}')
    return forms


def _parse_legacy_fields(body: Mapping[str, Any]) -> list[TextFormat | None]:
    values = {field: body.get(field) for field in LEGACY_FIELDS} | {"grammar": body.get("grammar") or None}
    return [_make_text_format(LEGACY_FIELDS[field], value, field) for field, value in values.items()]


def _make_text_format(kind: str, value: object, field: str) -> TextFormat | None:
    if value is None:
        return None
    if kind == "json":
        return _make_json_format(_decode_schema(value, field), field)
    if kind == "choice":
        return _make_choice_format(value, field)
    if not isinstance(value, str) or not value:
        raise FieldError(field, f"must be a string that is not empty, not {format_value(value)}")
    _check_size(len(value), field)
    return TextFormat(kind, value, field)


def _decode_schema(value: object, field: str) -> object:
    """Decode a schema that was sent as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json_text(value)
    except ValueError:
        raise FieldError(field, "must be a JSON schema; this string is no JSON, or nests too deeply") from None


def _make_json_format(schema: object, field: str, strict: bool = False) -> TextFormat:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise FieldError(field, f"must be a JSON schema (an object), not {format_value(schema)}")
    return TextFormat("json", schema, field, strict)


def _make_choice_format(value: object, field: str) -> TextFormat:
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        raise FieldError(field, "must be a list of strings, none empty")
    if len(value) > CHOICES_MAX:
        raise FieldError(field, f"has {len(value)} choices; {CHOICES_MAX} are the most")
    _check_size(sum(map(len, value)), field)
    return TextFormat("choice", value, field)


def _check_size(size: int, field: str) -> None:
    if size > FORMAT_BYTES_MAX:
        raise FieldError(field, f"is {size} characters long; {FORMAT_BYTES_MAX} are the most")
