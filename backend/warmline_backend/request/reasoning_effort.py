"""How much a request wants the model to reason, in whatever words its client has, as arguments of a chat template.

    reasoning_effort       none, minimal, low, medium, high, xhigh, max
    thinking               {"type": "enabled" | "disabled" | "adaptive"}, or true or false
    enable_thinking        true or false
    reasoning              {"effort": ..., "enabled": ...}
    chat_template_kwargs   the arguments themselves; these go first

What decides on or off is `thinking`, then `enable_thinking`, then `reasoning`, then the effort.  A budget of tokens is
no argument of any template, and not kept.
"""

import re
from typing import Any

import msgspec

from warmline_backend.request.params import Fields

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
EFFORTS_USUAL = ("low", "medium", "high")  # what a template that knows efforts at all was written for
SWITCHES = ("enable_thinking", "thinking")  # what templates call it
EFFORT = "reasoning_effort"
_TYPES = {"enabled": True, "disabled": False, "adaptive": None}


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked; None where nothing was, which leaves it to the model's template and the server's settings."""

    on: bool | None = None
    effort: str | None = None  # one of EFFORTS

    @property
    def reasons(self) -> bool | None:
        return self.on if self.on is not None or self.effort is None else self.effort != "none"


def read_switches(fields: Fields) -> Switches:
    """Raises BadRequest where a value is not known."""
    reasoning = Fields({} if (given := fields.get("reasoning")) is None else given, "reasoning")
    on = (_thinking(fields), fields.optional_boolean("enable_thinking"), reasoning.optional_boolean("enabled"))
    return Switches(on=_first(on), effort=_first((_effort(fields, EFFORT), _effort(reasoning, "effort"))))


def arguments_for(switches: Switches, known: frozenset[str], source: str) -> dict[str, Any]:
    """The template's arguments: `known` are the names that it reads, `source` its text.

    A template that knows efforts alone can't be switched off: it is given the least.
    """
    reasons = switches.reasons
    arguments: dict[str, Any] = {name: reasons for name in SWITCHES if name in known and reasons is not None}
    if EFFORT in known and (effort := switches.effort if reasons is not False else None if arguments else "none"):
        arguments[EFFORT] = _nearest(effort, source)
    return arguments


def _nearest(effort: str, source: str) -> str:
    """The effort nearest to what was asked of those that the template spells out, or that all do."""
    known = [name for name in EFFORTS if name in EFFORTS_USUAL or re.search(rf"""['"]{name}['"]""", source)]
    at = EFFORTS.index(effort)
    return min(known, key=lambda name: abs(EFFORTS.index(name) - at))


def _first(values: tuple[Any, ...]) -> Any:
    return next((value for value in values if value is not None), None)


def _effort(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise fields.refuse(name, f"one of {', '.join(EFFORTS)}", value)


def _thinking(fields: Fields) -> bool | None:
    value = fields.get("thinking")
    if value is None or isinstance(value, bool):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    expected = 'true, false, or an object whose type is "enabled", "disabled" or "adaptive"'
    raise fields.refuse("thinking", expected, value)
