"""Control of the faults that `site/sitecustomize.py` plants in a pair, and the gate at which engine steps wait."""

import contextlib
import itertools
import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SITE = str(Path(__file__).with_name("site"))
LIMIT_S = 60.0
POLL_S = 0.005

# Faults of a step: an exception, a step that never ends (with the other threads alive or not), the end of the process
# by a signal, a device that is broken until the process is restarted.
FAULTS = ("raise", "hang", "freeze", "segv", "abort", "oom", "device")
WEDGES = ("hang", "freeze")  # which only a time limit ends


class FaultControl:
    """Faults of one pair, ordered by files in a folder; the pair is started with `environment`."""

    def __init__(
        self,
        restart_delay_s: float | None = None,
        map_bytes: int | None = None,
        retry_interval_s: float | None = None,
        *,
        hold_loads: bool = False,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="planted-"))  # short: a socket's path has at most 104 characters
        paths = [SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PLANTED_FOLDER": str(self.folder)}
        if restart_delay_s is not None:
            own["PLANTED_RESTART_DELAY_S"] = str(restart_delay_s)
        if map_bytes is not None:
            own["PLANTED_MAP_BYTES"] = str(map_bytes)
        if retry_interval_s is not None:
            own["PLANTED_RETRY_INTERVAL_S"] = str(retry_interval_s)
        if hold_loads:
            own["PLANTED_HOLD_LOADS"] = "1"
        self.environment: Mapping[str, str] = {**os.environ, **own}
        self._numbers = itertools.count()

    def plant_fault(self, fault: str, phase: str = "any") -> None:
        """Plant the fault in the next step of this phase: "prefill", "first", "decode" or "any"."""
        (self.folder / "taken").unlink(missing_ok=True)
        draft = self.folder / "draft"
        draft.write_text(fault)
        draft.rename(self.folder / f"order-{phase}")

    def withdraw_fault(self) -> None:
        """Withdraw a fault that no step has met."""
        for order in self.folder.glob("order-*"):
            order.unlink(missing_ok=True)

    @property
    def is_taken(self) -> bool:
        """State of the last order: whether a step with its fault has begun."""
        return (self.folder / "taken").exists()

    def wait_until_taken(self) -> None:
        """Wait until a step with the fault has begun."""
        limit = time.monotonic() + LIMIT_S
        while not self.is_taken:
            assert time.monotonic() < limit, "no step met the fault"
            time.sleep(POLL_S)

    # ---- the disk

    def kill_at(self, process: str, nth: int, when: str = "before", steps: Sequence[str] = ()) -> None:
        """Kill the "proxy" or "backend" with SIGKILL at its `nth` disk operation from now on, 1 the first.

        `when`: "before" it, "after" it, or in its "middle": half of the data is written (other operations: before it).
        `steps`: names in `warmline_common.storage.disk`, to count these operations alone.
        """
        self._order_disk(process, {"kill": nth, "when": when, "steps": list(steps)})

    def is_killed(self, process: str) -> bool:
        """State of the last `kill_at`: whether the process was killed."""
        return (self.folder / f"disk-{process}-taken").exists()

    def fail_disk(self, process: str, error: str, steps: Sequence[str], under: str = "", times: int = 0) -> None:
        """Let these disk operations raise OSError, until `restore_disk`, or a number of `times`.

        `error`: its name ("ENOSPC").  `steps`: names in `warmline_common.storage.disk`; with "open_to_read" it is the
        reading that fails.  `under`: only at paths that contain this.
        """
        self._order_disk(process, {"error": error, "steps": list(steps), "under": under, "times": times})

    def lose_file(self, process: str, nth: int) -> None:
        """Delete the `nth` file that is opened for reading, just before that."""
        self._order_disk(process, {"lose": nth, "steps": ["open_to_read"]})

    def restore_disk(self, process: str) -> None:
        """Withdraw any order for this process's disk."""
        (self.folder / f"disk-{process}").unlink(missing_ok=True)

    # ---- bugs

    @contextlib.contextmanager
    def active_bug(self, name: str) -> Iterator[None]:
        """Switch one of `planted_bugs` on, in processes that were started with PLANTED_BUGS in their environment."""
        path = self.folder / "bug"
        path.write_text(name)
        try:
            yield
        finally:
            path.unlink()

    def _order_disk(self, process: str, order: dict[str, object]) -> None:
        (self.folder / f"disk-{process}-taken").unlink(missing_ok=True)
        draft = self.folder / f"draft-{process}"
        draft.write_text(json.dumps({**order, "number": next(self._numbers)}))
        draft.rename(self.folder / f"disk-{process}")

    def make_gate(self) -> "Gate":
        return Gate(self.folder / "gate")

    def __enter__(self) -> "FaultControl":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class HeldStep:
    """Step that waits at the gate before it computes."""

    process: int
    phase: str
    requests: list[str]
    connection: socket.socket

    def let_pass(self) -> bool:
        """Let the step compute and wait for its end; whether it succeeded."""
        self.start()
        return self.wait_for_end()

    def start(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(b".")

    def wait_for_end(self) -> bool:
        with self.connection:
            return _read_message(self.connection).get("phase") == "ended"


class Gate:
    """Gate at which each engine step waits; a context manager, after which all steps pass.

    A step that is under way when the gate is made does not wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._steps: queue.Queue[HeldStep] = queue.Queue()
        self._commands: queue.Queue[str] = queue.Queue()
        self._held: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self.step_count = 0  # steps that have arrived at the gate

    def next_step(self) -> HeldStep:
        """Return the waiting step, or wait for the next one."""
        return self._steps.get(timeout=LIMIT_S)

    def next_step_unless(self, is_ended: Callable[[], bool]) -> HeldStep | None:
        """Return the next step; None once `is_ended()` and none waits."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._steps.get(timeout=POLL_S)
            if is_ended():
                return None

    def iter_steps(self, phase: str, request: str = "") -> Iterator[HeldStep]:
        """Yield steps of this phase (and request) as they arrive; let all others pass."""
        while True:
            step = self.next_step()
            if step.phase == phase and (not request or request in step.requests):
                yield step
            else:
                step.let_pass()

    def wait_for_step(self, phase: str, request: str = "") -> HeldStep:
        """Return the first step of this phase (and request); let those before it pass."""
        return next(self.iter_steps(phase, request))

    def wait_for_command(self, word: str) -> None:
        """Wait until code that uses the name `word` is in the engine's mailbox."""
        while word not in self._commands.get(timeout=LIMIT_S).split():
            pass

    def forget_commands(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()

    def __enter__(self) -> "Gate":
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.open_for_all()

    def open_for_all(self) -> None:
        """Let all steps pass from now on."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is shut down already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()  # so that no step that arrives now waits
        self._listener.close()
        for connection in self._held:
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the gate is closed
            while True:
                self._receive(self._listener.accept()[0])

    def _receive(self, connection: socket.socket) -> None:
        message = _read_message(connection)
        if "asked" in message:
            self._commands.put(message["asked"])
            connection.close()
        elif message:
            self._held.append(connection)
            self.step_count += 1
            self._steps.put(HeldStep(message["process"], message["phase"], message["requests"], connection))


def _read_message(connection: socket.socket) -> dict[str, Any]:
    """Read the next message; empty where the other side is gone."""
    data = b""
    while not data.endswith(b"\n"):
        try:
            piece = connection.recv(1)
        except OSError:
            piece = b""
        if not piece:
            return {}
        data += piece
    message: dict[str, Any] = json.loads(data)
    return message
