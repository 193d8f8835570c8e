"""Backend process of one model: started, watched until it is loaded, started again, stopped.  Event loop thread.

Only a process that this object started is ever signalled, and only the port that it has announced is called.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from warmline_common.process import exit_codes
from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.protocol.keeper import ModelStage
from warmline_run.child_process import RestartBackoff, describe_exit, wait_for_exit
from warmline_run.keeper.backends.backend_client import BackendClient, BackendUnreachableError
from warmline_run.keeper.backends.backend_process import BackendProcess
from warmline_run.keeper.backends.process_starter import ProcessStarter
from warmline_run.processes import Command

log = logging.getLogger(__name__)

STOP_MARGIN_S = 15.0  # beyond the drain of running requests: to release them, and to save
STOP_UNLOADED_S = 5.0  # of a process that has not loaded its model: it has nothing to save
# Until it answers it starts Python, imports mlx, takes its lock (10 s at most) and a port: seconds, of a slow disk a
# minute.  The weights come later, and their time has no limit; it answers meanwhile.
FIRST_ANSWER_TIMEOUT_S = 120.0
LOADING_SILENCE_S = 600.0  # as the proxy's watchdog has it for a first step
# Until it is loaded, which has no event to wait for: requests wait for it, so polls come as often as a small part of
# the time since its start allows.
POLL_S_MIN, POLL_S_MAX = 0.01, 0.1
POLL_SHARE = 0.01
HEALTH_INTERVAL_S = 2.0  # once it is loaded
MakeCommand = Callable[[], Command]


@dataclass
class ProcessState:
    """Present state, read by the keeper."""

    stage: ModelStage = ModelStage.UNLOADED
    reason: str = ""
    port: int = 0  # once it is loaded, until it is gone: a process that stops still answers
    pid: int = 0
    starts: int = 0
    load_s: float = 0.0
    unanswered_since: float | None = None  # time.monotonic(), while a process that is to run doesn't answer

    @property
    def down_s(self) -> float:
        return 0.0 if self.unanswered_since is None else time.monotonic() - self.unanswered_since


class ModelProcess:
    """Owner of a model's backend process.  `on_change` is called after each change of `state`."""

    def __init__(
        self, name: str, log_file: Path, starter: ProcessStarter, client: BackendClient, on_change: Callable[[], None]
    ) -> None:
        """`name`: the model's, for people; `log_file`: of the process."""
        self.state = ProcessState()
        self._name, self._log_file = name, log_file
        self._starter, self._client, self._on_change = starter, client, on_change
        self._process: asyncio.subprocess.Process | None = None
        self._failure = ""  # that its last process has announced
        self._silent_s = 0.0  # for which it was killed
        self._has_announced = False  # the killed one, its port
        self._run_task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None

    def start(self, make_command: MakeCommand) -> None:
        """Start the process and keep it running; `make_command` is called for each start."""
        assert self._run_task is None and self._process is None, "stopped first"
        self._set(ModelStage.STARTING, "", unanswered_since=time.monotonic())
        self._run_task = asyncio.create_task(self._run(make_command))
        self._run_task.add_done_callback(_log_failure)

    def stop(self, hurry: asyncio.Event, drain_timeout_s: float) -> asyncio.Task[None]:
        """Begin to stop; the stage is UNLOADED when the process is gone.  Called again: the stop under way."""
        if self._stop_task is None:
            is_loaded = self.state.stage is ModelStage.LOADED
            if self._run_task is not None:
                self._set(ModelStage.STOPPING, "", pid=self.state.pid, port=self.state.port)
            timeout_s = drain_timeout_s + STOP_MARGIN_S if is_loaded else STOP_UNLOADED_S
            self._stop_task = asyncio.create_task(self._stop(hurry, timeout_s))
        return self._stop_task

    async def _run(self, make_command: MakeCommand) -> None:
        """Start the process, again and again.  Returns where its configuration is at fault."""
        backoff = RestartBackoff()
        while True:
            backoff.record_start()
            code = await self._run_once(make_command())
            if code == EXIT_CONFIGURATION:
                break
            delay_s = backoff.next_delay_s()
            end = self._describe_hang() if self._silent_s else describe_exit(code)
            log.warning("the backend %s %s; starting it again in %g s", self._name, end, delay_s)
            since = self.state.unanswered_since or time.monotonic()
            self._set(ModelStage.STARTING, f"its process {end}; it is started again", unanswered_since=since)
            await asyncio.sleep(delay_s)
        self._run_task = None
        reason = self._failure or f"it can't run as configured: see the end of its log, {self._log_file}"
        log.warning("the backend %s has failed: %s", self._name, reason)
        self._set(ModelStage.FAILED, reason)

    async def _run_once(self, command: Command) -> int:
        """Start the process and watch it to its end; its exit code."""
        started_at, self._failure, self._silent_s = time.monotonic(), "", 0.0
        try:
            backend = await self._starter.start(command)
        except OSError as error:
            log.error("the backend %s can't be started: %s", self._name, error)
            return exit_codes.EXIT_FAILURE
        self._process = backend.process
        self.state.starts += 1
        self._set(ModelStage.STARTING, self.state.reason, pid=backend.pid, unanswered_since=self.state.unanswered_since)
        watch = asyncio.create_task(self._watch(backend, started_at))
        watch.add_done_callback(_log_failure)
        try:
            code = await backend.process.wait()
            self._failure = backend.read_failure()
        finally:
            watch.cancel()
            backend.close()
        self._process = None
        return code

    def _describe_hang(self) -> str:
        what = "answered" if self._has_announced else "announced its port"
        return f"has not {what} for {self._silent_s:g} s and was killed"

    async def _watch(self, backend: BackendProcess, started_at: float) -> None:
        """Watch a process until it is loaded, and then whether it answers; kill one that hangs before it is loaded."""
        port, silence_s = 0, FIRST_ANSWER_TIMEOUT_S
        try:
            async with asyncio.timeout(silence_s) as deadline:
                port = await backend.wait_for_port()
                while not await self._check_health(port, backend.pid):
                    if self.state.unanswered_since is None:
                        silence_s = LOADING_SILENCE_S
                        deadline.reschedule(asyncio.get_running_loop().time() + silence_s)
                    await asyncio.sleep(choose_poll_interval_s(time.monotonic() - started_at))
        except TimeoutError:
            self._silent_s, self._has_announced = silence_s, bool(port)
            backend.kill()
            return
        if self.state.stage is not ModelStage.STARTING:
            return
        self.state.load_s = time.monotonic() - started_at
        log.info("loaded %s in %.1f s", self._name, self.state.load_s)
        self._set(ModelStage.LOADED, "", pid=backend.pid, port=port)
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._check_health(port, backend.pid)

    async def _check_health(self, port: int, pid: int) -> bool:
        """True where the process has loaded its model; records since when it doesn't answer."""
        try:
            health = await self._client.read_health(port)
        except BackendUnreachableError:
            health = None
        does_answer = health is not None and health.pid == pid
        if does_answer is not (self.state.unanswered_since is None):
            self.state.unanswered_since = None if does_answer else time.monotonic()
            self._on_change()
        return health is not None and does_answer and health.ready

    async def _stop(self, hurry: asyncio.Event, timeout_s: float) -> None:
        await self._cancel_run()
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            if not await wait_for_exit(process, hurry, timeout_s):
                log.warning("the backend %s doesn't end; killing it", self._name)
                with suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        self._process = self._stop_task = None
        self._set(ModelStage.UNLOADED, "")

    async def _cancel_run(self) -> None:
        run, self._run_task = self._run_task, None
        if run is not None:
            run.cancel()
            await asyncio.wait([run])

    def _set(
        self,
        stage: ModelStage,
        reason: str,
        *,
        pid: int = 0,
        port: int = 0,
        unanswered_since: float | None = None,
    ) -> None:
        state = self.state
        state.stage, state.reason, state.pid, state.port = stage, reason, pid, port
        state.unanswered_since = unanswered_since
        self._on_change()


def choose_poll_interval_s(elapsed_s: float) -> float:
    """Interval between looks at a process that was started so long ago and is not loaded yet."""
    return min(max(POLL_S_MIN, POLL_SHARE * elapsed_s), POLL_S_MAX)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the supervision of a backend failed", exc_info=error)
