"""Reading of JSON schemas: references, and keywords with values of the expected type.  Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

Schema = Mapping[str, Any]
K = TypeVar("K", dict[str, Any], list[Any])

CHAIN_MAX = 100  # references that lead to references


def get_typed(schema: Schema, key: str, kind: type[K]) -> K:
    """Value of a keyword; empty where the keyword is absent or has a value of another type."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()


def list_required_names(schema: Schema) -> list[str]:
    """Names that an object must have."""
    return [name for name in get_typed(schema, "required", list) if isinstance(name, str)]


def list_values(schema: Schema) -> list[Any] | None:
    """Values of `const` or `enum`; None where they are not listed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def resolve_references(schema: Any, root: Any) -> Schema | None:
    """Target of a chain of local references; None where it leads nowhere, or is no object."""
    for _ in range(CHAIN_MAX):
        if not isinstance(schema, Mapping):
            return None
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = lookup_reference(reference, root)
    return None


def lookup_reference(reference: str, root: Any) -> Any:
    """Part of `root` that a reference names; None for a missing part or another document."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    part = root
    for step in reference[2:].split("/"):
        if not isinstance(part, Mapping):
            return None
        name = step.replace("~1", "/").replace("~0", "~")
        part = part[name] if name in part else part.get(unquote(name))
    return part


def collect_references(schema: Any) -> set[str]:
    """All references of a schema, at any depth, as they are written."""
    return {reference for part in iter_objects(schema) if isinstance(reference := part.get("$ref"), str)}


def iter_objects(schema: Any) -> Iterator[Schema]:
    """All objects in a schema, at any depth."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
        waiting.extend(list_parts(part))


def list_parts(value: Any) -> list[Any]:
    """Values in an object or in a list; of another value none."""
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []


def rebase_references(schema: Any, prefix: str) -> Any:
    """Copy a schema with its references moved into a document that holds it at `prefix`, as in "#/$defs/whole"."""
    if isinstance(schema, list):
        return [rebase_references(part, prefix) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {key: rebase_references(part, prefix) for key, part in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        copy["$ref"] = prefix + reference[1:]
    return copy
