"""Reading of a whole index in a process of its own: LMDB's assertions end the process that meets a damaged page."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.store.environment import LmdbEnvironment
from warmline_proxy.store.errors import IndexDamagedError, IndexStoreError
from warmline_proxy.store.row_checks import find_flaws

EXIT_UNREADABLE = 3
CRASH_EXIT_CODES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}  # of LMDB's assertions and missing pages


def is_readable(folder: Path) -> bool:
    """True where another process reads all of it.  Raises IndexStoreError where it could not be started."""
    command = [sys.executable, "-m", "warmline_proxy.store.crash_probe", str(folder)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if ran.returncode not in (0, EXIT_UNREADABLE, *CRASH_EXIT_CODES):
        why = ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"
        raise IndexStoreError(f"the index could not be read through: {why}")
    return ran.returncode == 0


@contextmanager
def mark_reading(home: Home) -> Iterator[bool]:
    """Mark that an index is read whole; True where the last process that did so ended in it, or there is no mark."""
    mark = home.run / "index.reading"
    died, marked = mark.exists(), False
    with suppress(OSError):  # a full disk is no reason not to start
        disk.replace_file(mark, f"{os.getpid()}\n")
        marked = True
    yield died or not marked
    with suppress(OSError):
        disk.delete(mark)


def main(folder: str) -> int:
    """Exit code: 0 where all entries could be read, flawed or not, EXIT_UNREADABLE where not."""
    try:
        env = LmdbEnvironment(Path(folder), writable=False)
        with closing(env), env.read_transaction() as tables:
            sum(1 for _ in find_flaws(tables))
    except IndexDamagedError as error:
        print(error, file=sys.stderr)
        return EXIT_UNREADABLE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
