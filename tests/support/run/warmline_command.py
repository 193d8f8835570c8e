"""The command `warmline`, run as a process, or in this one."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from warmline_run.cli import app


def run_warmline(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without this process's settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMLINE_")}
    return subprocess.run(
        [sys.executable, "-m", "warmline_run.cli", *arguments],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        timeout=60,
    )


def invoke_warmline(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, without its settings, where it's only what is printed that matters."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WARMLINE_")]:
            patch.delenv(name)
        done = CliRunner().invoke(app, arguments, prog_name="warmline")
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
