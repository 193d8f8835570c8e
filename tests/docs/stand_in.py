"""What the commands of the documentation meet in place of programs that can't, or must not, run in a test.

Written under each such program's name.  Of ours, those that would serve for ever have their flags checked by
`warmline config`, launchd's and systemd's verbs meet a manager that starts nothing, and gates are cut to the first;
`make` says what it would do; benchmarks are asked whether they know their flags.  Programs of others (pmset ...) are
only written down: STAND_IN_LOG has a line for each.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
FOR_EVER = {"serve", "proxy", "backend"}
NOT_READY = 1


def main(program: str, arguments: list[str]) -> int:
    if program == "warmline":
        return warmline(arguments)
    if program == "make":
        where = ["-C", os.environ["STAND_IN_ROOT"], "TB_PYTHON=python3"]  # 3.12 need not be here to say so
        return run("/usr/bin/make", "--no-print-directory", "--dry-run", *where, *arguments)
    if program == "python":
        return python(arguments)
    with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
        log.write(f"{' '.join([program, *arguments])}\n")
    return 0


def warmline(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb in FOR_EVER:
        if "--lan" in arguments:  # what a first start with it makes, and a second one finds
            subprocess.run([str(BIN / "cachectl"), "key", "add", "default"], capture_output=True)
        arguments = ["config", *arguments[1:]]
    elif verb in ("launchd", "service"):
        return agents(arguments)
    elif verb == "gates" and not {"--only", "--list"} & {*arguments}:
        arguments = [*arguments, "--only", "load"]
    return run(str(BIN / "warmline"), *arguments)


def agents(arguments: list[str]) -> int:
    """A pair that is installed and never runs: of another home, on other ports, with something in its log."""
    home = Path(os.environ["HOME"], ".warmline")
    os.environ["WARMLINE_HOME"] = str(home)
    os.environ["WARMLINE_PORT"], os.environ["WARMLINE_BACKEND_PORT"] = os.environ["STAND_IN_PORTS"].split()
    group, verb = arguments[:2]
    installed = home / f"installed-{group}"
    if verb not in ("install", "uninstall") and not installed.exists():  # documents have an order of their own
        agents([group, "install"])
    if verb in ("install", "restart") and "--dry-run" not in arguments:
        arguments = [*arguments, "--wait-s", "0"]
    if verb == "logs":
        (home / "logs" / "backend.log").write_text("a line\n")
        arguments = [word for word in arguments if word not in ("-f", "--follow")]
    code = run(str(BIN / "warmline"), *arguments)
    if not code and "--dry-run" not in arguments:
        installed.unlink(missing_ok=True) if verb == "uninstall" else installed.touch()
    return 0 if verb == "status" and code == NOT_READY else code


def python(arguments: list[str]) -> int:
    if not arguments or not arguments[0].startswith("benchmarks/"):
        return run(str(BIN / "python"), *arguments)
    script = Path(os.environ["STAND_IN_ROOT"], arguments[0])
    told = subprocess.run([str(BIN / "python"), str(script), "--help"], capture_output=True, text=True)
    unknown = [flag for flag in arguments[1:] if flag.startswith("--") and not re.search(rf"{flag}\b", told.stdout)]
    if told.returncode or unknown:
        print(f"{arguments[0]} does not know {unknown or told.stderr}", file=sys.stderr)
    return told.returncode or bool(unknown)


def run(*command: str) -> int:
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
