"""Real processes in tests, and their output as events."""

import os
import queue
import re
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from warmline_common.process.pids import read_command_line
from warmline_common.storage.file_lock import is_process_alive

WRITE_BYTES_MAX = 65_536
LIMIT_S = 60.0
END = b"\0"  # no write of a process that prints text


_given_ports: set[int] = set()


def free_port() -> int:
    """A free port, another one at each call in this process: the system may offer one again that is not used yet."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def is_running(pid: int) -> bool:
    """True for a process that has not ended: one without a parent may stay as a zombie."""
    return is_process_alive(pid) and bool(read_command_line(pid))


class RunningProcess:
    """Process whose output is read line by line; killed at the end of the `with`."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        self.process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            pass_fds=descriptors,
        )
        self.seen: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, pattern: str, timeout_s: float = LIMIT_S) -> re.Match[str]:
        """Wait for the next line that matches."""
        while (line := self._lines.get(timeout=timeout_s)) is not None:
            self.seen.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"ended without a line like {pattern!r}:\n" + "\n".join(self.seen))

    def wait_for_all(self, *patterns: str, timeout_s: float = LIMIT_S) -> list[re.Match[str]]:
        """Wait for a line that matches each pattern, in any order."""
        found: dict[str, re.Match[str]] = {}
        while len(found) < len(patterns):
            line = self.wait_for("|".join(f"(?:{pattern})" for pattern in patterns if pattern not in found), timeout_s)
            matches = ((pattern, re.search(pattern, line.string)) for pattern in patterns if pattern not in found)
            found.update((pattern, match) for pattern, match in matches if match)
        return [found[pattern] for pattern in patterns]

    def wait_for_silence(self, timeout_s: float = LIMIT_S) -> list[str]:
        """Wait for the end of the output, when the process *and all children that inherited its output* have ended."""
        while (line := self._lines.get(timeout=timeout_s)) is not None:
            self.seen.append(line)
        return self.seen

    def __enter__(self) -> "RunningProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def capture_writes(
    arguments: Sequence[str], timeout_s: float = 60
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[str]]]:
    """Start a process and yield each write to its output, its children's too, until it has ended; unbuffered.

    A datagram socket keeps writes apart, which a pipe would join.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.settimeout(timeout_s)
    process = subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env={**os.environ, "PYTHONUNBUFFERED": "1"})

    def send_end() -> None:
        process.wait()
        with suppress(OSError):  # the reader is closed
            theirs.send(END)

    sender = threading.Thread(target=send_end, daemon=True)
    sender.start()
    try:
        yield process, (data.decode() for data in iter(lambda: ours.recv(WRITE_BYTES_MAX), END))
    finally:
        process.kill()
        ours.close()
        sender.join()
        theirs.close()
