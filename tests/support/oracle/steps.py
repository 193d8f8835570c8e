"""Steps of a script, as values: a script is a list of steps, printed and read as JSON lines.

Numbers that choose (`talk`, `at`, `which`) are taken modulo the choices, so that any part of a script is a script
again, which lets a failing one be shortened.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

BEGIN, APPEND, BRANCH, EDIT, AGAIN, TOOLS = "begin", "append", "branch", "edit", "again", "tools"
LENGTH, WORD, LEAVE_IN_PREFILL, LEAVE_IN_DECODE = "length", "word", "leave in prefill", "leave in decode"


class Step(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Step of a script."""


class Fresh(Step, frozen=True):
    """New conversations of other words from here on; stored ones stay."""

    salt: int = 0


class Ask(Step, frozen=True):
    """Request whose answer is compared.

    `how`: a new conversation; another turn (or, after a request without an answer, the same again); another turn after
    an earlier answer, as a conversation of its own; an earlier message changed, all after it kept; the last answer
    generated again; other tools.
    """

    how: Literal["begin", "append", "branch", "edit", "again", "tools"] = "begin"
    talk: int = 0
    at: int = 0  # number of the message
    words: int = 40  # length of the new message, in characters, which are tokens
    dice: int = 0  # seed of its text
    tokens: int = 8  # limit of the answer
    end: Literal["length", "word", "leave in prefill", "leave in decode"] = "length"
    after: int = 0  # steps of the engine until its client leaves
    stream: bool = False
    sampled: bool = False
    fault: Literal["", "prefill", "first", "decode"] = ""  # phase of the step that fails


class Together(Step, frozen=True):
    """Several requests at once."""

    asks: tuple[Ask, ...] = ()


class Forget(Step, frozen=True):
    """Drop all KV in memory, without the proxy, after all is saved."""


class Purge(Step, frozen=True):
    """Purge of a stored session."""

    which: int = 0


class Restart(Step, frozen=True):
    """Restart, softly or by SIGKILL, at once or after all is saved, with the given budgets."""

    how: Literal["softly", "-9", "-9 backend", "-9 proxy"] = "softly"
    settled: bool = True
    small_disk: bool = False
    small_memory: bool = False


class Kill(Step, frozen=True):
    """SIGKILL of a process before, after or in its `nth` disk operation since this request was sent."""

    process: Literal["proxy", "backend"] = "backend"
    nth: int = 1
    when: Literal["before", "middle", "after"] = "before"
    ask: Ask = Ask()


Any = Fresh | Ask | Together | Forget | Purge | Restart | Kill
Script = Sequence[Any]


def encode_script(script: Iterable[Any]) -> str:
    return "".join(msgspec.json.encode(step).decode() + "\n" for step in script)


def read_script(path: Path) -> list[Any]:
    return [msgspec.json.decode(line, type=Any) for line in path.read_text().splitlines() if line.startswith("{")]
