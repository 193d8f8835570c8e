"""Bars are for who watches: on a terminal's stderr, unless told to be quiet."""

import io

import pytest
import typer
from rich.console import Console

from warmline_cachectl import errors
from warmline_cachectl.views import output as showing
from warmline_cachectl.views import tables


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_progress_is_shown_on_terminal_only(
    terminal: bool, quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80)
    monkeypatch.setattr(showing, "Console", lambda stderr: console)
    with showing.show_progress("checking", 2_000_000, quiet) as done:
        done(1_000_000)
    assert ("checking" in out.getvalue() and "/2.0 MB" in out.getvalue()) is shown
    with showing.show_spinner("mending", quiet):
        pass
    assert ("mending" in out.getvalue()) is shown


@pytest.mark.parametrize(
    ("terminal", "lines"), [(True, ["what is told"] * 3), (False, ["what is told " * 2 + "what is told"])]
)
def test_lines_wrap_on_terminal_only(terminal: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(tables, "make_console", lambda: Console(file=out, force_terminal=terminal, width=14))
    showing.show({}, ["what is told " * 2 + "what is told"], as_json=False)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == lines


def test_names_cannot_move_cursor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "make_console", lambda: Console(force_terminal=True, color_system=None, width=80))
    showing.show({}, ["of model \x1b[2Jx"], as_json=False)
    with pytest.raises(typer.Exit):
        errors.fail("made with \x1b[2Jx", 2)
    output = capsys.readouterr()
    assert (output.out, output.err) == ("of model \ufffd[2Jx\n", "cachectl: made with \ufffd[2Jx\n")
