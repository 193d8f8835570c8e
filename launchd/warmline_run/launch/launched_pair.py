"""`warmline serve` as a child of `warmline launch`: started, waited for, started again after a kill, and stopped.

Event loop thread.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from warmline_common.process.exit_codes import EXIT_FAILURE
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.regular_file import open_regular
from warmline_run import ports, probe
from warmline_run.address import Address
from warmline_run.child_process import RestartBackoff, describe_exit, wait_for_exit
from warmline_run.launch.server import LaunchError
from warmline_run.processes import CLI_MODULE, module_arguments
from warmline_run.supervisor import PROBE_INTERVAL_S, STOP_MARGIN_S, print_message

LOG_FILE = "launch.log"
LOG_LINES_MAX = 12  # of a start that failed
LOG_BYTES_MAX = 8_000


class LaunchedPair:
    """Pair of these settings, which ends with this process unless it is kept.

    `model`: for `warmline serve --model`, "" for the settings' own.
    """

    def __init__(self, config: ResolvedConfig, model: str, environment: Mapping[str, str], *, keep: bool) -> None:
        self._config, self._environment, self._keep = config, environment, keep
        home = Home(Path(str(config["home"])))
        self._arguments = [*module_arguments(CLI_MODULE), "serve", "--home", str(home.root)]
        self._arguments += ["--model", model] if model else []
        self.log = home.logs / LOG_FILE
        self._pipe = os.pipe()  # the child ends when nobody has the write end any more
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start `warmline serve`.  Raises OSError where its log can't be written."""
        disk.make_folders(self.log.parent)
        await self._start(os.O_TRUNC)

    async def _start(self, mode: int) -> asyncio.subprocess.Process:
        read_end = self._pipe[0]
        watch = {} if self._keep else {PARENT_PIPE: str(read_end)}
        log = open_regular(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | mode)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                env={**self._environment, **watch},
                pass_fds=() if self._keep else (read_end,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the client's
            )
            return self._process
        finally:
            os.close(log)

    async def wait_until_ready(self, address: Address) -> None:
        """Wait until requests are served at `address`, and say what for.  Raises LaunchError where it ends before."""
        reason = ""
        while not (readiness := await asyncio.to_thread(probe.read_readiness, address)).is_ready:
            self._check_start()
            if readiness.reason != reason:
                reason = readiness.reason
                print_message(f"waiting for the pair: {reason}")
            await asyncio.sleep(PROBE_INTERVAL_S)
        if self._process is not None:
            self._supervision = asyncio.create_task(self._restart(self._process))

    def _check_start(self) -> None:
        """Raises LaunchError where it has ended."""
        code = self._process.returncode if self._process is not None else None
        if code is not None:
            ending = f"{describe_exit(code)}; {self.log} says why, and ends so:\n{self._read_log_end()}"
            raise LaunchError(f"the pair could not be started: it {ending}", code if code > 0 else EXIT_FAILURE)

    def _read_log_end(self) -> str:
        lines = disk.read_file(self.log)[-LOG_BYTES_MAX:].decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_MAX:])

    async def _restart(self, process: asyncio.subprocess.Process) -> None:
        """Start it again whenever it ends: clients try again, and wait for it."""
        backoff = RestartBackoff()
        while True:
            backoff.record_start()
            await process.wait()
            await asyncio.sleep(backoff.next_delay_s())
            await self._wait_for_home()
            process = await self._start(0)

    async def _wait_for_home(self) -> None:
        """Wait until the children of a killed `warmline serve` have ended, too."""
        while True:
            if not ports.describe_home_holder(Path(str(self._config["home"]))):
                return
            await asyncio.sleep(PROBE_INTERVAL_S)

    @property
    def is_started(self) -> bool:
        """True from `start` on, unless the start failed."""
        return self.is_running or self._supervision is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def stop(self, hurry: asyncio.Event) -> None:
        """Stop it as Ctrl-C does in its own terminal; `hurry` ends it at once."""
        if self._supervision is not None:
            self._supervision.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            return
        grace_s = float(self._config["drain_timeout_s"]) + 2 * STOP_MARGIN_S
        process.terminate()
        if not await wait_for_exit(process, hurry, grace_s):
            process.terminate()
            if not await wait_for_exit(process, asyncio.Event(), STOP_MARGIN_S):
                process.send_signal(signal.SIGKILL)
        await process.wait()
