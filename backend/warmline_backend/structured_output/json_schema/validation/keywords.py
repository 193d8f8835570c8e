"""Keywords that the jsonschema package evaluates without a bound, or not exactly.  Pure.

Each has jsonschema's signature; `validator.format_checker` is the state of the call.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonschema import ValidationError

from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError
from warmline_backend.structured_output.json_schema.validation.values import is_multiple, is_number, make_key

NAME_CHARS_MAX = 60
NAMING_KEYWORDS = ("required", "dependentRequired")  # whose errors have a message
Errors = Iterator[ValidationError]


def _refer(validator: Any, reference: str, instance: Any, schema: Any) -> Errors:
    yield from validator.descend(instance, validator.format_checker.schemas.targets[reference])


# ---- values


def _compare_values(validator: Any, keys: Any, instance: Any, schema: Any) -> Errors:
    if make_key(instance, validator.format_checker.spend) not in keys:
        yield ValidationError("")


def _compare_items(validator: Any, is_unique: bool, instance: Any, schema: Any) -> Errors:
    if is_unique and isinstance(instance, list):
        keys = {make_key(item, validator.format_checker.spend) for item in instance}
        if len(keys) < len(instance):
            yield ValidationError("")


def _divide(validator: Any, divisor: Any, instance: Any, schema: Any) -> Errors:
    if is_number(instance) and divisor > 0:
        result = is_multiple(instance, divisor)
        if result is None:
            raise CheckTooCostlyError("a number is too large or too long to be divided")
        if not result:
            yield ValidationError("")


# ---- strings


def _search_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Errors:
    if isinstance(instance, str) and not validator.format_checker.matches(pattern, instance):
        yield ValidationError("")


def _check_format(validator: Any, name: str, instance: Any, schema: Any) -> Errors:
    check = validator.format_checker.schemas.formats.get(name)
    if isinstance(instance, str) and check is not None and not check(instance):
        yield ValidationError("")


# ---- properties and items


def _require(validator: Any, names: list[str], instance: Any, schema: Any) -> Errors:
    if isinstance(instance, dict):
        yield from (_miss(name) for name in names if name not in instance)


def _require_dependent(validator: Any, names: Mapping[str, list[str]], instance: Any, schema: Any) -> Errors:
    if isinstance(instance, dict):
        for name in names.keys() & instance.keys():
            yield from _require(validator, names[name], instance, schema)


def _miss(name: str) -> ValidationError:
    shown = name if len(name) <= NAME_CHARS_MAX else name[:NAME_CHARS_MAX] + "..."
    return ValidationError(f"lacks {json.dumps(shown, ensure_ascii=False)}")


def _evaluate_items(validator: Any, items: Any, instance: Any, schema: Any) -> Errors:
    if isinstance(instance, list):
        start = len(schema.get("prefixItems", ()))
        if items is False and len(instance) > start:
            yield ValidationError("", path=[start])
        elif items is not True:
            for index in range(start, len(instance)):
                yield from validator.descend(instance[index], items, path=index)


def _evaluate_pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Errors:
    if isinstance(instance, dict):
        for pattern, subschema in patterns.items():
            for name, value in instance.items():
                if validator.format_checker.matches(pattern, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _evaluate_additional_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> Errors:
    if isinstance(instance, dict) and subschema is not True:
        listed = _find_named(validator, schema, instance)
        yield from _descend_rest(validator, subschema, [(key, instance[key]) for key in instance if key not in listed])


def _evaluate_unevaluated_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> Errors:
    if isinstance(instance, dict) and subschema is not True:
        found = _find_evaluated(validator, schema, instance, "unevaluatedProperties")
        yield from _descend_rest(validator, subschema, [(key, instance[key]) for key in instance if key not in found])


def _evaluate_unevaluated_items(validator: Any, subschema: Any, instance: Any, schema: Any) -> Errors:
    if isinstance(instance, list) and subschema is not True:
        found = _find_evaluated(validator, schema, instance, "unevaluatedItems")
        rest = [(index, item) for index, item in enumerate(instance) if index not in found]
        yield from _descend_rest(validator, subschema, rest)


def _descend_rest(validator: Any, subschema: Any, parts: list[tuple[Any, Any]]) -> Errors:
    for step, part in parts:
        if subschema is False:
            yield ValidationError("", path=[step])
        else:
            yield from validator.descend(part, subschema, path=step)


def _find_named(validator: Any, schema: Any, instance: Any) -> set[Any]:
    """Names of an object that `properties` and `patternProperties` cover."""
    found: set[Any] = instance.keys() & schema.get("properties", {}).keys()
    for pattern in schema.get("patternProperties", ()):
        found |= {name for name in instance if name not in found and validator.format_checker.matches(pattern, name)}
    return found


def _find_evaluated(validator: Any, schema: Any, instance: Any, own: str = "") -> set[Any]:
    """Names or indexes that a schema evaluates which holds for `instance`, apart from its keyword `own`."""
    if not isinstance(schema, dict):
        return set()
    validator.format_checker.spend(1 + len(instance) // 8)
    find_direct = _find_direct_properties if isinstance(instance, dict) else _find_direct_items
    found = find_direct(validator, schema, instance, own)
    for part in _list_holding_parts(validator, schema, instance):
        if len(found) == len(instance):
            break
        found |= _find_evaluated(validator, part, instance)
    return found


def _find_direct_properties(validator: Any, schema: Any, instance: Any, own: str) -> set[Any]:
    if any(key in schema and key != own for key in ("additionalProperties", "unevaluatedProperties")):
        return set(instance)
    return _find_named(validator, schema, instance)


def _find_direct_items(validator: Any, schema: Any, instance: Any, own: str) -> set[Any]:
    if any(key in schema and key != own for key in ("items", "unevaluatedItems")):
        return set(range(len(instance)))
    found = set(range(min(len(instance), len(schema.get("prefixItems", ())))))
    if "contains" in schema:
        contains = schema["contains"]
        found |= {index for index, item in enumerate(instance) if _is_valid(validator, contains, item)}
    return found


def _list_holding_parts(validator: Any, schema: Any, instance: Any) -> Iterator[Any]:
    """Subschemas of the same value that hold for it."""
    if "$ref" in schema:
        yield validator.format_checker.schemas.targets[schema["$ref"]]
    yield from schema.get("allOf", ())
    for key in ("anyOf", "oneOf"):
        yield from (part for part in schema.get(key, ()) if _is_valid(validator, part, instance))
    if "if" in schema:
        holds = _is_valid(validator, schema["if"], instance)
        if holds:
            yield schema["if"]
        yield schema.get("then" if holds else "else")
    if isinstance(instance, dict):
        yield from (part for name, part in schema.get("dependentSchemas", {}).items() if name in instance)


def _is_valid(validator: Any, schema: Any, instance: Any) -> bool:
    return bool(validator.evolve(schema=schema).is_valid(instance))


KEYWORDS: Mapping[str, Callable[..., Errors]] = {
    "$ref": _refer,
    "additionalProperties": _evaluate_additional_properties,
    "const": _compare_values,
    "dependentRequired": _require_dependent,
    "enum": _compare_values,
    "format": _check_format,
    "items": _evaluate_items,
    "multipleOf": _divide,
    "pattern": _search_pattern,
    "patternProperties": _evaluate_pattern_properties,
    "required": _require,
    "unevaluatedItems": _evaluate_unevaluated_items,
    "unevaluatedProperties": _evaluate_unevaluated_properties,
    "uniqueItems": _compare_items,
}
