"""Output to a closed pipe or a full disk: never reported as a command's result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cachectl.homes import find_session
from warmline_common.storage.home import Home

PROGRAM = "from warmline_cachectl.cli import app; app()"


@pytest.mark.parametrize("words", [["ls"], ["export", "SESSION", "-"]], ids=" ".join)
def test_closed_pipe_exits_with_141(home: Home, words: list[str]) -> None:
    unread, output = os.pipe()
    os.close(unread)
    words = [find_session(home, "first") if word == "SESSION" else word for word in words]
    assert run_with_output(home, words, output) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such disk here")
def test_full_device_exits_with_error(home: Home) -> None:
    output = os.open("/dev/full", os.O_WRONLY)
    assert run_with_output(home, ["ls", "--json"], output) == (3, "cachectl: [Errno 28] No space left on device\n")


def run_with_output(home: Home, words: list[str], output: int) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, *words, "--home", str(home.root)]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    os.close(output)
    return done.returncode, done.stderr
