"""Fork server of `warmline` and `cachectl`: a command is a fork with the caller's arguments, folder, variables, files.

Run by `reader.DocumentReader`, called by `stand_in.run_on_fork_server`.  Starting Python and importing the programs
takes longer than most commands, and the documentation has many.
"""

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from warmline_cachectl.cli import main as cachectl
from warmline_run.cli import main as warmline

PROGRAMS: dict[str, Any] = {"cachectl": cachectl, "warmline": warmline}
FILES = 3  # standard input, output and error


def serve(address: Path) -> None:
    """Serve until standard input ends, as it does with the parent; prints "ready" first."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            caller, _ = listener.accept()
            with caller:
                if not os.fork():
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    run_for_caller(caller)
                    os._exit(0)


def run_for_caller(caller: socket.socket) -> None:
    """Run a command in a fork of this process, which waits for it, since a command may become another program."""
    _, files, _, _ = socket.recv_fds(caller, 1, FILES)
    request = json.loads(b"".join(iter(lambda: caller.recv(1 << 16), b"")))
    if not (pid := os.fork()):
        for number, file in enumerate(files):
            os.dup2(file, number)
        os._exit(run_command(**request))
    caller.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF]))


def run_command(program: str, arguments: list[str], folder: str, variables: dict[str, str]) -> int:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [program, *arguments]
    try:
        PROGRAMS[program]()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
