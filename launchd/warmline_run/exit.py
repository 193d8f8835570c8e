"""In a process that launchd or systemd keeps: how it ends, and how much of what it prints is left."""

import os
import stat
from collections.abc import Mapping

# "launchd" or "systemd", or SERVE; warmline_common.process.exit_codes reads it in what we execute
MANAGER_VARIABLE = "WARMLINE_AGENT"
LAUNCHD = "launchd"
SERVE = "serve"  # `warmline serve`, in what it starts again
EXIT_CONFIGURATION = 2
OUTPUT_BYTES_MAX = 1_000_000


def map_exit_code(code: int, environment: Mapping[str, str] = os.environ) -> int:
    """launchd starts again what ends with anything but 0; a configuration error would come up again for ever.

    systemd is told to leave code 2 alone.
    """
    return 0 if code == EXIT_CONFIGURATION and environment.get(MANAGER_VARIABLE) == LAUNCHD else code


def truncate_output(environment: Mapping[str, str] = os.environ, descriptor: int = 2) -> None:
    """Begin the file anew into which a keeper has our stderr written, where it has grown large: nobody rotates it."""
    if environment.get(MANAGER_VARIABLE):
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_size > OUTPUT_BYTES_MAX:
            os.ftruncate(descriptor, 0)  # all writers append
