"""Findings of checks: level, area, text and remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from warmline_common.process.redaction import escape_unprintable

TEXT_CHARS_MAX = 4000


class FindingLevel(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class DoctorFinding:
    level: FindingLevel
    area: str  # "files", "config", "parameters", "cache", "drafts", "memory", "tokenizer", "template"
    what: str
    todo: str = ""  # what the user can do about it


class CheckError(Exception):
    """A failure after which the check can't go on; `todo` is the remedy."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(what)
        self.todo = todo


class Findings(list[DoctorFinding]):
    """Findings of one area, in the order in which they were made."""

    def __init__(self, area: str) -> None:
        super().__init__()
        self._area = area

    def ok(self, what: str, todo: str = "") -> None:
        self._add(FindingLevel.OK, what, todo)

    def warn(self, what: str, todo: str) -> None:
        self._add(FindingLevel.WARN, what, todo)

    def fail(self, what: str, todo: str = "") -> None:
        """Add a failure; without `todo` where `what` includes the remedy."""
        self._add(FindingLevel.FAIL, what, todo)

    def _add(self, level: FindingLevel, what: str, todo: str) -> None:
        self.append(DoctorFinding(level, self._area, escape_text(what), escape_text(todo)))


def escape_text(text: str) -> str:
    """Text that is safe on a terminal: names in a broken file may be long and may move the cursor."""
    cut = text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + " ..."
    return escape_unprintable(cut, line_end="\n")


def format_first(names: Iterable[str], count_max: int = 5) -> str:
    """First names of a list that may be long, with the number of the others."""
    listed = list(names)
    more = len(listed) - count_max
    return ", ".join(listed[:count_max]) + (f" and {more} more" if more > 0 else "")


def format_bytes(count: float) -> str:
    if abs(count) >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if abs(count) >= 1e5 else f"{count / 1e3:,.1f} KB"
