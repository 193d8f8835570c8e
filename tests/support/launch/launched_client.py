"""Client under `warmline launch`, whose tool waits in the middle of its task until a test lets it go on.

The tool reads a pipe in the client's project; so a test knows that it runs, and when it ends.
"""

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support.pair.pair import WARMLINE, Pair
from support.pair.waiting import wait_until

GATE, WAIT_FILE = "gate", "wait.sh"
WAIT = f"sh {WAIT_FILE}"  # the tool's command, if it runs commands
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
}
TIMEOUT_S = 60


class LaunchedClient:
    """Client in `folder`, its project and its home.  `path`: where clients are installed.

    The pair runs from the home of `pair` and at its ports, or is started so.
    """

    def __init__(
        self, name: str, pair: Pair, folder: Path, path: str, *words: str, typed: str = "", **variables: str
    ) -> None:
        self._folder, self._gate = folder, -1
        (folder / WAIT_FILE).write_text(f"cat {GATE}\n")
        os.mkfifo(folder / GATE)
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [WARMLINE, "launch", name, "--home", str(pair.home.root), *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=make_environment(pair, folder, path) | variables,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(typed.encode())
        self.process.stdin.close()

    def wait_for_tool(self) -> None:
        if self._gate < 0:
            wait_until(self._is_tool_running, "the client calls no tool", TIMEOUT_S)

    def _is_tool_running(self) -> bool:
        assert self.process.poll() is None, self.read_output()
        with contextlib.suppress(OSError):  # of a pipe that nobody reads
            self._gate = os.open(self._folder / GATE, os.O_WRONLY | os.O_NONBLOCK)
        return self._gate >= 0

    def end_tool(self) -> None:
        os.write(self._gate, b"opened\n")
        os.close(self._gate)

    def wait(self) -> str:
        """Wait for the client's end; all that it has printed."""
        self.process.wait(TIMEOUT_S)
        return self.read_output()

    def read_output(self) -> str:
        return (self._folder / "output").read_text()


def make_environment(pair: Pair, folder: Path, path: str) -> Mapping[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("WARMLINE_")},
        **OFFLINE,
        "HOME": str(folder),
        "PWD": str(folder),
        "PATH": os.pathsep.join([path, os.environ["PATH"]]),
        "WARMLINE_PORT": str(pair.port),
        "WARMLINE_BACKEND_PORT": str(pair.backend_port),
    }
