"""Output to a closed pipe or a full disk: never reported as a command's result."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cachectl.homes import find_session
from warmline_common.storage.home import Home

CACHECTL, WARMLINE = "warmline_cachectl.cli", "warmline_run.cli"
NO_SPACE = "the output can't be written: No space left on device; free space, or send it elsewhere\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [[CACHECTL, "ls"], [CACHECTL, "export", "SESSION", "-"], [CACHECTL, "--version"], [WARMLINE, "config"]]
)
def test_closed_pipe_exits_with_141(home: Home, words: list[str], unbuffered: str) -> None:
    unread, output = os.pipe()
    os.close(unread)
    assert run_with_output(home, words, output, unbuffered) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such disk here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([CACHECTL, "ls", "--json"], (3, f"cachectl: {NO_SPACE}")),
        ([CACHECTL, "export", "SESSION", "-"], (3, f"cachectl: {NO_SPACE}")),
        ([CACHECTL, "--help"], (3, f"cachectl: {NO_SPACE}")),
        ([WARMLINE, "config"], (1, f"warmline: {NO_SPACE}")),
        ([WARMLINE, "serve", "--help"], (1, f"warmline: {NO_SPACE}")),
    ],
)
def test_full_device_exits_with_error(home: Home, words: list[str], expected: tuple[int, str], unbuffered: str) -> None:
    output = os.open("/dev/full", os.O_WRONLY)
    assert run_with_output(home, words, output, unbuffered) == expected


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no such disk here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("words", "code"), [([CACHECTL, "ls", "--json"], 3), ([WARMLINE, "config"], 1)])
def test_full_device_for_errors_too_exits_with_error(home: Home, words: list[str], code: int, unbuffered: str) -> None:
    output = os.open("/dev/full", os.O_WRONLY)
    assert run_with_output(home, words, output, unbuffered, stderr=output)[0] == code


@pytest.mark.parametrize("words", ["ls --json", "export SESSION -", "--help"])
def test_closed_stdout_and_file_size_limit_are_errors(home: Home, words: str, tmp_path: Path) -> None:
    for limit in (">&-", f"> {tmp_path / 'out'}"):
        done = run_in_shell(home, f"ulimit -f 0; cachectl {words} {limit}")
        assert done.returncode == 3
        assert re.fullmatch(r"cachectl: the output can't be written: [A-Z][a-z ]+; send it elsewhere\n", done.stderr)


@pytest.mark.parametrize(("words", "code"), [("export SESSION - >/dev/null", 0), ("top --once", 3)])
def test_closed_stdin_is_empty(home: Home, words: str, code: int) -> None:
    done = run_in_shell(home, f"cachectl {words} <&-")
    assert done.returncode == code and "Traceback" not in done.stderr
    asked = run_in_shell(home, "cachectl purge --all <&-")
    assert (asked.returncode, asked.stderr.count("\n")) == (2, 1)


def test_message_for_closed_stderr_is_not_on_stdout(home: Home) -> None:
    done = run_in_shell(home, "cachectl inspect nothing-like-it 2>&-")
    assert (done.returncode, done.stdout) == (1, "")


def run_in_shell(home: Home, command: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell's command that names `cachectl`."""
    run = f"{sys.executable} -c 'from {CACHECTL} import main; main()'"
    command = command.replace("cachectl", run, 1).replace("SESSION", find_session(home, "first"))
    environment = {**os.environ, "WARMLINE_HOME": str(home.root)}
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


def run_with_output(
    home: Home, words: list[str], output: int, unbuffered: str, stderr: int = subprocess.PIPE
) -> tuple[int, str]:
    """Run a program's `main`; (exit code, stderr)."""
    module, *arguments = [find_session(home, "first") if word == "SESSION" else word for word in words]
    command = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    environment = {**os.environ, "WARMLINE_HOME": str(home.root), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=output, stderr=stderr, text=True, check=False, env=environment)
    os.close(output)
    return done.returncode, done.stderr
