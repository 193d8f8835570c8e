"""One started backend process, and the pipe on which it announces its port.  Event loop thread."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress

from warmline_common.process.keeper_pipes.announcement import (
    ANNOUNCE_PIPE,
    FAILURE_CHARS_MAX,
    Announcement,
    parse_announcement,
)
from warmline_run.child_process import start_child
from warmline_run.processes import Command

RECEIVED_BYTES_MAX = 16 * FAILURE_CHARS_MAX  # of announcements that are not complete; JSON may escape each character


class AnnouncementPipe:
    """Read end of the pipe of one process; close it once that has ended, or is not watched any more."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._received = b""
        self._last = Announcement()
        self._has_port = asyncio.Event()
        self._is_closed = False
        asyncio.get_running_loop().add_reader(self._read_end, self._receive)

    async def wait_for_port(self) -> int:
        """Port that the process listens on, once it has announced that."""
        await self._has_port.wait()
        return self._last.port

    def read_failure(self) -> str:
        """Why the process has ended; "" where it has not said so."""
        self._receive()  # what the loop has not seen yet
        return self._last.failure

    def close_write_end(self) -> None:
        """Leave the write end to the process that has inherited it."""
        os.close(self.write_end)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)

    def _receive(self) -> None:
        """Take what has come, without waiting."""
        with suppress(BlockingIOError):
            while not self._is_closed and (data := os.read(self._read_end, RECEIVED_BYTES_MAX)):
                *lines, rest = (self._received + data).split(b"\n")
                self._received = rest[:RECEIVED_BYTES_MAX]
                for line in lines:
                    self._take(line)
            self.close()  # its other end is: the process has ended, or is about to

    def _take(self, line: bytes) -> None:
        if (announcement := parse_announcement(line)) is not None:
            self._last = announcement
        if self._last.port:
            self._has_port.set()


class BackendProcess:
    """Backend, or a standby process that becomes one.  `close` it in the end."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: AnnouncementPipe) -> None:
        self.process, self._pipe = process, pipe

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def wait_for_port(self) -> int:
        """Port that it listens on, once it has announced that; waits on where it has ended without."""
        return await self._pipe.wait_for_port()

    def read_failure(self) -> str:
        """Why it has ended; "" where it has not said so."""
        return self._pipe.read_failure()

    async def send(self, line: bytes, timeout_s: float, *, is_last: bool = False) -> bool:
        """Write a line to its standard input; False where it has ended, or takes none."""
        stream = self.process.stdin
        assert stream is not None
        try:
            async with asyncio.timeout(timeout_s):
                stream.write(line)
                await stream.drain()
        except OSError:  # TimeoutError is one
            return False
        if is_last:
            stream.close()
        return self.is_alive

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        await self.process.wait()
        self.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> None:
        """Read no more announcements."""
        self._pipe.close()


async def start_backend(
    command: Command, parent_pipe: int, variables: Mapping[str, str], *, has_input: bool = False
) -> BackendProcess:
    """Start a backend, or a standby process, with `variables` besides its environment.  Raises OSError."""
    pipe = AnnouncementPipe()
    try:
        process = await start_child(
            command,
            parent_pipe,
            {**variables, ANNOUNCE_PIPE: str(pipe.write_end)},
            has_input=has_input,
            descriptors=(pipe.write_end,),
        )
    except BaseException:
        pipe.close()
        raise
    finally:
        pipe.close_write_end()
    return BackendProcess(process, pipe)
