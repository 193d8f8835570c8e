"""Console output of a process, besides its log."""

import sys
from collections.abc import Callable

_log: Callable[[str], None] | None = None
_log_only = False


def write_line(line: str) -> None:
    """Write a line to stderr, at once and whole: under `warmline serve` several processes write there, and any may be
    killed at any moment.  print() writes a line's end by itself where output is unbuffered.
    """
    if _log is not None:
        _log(line)
    if not _log_only:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def copy_to_log(log: Callable[[str], None], *, log_only: bool) -> None:
    """Copy printed lines to the log from now on: stderr may have no reader.  `log_only`: print nothing."""
    global _log, _log_only
    _log, _log_only = log, log_only
