"""Benchmarks start, and the runner lists all that ask servers, and folders that are benchmarks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SERVING = ("serving", "models")  # folders whose benchmarks ask servers
# The runner has no second checkout or environment.
COMPARE_CHECKOUTS = {"serving/hot_path.py", "models/one_model.py"}
DOWNLOADS_SCHEMAS = "schemas"
# One process for all: each would import mlx anew.
PRINT_HELP = """
import contextlib, io, json, runpy, sys
listed = list(runpy.run_path("benchmarks/__main__.py")["BENCHMARKS"])
helps = {}
for script in ["", *listed, *sys.argv[1:]]:
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(f"benchmarks/{script}", run_name="__main__")
        except SystemExit as error:
            assert not error.code, script
    helps[script] = printed.getvalue()
print(json.dumps([listed, helps]))
"""


@pytest.fixture(scope="module")
def started() -> tuple[list[str], dict[str, str]]:
    """(scripts that the runner lists, what each script of it and the others print with --help)."""
    others = [path.name for path in BENCHMARKS.glob("*.py") if path.name != "__main__.py"]
    others += [path.parent.name for path in BENCHMARKS.glob("*/__main__.py")]
    others += [f"gpu/{path.name}" for path in (BENCHMARKS / "gpu").glob("*.py")]
    command = [sys.executable, "-c", PRINT_HELP, *sorted(COMPARE_CHECKOUTS), *others]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed, helps = json.loads(done.stdout)
    return listed, helps


def test_benchmarks_start(started: tuple[list[str], dict[str, str]]) -> None:
    _, helps = started
    assert [script for script, text in helps.items() if not text.startswith("usage:")] == []


def test_runner_lists_benchmarks_of_servers(started: tuple[list[str], dict[str, str]]) -> None:
    listed, _ = started
    scripts = {f"{folder}/{path.name}" for folder in SERVING for path in (BENCHMARKS / folder).glob("*.py")}
    assert scripts - {*listed} == COMPARE_CHECKOUTS


def test_runner_lists_folders(started: tuple[list[str], dict[str, str]]) -> None:
    listed, _ = started
    assert {path.parent.name for path in BENCHMARKS.glob("*/__main__.py")} - {*listed} == {DOWNLOADS_SCHEMAS}


def test_listed_benchmarks_have_json_and_quick(started: tuple[list[str], dict[str, str]]) -> None:
    listed, helps = started
    assert [script for script in listed if "--json" not in helps[script] or "--quick" not in helps[script]] == []
