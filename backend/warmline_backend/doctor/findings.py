"""What a check found."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

CHARS_MAX = 4000


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    level: Level
    area: str  # "files", "config", "parameters", "cache", "memory", "tokenizer", "template"
    what: str
    todo: str = ""  # what the user can do about it


class Findings(list[Finding]):
    """The findings of one area, in the order in which they were made."""

    def __init__(self, area: str, findings: Iterable[Finding] = ()) -> None:
        super().__init__(findings)
        self._area = area

    def ok(self, what: str, todo: str = "") -> None:
        self._add(Level.OK, what, todo)

    def warn(self, what: str, todo: str) -> None:
        self._add(Level.WARN, what, todo)

    def fail(self, what: str, todo: str = "") -> None:
        """Without `todo` where `what` says it already."""
        self._add(Level.FAIL, what, todo)

    def _add(self, level: Level, what: str, todo: str) -> None:
        self.append(Finding(level, self._area, shown(what), shown(todo)))


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)


def shown(text: str) -> str:
    """Fit for a terminal: names in a broken file may be anything, as long as they like, and move the cursor."""
    cut = text if len(text) <= CHARS_MAX else text[:CHARS_MAX] + " ..."
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in cut)


def few(names: Iterable[str], most: int = 5) -> str:
    """The first names of a list that may be long."""
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def gigabytes(count: float) -> str:
    if abs(count) >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if abs(count) >= 1e5 else f"{count / 1e3:,.1f} KB"
