"""Commands, files, variables and make targets that the documentation mentions exist."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from support.docs.commands import DOCUMENTS, ROOT
from support.docs.spans import find_problem, is_missing, list_make_targets, list_paths, list_spans, list_variables
from warmline_cachectl.cli import app as cachectl
from warmline_common.settings.table import SETTINGS
from warmline_run.cli import app as warmline

PROGRAMS = {"cachectl": get_command(cachectl), "warmline": get_command(warmline)}
TEXTS = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
MADE_LATER = {"build/screenshots"}


def get_document_name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=get_document_name)
def test_named_commands_and_flags_exist(document: Path) -> None:
    found = [find_problem(span, PROGRAMS) for span in list_spans(TEXTS[document])]
    assert list(filter(None, found)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=get_document_name)
def test_named_files_exist(document: Path) -> None:
    named = {path for span in list_spans(TEXTS[document]) for path in list_paths(span)}
    assert [path for path in sorted(named - MADE_LATER) if is_missing(path, ROOT)] == []


def test_named_variables_are_read() -> None:
    named = set().union(*map(list_variables, TEXTS.values()))
    of_settings = {setting.variable for setting in SETTINGS.values()}
    folders = ("backend", "proxy", "cachectl", "launchd", "tests", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    read = set().union(*(list_variables(path.read_text(encoding="utf-8")) for path in sources))
    assert sorted(named - of_settings - read) == []


def test_named_make_targets_exist() -> None:
    there = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(set().union(*map(list_make_targets, TEXTS.values())) - there) == []


def test_picture_shows_benchmark_figures() -> None:
    """Its seconds are a row of docs/benchmarks.md each, its bars are as long, and who can't see it is told the same."""
    picture = (ROOT / "docs" / "picture.svg").read_text(encoding="utf-8")
    bars = re.findall(r'<rect x="200" y="\d+" width="([\d.]+)" height="14".*\n +<text [^>]*>([\d.]+)</text>', picture)
    seconds = [float(shown) for _, shown in bars]
    assert [float(width) for width, _ in bars] == [pytest.approx(15 * each, abs=0.1) for each in seconds]
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for who, own in (("8,861 tokens, Warmline", seconds[::2]), ("mlx_lm.server", seconds[1::2])):
        assert f"| {who} | {' | '.join(f'{each:g} s' for each in own)} |" in measured
    (title,) = re.findall(r"<title[^>]*>(.*)\.</title>", picture)
    assert f"![{title}](docs/picture.svg)" in TEXTS[ROOT / "README.md"]


def test_code_span_extraction() -> None:
    assert list_spans("`a` and `b\nc`, ``d`` | `e\\|f` |\n\n    `g`\n\n```sh\n`h`\n```\n") == ["a", "b c", "e|f"]


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ("warmline serve --lan", ""),
        (".venv/bin/warmline launchd restart [proxy|backend]", ""),
        ("cachectl key show|rotate|add NAME", ""),
        ("cachectl key shows", "no 'shows'"),
        ("cachectl purge --all --dry-run", ""),
        ("cachectl purge --everything", "no --everything"),
        ("warmline", ""),
        ("someone's words", ""),
        ("warmline sing", "no 'sing'"),
    ],
)
def test_typed_command_detection(span: str, problem: str) -> None:
    found = find_problem(span, PROGRAMS)
    assert problem in found and bool(problem) == bool(found)
