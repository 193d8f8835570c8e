"""Supervisor over two stand-ins, in its own process, as `warmline serve` runs it over the real pair.

Usage: run_supervisor.py PORT BACKEND_PORT [MANNER_OF_BACKEND [GRACE_S]]
"""

import os
import sys
from pathlib import Path

from warmline_run import supervisor as supervise
from warmline_run.address import Address
from warmline_run.processes import Command

STANDIN = str(Path(__file__).with_name("stand_in_process.py"))


def make_child(name: str, port: str, drain_timeout_s: float, *manner: str) -> Command:
    return Command(name, [sys.executable, STANDIN, name, port, *manner], os.environ, drain_timeout_s)


if __name__ == "__main__":
    port, backend_port, *more = sys.argv[1:]
    manner, grace_s = more[:1], more[1:]
    if grace_s:
        supervise.STOP_MARGIN_S = 0
    drain_timeout_s = float(grace_s[0]) if grace_s else 30.0
    backend, proxy = (
        make_child("backend", backend_port, drain_timeout_s, *manner),
        make_child("proxy", port, drain_timeout_s),
    )
    sys.exit(supervise.run(backend, proxy, Address("127.0.0.1", int(port))))
