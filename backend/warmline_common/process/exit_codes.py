"""Ending under who keeps a process running: `warmline serve`, or launchd or systemd, who each start again what fails.

`warmline launchd` and `warmline service` name the keeper in ``WARMLINE_AGENT``; `warmline serve` does so in what it
starts again: at its own start it rather ends than waits for a home that another pair holds.
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

AGENT_VARIABLE = "WARMLINE_AGENT"
LAUNCHD = "launchd"
EXIT_FAILURE = 1
EXIT_CONFIGURATION = 2  # starting again would not help


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a process's `main`, and exit as its keeper understands it; what argparse ends included."""
    try:
        code: int | str | None = main()
    except SystemExit as ended:
        code = ended.code
    sys.exit(exit_code(code) if isinstance(code, int) else code)


def exit_code(code: int) -> int:
    """launchd starts again what ends with anything but 0; systemd and serve know what 2 means."""
    return 0 if code == EXIT_CONFIGURATION and os.environ.get(AGENT_VARIABLE) == LAUNCHD else code


def locked_home_exit_code() -> int:
    """For a home that another process holds: it may let go, and who keeps us for good tries again then."""
    return EXIT_FAILURE if os.environ.get(AGENT_VARIABLE) else EXIT_CONFIGURATION
