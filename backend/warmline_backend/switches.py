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

from warmline_backend.params import BadRequest

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


def read_switches(body: dict[str, Any]) -> Switches:
    """Raises BadRequest where a value is not known."""
    reasoning = _object(body, "reasoning")
    on = (_thinking(body), _boolean(body, "enable_thinking"), _boolean(reasoning, "enabled", "reasoning."))
    efforts = (_effort(body, EFFORT), _effort(reasoning, "effort", "reasoning."))
    return Switches(on=_first(on), effort=_first(efforts))


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


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None or isinstance(value, dict):
        return value or {}
    raise BadRequest(f"'{name}' must be an object", name)


def _boolean(fields: dict[str, Any], name: str, within: str = "") -> bool | None:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise BadRequest(f"'{within}{name}' must be true or false", within + name)


def _effort(fields: dict[str, Any], name: str, within: str = "") -> str | None:
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value in EFFORTS):
        return value
    raise BadRequest(f"'{within}{name}' must be one of {', '.join(EFFORTS)}", within + name)


def _thinking(body: dict[str, Any]) -> bool | None:
    value = body.get("thinking")
    if value is None or isinstance(value, bool):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    raise BadRequest(
        '\'thinking\' must be true, false, or an object whose type is "enabled", "disabled" or "adaptive"', "thinking"
    )
