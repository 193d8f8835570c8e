"""Places of an answer that checks concern: which subschemas apply to a value, by where it stands.  Pure; any thread.

Subschemas that apply to a value for certain are followed from the root on (`$ref`, `allOf`, `properties`, `items` and
the like), so that a value with a check is validated as soon as it is complete.  Whether others apply (`anyOf`, `not`,
`if`, `contains` and the like) depends on the value that has them: where there is a check in them, that value is
validated.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from warmline_backend.request.schemas import Schema, get_typed
from warmline_backend.structured_output.json_schema.keywords import escape_step
from warmline_backend.structured_output.json_schema.validation.reduced_schemas import find_part

# Beyond these bounds a value is validated as a whole, instead of the values within it.
SUBSCHEMAS_MAX = 256  # that are followed at one place
VALIDATIONS_MAX = 16  # of one value
PLACES_CACHED_MAX = 1024

_UNCERTAIN = ("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
_UNCERTAIN_LISTS = ("anyOf", "oneOf")

CompilePattern = Callable[[str], Callable[[str], bool]]  # (pattern of the schema) -> whether a name matches


@dataclass(eq=False, slots=True)
class _Subschema:
    """A subschema, with those that it has or refers to; None for one that is true or false."""

    parent: "_Subschema | None"
    path: str  # from the parent, or from the root; a JSON pointer
    in_place: list["_Subschema"] = field(default_factory=list)  # that apply to the same value
    properties: dict[str, "_Subschema | None"] = field(default_factory=dict)
    patterns: dict[str, "_Subschema | None"] = field(default_factory=dict)
    matchers: list[tuple[Callable[[str], bool], "_Subschema | None"]] = field(default_factory=list)
    additional: "_Subschema | None" = None
    prefix: list["_Subschema | None"] = field(default_factory=list)
    items: "_Subschema | None" = None
    users: list["_Subschema"] = field(default_factory=list)  # that apply it
    uncertain_users: list["_Subschema"] = field(default_factory=list)  # that apply it to some values only
    has_unique_items: bool = False
    has_check: bool = False  # in itself, or in any that it applies
    is_concerned: bool = False  # by a check that only the whole value can pass

    @property
    def pointer(self) -> str:
        return f"{self.parent.pointer if self.parent else ''}{self.path}"

    @property
    def has_children(self) -> bool:
        return bool(self.properties or self.patterns or self.additional or self.prefix or self.items)

    def iter_children(self, step: str | int) -> "Iterator[_Subschema | None]":
        """Subschemas that apply to a property or an item for certain."""
        if isinstance(step, int):
            yield self.prefix[step] if step < len(self.prefix) else self.items
            return
        matching = [child for matches, child in self.matchers if matches(step)]
        yield from matching
        if step in self.properties:
            yield self.properties[step]
        elif not matching:
            yield self.additional


@dataclass(frozen=True)
class Place:
    """Subschemas with checks that apply to a value for certain."""

    followed: tuple[_Subschema, ...] = ()  # whose children apply to the value's properties or items
    validated: tuple[_Subschema, ...] = ()  # that the whole value is validated against
    has_unique_items: bool = False

    @property
    def is_checked(self) -> bool:
        return bool(self.validated)

    @property
    def pointers(self) -> list[str]:
        """Pointers of the subschemas that the value is validated against."""
        return [subschema.pointer for subschema in self.validated]


NO_PLACE = Place()


class CheckPlaces:
    """Places that the checks of one schema concern.

    `checks` are pointers into the schema, which has references "#/..." alone.  Raises what `compile_pattern` raises.
    """

    def __init__(self, schema: Schema, checks: Collection[str], compile_pattern: CompilePattern) -> None:
        reader = _SubschemaReader(schema)
        _mark_checks([found for pointer in checks if (found := reader.find(pointer))])
        for subschema in reader.subschemas.values():
            if any(child and child.has_check for child in (*subschema.patterns.values(), subschema.additional)):
                subschema.matchers = [(compile_pattern(name), child) for name, child in subschema.patterns.items()]
        root = reader.root
        self._make_place = lru_cache(PLACES_CACHED_MAX)(_make_place)
        self.root = self._make_place((root,)) if root.has_check else NO_PLACE

    def find_child(self, place: Place, step: str | int) -> Place:
        """Find the place of a property or an item of a value."""
        if not place.followed:
            return NO_PLACE
        children = (child for subschema in place.followed for child in subschema.iter_children(step))
        roots = dict.fromkeys(child for child in children if child and child.has_check)
        return self._make_place(tuple(roots)) if roots else NO_PLACE


def _make_place(roots: tuple[_Subschema, ...]) -> Place:
    """Make the place that these subschemas apply to."""
    followed, validated = dict.fromkeys(roots), dict[_Subschema, None]()
    covered = set[_Subschema]()  # by one that is validated
    waiting = [*roots]
    for subschema in waiting:  # which grows
        if subschema.is_concerned and subschema not in covered:
            validated[subschema] = None
        for part in subschema.in_place:
            if subschema in validated or subschema in covered:
                covered.add(part)
            if part.has_check and part not in followed:
                followed[part] = None
                waiting.append(part)
        if len(waiting) > SUBSCHEMAS_MAX:
            return Place((), roots)
    with_children = [subschema for subschema in followed if subschema.has_children]
    if sum(1 + len(subschema.matchers) for subschema in with_children) > VALIDATIONS_MAX:
        return Place((), roots)
    is_unique = any(subschema.has_unique_items for subschema in followed)
    return Place(tuple(with_children), tuple(validated) if len(validated) <= VALIDATIONS_MAX else roots, is_unique)


class _SubschemaReader:
    """Reader of all subschemas that the root leads to; one that is the same object at two places counts once."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.root = _Subschema(None, "")
        self.subschemas: dict[int, _Subschema] = {id(schema): self.root}  # by the identity of what they are read from
        self._waiting: list[tuple[Schema, _Subschema]] = [(schema, self.root)]
        while self._waiting:
            self._read(*self._waiting.pop())

    def find(self, pointer: str) -> _Subschema | None:
        """Subschema of a pointer, or else the root; None for one that applies to nothing."""
        schema = _look_up(pointer, self._schema)
        return self.subschemas.get(id(schema)) if isinstance(schema, Mapping) else self.root

    def _read(self, schema: Schema, made: _Subschema) -> None:
        made.has_unique_items = schema.get("uniqueItems") is True
        if isinstance(reference := schema.get("$ref"), str):
            self._add_in_place(made, self._refer(reference, made))
        for index, part in enumerate(get_typed(schema, "allOf", list)):
            self._add_in_place(made, self._add(part, made, f"/allOf/{index}"))
        made.properties = self._add_all(schema, made, "properties")
        made.patterns = self._add_all(schema, made, "patternProperties")
        made.additional = self._add(schema.get("additionalProperties"), made, "/additionalProperties")
        prefix = enumerate(get_typed(schema, "prefixItems", list))
        made.prefix = [self._add(part, made, f"/prefixItems/{index}") for index, part in prefix]
        made.items = self._add(schema.get("items"), made, "/items")
        for keyword in _UNCERTAIN:
            self._add(schema.get(keyword), made, f"/{keyword}", is_certain=False)
        for keyword in _UNCERTAIN_LISTS:
            for index, part in enumerate(get_typed(schema, keyword, list)):
                self._add(part, made, f"/{keyword}/{index}", is_certain=False)
        self._add_all(schema, made, "dependentSchemas", is_certain=False)

    def _add(self, schema: Any, user: _Subschema, path: str, *, is_certain: bool = True) -> _Subschema | None:
        """Add a part of a subschema, to be read later.  None for one that is true or false, or absent."""
        if not isinstance(schema, Mapping):
            return None
        return self._add_user(schema, _Subschema(user, path), user, is_certain)

    def _add_all(
        self, schema: Schema, user: _Subschema, keyword: str, *, is_certain: bool = True
    ) -> dict[str, _Subschema | None]:
        parts = get_typed(schema, keyword, dict)
        return {
            name: self._add(part, user, f"/{keyword}/{escape_step(name)}", is_certain=is_certain)
            for name, part in parts.items()
        }

    def _refer(self, reference: str, user: _Subschema) -> _Subschema | None:
        pointer = unquote(reference.removeprefix("#"))
        schema = _look_up(pointer, self._schema)
        return self._add_user(schema, _Subschema(None, pointer), user, True) if isinstance(schema, Mapping) else None

    def _add_user(self, schema: Schema, made: _Subschema, user: _Subschema, is_certain: bool) -> _Subschema:
        if (known := self.subschemas.setdefault(id(schema), made)) is made:
            self._waiting.append((schema, made))
        known.users.append(user)
        if not is_certain:
            known.uncertain_users.append(user)
        return known

    @staticmethod
    def _add_in_place(user: _Subschema, part: _Subschema | None) -> None:
        if part is not None:
            user.in_place.append(part)


def _mark_checks(targets: list[_Subschema]) -> None:
    """Mark subschemas with a check of their own, and all that apply them."""
    for subschema in targets:
        subschema.has_check = subschema.is_concerned = True
    waiting = [*targets]
    for subschema in waiting:  # which grows
        for user in subschema.uncertain_users:
            user.is_concerned = True
        for user in subschema.users:
            if not user.has_check:
                user.has_check = True
                waiting.append(user)


def _look_up(pointer: str, schema: Schema) -> Any:
    """Value in a schema; None for a missing one."""
    try:
        return find_part(schema, pointer)
    except LookupError:
        return None
