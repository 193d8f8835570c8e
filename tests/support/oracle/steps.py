"""What may happen to a pair, as values: a script is a list of steps, printed and read as JSON lines.

Numbers that choose (`talk`, `at`, `which`) are taken modulo what there is, so any part of a script is a script again:
that is how one that found something is made short.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

BEGIN, APPEND, BRANCH, EDIT, AGAIN, TOOLS = "begin", "append", "branch", "edit", "again", "tools"
LENGTH, WORD, LEAVE_IN_PREFILL, LEAVE_IN_DECODE = "length", "word", "leave in prefill", "leave in decode"


class Step(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One thing that happens."""


class Fresh(Step, frozen=True):
    """Other conversations from here on, made of other words; what is stored stays."""

    salt: int = 0


class Ask(Step, frozen=True):
    """One request, and its answer compared.

    `how`: a new conversation; another turn (or, where the last got no answer, the same again); another turn after an
    earlier answer, as a conversation of its own; an earlier message changed, all after it kept; the last answer thrown
    away; other tools, at the top of everything.
    """

    how: Literal["begin", "append", "branch", "edit", "again", "tools"] = "begin"
    talk: int = 0
    at: int = 0  # which message
    words: int = 40  # how long the new one is, in characters, which are tokens
    dice: int = 0  # what it says
    tokens: int = 8  # how long the answer may be
    end: Literal["length", "word", "leave in prefill", "leave in decode"] = "length"
    after: int = 0  # steps of the engine until its client leaves
    stream: bool = False
    sampled: bool = False
    fault: Literal["", "prefill", "first", "decode"] = ""  # a step of this phase that fails


class Together(Step, frozen=True):
    """Several at once."""

    asks: tuple[Ask, ...] = ()


class Forget(Step, frozen=True):
    """Once all is saved, all KV in memory is dropped behind the proxy's back."""


class Purge(Step, frozen=True):
    """A stored session is removed."""

    which: int = 0


class Restart(Step, frozen=True):
    """Softly or with -9, at once or once everything is saved, with other budgets if they are given."""

    how: Literal["softly", "-9", "-9 backend", "-9 proxy"] = "softly"
    settled: bool = True
    small_disk: bool = False
    small_memory: bool = False


class Kill(Step, frozen=True):
    """A process dies at a step of the disk: its `nth` from when this request is sent on, before, after or in it."""

    process: Literal["proxy", "backend"] = "backend"
    nth: int = 1
    when: Literal["before", "middle", "after"] = "before"
    ask: Ask = Ask()


Any = Fresh | Ask | Together | Forget | Purge | Restart | Kill
Script = Sequence[Any]


def written(script: Iterable[Any]) -> str:
    return "".join(msgspec.json.encode(step).decode() + "\n" for step in script)


def read(path: Path) -> list[Any]:
    return [msgspec.json.decode(line, type=Any) for line in path.read_text().splitlines() if line.startswith("{")]
