"""The table of what is served: each schema as an answer's form, strict or not, and each tool's as its arguments."""

import argparse
import json
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from compilers import NAMES, THOUGHT, TOOL_NAMES, make_compiler
from corpus.load import CorpusSchema, load_corpus
from workers import run_items

from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.constraint import Constraint

TIMEOUT_S = 120.0
REASON_CHARS_MAX = 130
ANSWER_MODES = ("strict", "loose")
TOOL_MODES = ("tool strict", "tool loose")
COLUMNS = ("schemas", *ANSWER_MODES, "tools", *TOOL_MODES, "keep types", "exact", "checked", "median", "95 %", "most")


@dataclass
class ModeResult:
    """Result of one way to ask for a schema."""

    seconds: float
    problem: str = ""
    is_checked: bool = False  # the grammar does not force all of it
    keeps_types: bool | None = None


def make_request(item: CorpusSchema, mode: str) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """Make a body and its tools."""
    if mode in ANSWER_MODES:
        form = {"name": "answer", "schema": item.schema, "strict": mode == "strict"}
        return {"response_format": {"type": "json_schema", "json_schema": form}}, None
    return {"tool_choice": "required"}, [make_tool(item, item.schema, strict=mode == "tool strict")]


def make_tool(item: CorpusSchema, parameters: Any, *, strict: bool) -> dict[str, Any]:
    function = {"name": item.name, "description": item.description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def build_constraint(compiler: GrammarCompiler, item: CorpusSchema, mode: str) -> Constraint:
    """Build the constraint of a request, as the server does.  Raises BadRequestError."""
    constraint = compiler.build_constraint("chat", *make_request(item, mode), THOUGHT)
    assert constraint is not None
    return constraint


def measure_schema(cache: Path, item: CorpusSchema) -> dict[tuple[str, str], ModeResult]:
    """Measure a schema in all ways, by tokenizer and mode."""
    results = {}
    ways = [(tokenizer, mode) for tokenizer in NAMES for mode in ANSWER_MODES]
    ways += [(tokenizer, mode) for tokenizer in TOOL_NAMES for mode in TOOL_MODES if item.is_tool]
    for tokenizer, mode in ways:
        compiler = make_compiler(tokenizer, cache)
        compiler.clear()
        results[tokenizer, mode] = measure_mode(compiler, item, mode)
    return results


def measure_mode(compiler: GrammarCompiler, item: CorpusSchema, mode: str) -> ModeResult:
    began = time.perf_counter()
    try:
        constraint = build_constraint(compiler, item, mode)
    except BadRequestError as error:
        return ModeResult(time.perf_counter() - began, str(error))
    seconds = time.perf_counter() - began
    keeps = has_types(compiler, item, constraint) if mode == "tool loose" else None
    return ModeResult(seconds, "", is_checked(constraint), keeps)


def is_checked(constraint: Constraint) -> bool:
    """True where the grammar does not force all of the schema."""
    content = constraint.checks.content if constraint.checks else None
    return content is not None and content.has_checks


def has_types(compiler: GrammarCompiler, item: CorpusSchema, constraint: Constraint) -> bool:
    """True where the arguments of a tool that isn't strict are held to more than their names."""
    properties = item.schema.get("properties") if isinstance(item.schema, Mapping) else None
    if not isinstance(properties, Mapping) or not properties:
        return True
    required = [name for name in item.schema.get("required") or () if name in properties]
    names: dict[str, Any] = {"type": "object", "properties": {name: {} for name in properties}, "required": required}
    closed = {**names, "additionalProperties": False}
    body, _ = make_request(item, "tool loose")
    for parameters in (names, closed):
        reduced = compiler.build_constraint("chat", body, [make_tool(item, parameters, strict=False)], THOUGHT)
        if reduced is not None and strip_options(reduced.grammar) == strip_options(constraint.grammar):
            return all(not properties[name] for name in properties)
    return True


def strip_options(grammar: str) -> str:
    return grammar.replace('\\"additionalProperties\\": false, ', "").replace(', \\"additionalProperties\\": false', "")


# ---- sums


@dataclass
class SourceSum:
    """Sum over the schemas of one source."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, item: CorpusSchema, results: Mapping[tuple[str, str], ModeResult], failure: str) -> None:
        self.counts["schemas"] += 1
        self.counts["tools"] += item.is_tool
        if failure:
            return
        for mode in (*ANSWER_MODES, *TOOL_MODES):
            found = [result for (_, each), result in results.items() if each == mode]
            self.counts[mode] += bool(found) and all(not result.problem for result in found)
        if (calls := results.get((TOOL_NAMES[0], "tool loose"))) is not None:
            self.counts["keep types"] += bool(calls.keeps_types)
        self.seconds += [result.seconds for result in results.values()]
        main = results[NAMES[0], "strict"]
        if not main.problem:
            self.counts["checked" if main.is_checked else "exact"] += 1

    def format_cells(self) -> list[str]:
        cells = [str(self.counts[name]) for name in COLUMNS[:-3]]
        values = sorted(self.seconds) or [0.0]
        times = (statistics.median(values), values[int(0.95 * (len(values) - 1))], values[-1])
        return [*cells, *(f"{1e3 * seconds:.0f} ms" for seconds in times)]


def group_reason(problem: str) -> str:
    """Group an error by its text, without the names, addresses and numbers of its schema."""
    _, _, quoted = problem.partition("can't be used: ")
    text = re.sub(r"^'[^ ]*' ", "", quoted.strip('"') or problem)
    text = re.sub(r" while processing .*", "", text)
    text = re.sub(r"\w+:/\S*?(?=['\" ]|$)", "ADDRESS", text)
    return re.sub(r"\d+", "N", text)[:REASON_CHARS_MAX]


def get_group(source: str) -> str:
    """Group all servers' tools; parts of the test suite stay apart, since some are optional."""
    return source if source.startswith("suite") else source.split("/")[0]


def write_results(place: Path, rows: Iterable[tuple[CorpusSchema, Any, str]]) -> Counter[tuple[str, str]]:
    """Write a line a schema, and sum up: sources are printed at the end, reasons by their number."""
    sums, reasons = defaultdict[str, SourceSum](SourceSum), Counter[tuple[str, str]]()
    with place.open("w") as file:
        for item, results, failure in rows:
            for name in (get_group(item.source), "all" if not item.instances else "all of the suite"):
                sums[name].add(item, results or {}, failure)
            problems = {" ".join(key): result.problem for key, result in (results or {}).items() if result.problem}
            seconds = {" ".join(key): round(result.seconds, 4) for key, result in (results or {}).items()}
            line = {"schema": item.key, "failure": failure, "problems": problems, "seconds": seconds}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            found = {(mode, group_reason(result.problem)) for (_, mode), result in (results or {}).items()}
            reasons.update((mode, reason) for mode, reason in found if reason)
            if failure:
                reasons["any", failure.strip().split("\n")[-1]] += 1
    print_rows(["source", *COLUMNS], [[name, *sums[name].format_cells()] for name in sorted(sums)])
    return reasons


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def run(options: argparse.Namespace, order: Callable[[list[CorpusSchema]], list[CorpusSchema]] = list) -> None:
    items = order(load_corpus(options.cache, options.sources))
    for tokenizer in (*NAMES, *TOOL_NAMES):
        make_compiler(tokenizer, options.cache)  # makes its folder once
    measure = partial(measure_schema, options.cache)
    rows = run_items(measure, items, process_count=options.processes, timeout_s=TIMEOUT_S)
    reasons = write_results(options.cache / "table.jsonl", rows)
    print()
    counted = [[mode, str(count), reason.replace("|", "\\|")] for (mode, reason), count in reasons.most_common(60)]
    print_rows(["refused as", "times", "reason"], counted)
