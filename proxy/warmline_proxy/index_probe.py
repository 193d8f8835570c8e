"""Reading an index through in a process of its own: LMDB's assertions end the process that meets a damaged page."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warmline_proxy.index_env import Env
from warmline_proxy.index_errors import DamagedIndex
from warmline_proxy.index_flaws import flaws
from warmline_wire import disk
from warmline_wire.home import Home


def is_readable(folder: Path) -> bool:
    """Whether a process gets through all of it."""
    command = [sys.executable, "-m", "warmline_proxy.index_probe", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextmanager
def at_risk(home: Home) -> Iterator[bool]:
    """Around reading an index through; gives whether who did so last has not come back from it."""
    mark = home.run / "index.reading"
    died = mark.exists()
    disk.write_small(mark, f"{os.getpid()}\n")
    yield died
    disk.delete(mark)


def main(folder: str) -> int:
    """The exit code: 0 where all entries could be read, flawed or not."""
    env = Env(Path(folder), writable=False)
    try:
        with env.reading() as tables:
            sum(1 for _ in flaws(tables))
    except DamagedIndex as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        env.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
