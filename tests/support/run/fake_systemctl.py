"""Fake systemctl: records its calls, and runs units as systemd does, without restarting failed ones.

Put on PATH by `fake_managers.FakeUser`.  FAKE_MANAGER_THEN says what a unit becomes that is started: "run" (its
ExecStart, with nothing in its environment but what the unit says), "pid N" or "exit N" (nothing is run, and show tells
this).
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path(os.environ["FAKE_MANAGER"])
UNITS = Path(os.environ["HOME"]) / ".config" / "systemd" / "user"
ENDING_S = 60


def start_unit(unit: Path) -> int:
    """Start a unit; the pid of its process, an orphan that init reaps."""
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    directives = {name: value.replace("%%", "%") for name, _, value in lines}
    environment = [shlex.split(value.replace("%%", "%"))[0] for name, _, value in lines if name == "Environment"]
    with Path(directives["StandardError"].removeprefix("append:")).open("ab") as output:
        return subprocess.Popen(
            [word.replace("$$", "$") for word in shlex.split(directives["ExecStart"])],
            env=dict(each.split("=", 1) for each in environment),
            cwd=directives["WorkingDirectory"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            umask=int(directives["UMask"], 8),
            start_new_session=True,
        ).pid


def end_unit(state: Path) -> None:
    """End a unit, with its process, if it has one."""
    kind, _, number = (state.read_text() if state.exists() else "").partition(" ")
    state.unlink(missing_ok=True)
    if kind != "run":
        return
    with suppress(ProcessLookupError):
        os.kill(int(number), signal.SIGTERM)
    until = time.monotonic() + ENDING_S
    while is_alive(int(number)) and time.monotonic() < until:
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def main(user: str, verb: str, *words: str) -> int:
    assert user == "--user"
    with (FOLDER / "calls").open("a") as calls:
        calls.write(json.dumps([verb, *words]) + "\n")
    if verb == "daemon-reload":
        return 0
    unit = words[-1]
    state = FOLDER / f"{unit}.state"
    is_there = (UNITS / unit).is_file()
    if verb == "show":
        kind, _, number = (state.read_text() if state.exists() else "").partition(" ")
        print(f"LoadState={'loaded' if is_there else 'not-found'}")
        print(f"MainPID={number if kind in ('pid', 'run') else 0}")
        print(f"ExecMainCode={1 if kind == 'exit' else 0}\nExecMainStatus={number if kind == 'exit' else 0}")
        print(f"ExecMainExitTimestampMonotonic={1 if kind == 'exit' else 0}")
    elif verb == "stop":
        end_unit(state)
    elif not is_there:
        sys.stderr.write(f"Failed to {verb} unit: Unit file {unit} does not exist.\n")
        return 1
    elif verb == "restart":
        end_unit(state)
        then = os.environ.get("FAKE_MANAGER_THEN", "run")
        state.write_text(f"run {start_unit(UNITS / unit)}" if then == "run" else then)
    elif verb == "disable":
        end_unit(state)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
