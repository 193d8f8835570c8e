"""Keeper's process: lock, files, HTTP server and signals.

Exit codes: 0 after a clean stop, 2 for a fault of the configuration, else 1; for a home that is held, as a backend's.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from warmline_common.logging import log_loop_error, start_logging
from warmline_common.process import exit_codes
from warmline_common.process.console import write_line
from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.process.file_limits import DescriptorLimitError, reserve_descriptors
from warmline_common.process.parent_watch import watch_parent
from warmline_common.process_files import ProcessFiles, describe_process
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.storage.file_lock import LockedError, process_lock
from warmline_common.storage.home import Home, describe_unusable_home
from warmline_common.storage.permissions import set_private_umask
from warmline_run.child_process import SupervisorSignals, open_parent_pipe
from warmline_run.keeper.backends.backend_client import BackendClient
from warmline_run.keeper.keeper import Keeper, KeeperSurroundings
from warmline_run.keeper.routes import make_app
from warmline_run.processes import CLIENT_KEY, KEEPER_MARGIN_S

log = logging.getLogger(__name__)

LOCK_WAIT_S = 10.0  # for a predecessor that is ending
DESCRIPTOR_LIMIT = 2_048
SHUTDOWN_S = 1.0  # for the last answers


def run_keeper(config: ResolvedConfig, environment: Mapping[str, str]) -> int:
    """Run the keeper in this process; its exit code."""
    set_private_umask()
    home, drain_timeout_s = Home(Path(str(config["home"]))), float(config["drain_timeout_s"])
    start_logging("keeper", str(config["log_level"]), str(config["log_format"]), bool(config["log_files"]), home)
    watch_parent(drain_timeout_s + KEEPER_MARGIN_S)
    try:
        reserve_descriptors(DESCRIPTOR_LIMIT)
        home.prepare()
        secret = home.load_secret()
    except DescriptorLimitError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(describe_unusable_home(home, error))
    try:
        with process_lock(home.backend_lock, LOCK_WAIT_S) as write_pid:
            return asyncio.run(_serve(config, home, secret, environment, write_pid))
    except LockedError as error:
        _fail(f"{home.root} is {error}, another backend; use another --home")
        return exit_codes.locked_home_exit_code()


def _fail(message: str) -> int:
    write_line(f"warmline backend: {message}")
    return EXIT_CONFIGURATION


async def _serve(
    config: ResolvedConfig, home: Home, secret: str, environment: Mapping[str, str], write_pid: Callable[[], None]
) -> int:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    signals, client, port = SupervisorSignals(), BackendClient(secret), int(config["backend_port"])
    variables = {name: value for name, value in environment.items() if name != CLIENT_KEY}
    try:
        with open_parent_pipe() as pipe:
            keeper = Keeper(config, KeeperSurroundings(home, variables, pipe, client, signals.kill_requested))
            async with _listen(make_app(keeper, secret), port), _announce(home, port, write_pid):
                keeper.start()
                log.info("keeping models at http://127.0.0.1:%d", port)
                ends = [asyncio.create_task(each.wait()) for each in (signals.stop_requested, keeper.nothing_fits)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                await keeper.stop()
                if keeper.nothing_fits.is_set() and not signals.stop_requested.is_set():
                    return _fail("none of the models can be loaded (see the messages above)")
    except _ListenError as error:
        return _fail(str(error))
    finally:
        await client.close()
    return 0


class _ListenError(Exception):
    """Message for people: another process has the port."""


@asynccontextmanager
async def _listen(app: web.Application, port: int) -> AsyncIterator[None]:
    """Listen on loopback until the end of the block.  Raises _ListenError."""
    runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        except OSError as error:
            raise _ListenError(
                f"can't listen on 127.0.0.1 port {port}: {error}; stop what listens there, or use another port"
            ) from None
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _announce(home: Home, port: int, write_pid: Callable[[], None]) -> AsyncIterator[None]:
    """Have files with this process's pid and port until the end of the block; `write_pid`: into the lock file."""
    files = ProcessFiles(describe_process(home, port), [write_pid])
    files.write()
    try:
        yield
    finally:
        files.delete()
