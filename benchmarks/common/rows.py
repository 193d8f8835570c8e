"""A table whose rows are printed as they come, so that a run that is cut off shows what it had."""

from collections.abc import Mapping

from rich.console import Console

GAP = "  "


class StreamingTable:
    def __init__(self, console: Console, title: str, widths: Mapping[str, int]) -> None:
        """`widths` in characters by heading; a heading that is longer has its own."""
        self._console = console
        self._widths = [max(len(heading), width) for heading, width in widths.items()]
        console.print(title, style="italic", highlight=False)
        self.add_row(*widths)
        console.print("-" * (sum(self._widths) + len(GAP) * (len(self._widths) - 1)), highlight=False)

    def add_row(self, *cells: str) -> None:
        row = (cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))
        self._console.print(GAP.join(row), highlight=False, markup=False, soft_wrap=True)
