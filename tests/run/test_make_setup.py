"""`make setup` says before each long step what it does, and nothing once all is installed."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Makes a .venv with itself in it, and installs nothing.
PYTHON = """#!/bin/sh
echo "$@" >>asked
[ "$2" = pip ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/python; }
"""


def test_make_setup_announces_long_steps(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)

    clean = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # of a make that runs us

    def run_setup() -> list[str]:
        words = ["make", "--no-print-directory", "setup", f"PYTHON={python}"]
        done = subprocess.run(words, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    assert [line.split()[0] for line in run_setup()] == ["making", "downloading", "installing", "installing"]
    steps = (tmp_path / "asked").read_text().splitlines()
    assert [step.split()[1] for step in steps] == ["venv", "pip", "pip", "pip"]
    assert "Nothing to be done" in run_setup()[0]
    assert (tmp_path / "asked").read_text().splitlines() == steps
