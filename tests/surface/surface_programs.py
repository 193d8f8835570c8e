"""Runs of the commands `warmline` and `cachectl`, dozens of them in seconds: each is a fork of a process that has
imported them once.  Run as a script this file is that process.
"""

import contextlib
import gc
import importlib
import importlib.metadata
import io
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warmline_cachectl
import warmline_run.cli

PROGRAMS = ("warmline", "cachectl")
AT_ONCE = 3
TIMEOUT_S = 120


@dataclass(frozen=True)
class Done:
    """Result of one run."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Printed JSON; None where there is none."""
        try:
            return json.loads(self.stdout)
        except ValueError:
            return None


@dataclass(frozen=True)
class Run:
    """Command to run; `environment` is added to that of the process."""

    words: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str] | None = None


class Programs:
    """Process that forks commands, whose environment is `environment` together with each run's own."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
            cwd=folder,
        )

    def run(self, runs: Sequence[Run]) -> list[Done]:
        """Run commands, some at a time, in any order."""
        assert self._process.stdin and self._process.stdout
        wanted = [{"words": list(each.words), "environment": dict(each.environment or {})} for each in runs]
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return [Done(**each) for each in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def executable(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


# ---- the process that forks


def serve() -> None:
    """Answers each line of runs on stdin with a line of what they have left."""
    entries = _load()
    for line in sys.stdin:
        print(json.dumps(_run_all(json.loads(line), entries)), flush=True)


def _load() -> dict[str, Callable[[], object]]:
    """Load the entry points, and what their commands import once they run: else each fork imports it again."""
    points = importlib.metadata.entry_points(group="console_scripts")
    entries = {point.name: point.load() for point in points if point.name in PROGRAMS}
    for package in (warmline_run, warmline_cachectl):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    with contextlib.redirect_stdout(io.StringIO()):  # typer imports its parsers when it first parses
        warmline_run.cli.app(["config"], standalone_mode=False)
    gc.freeze()  # so that no fork copies these pages to count their references
    return entries


def _run_all(runs: Sequence[dict[str, Any]], entries: Mapping[str, Callable[[], object]]) -> list[dict[str, Any]]:
    done: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, int] = {}
        for number, run in enumerate(runs):
            if len(running) >= AT_ONCE:
                _reap(running, done)
            running[_fork(run, entries, Path(folder, str(number)))] = number
        while running:
            _reap(running, done)
        return [{"code": done[number], **_texts(Path(folder, str(number)))} for number in range(len(runs))]


def _reap(running: dict[int, int], done: dict[int, int]) -> None:
    pid, status = os.wait()
    done[running.pop(pid)] = os.waitstatus_to_exitcode(status)


def _texts(path: Path) -> dict[str, str]:
    return {name: path.with_suffix(f".{name}").read_text(errors="replace") for name in ("stdout", "stderr")}


def _fork(run: dict[str, Any], entries: Mapping[str, Callable[[], object]], path: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.alarm(TIMEOUT_S)
        os.environ.update(run["environment"])
        _redirect(path)
        sys.argv = [executable(run["words"][0]), *run["words"][1:]]
        code = _code_of(entries[run["words"][0]])
    finally:
        os._exit(code)


def _redirect(path: Path) -> None:
    """Redirect as a shell does: stdin is empty, and each output a file."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(path.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), number)


def _code_of(entry: Callable[[], object]) -> int:
    """Compute the exit code as an entry point's script does."""
    try:
        ended: object = entry()
    except SystemExit as error:
        ended = error.code
    except BaseException:  # noqa: BLE001  as Python itself does
        traceback.print_exc()
        ended = 1
    if isinstance(ended, str):
        print(ended, file=sys.stderr)
        ended = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return ended if isinstance(ended, int) else 0


if __name__ == "__main__":
    serve()
