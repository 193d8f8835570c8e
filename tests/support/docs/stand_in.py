"""Stand-ins of programs that can't, or must not, run in a test of the documentation.

Written under each such program's name.  Commands of ours that serve for ever have their flags checked by `warmline
config`, launchd's and systemd's verbs meet a manager that starts nothing, and gates are cut to the first; `make`
prints what it would do; benchmarks are searched for their flags.  Other projects' programs (pmset ...) are only
recorded: STAND_IN_LOG has a line for each.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
FOR_EVER = {"serve", "proxy", "backend"}
NOT_READY = 1


def main(program: str, arguments: list[str]) -> int:
    if program == "warmline":
        return run_warmline(arguments)
    if program == "cachectl":
        return run_on_fork_server("cachectl", *arguments)
    if program == "make":
        where = ["-C", os.environ["STAND_IN_ROOT"], "TB_PYTHON=python3"]  # 3.12 need not be here to say so
        return run_program("/usr/bin/make", "--no-print-directory", "--dry-run", *where, *arguments)
    if program == "python":
        is_benchmark = arguments[:1] and arguments[0].startswith("benchmarks/")
        return check_benchmark_flags(arguments) if is_benchmark else run_program(str(BIN / "python"), *arguments)
    with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
        log.write(f"{' '.join([program, *arguments])}\n")
    return 0


def run_warmline(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb in FOR_EVER:
        if "--lan" in arguments and not Path(os.environ["WARMLINE_HOME"], "keys.json").exists():
            run_on_fork_server("cachectl", "key", "add", "default")  # as a first start with it does
        arguments = ["config", *arguments[1:]]
    elif verb in ("launchd", "service"):
        return run_service_command(arguments)
    elif verb == "gates" and not {"--only", "--list"} & {*arguments}:
        arguments = [*arguments, "--only", "load"]
    return run_on_fork_server("warmline", *arguments)


def run_service_command(arguments: list[str]) -> int:
    """Run a service command on a pair that never runs: another home, other ports, a line in its log."""
    home = Path(os.environ["HOME"], ".warmline")
    os.environ["WARMLINE_HOME"] = str(home)
    os.environ["WARMLINE_PORT"], os.environ["WARMLINE_BACKEND_PORT"] = os.environ["STAND_IN_PORTS"].split()
    group, verb = arguments[:2]
    installed = home / f"installed-{group}"
    if verb not in ("install", "uninstall") and not installed.exists():  # documents have an order of their own
        run_service_command([group, "install"])
    if verb in ("install", "restart") and "--dry-run" not in arguments:
        arguments = [*arguments, "--wait-s", "0"]
    if verb == "logs":
        (home / "logs" / "backend.log").write_text("a line\n")
        arguments = [word for word in arguments if word not in ("-f", "--follow")]
    code = run_on_fork_server("warmline", *arguments)
    if not code and "--dry-run" not in arguments:
        installed.unlink(missing_ok=True) if verb == "uninstall" else installed.touch()
    return 0 if verb == "status" and code == NOT_READY else code


def check_benchmark_flags(arguments: list[str]) -> int:
    """Exit code: 0 if the script, or its shared modules, has these flags."""
    script = Path(os.environ["STAND_IN_ROOT"], arguments[0])
    text = script.read_text() + Path(os.environ["STAND_IN_ROOT"], "benchmarks", "common", "results.py").read_text()
    unknown = [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in text]
    if unknown:
        print(f"{arguments[0]} does not know {unknown}", file=sys.stderr)
    return bool(unknown)


def run_on_fork_server(program: str, *arguments: str) -> int:
    """Run a command of ours on the fork server; its exit code."""
    request = {"program": program, "arguments": arguments, "folder": str(Path.cwd()), "variables": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ["STAND_IN_SERVER"])
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        return server.recv(1)[0]


def run_program(*command: str) -> int:
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
