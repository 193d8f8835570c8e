"""Output of commands as docs/cachectl.md prints it, except for numbers."""

import re
from pathlib import Path

from typer.main import get_command

from support.cachectl.documentation import DOCUMENT, OURS, list_examples, make_documented_home, run_example
from support.cachectl.top_status import RECORDS, make_live_row, make_status, render_text
from warmline_cachectl.cli import app
from warmline_cachectl.views.top import build_snapshot


def remove_variable_parts(text: str) -> str:
    """Remove what differs between runs, and between versions with other file sizes."""
    text = re.sub(r"/\S+/home\b", "HOME", text)
    text = re.sub(r"\b\d[\d,.]*(?: [KMGT]?B\b|[smhd]\b)?", "N", text)
    return re.sub(r"[ ─━]+", " ", text.replace("┄", "")).strip()


def test_documented_examples_match_output(tmp_path: Path) -> None:
    home = make_documented_home(tmp_path / "home")
    examples = list_examples(DOCUMENT.read_text(encoding="utf-8"))
    assert len(examples) >= 10
    for command, output in examples:
        printed = "\n".join(line.rstrip() for line in run_example(home, command).splitlines())
        assert remove_variable_parts(printed) == remove_variable_parts(output), command


def test_documented_top_screen_matches_output() -> None:
    (screen,) = re.findall(r"```text\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    view = build_snapshot(
        make_status(100.0, make_live_row(), make_live_row("r2", phase="answering", ttft_s=8.0, spoken=60)), RECORDS
    )
    assert "\n".join(line.rstrip() for line in render_text(view).splitlines()) == screen.strip()


def test_document_names_every_command() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    verbs = list(get_command(app).commands)
    assert set(OURS) <= set(verbs)
    assert [verb for verb in verbs if f"`cachectl {verb}" not in text] == []
