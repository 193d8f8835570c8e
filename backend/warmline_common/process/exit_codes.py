"""Exit codes: of output that can't be written, and of a process under its manager, which starts again what fails.

Managers are `warmline serve`, launchd and systemd.  `warmline launchd` and `warmline service` name theirs in
``WARMLINE_AGENT``; `warmline serve` does so in what it starts again: at its own start it ends rather than wait for a
home that another pair holds.
"""

import errno
import os
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn, TextIO

AGENT_VARIABLE = "WARMLINE_AGENT"
LAUNCHD = "launchd"
SERVE = "serve"
OUTPUT_BYTES_MAX = 1_000_000
EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2  # starting again would not help
EXIT_BROKEN_PIPE = 141  # shells' code for SIGPIPE


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a process's `main` and exit with the code that its manager expects, after argparse's exits too."""
    code = run_with_output(main, "warmline", EXIT_FAILURE)
    sys.exit(map_exit_code(code) if isinstance(code, int) else code)


def run_with_output(main: Callable[[], int], program: str, exit_code: int) -> int | str | None:
    """Run `main` and write what it has printed; its code, as `sys.exit` takes it.

    Output that can't be written is a failure: 141 for a closed pipe, for a full disk `exit_code` and a line on stderr.
    """
    try:
        try:
            code: int | str | None = main()
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # click and rich exit with 1
                raise ended.__context__ from None
            code = ended.code
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard_output(sys.stdout)
        with suppress(OSError):  # stderr may go to the same disk
            print(f"{program}: {describe_full_output(error)}", file=sys.stderr)
        code = exit_code
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)
    return code


def describe_full_output(error: OSError) -> str:
    """Message for output that a full disk does not take."""
    return f"the output can't be written: {error.strerror}; free space, or send it elsewhere"


def discard_output(stream: TextIO | None) -> None:
    """Have the buffered rest go nowhere: else Python tries to write it at its exit, and exits with 120."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def map_exit_code(code: int, environment: Mapping[str, str] = os.environ) -> int:
    """Exit code for the manager: launchd starts again whatever ends with anything but 0, a configuration error too.

    systemd and `warmline serve` are told to leave code 2 alone.
    """
    return 0 if code == EXIT_CONFIGURATION and environment.get(AGENT_VARIABLE) == LAUNCHD else code


def locked_home_exit_code() -> int:
    """Exit code for a home that another process holds: a manager tries again later."""
    return EXIT_FAILURE if os.environ.get(AGENT_VARIABLE) else EXIT_CONFIGURATION


def truncate_output(environment: Mapping[str, str] = os.environ, descriptor: int = 2) -> None:
    """Empty the file that a manager has stderr written to, where it has grown large: nothing else rotates it."""
    if environment.get(AGENT_VARIABLE):
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size > OUTPUT_BYTES_MAX:
            os.ftruncate(descriptor, 0)  # all writers append
