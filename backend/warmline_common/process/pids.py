"""Processes by their pids."""

import subprocess
from contextlib import suppress
from pathlib import Path

PS_TIMEOUT_S = 5.0


def read_command_line(pid: int) -> str:
    """Command line of a process; "" where there is none, or where it can't be known."""
    with suppress(OSError, subprocess.SubprocessError):
        if Path("/proc/self/cmdline").exists():
            return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        ps = ("ps", "-ww", "-o", "command=", "-p", str(pid))
        return subprocess.run(ps, capture_output=True, text=True, timeout=PS_TIMEOUT_S, check=False).stdout
    return ""
