"""Announcements of a backend to its keeper: the port that it listens on, or why it can't serve its model.

They go through a pipe whose write end the backend inherits, and the keeper alone reads: no disk is needed for them, and
none can be another process's.  The number of the descriptor is in ``WARMLINE_ANNOUNCE_PIPE``.  Each is a line of JSON.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass

ANNOUNCE_PIPE = "WARMLINE_ANNOUNCE_PIPE"
FAILURE_CHARS_MAX = 2000  # so that all announcements of a process fit into the pipe, whose reader may be stopped


@dataclass(frozen=True)
class Announcement:
    """`port`: 0 while it is not known; `failure`: why the process ends, "" while it does not."""

    port: int = 0
    failure: str = ""


class Announcer:
    """Backend's end of the pipe; does nothing where no keeper is the parent.  Make one, early in ``__main__``."""

    def __init__(self) -> None:
        number = os.environ.pop(ANNOUNCE_PIPE, "")
        self._descriptor = int(number) if number else None
        if self._descriptor is not None:
            os.set_inheritable(self._descriptor, False)

    def announce(self, announcement: Announcement) -> None:
        if self._descriptor is None:
            return
        fields = [announcement.port, announcement.failure[:FAILURE_CHARS_MAX]]
        with suppress(OSError):  # the keeper has ended, or it reads no more since it stops this process
            os.write(self._descriptor, json.dumps(fields).encode() + b"\n")


def parse_announcement(line: bytes) -> Announcement | None:
    """None for a line that is none."""
    with suppress(ValueError, TypeError):
        port, failure = json.loads(line)
        return Announcement(int(port) if 0 <= int(port) < 65536 else 0, str(failure))
    return None
