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
# Of output: a full disk, a quota, a limit of a file's size, a closed descriptor.
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
OUTPUT_ERRORS = (*NO_SPACE_ERRNOS, errno.EFBIG, errno.EBADF)
# Name, mode and flags of descriptors 0, 1 and 2.  A write to a descriptor that was opened to read fails.
CLOSED_STREAMS = (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a process's `main` and exit with the code that its manager expects, after argparse's exits too."""
    code = run_with_output(main, "warmline", EXIT_FAILURE)
    sys.exit(map_exit_code(code) if isinstance(code, int) else code)


def run_with_output(main: Callable[[], int], program: str, exit_code: int) -> int | str | None:
    """Run `main` and write what it has printed; its code, as `sys.exit` takes it.

    Output that can't be written is a failure: 141 for a closed pipe, else `exit_code` and a line on stderr.
    """
    open_closed_streams()
    try:
        try:
            code: int | str | None = main()
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # click and rich exit with 1
                raise ended.__context__ from None
            code = ended.code
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        code = EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        discard_output(sys.stdout)
        with suppress(OSError):  # stderr may go to the same disk
            print(f"{program}: {describe_output_error(error)}", file=sys.stderr)
        code = exit_code
    try:
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)
    return code


def describe_output_error(error: OSError) -> str:
    """Message for output that can't be written."""
    remedy = "free space, or send it elsewhere" if error.errno in NO_SPACE_ERRNOS else "send it elsewhere"
    return f"the output can't be written: {error.strerror}; {remedy}"


def open_closed_streams() -> None:
    """Open the standard streams that the caller closed: Python has None for them, and other files take their place.

    An input is empty then, and output fails, as programs in C have it; messages are lost.
    """
    for descriptor, (name, mode, flags) in enumerate(CLOSED_STREAMS):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, mode))


def discard_output(stream: TextIO) -> None:
    """Have the buffered rest go nowhere: else Python tries to write it at its exit, and exits with 120."""
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
