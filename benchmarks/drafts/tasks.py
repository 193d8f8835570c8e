"""Tasks whose answers are known: a file with one change, edits of a file, and prose, of this project's own files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "backend/warmline_backend/kv_cache/residents.py",
    "backend/warmline_backend/scheduler/admission.py",
    "proxy/warmline_proxy/request/deadlines.py",
    "proxy/warmline_proxy/http/body_budget.py",
)
PROSE = ("docs/resilience.md", "docs/cache.md", "docs/correctness.md", "docs/models.md")
LINES = 90  # of a file that is rewritten
PROSE_PROMPT_CHARS, PROSE_ANSWER_CHARS = 6000, 2400
EDITS = 8
KINDS = ("rewrite", "edits", "prose")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Task:
    kind: str
    prompt: list[int]
    answer: list[int]


def make_tasks(encode: Encode, kind: str, count: int) -> list[Task]:
    """Make `count` tasks of one kind, each of another file."""
    make = {"rewrite": _make_rewrite, "edits": _make_edits, "prose": _make_prose}[kind]
    paths = PROSE if kind == "prose" else CODE
    texts = (make((ROOT / paths[n % len(paths)]).read_text()) for n in range(count))
    return [Task(kind, encode(prompt), encode(answer)) for prompt, answer in texts]


def _make_rewrite(text: str) -> tuple[str, str]:
    """The file's first lines, with one line changed in the middle."""
    lines = text.splitlines(keepends=True)[:LINES]
    changed = list(lines)
    changed[len(lines) // 2] = "    # The limit is checked by the caller, which knows what else is running.\n"
    prompt = "Add a comment in the middle of this file, and write the whole file.\n```python\n" + "".join(lines)
    return prompt + "```\n", "```python\n" + "".join(changed) + "```\n"


def _make_edits(text: str) -> tuple[str, str]:
    """Blocks that search for some lines and replace the last one of each."""
    lines = text.splitlines(keepends=True)[: 2 * LINES]
    answer = ""
    for number in range(EDITS):
        start = (number + 1) * len(lines) // (EDITS + 2)
        found = lines[start : start + 6]
        replaced = [*found[:-1], f"    # step {number + 1}: {found[-1].strip()}\n"]
        answer += "<<<<<<< SEARCH\n" + "".join(found) + "=======\n" + "".join(replaced) + ">>>>>>> REPLACE\n"
    prompt = "Make these changes with search and replace blocks.\n```python\n" + "".join(lines) + "```\n"
    return prompt, answer


def _make_prose(text: str) -> tuple[str, str]:
    end = PROSE_PROMPT_CHARS + PROSE_ANSWER_CHARS
    return text[:PROSE_PROMPT_CHARS], text[PROSE_PROMPT_CHARS:end]
