"""The forced schema: the nearest one that llguidance can enforce, which accepts all that the schema accepts.  Pure.

Where it accepts more, the pointer of the subschema is among the checks.  In a few places it accepts less, so that no
check is needed: tags that tell the branches of a union apart are required.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from warmline_backend.request.schemas import Schema, collect_references, list_values, lookup_reference
from warmline_backend.structured_output.json_schema.forcing import objects, unions
from warmline_backend.structured_output.json_schema.forcing.combining import Domain, collect_domain
from warmline_backend.structured_output.json_schema.formats import force_format
from warmline_backend.structured_output.json_schema.keywords import escape_step
from warmline_backend.structured_output.json_schema.patterns import (
    CheckTooCostlyError,
    ForcedPattern,
    force_pattern,
    simplify_pattern,
)
from warmline_backend.structured_output.json_schema.validator import SchemaValidator, StepBudget

# How a costly subschema is relaxed: its costly keywords are simplified or left out; only its types are forced.
SIMPLIFIED, TYPES_ONLY = 1, 2

INTEGER_BOUND = 1 << 62  # a bound beyond it is checked: llguidance reckons with 64 bits
_VALUES_FILTERED_MAX = 2000
_FILTER_STEPS_MAX = 200_000  # for the listed values of one schema, in all
_LOWER_BOUNDS, _UPPER_BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_KEYWORDS_BY_TYPE = {
    "string": {"pattern", "format", "minLength", "maxLength"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains"}
    | {"uniqueItems", "unevaluatedItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"},
}


@dataclass
class ForcedParts:
    """A forced schema under construction."""

    made: dict[str, Any]
    parts: list[Any]  # of its allOf

    def build(self) -> Any:
        if False in self.parts:
            return False
        parts = [part for part in self.parts if part not in (True, {})]
        return {**self.made, "allOf": parts} if parts else self.made


class SchemaForcer:
    """Forcer of one normalized schema.

    `relaxed`: levels by pointer; `unsatisfiable`: references that no value satisfies.  With `requires_tags`, tags that
    tell branches apart are required, and the branches not checked.  After `force_root`, `checks` has the pointers of
    what the result leaves out.
    """

    def __init__(
        self,
        root: Schema,
        relaxed: Mapping[str, int],
        unsatisfiable: Collection[str] = (),
        requires_tags: bool = True,
    ) -> None:
        self.root, self.requires_tags, self.checks = root, requires_tags, set[str]()
        self._relaxed, self._unsatisfiable = relaxed, unsatisfiable
        self._resolved: dict[str, Any] = {}  # ends of chains of references
        self._domain: list[Schema] = []  # schemas that hold wherever the present part does
        self._steps_left = StepBudget(_FILTER_STEPS_MAX)

    def force_root(self) -> Schema:
        made = self.force({key: value for key, value in self.root.items() if key != "$defs"}, "")
        definitions = self.force_definitions()
        made = made if isinstance(made, dict) else {} if made else {"enum": []}
        return {**made, "$defs": definitions} if definitions else made

    def force_definitions(self) -> dict[str, Any]:
        return {
            name: self.force(part, f"/$defs/{escape_step(name)}")
            for name, part in self.root.get("$defs", {}).items()
            if f"#/$defs/{escape_step(name)}" not in self._unsatisfiable
        }

    def force(self, schema: Any, pointer: str) -> Any:
        """Forced form of a subschema."""
        if isinstance(schema, bool):
            return schema
        if schema.get("$ref") in self._unsatisfiable:
            return False
        level = self._relaxed.get(pointer, 0)
        if level:
            self.checks.add(pointer)
        if level >= TYPES_ONLY:
            return {"type": schema["type"]} if "type" in schema else {}
        if "enum" in schema or "const" in schema:
            return self._force_values(schema, pointer)
        if level and unions.COMBINATORS & schema.keys() and collect_references(schema):
            # llguidance has no circular references beside other keywords.
            schema = {key: value for key, value in schema.items() if key in unions.COMBINATORS or key == "type"}
        schema = _drop_ineffective(schema)
        built = ForcedParts({key: schema[key] for key in ("type", "$ref") if key in schema}, [])
        self.force_string(schema, pointer, built)
        self._force_number(schema, pointer, built)
        with self._leave_domain():
            self._force_array(schema, pointer, built)
            objects.force_object(self, schema, pointer, built, level)
        unions.force_combinators(self, schema, pointer, built, level)
        return built.build()

    def resolve(self, schema: Any) -> Any:
        """Target of a schema that is a reference and nothing else, or the schema itself."""
        passed: list[str] = []
        while isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
            reference = schema["$ref"]
            if reference in self._resolved:
                schema = self._resolved[reference]
                break
            if reference in passed:
                schema = False  # refers to itself
                break
            passed.append(reference)
            schema = self.lookup(reference)
        self._resolved |= dict.fromkeys(passed, schema)
        return schema

    def lookup(self, reference: str) -> Any:
        return lookup_reference(reference, self.root)

    def collect_domain(self) -> Domain:
        """Collect the schemas that hold for all values for which the present forced form is used."""
        return collect_domain(self, reversed(self._domain))

    @contextmanager
    def extend_domain(self, schema: Schema) -> Iterator[None]:
        """Force parts of a schema that apply to the same values."""
        self._domain.append(schema)
        yield
        self._domain.pop()

    @contextmanager
    def _leave_domain(self) -> Iterator[None]:
        """Force parts that apply to other values."""
        domain, self._domain = self._domain, []
        yield
        self._domain = domain

    # ---- values and scalars

    @cached_property
    def _validator(self) -> SchemaValidator:
        """Made for the first listed values: most schemas have none."""
        return SchemaValidator(self.root)

    def _force_values(self, schema: Schema, pointer: str) -> Any:
        values = list_values(schema) or []
        if len(values) > _VALUES_FILTERED_MAX:
            self.checks.add(pointer)
        else:
            values = [value for value in values if self._is_valid(value, pointer)]
        return {"enum": values} if values else False

    def _is_valid(self, value: object, pointer: str) -> bool:
        try:
            return self._validator.find_error(value, pointer, self._steps_left) is None
        except CheckTooCostlyError:
            self.checks.add(pointer)
            return True

    def force_string(self, schema: Schema, pointer: str, built: ForcedParts) -> None:
        built.made |= {key: int(schema[key]) for key in _COUNTS if key in schema}
        patterns: list[str] = []
        for key, force in _PATTERN_KEYWORDS.items():
            if key in schema and (forced := force(schema[key])) is not None:
                if not forced.is_exact:
                    self.checks.add(pointer)
                patterns += forced.patterns
        if self._relaxed.get(pointer):
            patterns = [simple for pattern in patterns if (simple := simplify_pattern(pattern)) is not None]
        if patterns:
            built.made["pattern"] = patterns[0]
            built.parts += [{"pattern": pattern} for pattern in patterns[1:]]

    def _force_number(self, schema: Schema, pointer: str, built: ForcedParts) -> None:
        """Force bounds; those beyond 64 bits are checked, unless they are those of a wider type."""
        for key in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
            if key in schema:
                if -INTEGER_BOUND < schema[key] < INTEGER_BOUND:
                    built.made[key] = schema[key]
                else:
                    self.checks.add(pointer)
        if "multipleOf" in schema:
            built.made["multipleOf"] = schema["multipleOf"]

    # ---- arrays

    def _force_array(self, schema: Schema, pointer: str, built: ForcedParts) -> None:
        made = built.made
        if "prefixItems" in schema:
            made["prefixItems"] = self.force_list(schema, "prefixItems", pointer)
        if "items" in schema:
            made["items"] = self.force(schema["items"], f"{pointer}/items")
        elif "unevaluatedItems" in schema:
            self._force_unevaluated_items(schema, pointer, made)
        if "contains" in schema and (least := int(schema.get("minContains", 1))):
            made["minItems"] = max(made.get("minItems", 0), least)
            self.checks.add(pointer)
        elif "contains" in schema and "maxContains" in schema:
            self.checks.add(pointer)
        if schema.get("uniqueItems") and made.get("maxItems", 2) > 1:
            self.checks.add(pointer)
            if (count := self._count_values(schema.get("items", True))) is not None and "prefixItems" not in schema:
                made["maxItems"] = min(made.get("maxItems", count), count)

    def _force_unevaluated_items(self, schema: Schema, pointer: str, made: dict[str, Any]) -> None:
        if unions.IN_PLACE_KEYWORDS & schema.keys() or "contains" in schema:
            self.checks.add(pointer)
        else:
            made["items"] = self.force(schema["unevaluatedItems"], f"{pointer}/unevaluatedItems")

    def _count_values(self, schema: Any) -> int | None:
        """Number of values that a schema allows; None where they are not listed."""
        schema = self.resolve(schema)
        if not isinstance(schema, Mapping):
            return None
        if schema.get("type") == "boolean":
            return 2
        return len(schema["enum"]) if "enum" in schema else 1 if "const" in schema else None

    def force_list(self, schema: Schema, key: str, pointer: str) -> list[Any]:
        return [self.force(part, f"{pointer}/{key}/{n}") for n, part in enumerate(schema[key])]


_PATTERN_KEYWORDS: Mapping[str, Callable[[str], ForcedPattern | None]] = {
    "pattern": force_pattern,
    "format": force_format,
}


def _drop_ineffective(schema: Schema) -> Schema:
    """Drop the keywords of types that the schema does not allow."""
    if "type" not in schema:
        return schema
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    ineffective = {key for name, keys in _KEYWORDS_BY_TYPE.items() if name not in types for key in keys}
    return {key: value for key, value in schema.items() if key not in ineffective}
