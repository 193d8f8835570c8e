"""Tables that fit a terminal: columns are left out, the least important first, before any cell wraps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

ID_CHARS = 12  # of a file's id, where there is no room for 32; as many as resolve it in practice
TEXT_CHARS_MIN = 8  # of a text that may be cut
PADDING = 3  # a column's two spaces and its line


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table; `cell` makes a row's text.

    `rank`: those with the highest go first; 0 always stays.  `kind`: "id" and "text" may be cut, numbers never.
    """

    name: str
    cell: Callable[[Any], str]
    rank: int = 0
    kind: str = "number"
    is_optional: bool = False  # left out where all its cells are empty


def fit_table(columns: Sequence[Column], rows: Sequence[Any], width: int, title: str = "") -> list[Table | str]:
    """Table, and a line that names the columns that did not fit."""
    filled = [(column, [printable(column.cell(row)) for row in rows]) for column in columns]
    filled = [(column, texts) for column, texts in filled if any(texts) or not column.is_optional]
    columns = [column for column, _ in filled]
    widths = [max([len(column.name), *map(_longest_line, texts)]) for column, texts in filled]
    shown, widths = _choose_columns(columns, widths, width)
    table = Table(title=title or None, title_justify="left", pad_edge=True)
    for at in shown:
        side: Literal["left", "right"] = "right" if columns[at].kind == "number" else "left"
        table.add_column(columns[at].name, justify=side, no_wrap=True, overflow="ellipsis", width=widths[at])
    for number in range(len(rows)):
        table.add_row(*(_cut_cell(filled[at][1][number], widths[at], columns[at].kind) for at in shown))
    missing = [column.name for at, column in enumerate(columns) if at not in shown]
    return [table, *([f"(no room for {', '.join(missing)}; --json has all)"] if missing else [])]


def printable(text: str) -> str:
    """Text without control characters, which steer a terminal: some texts are clients'."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def _longest_line(text: str) -> int:
    return max(map(len, text.split("\n")))


def _choose_columns(columns: Sequence[Column], natural: list[int], width: int) -> tuple[list[int], list[int]]:
    """(shown columns, their widths): ids are cut first, then columns are removed, then texts are cut."""
    shown, widths = list(range(len(columns))), list(natural)

    def excess(chars: Sequence[int]) -> int:
        return sum(chars[at] + PADDING for at in shown) + 1 - width

    for at in shown:
        if columns[at].kind == "id" and excess(widths) > 0:
            widths[at] = max(len(columns[at].name), min(widths[at], ID_CHARS))
    least = [min(widths[at], TEXT_CHARS_MIN) if columns[at].kind == "text" else widths[at] for at in shown]
    while excess(least) > 0 and (spare := [at for at in shown if columns[at].rank]):
        shown.remove(max(spare, key=lambda at: columns[at].rank))
    for at in sorted(shown, key=lambda at: -widths[at]):
        if columns[at].kind == "text" and excess(widths) > 0:
            widths[at] = max(least[at], widths[at] - excess(widths))
    return shown, widths


def _cut_cell(text: str, width: int, kind: str) -> str:
    """Cut an id without rich's ellipsis: its beginning resolves, too."""
    return text[:width] if kind == "id" else text
