"""A systemctl for tests: records its calls, and remembers which units run; runs nothing.

Put on PATH by `fake_managers.User`.  FAKE_MANAGER_THEN says what a unit becomes that is started: "pid N", "exit N".
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_MANAGER"])
UNITS = Path(os.environ["HOME"]) / ".config" / "systemd" / "user"


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
        print(f"MainPID={number if kind == 'pid' else 0}")
        print(f"ExecMainCode={1 if kind == 'exit' else 0}\nExecMainStatus={number if kind == 'exit' else 0}")
        print(f"ExecMainExitTimestampMonotonic={1 if kind == 'exit' else 0}")
    elif not is_there:
        sys.stderr.write(f"Failed to {verb} unit: Unit file {unit} does not exist.\n")
        return 1
    elif verb == "restart":
        state.write_text(os.environ["FAKE_MANAGER_THEN"])
    elif verb == "disable":
        state.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
