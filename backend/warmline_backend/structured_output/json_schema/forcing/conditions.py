"""Conditions on one property with listed values, in the forced schema.  Pure.

    allOf: [{if: kind is "a", then: A}, {if: kind is "b", then: B}, ...]

becomes a branch for each value instead of two for each condition, whose product would be too large.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmline_backend.request.schemas import Schema, list_values
from warmline_backend.structured_output.json_schema.forcing.combining import (
    all_of,
    any_of,
    collect_property_domain,
    spell,
)

if TYPE_CHECKING:
    from warmline_backend.structured_output.json_schema.forcing.force import SchemaForcer

CONDITIONS_MIN = 2  # one alone is as small by itself
BRANCHES_MAX = 64


@dataclass(frozen=True)
class _Condition:
    """An `if` on one property."""

    index: int  # in the allOf
    name: str
    values: frozenset[str]  # spelled, for which it holds
    needs_property: bool  # it does not hold where the property is missing
    schema: Schema


def force_tagged_conditions(forcer: "SchemaForcer", parts: list[Any], pointer: str) -> tuple[set[int], list[Any]]:
    """Force the conditions of an allOf at `pointer` that look at one property; returns their indexes, and the parts."""
    conditions = [found for index, part in enumerate(parts) if (found := _read_condition(forcer, index, part))]
    name = conditions[0].name if conditions else ""
    conditions = [condition for condition in conditions if condition.name == name]
    values = _find_values(forcer, name)
    if len(conditions) < CONDITIONS_MIN or values is None:
        return set(), []
    cases: dict[tuple[bool, ...], list[Any]] = {}  # values by the conditions that hold
    for value in values:
        cases.setdefault(tuple(spell(value) in each.values for each in conditions), []).append(value)
    if len(cases) >= BRANCHES_MAX:
        return set(), []
    branches = [
        _make_branch(forcer, conditions, holds, pointer, {name: {"enum": listed}}) for holds, listed in cases.items()
    ]
    missing = tuple(not each.needs_property for each in conditions)
    branches.append(_make_branch(forcer, conditions, missing, pointer, {name: False}))
    return {condition.index for condition in conditions}, [any_of(branches)]


def _read_condition(forcer: "SchemaForcer", index: int, part: Any) -> _Condition | None:
    if not isinstance(part, Mapping) or "if" not in part or part.keys() - {"if", "then", "else"}:
        return None
    condition = forcer.resolve(part["if"])
    if not isinstance(condition, Mapping) or condition.keys() - {"properties", "required", "type"}:
        return None
    properties, required = condition.get("properties", {}), condition.get("required", [])
    if len(properties) != 1 or condition.get("type", "object") != "object" or set(required) - set(properties):
        return None
    (name, values), *_ = properties.items()
    values = forcer.resolve(values)
    listed = (
        list_values(values) if isinstance(values, Mapping) and not values.keys() - {"const", "enum", "type"} else None
    )
    if listed is None:
        return None
    return _Condition(index, name, frozenset(map(spell, listed)), bool(required), part)


def _find_values(forcer: "SchemaForcer", name: str) -> list[Any] | None:
    """All values that a property may have, where an object is required and they are listed."""
    domain = forcer.collect_domain()
    if not any(schema.get("type") == "object" for schema in domain):
        return None
    listed = map(list_values, collect_property_domain(forcer, domain, name))
    return next((values for values in listed if values is not None), None)


def _make_branch(
    forcer: "SchemaForcer", conditions: list[_Condition], holds: tuple[bool, ...], pointer: str, properties: Schema
) -> Any:
    """Branch of objects with these properties, for which some of the conditions hold."""
    is_present = False not in properties.values()
    parts: list[Any] = [{"properties": properties, **({"required": list(properties)} if is_present else {})}]
    for condition, is_held in zip(conditions, holds, strict=True):
        key = "then" if is_held else "else"
        if key in condition.schema:
            parts.append(forcer.force(condition.schema[key], f"{pointer}/{condition.index}/{key}"))
    return all_of(parts)
