"""Reasoning options of a request, under the names of all clients, as arguments of a chat template.  Pure.

    reasoning_effort       none, minimal, low, medium, high, xhigh, max
    thinking               {"type": "enabled" | "disabled" | "adaptive"}, or true or false
    enable_thinking        true or false
    think                  true or false, or an effort (Ollama's)
    reasoning              {"effort": ..., "enabled": ...}
    chat_template_kwargs   the arguments themselves; these go first

On or off is decided by `thinking`, then `enable_thinking`, then `think`, then `reasoning`, then the effort.  A budget
of tokens is no argument of any template, and ignored.

A template gets the nearest effort that it knows.  One that can't turn reasoning off gets its least effort instead.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from warmline_backend.request.params import Fields

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORTS_USUAL = ("low", "medium", "high")  # of any template that knows efforts
THINKING_ARGUMENTS = ("enable_thinking", "thinking")  # names in templates
EFFORT_ARGUMENT = "reasoning_effort"
_THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None}


class ReasoningControls(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments by which a template controls reasoning; the defaults are those of a template without any."""

    names: frozenset[str] = frozenset()  # of THINKING_ARGUMENTS and EFFORT_ARGUMENT, those that it reads
    efforts: tuple[str, ...] = EFFORTS_USUAL  # that it knows, ascending; at least one
    refused_values: frozenset[tuple[str, bool | str]] = frozenset()  # names and values that it raises an error for

    def find_nearest_effort(self, effort: str) -> str:
        """Nearest effort that the template knows, the lower of two; "none" only for itself."""
        index = EFFORTS.index(effort)
        efforts = [name for name in self.efforts if name != "none" or effort == "none"] or list(self.efforts)
        return min(efforts, key=lambda name: abs(EFFORTS.index(name) - index))


def make_template_arguments(
    fields: Fields, own_arguments: Mapping[str, Any], controls: ReasoningControls
) -> dict[str, Any]:
    """Arguments for a template with these controls; the request's `own_arguments` go first.  Raises BadRequestError."""
    reasoning = Fields({} if (value := fields.get("reasoning")) is None else value, "reasoning")
    think = fields.get("think")
    think_switch, think_effort = (think, None) if isinstance(think, bool) else (None, _parse_effort(fields, "think"))
    switches = [_parse_thinking(fields), fields.get_optional_boolean("enable_thinking"), think_switch]
    is_on = _find_first([*switches, reasoning.get_optional_boolean("enabled")])
    effort = _find_first([_parse_effort(fields, EFFORT_ARGUMENT), _parse_effort(reasoning, "effort"), think_effort])
    if is_on is None and effort is not None:
        is_on = effort != "none"
    names = [name for name in THINKING_ARGUMENTS if name in controls.names and is_on is not None]
    arguments: dict[str, Any] = dict.fromkeys(names, is_on)
    if is_on is False:
        effort = "" if arguments else "none"
    if effort and EFFORT_ARGUMENT in controls.names:
        arguments[EFFORT_ARGUMENT] = controls.find_nearest_effort(effort)
    return _replace_refused_values({**arguments, **own_arguments}, controls)


def _replace_refused_values(arguments: dict[str, Any], controls: ReasoningControls) -> dict[str, Any]:
    """Leave out switches that the template refuses, and give the least effort where none turns reasoning off."""
    refused = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, bool | str) and (name, value) in controls.refused_values
    }
    arguments = {name: value for name, value in arguments.items() if name not in refused}
    if EFFORT_ARGUMENT in refused:
        arguments[EFFORT_ARGUMENT] = controls.find_nearest_effort(str(refused[EFFORT_ARGUMENT]))
    is_off = any(arguments.get(name) is False for name in THINKING_ARGUMENTS)
    if False in refused.values() and EFFORT_ARGUMENT in controls.names and not is_off:
        arguments[EFFORT_ARGUMENT] = controls.efforts[0]
    return arguments


def _find_first(values: list[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _parse_effort(fields: Fields, name: str) -> str | None:
    if (value := fields.get(name)) is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise fields.make_error(name, f"one of {', '.join(EFFORTS)}", value)


def _parse_thinking(fields: Fields) -> bool | None:
    if (value := fields.get("thinking")) is None or isinstance(value, bool):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _THINKING_TYPES:
        return _THINKING_TYPES[kind]
    expected = 'true, false, or an object whose type is "enabled", "disabled" or "adaptive"'
    raise fields.make_error("thinking", expected, value)
