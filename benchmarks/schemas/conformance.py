"""Instances, valid or not by jsonschema, and whether an answer could be them."""

import argparse
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from answers import is_accepted, load_token_table
from compilers import create_matcher, load_tokenizer, make_compiler
from corpus.load import CorpusSchema, load_corpus
from instances import change_instance, format_instance, relax_schema
from judge import Judge, parse_answer
from table import build_constraint, get_group, print_rows
from walk import WalkTask, find_served, walk_schema
from workers import run_items

from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.matcher import GrammarDeadEndError

TIMEOUT_S = 240.0
TOKENIZER = "demo"
WALKS, CHANGES = 3, 6  # walks a schema, and changes of each of its valid answers
TOKENS_MAX = 2000
KINDS = (
    "valid",
    "valid, refused",
    "invalid",
    "invalid, accepted",
    "by format",
    "by format, accepted",
    "not judged",
    "errors",
)


@dataclass
class ConformanceSum:
    counts: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)  # of instances that are wrongly accepted, by kind
    examples: list[dict[str, Any]] = field(default_factory=list)


def iter_instances(cache: Path, item: CorpusSchema, seed: int) -> Iterator[tuple[str, Any, bool | None]]:
    """Yield instances, each with its kind and, where it is known already, whether it is valid."""
    if item.instances:
        yield from (("given", instance, is_valid) for instance, is_valid in item.instances)
        return
    draw = random.Random(seed)
    relaxed = replace(item, schema=relax_schema(item.schema))
    tasks = (WalkTask(each, TOKENIZER, WALKS, seed + i) for i, each in enumerate((item, relaxed)))
    for text in (text for task in tasks for text in walk_schema(cache, task).texts):
        instance = parse_answer(text)
        yield "sampled", instance, None
        for kind, changed in change_instance(instance, item.schema, draw, CHANGES):
            yield kind, changed, None


def check_schema(cache: Path, seed: int, item: CorpusSchema) -> ConformanceSum:
    result, compiler = ConformanceSum(), make_compiler(TOKENIZER, cache)
    instances = list(iter_instances(cache, item, seed + zlib.crc32(item.key.encode())))
    try:
        constraint = build_constraint(compiler, item, "strict")
    except BadRequestError:
        result.counts["refused schemas"] += 1
        return result
    tokenizer, judge = load_tokenizer(TOKENIZER, cache)[0], Judge(item.schema)
    table = load_token_table(TOKENIZER, cache)
    for kind, instance, is_valid in instances:
        try:
            label = label_instance(judge, instance, is_valid)
            text = format_instance(instance, item.schema)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) > TOKENS_MAX:
                continue
            accepts = is_accepted(create_matcher(TOKENIZER, cache, constraint), tokens, table)
        except GrammarDeadEndError:
            result.counts["errors"] += 1
            continue
        except Exception:  # noqa: BLE001  (references and patterns that jsonschema can't follow)
            result.counts["not judged"] += 1
            continue
        result.counts[label] += 1
        if accepts is (label == "valid"):
            continue
        result.counts[f"{label}, {'accepted' if accepts else 'refused'}"] += 1
        result.changes[f"{label}: {kind}"] += 1
        result.examples.append({"label": label, "kind": kind, "text": text[:600]})
    return result


def label_instance(judge: Judge, instance: Any, is_valid: bool | None) -> str:
    if is_valid is not None:
        return "valid" if is_valid else "invalid"
    verdict = judge.judge(instance)
    return "invalid" if not verdict.is_valid else "by format" if verdict.formats else "valid"


def run(options: argparse.Namespace) -> None:
    items = find_served(options.cache, load_corpus(options.cache, options.sources))
    check = partial(check_schema, options.cache, options.seed)
    groups, changes = dict[str, Counter[str]](), Counter[str]()
    with (options.cache / "conformance.jsonl").open("w") as file:
        for item, result, failure in run_items(check, items, process_count=options.processes, timeout_s=TIMEOUT_S):
            for name in (get_group(item.source), "all of the suite" if item.instances else "all"):
                counts = groups.setdefault(name, Counter())
                counts["schemas"] += 1
                counts["failed"] += bool(failure)
                counts.update(result.counts if result else {})
            if failure or result.examples:
                changes.update(result.changes if result else {})
                line = {"schema": item.key, "failure": failure, "examples": result.examples if result else []}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    kinds = ("schemas", *KINDS, "refused schemas", "failed")
    print_rows(["source", *kinds], [[name, *(str(groups[name][kind]) for kind in kinds)] for name in sorted(groups)])
    print()
    print_rows(["judged otherwise: kind", "times"], [[kind, str(count)] for kind, count in changes.most_common(40)])
