"""References within a JSON schema.  Pure."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]

CHAIN_MAX = 100  # references that lead to references


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
    found = root
    for step in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        name = step.replace("~1", "/").replace("~0", "~")
        found = found[name] if name in found else found.get(unquote(name))
    return found


def collect_references(schema: Any) -> set[str]:
    """All references of a schema, at any depth, as they are written."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(reference := part.get("$ref"), str):
                found.add(reference)
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    return found


def rebase_references(schema: Any, prefix: str) -> Any:
    """Copy a schema with its references moved into a document that holds it at `prefix`, as in "#/$defs/whole"."""
    if isinstance(schema, list):
        return [rebase_references(part, prefix) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: rebase_references(part, prefix) for key, part in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        made["$ref"] = prefix + reference[1:]
    return made
