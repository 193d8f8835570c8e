"""Starter of backend processes, from a standby process where one is ready.  Event loop thread."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from warmline_common.process import exit_codes
from warmline_common.process.keeper_pipes.standby import RELEASE_LINE, encode_order
from warmline_run.keeper.backends.backend_process import BackendProcess, start_backend
from warmline_run.processes import Command, list_backend_flags, make_standby_command

log = logging.getLogger(__name__)

ORDER_TIMEOUT_S = 5.0  # for an order that is larger than what a pipe holds
# A held home is waited for, and exit codes are meant for the keeper, whatever manager started it.
VARIABLES = {exit_codes.AGENT_VARIABLE: exit_codes.SERVE}


@dataclass(frozen=True)
class _HeldProcess:
    """Backend that has prepared all but its model, and waits for its release."""

    backend: BackendProcess
    command: Command


class ProcessStarter:
    """Starts backends.  One standby process at most waits for an order, and one at most is held.

    Both have imported mlx and hold no memory of a model.
    """

    def __init__(self, environment: Mapping[str, str], pipe: int) -> None:
        self._environment, self._pipe = environment, pipe
        self._standby: BackendProcess | None = None
        self._held: _HeldProcess | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def prepare_standby(self) -> None:
        """Start a standby process, unless one waits."""
        async with self._lock:
            if self._is_closed or _is_alive(self._standby):
                return
            if self._standby is not None:
                self._standby.close()
            try:
                self._standby = await start_backend(
                    make_standby_command(self._environment), self._pipe, VARIABLES, has_input=True
                )
            except OSError as error:
                log.warning("no process could be started ahead of the next load: %s", error)

    async def hold(self, command: Command) -> None:
        """Have the standby process, if there is one, prepare a load that has to wait for memory."""
        async with self._lock:
            if self._is_closed or self._is_held_for(command) or not _is_alive(self._standby):
                return
            await self._end_held()
            if standby := await self._order_standby(command, is_held=True):
                self._held = _HeldProcess(standby, command)

    async def start(self, command: Command) -> BackendProcess:
        """Start a backend by its command line.  Raises OSError.

        A process that was prepared may hang by now: the caller finds that out, as of any other.
        """
        async with self._lock:
            if self._held is not None and self._is_held_for(command):
                backend = self._held.backend
                if await backend.send(RELEASE_LINE, ORDER_TIMEOUT_S, is_last=True):
                    self._held = None
                    return backend
            await self._end_held()  # it may have the instance's lock
            if standby := await self._order_standby(command):
                return standby
        return await start_backend(command, self._pipe, VARIABLES)

    async def close(self) -> None:
        """End the waiting processes; start none any more."""
        async with self._lock:
            self._is_closed = True
            await self._end_held()
            standby, self._standby = self._standby, None
            if standby is not None:
                await standby.end()

    def _is_held_for(self, command: Command) -> bool:
        held = self._held
        return held is not None and held.backend.is_alive and held.command.arguments == command.arguments

    async def _order_standby(self, command: Command, *, is_held: bool = False) -> BackendProcess | None:
        """Have the standby process go on with a command line; None where there is none that takes it."""
        standby, self._standby, is_sent = self._standby, None, False
        if standby is None:
            return None
        order = encode_order(list_backend_flags(command), is_held=is_held)
        try:
            is_sent = await standby.send(order, ORDER_TIMEOUT_S, is_last=not is_held)
        finally:
            if not is_sent:
                await standby.end()
        return standby if is_sent else None

    async def _end_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.backend.end()


def _is_alive(backend: BackendProcess | None) -> bool:
    return backend is not None and backend.is_alive
