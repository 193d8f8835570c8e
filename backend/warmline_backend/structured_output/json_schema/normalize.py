"""JSON schemas of any draft brought into one form: draft 2020-12, and references into the root's `$defs` alone.  Pure.

Annotations and unknown keywords are left out, as a validator ignores them.
"""

import itertools
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from warmline_backend.request.params import FieldError
from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.json_schema.keywords import (
    LIST_KEYWORDS,
    MAP_KEYWORDS,
    SCHEMA_KEYWORDS,
    VALUE_KINDS,
    escape_step,
    format_json,
)
from warmline_backend.structured_output.json_schema.patterns import PatternError, compile_check
from warmline_backend.structured_output.json_schema.references import SchemaDocuments, UnresolvedReferenceError

_REFERENCE_KEYWORDS = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that say nothing without another.
_NEEDED_KEYWORDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_OLD_DRAFT = re.compile(r"https?://json-schema\.org/draft-0[3-7]/schema#?")  # where "$ref" stands alone


@dataclass(frozen=True)
class NormalizedSchema:
    schema: Any
    origins: Mapping[str, str]  # pointer of the original by name in "$defs"


@dataclass(frozen=True)
class _Place:
    """Place of a subschema in the original."""

    pointer: str
    base: str

    def descend(self, *steps: object) -> "_Place":
        return _Place(self.pointer + "".join(f"/{escape_step(step)}" for step in steps), self.base)


@dataclass
class _Normalizer:
    field_name: str
    strict: bool
    documents: SchemaDocuments
    is_old: bool
    fault_count: int = 0
    names: dict[tuple[str, int], str] = field(default_factory=dict)  # in "$defs", by identity of the target
    stem_counts: Counter[str] = field(default_factory=Counter)
    targets: dict[str, tuple[Any, _Place]] = field(default_factory=dict)
    definitions: dict[str, Any] = field(default_factory=dict)

    def normalize(self, schema: Any, place: _Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._report(place, f"must be a schema (an object, true or false), not {format_json(schema)}")
            return {}
        place = _Place(place.pointer, self.documents.find_base(schema, place.base))
        made: dict[str, Any] = {}
        for key in _REFERENCE_KEYWORDS:
            if isinstance(schema.get(key), str):
                self._add_reference(made, key, schema[key], place)
        if not (made and self.is_old):
            for key, value in _upgrade(schema).items():
                self._add_keyword(made, key, value, place)
        return made

    # ---- references

    def _add_reference(self, made: dict[str, Any], key: str, reference: str, place: _Place) -> None:
        try:
            if key == "$ref":
                target, pointer, base = self.documents.lookup(reference, place.base)
            elif key == "$dynamicRef":
                target, pointer, base = self.documents.lookup_dynamic(reference, place.base)
            else:
                target, pointer, base = self.documents.lookup_recursive(place.base)
        except UnresolvedReferenceError:
            advice = "put the schema that it names into '$defs'"
            self._report(place, f"has {key} {format_json(reference)}, which is no part of the schema; {advice}")
            return
        _add_applicator(made, {"$ref": f"#/$defs/{escape_step(self._name_target(target, pointer, base))}"})

    def _name_target(self, target: Any, pointer: str, base: str) -> str:
        """Name of a target in "$defs": the last step of its pointer, made unique."""
        key = ("boolean", target) if isinstance(target, bool) else ("identity", id(target))
        if key not in self.names:
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", pointer.rpartition("/")[2]) or "root"
            self.stem_counts[stem] += 1
            count = self.stem_counts[stem]
            self.names[key] = name = stem if count == 1 else f"{stem}.{count}"
            if name in self.targets:  # another stem of that form
                self.names[key] = name = f"{stem}.{count}.{len(self.targets)}"
            self.targets[name] = target, _Place(pointer, base)
        return self.names[key]

    def normalize_definitions(self) -> None:
        """Normalize the targets of all references, and of those within them."""
        waiting = deque(self.targets)
        while waiting:
            name, known = waiting.popleft(), len(self.targets)
            target, place = self.targets[name]
            self.definitions[name] = self.normalize(target, place)
            waiting.extend(itertools.islice(self.targets, known, None))

    # ---- keywords

    def _add_keyword(self, made: dict[str, Any], key: str, value: Any, place: _Place) -> None:
        if key not in VALUE_KINDS or key == "$defs":
            return
        fits, kind = VALUE_KINDS[key]
        if key == "pattern" and isinstance(value, str) and not self._is_readable(key, value, place):
            return
        if key in MAP_KEYWORDS and isinstance(value, Mapping):
            if key == "patternProperties":
                value = {name: part for name, part in value.items() if self._is_readable(key, name, place)}
            made[key] = {name: self.normalize(part, place.descend(key, name)) for name, part in value.items()}
        elif key in LIST_KEYWORDS and isinstance(value, list) and value:
            faults = self.fault_count
            parts = [self.normalize(part, place.descend(key, n)) for n, part in enumerate(value)]
            # A branch that can't be read allows anything: another may hold, too.
            self._add_list(made, "anyOf" if key == "oneOf" and self.fault_count > faults else key, parts)
        elif not fits(value):
            self._report(place, f"has {key} {format_json(value)}; it must be {kind}")
        else:
            made[key] = self.normalize(value, place.descend(key)) if key in SCHEMA_KEYWORDS else value

    def _is_readable(self, key: str, pattern: str, place: _Place) -> bool:
        """False, and reported, for a pattern that is no regular expression."""
        try:
            compile_check(pattern)
        except PatternError as error:
            self._report(place, f"has {key} {format_json(pattern)}, which is no regular expression: {error}")
            return False
        return True

    def _add_list(self, made: dict[str, Any], key: str, parts: list[Any]) -> None:
        if key == "anyOf" and "anyOf" in made:
            made["allOf"] = [*made.get("allOf", ()), {"anyOf": parts}]
        else:
            made[key] = [*made.get(key, ()), *parts] if key == "allOf" else parts

    def _report(self, place: _Place, fault: str) -> None:
        """Refuse what no validator can read, if the schema is strict; else it says nothing."""
        self.fault_count += 1
        if self.strict:
            raise FieldError(self.field_name, f"at {format_place(place.pointer)} {fault}", self.field_name)


def normalize_schema(schema: Schema, field: str, strict: bool) -> NormalizedSchema:
    """Normalize a schema.  What can't be read allows anything; if it is strict, that raises FieldError."""
    is_old = isinstance(uri := schema.get("$schema"), str) and _OLD_DRAFT.fullmatch(uri) is not None
    documents = SchemaDocuments(schema, is_old)
    normalizer = _Normalizer(field, strict, documents, is_old)
    made = normalizer.normalize(schema, _Place("", documents.root_uri))
    normalizer.normalize_definitions()
    if normalizer.definitions:
        made = {**made, "$defs": normalizer.definitions}
    return NormalizedSchema(made, {name: place.pointer for name, (_, place) in normalizer.targets.items()})


def format_place(pointer: str) -> str:
    """Format a pointer into a schema for people."""
    return pointer or "its root"


def _add_applicator(made: dict[str, Any], part: Schema) -> None:
    """Add a reference; a second one of the same schema becomes a part of allOf."""
    if "$ref" in made:
        made["allOf"] = [*made.get("allOf", ()), part]
    else:
        made.update(part)


def _upgrade(schema: Schema) -> dict[str, Any]:
    """Write the keywords of drafts 3 to 7 as 2020-12 has them."""
    made = dict(schema)
    if isinstance(schema.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(limit), bool) and made.pop(limit) and bound in made:
            made[limit] = made.pop(bound)
    if isinstance(made.get("dependencies"), Mapping):
        _upgrade_dependencies(made)
    for key, needed in _NEEDED_KEYWORDS.items():
        if needed not in made:
            made.pop(key, None)
    return made


def _upgrade_dependencies(made: dict[str, Any]) -> None:
    for name, value in made.pop("dependencies").items():
        key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
        if isinstance(made.get(key, {}), Mapping):
            made[key] = {**made.get(key, {}), name: value}
