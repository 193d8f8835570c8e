"""Output of results: JSON for programs, rich's rendering for people."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from warmline_cachectl.views import tables
from warmline_cachectl.views.columns import printable


def show(view: dict[str, Any], renderables: Iterable[Any], as_json: bool) -> None:
    """Print `view` as JSON, or its renderables."""
    if as_json:
        print(json.dumps(view, indent=2, default=msgspec.to_builtins))
        return
    console = tables.make_console()
    for part in renderables:
        is_line = isinstance(part, str) and not console.is_terminal  # piped lines are not wrapped: they are searched
        console.print(printable(part) if isinstance(part, str) else part, soft_wrap=is_line)


@contextmanager
def show_progress(label: str, bytes_total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Progress bar on stderr, where that is a terminal; yields a function to be called with numbers of bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _make_progress(quiet, *columns) as progress:
        task = progress.add_task(label, total=bytes_total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def show_spinner(label: str, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Spinner on stderr, where that is a terminal, while another process works; yields a function for a new label."""
    with _make_progress(quiet, SpinnerColumn(), TextColumn("{task.description}")) as progress:
        task = progress.add_task(label, total=None)
        yield lambda text: progress.update(task, description=printable(text))


def _make_progress(quiet: bool, *columns: Any) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
