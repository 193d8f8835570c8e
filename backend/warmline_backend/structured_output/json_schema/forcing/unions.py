"""Keywords that combine schemas in the forced schema: anyOf, oneOf, not, if.  Pure."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from warmline_backend.request.schemas import Schema, collect_references, list_values
from warmline_backend.structured_output.json_schema.forcing import conditions
from warmline_backend.structured_output.json_schema.forcing.combining import (
    Domain,
    all_of,
    any_of,
    collect_property_domain,
    spell,
)
from warmline_backend.structured_output.json_schema.keywords import JSON_TYPES

if TYPE_CHECKING:
    from warmline_backend.structured_output.json_schema.forcing.force import ForcedParts, SchemaForcer

CONDITIONAL_KEYWORDS = frozenset({"anyOf", "oneOf", "not", "if", "dependentSchemas"})
IN_PLACE_KEYWORDS = CONDITIONAL_KEYWORDS | {"allOf", "$ref"}
COMBINATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
EXCLUDED_BRANCHES_MAX = 8  # of a oneOf, each without all others
_DEPTH_MAX = 6  # of negations within negations
_BRANCHES_MAX = 12
# The opposite of a bound: the type that it concerns, and the keyword that holds where it does not.
_OPPOSITE_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


def force_combinators(forcer: "SchemaForcer", schema: Schema, pointer: str, built: "ForcedParts", level: int) -> None:
    with forcer.extend_domain(schema):
        if "allOf" in schema:
            indexes, built_parts = conditions.force_tagged_conditions(forcer, schema["allOf"], f"{pointer}/allOf")
            built.parts += built_parts
            built.parts += [
                forcer.force(part, f"{pointer}/allOf/{n}") for n, part in enumerate(schema["allOf"]) if n not in indexes
            ]
        if "anyOf" in schema:
            built.made["anyOf"] = forcer.force_list(schema, "anyOf", pointer)
        if "oneOf" in schema:
            built.parts.append({"anyOf": _force_one_of(forcer, schema, pointer)})
        if not level:
            _force_conditions(forcer, schema, pointer, built)


def _force_conditions(forcer: "SchemaForcer", schema: Schema, pointer: str, built: "ForcedParts") -> None:
    if "not" in schema:
        opposite = negate(forcer, schema["not"], forcer.collect_domain())
        if opposite is None:
            forcer.checks.add(pointer)
        else:
            built.parts.append(opposite)
    if "if" in schema and schema.keys() & {"then", "else"}:
        built.parts.append(_force_if(forcer, schema, pointer))


def _force_if(forcer: "SchemaForcer", schema: Schema, pointer: str) -> Any:
    first = [forcer.force(schema[key], f"{pointer}/{key}") for key in ("if", "then") if key in schema]
    holds = all_of(first)
    fails = forcer.force(schema.get("else", True), f"{pointer}/else")
    opposite = negate(forcer, schema["if"], forcer.collect_domain())
    if opposite is None:
        forcer.checks.add(pointer)
    else:
        fails = all_of([opposite, fails])
    return any_of([holds, fails])


# ---- oneOf


def _force_one_of(forcer: "SchemaForcer", schema: Schema, pointer: str) -> list[Any]:
    """Branches of which exactly one holds, or at least one where a check does the rest."""
    branches = schema["oneOf"]
    forced = forcer.force_list(schema, "oneOf", pointer)
    if len(branches) == 1:
        return forced
    resolved = [forcer.resolve(branch) for branch in branches]
    if all(isinstance(branch, Mapping) for branch in resolved):
        if _are_disjoint(map(_find_types, resolved)):
            return forced
        if forcer.requires_tags and (tag := _find_tag(forcer, resolved, schema)):
            return [all_of([part, {"required": [tag]}]) for part in forced]
    if len(branches) <= EXCLUDED_BRANCHES_MAX:
        domain = forcer.collect_domain()
        opposites = [negate(forcer, branch, domain) for branch in branches]
        if None not in opposites:
            return [
                all_of([part, *(other for m, other in enumerate(opposites) if m != n)]) for n, part in enumerate(forced)
            ]
    forcer.checks.add(pointer)
    return forced


def _are_disjoint(sets: Iterable[frozenset[str] | None]) -> bool:
    """True for disjoint sets; stops at the first that is not."""
    seen: set[str] = set()
    for values in sets:
        if not values or seen & values:
            return False
        seen |= values
    return True


def _find_types(schema: Schema) -> frozenset[str] | None:
    """Types of a schema; None for any.  A number may be an integer: "number" counts as both."""
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    elif (values := list_values(schema)) is not None:
        types = list(map(_find_type, values))
    else:
        return None
    return frozenset(types) | ({"integer"} if "number" in types else frozenset())


def _find_type(value: object) -> str:
    kinds: tuple[tuple[type, str], ...] = ((bool, "boolean"), (str, "string"), (int, "number"), (float, "number"))
    kinds += ((list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _find_tag(forcer: "SchemaForcer", branches: list[Any], union: Schema) -> str:
    """Name of a property whose listed values tell objects of the branches apart; "" for none."""
    for name in _list_properties(forcer, branches[0]):
        if _are_disjoint(_find_tag_values(forcer, branch, name, union) for branch in branches):
            return name
    return ""


def _list_properties(forcer: "SchemaForcer", branch: Any) -> list[str]:
    parts = [branch, *(forcer.resolve(part) for part in branch.get("allOf", ()))]
    return [name for part in parts if isinstance(part, Mapping) for name in part.get("properties", ())]


def _find_tag_values(forcer: "SchemaForcer", branch: Any, name: str, union: Schema) -> frozenset[str] | None:
    """Values of a property of an object, as JSON; None where they are not listed."""
    parts = [branch, *(forcer.resolve(part) for part in branch.get("allOf", ()))]
    if not any(isinstance(part, Mapping) and part.get("type") == "object" for part in (union, *parts)):
        return None
    for part in parts:
        inner = forcer.resolve(part.get("properties", {}).get(name, True)) if isinstance(part, Mapping) else True
        if isinstance(inner, Mapping) and (values := list_values(inner)) is not None:
            return frozenset(map(spell, values))
    return None


# ---- negation


def negate(forcer: "SchemaForcer", schema: Any, domain: Domain, depth: int = 0) -> Any:
    """A schema that holds exactly where `schema` does not, among the values of `domain`; None where there is none."""
    schema = forcer.resolve(schema)
    if isinstance(schema, bool):
        return not schema
    if depth > _DEPTH_MAX:
        return None
    opposites: list[Any] = []
    for key, value in schema.items():
        if key in ("then", "else", "minContains", "maxContains", "$defs"):
            continue
        opposite = _negate_keyword(forcer, key, value, domain, depth)
        if opposite is None:
            return None
        opposites.append(opposite)
    return any_of(opposites)


def _negate_keyword(forcer: "SchemaForcer", key: str, value: Any, domain: Domain, depth: int) -> Any:
    match key:
        case "type":
            return _negate_types(value, domain)
        case "const":
            return _negate_values([value], domain)
        case "enum":
            return _negate_values(value, domain)
        case "required":
            return any_of([{"type": "object", "properties": {name: False}} for name in value])
        case "properties":
            return _negate_properties(forcer, value, domain, depth)
        case "not":
            return _force_exactly(forcer, value)
        case "$ref":
            return negate(forcer, forcer.lookup(value), domain, depth + 1)
        case "anyOf" | "allOf":
            parts = [negate(forcer, part, domain, depth + 1) for part in value]
            combine = all_of if key == "anyOf" else any_of
            return None if None in parts or len(parts) > _BRANCHES_MAX else combine(parts)
    if key in _OPPOSITE_BOUNDS:
        kind, opposite, step = _OPPOSITE_BOUNDS[key]
        return False if value + step < 0 and kind != "number" else {"type": kind, opposite: value + step}
    return None


def _force_exactly(forcer: "SchemaForcer", schema: Any) -> Any:
    """Forced form of a schema; None where it has, or may have, to be checked."""
    if isinstance(schema, bool):
        return schema
    if collect_references(schema):
        return None
    alone = type(forcer)(schema, {})
    forced = alone.force(schema, "")
    return None if alone.checks else forced


def _negate_types(value: Any, domain: Domain) -> Any:
    types = set(value if isinstance(value, list) else [value])
    possible = _find_domain_types(domain)
    if "number" in types:
        types.add("integer")
    elif "integer" in types and "number" in possible:
        return None  # numbers that are no integers
    left = possible - types
    return {"type": sorted(left - ({"integer"} if "number" in left else set()))} if left else False


def _find_domain_types(domain: Domain) -> frozenset[str]:
    found = (types for schema in domain if (types := _find_types(schema)) is not None)
    return frozenset.intersection(frozenset(JSON_TYPES), *found)


def _negate_values(values: list[Any], domain: Domain) -> Any:
    """Negate a list of values: all others of a listed domain, or of booleans and null."""
    excluded = set(map(spell, values))
    for schema in domain:
        if (possible := list_values(schema)) is not None:
            left = [value for value in possible if spell(value) not in excluded]
            return {"enum": left} if left else False
    types = set(_find_domain_types(domain))
    has_booleans = "boolean" in types
    for value in values:
        kinds = {"number", "integer"} if _find_type(value) == "number" else {_find_type(value)}
        if kinds & types - {"boolean", "null"}:
            return None
        types -= kinds
    constants = [word for word in (True, False) if spell(word) not in excluded]
    others = [{"enum": constants}] if constants and has_booleans and "boolean" not in types else []
    types -= {"integer"} if "number" in types else set()
    return any_of([*others, *([{"type": sorted(types)}] if types else [])])


def _negate_properties(forcer: "SchemaForcer", properties: Mapping[str, Any], domain: Domain, depth: int) -> Any:
    opposites = []
    for name, part in properties.items():
        inner = collect_property_domain(forcer, domain, name)
        opposite = negate(forcer, part, inner, depth + 1)
        if opposite is None:
            return None
        if opposite is not False:
            opposites.append({"type": "object", "required": [name], "properties": {name: opposite}})
    return any_of(opposites)
