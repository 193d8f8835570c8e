"""Starts on damaged files: a sample of what `make index-damage` tries, in a process that may end of it."""

import subprocess
import sys
from pathlib import Path

import support.index.page_damage as driver


def test_damaged_files_bring_everything_back() -> None:
    command = [sys.executable, driver.__file__, "--sample", "40"]
    tests = str(Path(driver.__file__).parents[2])
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={"PYTHONPATH": tests})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 damages to" in done.stdout and done.stdout.endswith("; 0 went wrong\n")
