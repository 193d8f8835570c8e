"""Reasoning options of a request, under the names of all clients, as arguments of a chat template.  Pure.

    reasoning_effort       none, minimal, low, medium, high, xhigh, max
    thinking               {"type": "enabled" | "disabled" | "adaptive"}, or true or false
    enable_thinking        true or false
    think                  true or false, or an effort (Ollama's)
    reasoning              {"effort": ..., "enabled": ...}
    chat_template_kwargs   the arguments themselves; these go first

On or off is decided by `thinking`, then `enable_thinking`, then `think`, then `reasoning`, then the effort.  A budget
of tokens is no argument of any template, and ignored.
"""

import re
from typing import Any

from warmline_backend.request.params import Fields

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORTS_USUAL = ("low", "medium", "high")  # of any template that knows efforts
THINKING_ARGUMENTS = ("enable_thinking", "thinking")  # names in templates
EFFORT_ARGUMENT = "reasoning_effort"
_THINKING_TYPES = {"enabled": True, "disabled": False, "adaptive": None}


def make_template_arguments(fields: Fields, variable_names: frozenset[str], source: str) -> dict[str, Any]:
    """Arguments for a template that reads `variable_names` and has the text `source`.  Raises BadRequestError.

    A template that knows efforts alone can't be switched off: it is given the least.
    """
    reasoning = Fields({} if (value := fields.get("reasoning")) is None else value, "reasoning")
    think = fields.get("think")
    think_switch, think_effort = (think, None) if isinstance(think, bool) else (None, _parse_effort(fields, "think"))
    switches = [_parse_thinking(fields), fields.get_optional_boolean("enable_thinking"), think_switch]
    is_on = _find_first([*switches, reasoning.get_optional_boolean("enabled")])
    effort = _find_first([_parse_effort(fields, EFFORT_ARGUMENT), _parse_effort(reasoning, "effort"), think_effort])
    if is_on is None and effort is not None:
        is_on = effort != "none"
    names = [name for name in THINKING_ARGUMENTS if name in variable_names and is_on is not None]
    arguments: dict[str, Any] = dict.fromkeys(names, is_on)
    if is_on is False:
        effort = "" if arguments else "none"
    if effort and EFFORT_ARGUMENT in variable_names:
        arguments[EFFORT_ARGUMENT] = _find_nearest_effort(effort, source)
    return arguments


def _find_nearest_effort(effort: str, source: str) -> str:
    """Nearest effort among those that the template spells out, or that all templates know."""
    efforts = [name for name in EFFORTS if name in EFFORTS_USUAL or re.search(rf"""['"]{name}['"]""", source)]
    index = EFFORTS.index(effort)
    return min(efforts, key=lambda name: abs(EFFORTS.index(name) - index))


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
