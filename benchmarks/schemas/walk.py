"""Random walks: answers sampled without a model, several of a schema at a time, some of them abandoned."""

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from answers import TOKENS_MAX, GivenUpError, Walk, load_token_table
from compilers import NAMES, TOOL_NAMES, create_matcher, load_tokenizer, make_compiler
from corpus.load import CorpusSchema, load_corpus
from judge import Judge, UnusualJsonError, parse_answer
from table import build_constraint, make_request, print_rows
from workers import run_items

from warmline_backend.output.parser import parse_turn
from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.matcher import GrammarDeadEndError

TIMEOUT_S = 180.0
WALKED_TOOL_NAMES = ("json_tools",)  # at random, a tag that ends a text would hardly ever be found
TOGETHER = 4
ABANDONED_SHARE = 0.1
KINDS = (
    "walks",
    "valid",
    "invalid",
    "not JSON",
    "a key twice",
    "too large numbers",
    "errors",
    "cut",
    "abandoned",
    "given up",
    "redraws",
    "slow",
)
SLOW_STEP_S = 0.05
EXAMPLES_MAX = 5  # a schema


@dataclass(frozen=True)
class WalkTask:
    item: CorpusSchema
    tokenizer: str
    count: int
    seed: int

    @property
    def mode(self) -> str:
        return "tool strict" if self.tokenizer in TOOL_NAMES else "strict"

    def read_answer(self, cache: Path, walk: Walk) -> Any:
        """Read the JSON of an answer, or the arguments of its first call.  Raises ValueError."""
        if self.tokenizer not in TOOL_NAMES:
            return parse_answer(walk.text)
        tokenizer, tools = load_tokenizer(self.tokenizer, cache)[0], make_request(self.item, self.mode)[1]
        content, calls = parse_turn(walk.tokens, tokenizer, tools)
        if content or not calls or calls[0][0] != self.item.name:
            raise ValueError("is no call")
        return parse_answer(calls[0][1])


@dataclass
class WalkSum:
    counts: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)  # that answers of finished walks don't follow
    examples: list[dict[str, str]] = field(default_factory=list)  # of errors and invalid answers
    step_max_s: float = 0.0
    texts: list[str] = field(default_factory=list)  # of valid answers

    def note(self, kind: str, text: str, reason: str) -> None:
        self.counts[kind] += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append({"kind": kind, "text": text[:1000], "reason": reason[:300]})


def walk_schema(cache: Path, task: WalkTask) -> WalkSum:
    """Walk through a schema's answers; a refused schema has none."""
    result, compiler = WalkSum(), make_compiler(task.tokenizer, cache)
    compiler.clear()
    try:
        constraint = build_constraint(compiler, task.item, task.mode)
        judge = Judge(task.item.schema)
    except BadRequestError:
        result.counts["refused schemas"] += 1
        return result
    table, seeds = load_token_table(task.tokenizer, cache), iter(range(task.seed, task.seed + task.count))
    draw, running = random.Random(task.seed), list[Walk]()
    while True:
        while len(running) < TOGETHER and (seed := next(seeds, None)) is not None:
            matcher = create_matcher(task.tokenizer, cache, constraint, make_request(task.item, task.mode)[1])
            running.append(Walk(matcher, table, seed))
        if not running:
            return result
        for walk in list(running):
            if not step_walk(walk, result, is_abandoned=draw.random() < ABANDONED_SHARE / 50):
                running.remove(walk)
                if walk.is_ended:
                    judge_walk(walk, result, judge, partial(task.read_answer, cache))
                walk.close()
                result.counts["redraws"] += walk.redraw_count
                result.counts["slow"] += walk.step_max_s > SLOW_STEP_S
                result.step_max_s = max(result.step_max_s, walk.step_max_s)


def step_walk(walk: Walk, result: WalkSum, *, is_abandoned: bool) -> bool:
    """Take a step of a walk; false where it is over."""
    try:
        walk.step()
    except (GrammarDeadEndError, GivenUpError) as error:
        result.note("errors" if isinstance(error, GrammarDeadEndError) else "given up", walk.text, str(error))
        return False
    if not walk.is_ended and (is_abandoned or len(walk.tokens) >= TOKENS_MAX):
        result.counts["abandoned" if is_abandoned else "cut"] += 1
        return False
    return not walk.is_ended


def judge_walk(walk: Walk, result: WalkSum, judge: Judge, read_answer: Callable[[Walk], Any]) -> None:
    text = walk.text
    try:
        verdict = judge.judge(read_answer(walk))
    except UnusualJsonError as error:
        result.note("a key twice" if "key" in str(error) else "too large numbers", text, str(error))
        return
    except ValueError as error:
        result.note("not JSON", text, str(error))
        return
    except Exception as error:  # noqa: BLE001  (a reference that jsonschema doesn't find, a pattern of another language)
        result.note("not judged", text, f"{type(error).__name__}: {error}")
        return
    if not verdict.is_valid:
        result.note("invalid", text, verdict.reason)
        return
    result.counts["valid"] += 1
    result.texts.append(text)
    if verdict.formats:
        result.counts["other format"] += 1
        result.formats.update(verdict.formats)
        result.examples.append({"kind": "format", "text": text[:300], "reason": ", ".join(verdict.formats)})


def make_tasks(items: Sequence[CorpusSchema], walk_count: int, seed: int) -> list[WalkTask]:
    """Spread walks evenly over schemas and tokenizers; a seed is each walk's own."""
    keys = [(item, name) for item in items for name in (*NAMES, *(WALKED_TOOL_NAMES if item.is_tool else ()))]
    share, rest = divmod(walk_count, max(len(keys), 1))
    counts = [share + (i < rest) for i in range(len(keys))]
    random.Random(seed).shuffle(counts)
    return [
        WalkTask(item, tokenizer, count, seed * 1_000_000_007 + i * 10_007)
        for i, ((item, tokenizer), count) in enumerate(zip(keys, counts, strict=True))
        if count
    ]


def find_served(cache: Path, items: Sequence[CorpusSchema]) -> list[CorpusSchema]:
    """Find the schemas that the last table has as served; all where there is no table."""
    place = cache / "table.jsonl"
    if not place.exists():
        return list(items)
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    refused = {line["schema"] for line in lines if line["failure"] or f"{NAMES[0]} strict" in line["problems"]}
    return [item for item in items if item.key not in refused]


def run(options: argparse.Namespace) -> None:
    items = find_served(options.cache, load_corpus(options.cache, options.sources))
    tasks = make_tasks(items, options.walks, options.seed)
    total, by_tokenizer, slowest = WalkSum(), defaultdict[str, Counter[str]](Counter), (0.0, "")
    rows = run_items(partial(walk_schema, options.cache), tasks, process_count=options.processes, timeout_s=TIMEOUT_S)
    with (options.cache / "walks.jsonl").open("w") as file:
        for task, result, failure in rows:
            by_tokenizer[task.tokenizer]["walks"] += task.count
            if failure:
                by_tokenizer[task.tokenizer]["failed tasks"] += 1
            else:
                by_tokenizer[task.tokenizer].update(result.counts)
                total.formats.update(result.formats)
                slowest = max(slowest, (result.step_max_s, task.item.key))
            if failure or result.examples:
                examples: list[Any] = [failure] if failure else result.examples
                line = {"schema": task.item.key, "tokenizer": task.tokenizer, "seed": task.seed, "examples": examples}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    kinds = [*KINDS, "other format", "not judged", "refused schemas", "failed tasks"]
    print_rows(
        ["tokenizer", *kinds], [[name, *(str(counts[kind]) for kind in kinds)] for name, counts in by_tokenizer.items()]
    )
    print(f"slow: a step took more than {SLOW_STEP_S} s of CPU; the slowest took {slowest[0]:.3f} s, in {slowest[1]}")
    print("formats that answers don't follow:", dict(total.formats.most_common()))
