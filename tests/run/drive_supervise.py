"""Runs the supervisor over two stand-ins, in its own process, as `warmline serve` does over the real pair.

Usage: drive_supervise.py PORT BACKEND_PORT [MANNER_OF_BACKEND]
"""

import os
import sys
from pathlib import Path

from warmline_run import supervise
from warmline_run.commands import Command

STANDIN = str(Path(__file__).with_name("standin.py"))


def child(name: str, port: str, *manner: str) -> Command:
    return Command(name, [sys.executable, STANDIN, name, port, *manner], os.environ)


if __name__ == "__main__":
    port, backend_port, *manner = sys.argv[1:]
    address = supervise.Address("127.0.0.1", int(port))
    sys.exit(supervise.run(child("backend", backend_port, *manner), child("proxy", port), address))
