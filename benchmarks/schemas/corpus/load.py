"""Schemas of a corpus's folder, and of JSON-Schema-Test-Suite."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus.sources import SUITE_DRAFTS, TOOLS, check_sources, is_selected


@dataclass(frozen=True)
class CorpusSchema:
    source: str
    name: str
    schema: Any
    is_tool: bool = False
    description: str = ""
    instances: tuple[tuple[Any, bool], ...] = ()  # of the test suite: each with whether it is valid

    @property
    def key(self) -> str:
        return f"{self.source}/{self.name}"


def load_corpus(cache: Path, sources: Sequence[str] = (), *, suite: bool = True) -> list[CorpusSchema]:
    """Load all schemas, or those of some sources, sorted by their names.  Raises UnknownSourceError."""
    found = [*_iter_files(cache / "corpus"), *(_iter_suite(cache / "suite" / "tests") if suite else ())]
    check_sources(sources, {name for item in found for name in (item.source, item.source.split("/")[0])})
    return [item for item in found if is_selected(item.source, sources)]


def _iter_files(corpus: Path) -> Iterator[CorpusSchema]:
    for path in sorted(corpus.rglob("*.json")):
        source, name = str(path.parent.relative_to(corpus)), path.stem
        if source.startswith("."):  # a draft
            continue
        value = json.loads(path.read_text())
        if source.split("/")[0] == TOOLS:
            description = str(value.get("description") or "")
            yield CorpusSchema(source, name, value.get("inputSchema"), is_tool=True, description=description)
        else:
            yield CorpusSchema(source, name, value)


def _iter_suite(folder: Path) -> Iterator[CorpusSchema]:
    """Yield the suite's schemas; the optional tests' of formats and others have a source of their own."""
    for draft, dialect in SUITE_DRAFTS.items():
        for path in sorted((folder / draft).rglob("*.json")):
            parts = path.relative_to(folder / draft).parts
            source = "/".join((f"suite-{draft}", *parts[:-1]))
            for number, case in enumerate(json.loads(path.read_text())):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": dialect} | schema
                instances = tuple((test["data"], test["valid"]) for test in case["tests"])
                yield CorpusSchema(source, f"{path.stem}-{number}", schema, instances=instances)
