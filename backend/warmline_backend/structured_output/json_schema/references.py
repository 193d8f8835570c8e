"""References within one JSON schema: by pointer, by `$id` and by anchor, and to the metaschemas.  Pure."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from jsonschema_specifications import REGISTRY

from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.json_schema.keywords import (
    LIST_KEYWORDS,
    MAP_KEYWORDS,
    SCHEMA_KEYWORDS,
    escape_step,
)

_ROOT_URI = "warmline:schema"
# Keywords of all drafts: identifiers count only where a schema stands.
_RAW_MAP_KEYWORDS = MAP_KEYWORDS | {"definitions", "dependencies"}
_RAW_KEYWORDS = SCHEMA_KEYWORDS | LIST_KEYWORDS | {"additionalItems"}
_METASCHEMAS = ("https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema")


class UnresolvedReferenceError(Exception):
    """A reference leads nowhere, or out of the schema."""


class SchemaDocuments:
    """A schema and the metaschemas that it refers to, by their URIs."""

    def __init__(self, root: Schema, is_old: bool) -> None:
        """`is_old`: drafts 3 to 7, where nothing counts beside "$ref"."""
        self._is_old = is_old
        self._resources: dict[str, tuple[Any, str]] = {}  # URI without fragment -> (schema, its pointer from the root)
        self._anchors: dict[tuple[str, str], tuple[Any, str, str]] = {}  # (URI, name) -> (schema, pointer, base URI)
        self._dynamic_anchors: dict[str, list[tuple[Any, str, str]]] = {}
        self.root_uri = self._add(root, _ROOT_URI)

    def _add(self, document: Any, uri: str) -> str:
        """Register a document with all of its resources; returns its own URI."""
        base = self.find_base(document, uri)
        self._resources.setdefault(uri, (document, ""))
        waiting: list[tuple[Any, str, str]] = [(document, "", uri)]
        while waiting:
            part, pointer, parent = waiting.pop()
            if not isinstance(part, Mapping):
                continue
            own = self.find_base(part, parent)
            if own != parent or not pointer:
                self._resources.setdefault(own, (part, pointer))
            self._add_anchors(part, pointer, own)
            waiting.extend((inner, pointer + step, own) for step, inner in _iter_raw_subschemas(part))
        return base

    def _add_anchors(self, part: Schema, pointer: str, base: str) -> None:
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := part.get(key), str):
                self._anchors.setdefault((base, name), (part, pointer, base))
                if key == "$dynamicAnchor":
                    self._dynamic_anchors.setdefault(name, []).append((part, pointer, base))
        for key in ("$id", "id"):  # an anchor as drafts 4 to 7 have it
            name = part.get(key)
            if isinstance(name, str) and name.startswith("#") and len(name) > 1:
                self._anchors.setdefault((base, name[1:]), (part, pointer, base))

    def find_base(self, schema: Any, base: str) -> str:
        """Base URI of references within a schema that lies in `base`."""
        return base if self._is_old and isinstance(schema, Mapping) and "$ref" in schema else _read_base(schema, base)

    def lookup(self, reference: str, base: str) -> tuple[Any, str, str]:
        """Target of a reference: (schema, its pointer for people, its base URI).  Raises UnresolvedReferenceError."""
        try:
            uri, fragment = (base, reference[1:]) if reference.startswith("#") else urldefrag(urljoin(base, reference))
        except ValueError as error:
            raise UnresolvedReferenceError from error
        document, pointer = self._find_document(uri)
        own = self.find_base(document, uri)
        if fragment and not fragment.startswith("/"):
            if (found := self._anchors.get((own, unquote(fragment)))) is None:
                raise UnresolvedReferenceError
            return found
        for step in fragment.split("/")[1:]:
            document, pointer = _descend(document, step), f"{pointer}/{step}"
            own = self.find_base(document, own)
        return document, pointer, own

    def lookup_dynamic(self, reference: str, base: str) -> tuple[Any, str, str]:
        """Target of a `$dynamicRef`, where the schema leaves no choice.  Raises UnresolvedReferenceError."""
        found = self.lookup(reference, base)
        candidates = self._dynamic_anchors.get(unquote(reference.rpartition("#")[2]), [])
        if not isinstance(found[0], Mapping) or "$dynamicAnchor" not in found[0] or len(candidates) <= 1:
            return found
        own = [each for each in candidates if each[2] == self.root_uri]
        outermost = own or [each for each in candidates if each[2] in _METASCHEMAS]
        if len(outermost) != 1:
            raise UnresolvedReferenceError
        return outermost[0]

    def lookup_recursive(self, base: str) -> tuple[Any, str, str]:
        """Target of a `$recursiveRef`, where the schema leaves no choice.  Raises UnresolvedReferenceError."""
        found = self.lookup("#", base)
        if not _is_recursive(found[0]):
            return found
        candidates = [uri for uri, (part, _) in self._resources.items() if _is_recursive(part)]
        outermost = [uri for uri in candidates if uri == self.root_uri] or candidates
        outermost = [uri for uri in outermost if uri in _METASCHEMAS] or outermost
        if len(outermost) != 1:
            raise UnresolvedReferenceError
        return self.lookup("#", outermost[0])

    def _find_document(self, uri: str) -> tuple[Any, str]:
        if uri not in self._resources:
            try:
                self._add(REGISTRY.contents(uri), uri)
            except Exception as error:  # NoSuchResource, and what the package raises for odd URIs
                raise UnresolvedReferenceError from error
        return self._resources[uri]


def _iter_raw_subschemas(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Iterate over a schema's direct subschemas in any draft, each with its pointer from here."""
    for key, value in schema.items():
        if key in _RAW_MAP_KEYWORDS and isinstance(value, Mapping):
            yield from ((f"/{key}/{escape_step(name)}", part) for name, part in value.items())
        elif key in _RAW_KEYWORDS and isinstance(value, list):
            yield from ((f"/{key}/{n}", part) for n, part in enumerate(value))
        elif key in _RAW_KEYWORDS:
            yield f"/{key}", value


def _is_recursive(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("$recursiveAnchor") is True


def _read_base(schema: Any, base: str) -> str:
    """Base URI within a schema: its `$id`, or that of the schema around it."""
    for key in ("$id", "id"):
        own = schema.get(key) if isinstance(schema, Mapping) else None
        if isinstance(own, str) and own and not own.startswith("#"):
            try:
                return urldefrag(urljoin(base, own))[0]
            except ValueError:
                return base
    return base


def _descend(document: Any, step: str) -> Any:
    """Part of a document by one step of a pointer.  Raises UnresolvedReferenceError."""
    name = step.replace("~1", "/").replace("~0", "~")
    if isinstance(document, Mapping):
        for each in (name, unquote(step).replace("~1", "/").replace("~0", "~")):
            if each in document:
                return document[each]
    if isinstance(document, list) and name.isdigit() and int(name) < len(document):
        return document[int(name)]
    raise UnresolvedReferenceError
