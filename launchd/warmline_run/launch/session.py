"""A client's run, from the search for a pair to the client's end.

The client is a child in this process's group: the terminal is its own, and so are Ctrl-C and Ctrl-Z.  One asyncio loop
owns everything.
"""

import asyncio
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig, resolve
from warmline_common.storage import disk
from warmline_common.storage.file_lock import LockedError, process_lock
from warmline_common.storage.home import Home, describe_unusable_home
from warmline_common.storage.regular_file import open_regular
from warmline_run import model_folders, ports
from warmline_run.launch import server as servers
from warmline_run.launch.clients import ClientSettings, LaunchableClient, ModelFacts, ServerFacts
from warmline_run.launch.command_text import HIDDEN, format_client_command
from warmline_run.launch.launched_pair import LaunchedPair
from warmline_run.launch.server import ClientKey, LaunchError, Server
from warmline_run.supervisor import PROBE_INTERVAL_S, print_message

T = TypeVar("T")

FOLDER = "launch"
START_LOCK, USE_LOCK = "launch-start.lock", "launch.lock"
EXIT_INTERRUPTED = 130
EXIT_NOT_FOUND = 127  # as shells have it
SIGNAL_EXIT = 128


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the command; "" and False where they are not given."""

    url: str = ""
    model: str = ""
    key: str = ""
    keep: bool = False


class LaunchSignals:
    """Signals of this process: the terminal's are the client's while it runs, the others are passed on to it.

    Without a client they set `interrupted`.
    """

    def __init__(self) -> None:
        self.interrupted = asyncio.Event()
        self._client: asyncio.subprocess.Process | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGQUIT):  # the client has them from the terminal itself
            loop.add_signal_handler(number, self._handle, 0)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._handle, number)

    def _handle(self, passed_on: int) -> None:
        if self._client is None:
            self.interrupted.set()
        elif passed_on:
            self._client.send_signal(passed_on)

    async def run_unless_interrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`, which is cancelled by a signal.  Raises LaunchError then."""
        task, interrupt = asyncio.create_task(work), asyncio.create_task(self.interrupted.wait())
        try:
            await asyncio.wait([task, interrupt], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise LaunchError("interrupted before the client was started", EXIT_INTERRUPTED)
            return task.result()
        finally:
            task.cancel()
            interrupt.cancel()

    async def run_client(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the client to its end; its exit code, as shells have it.  Raises OSError."""
        self._client = await asyncio.create_subprocess_exec(*arguments, env=environment)
        try:
            code = await self._client.wait()
        finally:
            self._client = None
        return code if code >= 0 else SIGNAL_EXIT - code


def find_program(client: LaunchableClient, environment: Mapping[str, str]) -> str:
    """Path of the client.  Raises LaunchError where it is not installed."""
    program = shutil.which(client.program, path=environment.get("PATH"))
    if program is None:
        raise LaunchError(
            f"{client.title} is not installed, or not on PATH: there is no program {client.program}; install it with "
            f"`{client.install_command}`",
            EXIT_NOT_FOUND,
        )
    return program


def describe_launch(
    client: LaunchableClient, config: ResolvedConfig, options: LaunchOptions, arguments: Sequence[str]
) -> str:
    """Variables and command, for a shell.  The client's folder has the files that they name afterwards.

    Without a running pair, what only that knows is left out.  Raises LaunchError, ConfigurationError, OSError.
    """
    server = _find_server(config, options)
    if server is None:
        server, key = servers.make_configured_server(config), ClientKey(options.key or servers.NO_KEY)
        print_message(f"no pair runs at {server.url}, so the model's context length and a key are left out")
        facts = ServerFacts(server.url, [ModelFacts(options.model or servers.ANY_NAME)])
    else:
        key = servers.find_key(server, config, options.key)
        facts = servers.read_facts(server, key, config, options.model)
    settings = _make_settings(client, config, facts)
    command = [client.program, *settings.options, *arguments]
    return format_client_command(settings.variables, client.key_variable, key.expression, command)


async def launch(
    client: LaunchableClient,
    config: ResolvedConfig,
    options: LaunchOptions,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> int:
    """Run a client on a pair, which is started where none runs; the client's exit code.

    Raises LaunchError, ConfigurationError, OSError.
    """
    program, signals = find_program(client, environment), LaunchSignals()

    async def run_client(server: Server, model: str) -> int:
        key = servers.find_key(server, config, options.key)
        facts = servers.read_facts(server, key, config, model)
        settings = _make_settings(client, config, facts)
        _report(client, settings, facts.model, key, arguments)
        variables = {**environment, **settings.variables, client.key_variable: key.value}
        return await signals.run_client([program, *settings.options, *arguments], variables)

    if options.url:
        return await run_client(servers.make_remote_server(options.url), options.model)
    home = _prepare_home(config)
    with _hold_use_lock(home) as use_lock:
        pair = LaunchedPair(config, options.model, environment, keep=options.keep)
        try:
            server = await signals.run_unless_interrupted(_find_or_start(home, config, options, pair))
            # a pair that was started here lists the wanted model first
            return await run_client(server, "" if pair.is_started else options.model)
        finally:
            await _end_pair(pair, use_lock, signals.interrupted, keep=options.keep)


def _find_server(config: ResolvedConfig, options: LaunchOptions) -> Server | None:
    return servers.make_remote_server(options.url) if options.url else servers.find_running_server(config)


async def _find_or_start(home: Home, config: ResolvedConfig, options: LaunchOptions, pair: LaunchedPair) -> Server:
    """The running pair once it is ready, or `pair`.  One `launch` at a time does this, so that one starts a pair."""
    async with _hold_start_lock(home):
        server = servers.find_running_server(config)
        if server is None:
            server = servers.make_configured_server(config)
            _check_start(config, options)
            print_message(f"starting a pair at {server.url}; its messages are in {pair.log}")
            await pair.start()
        await pair.wait_until_ready(server.address)
    return server


def _check_start(config: ResolvedConfig, options: LaunchOptions) -> None:
    """Raises ConfigurationError for what `warmline serve` would refuse, before that is started."""
    flags = {"home": str(config["home"]), "model": [options.model] if options.model else None}
    model_folders.check_model_folders(resolve(flags, os.environ))
    if problem := ports.describe_occupied_port(config):
        raise ConfigurationError(f"{problem} (here with WARMLINE_PORT and WARMLINE_BACKEND_PORT)")


async def _end_pair(pair: LaunchedPair, use_lock: int, hurry: asyncio.Event, *, keep: bool) -> None:
    """Stop the pair that was started here once no other client of `launch` uses it, or leave it."""
    hurry.clear()
    if not pair.is_started:
        return
    if keep and pair.is_running:
        return print_message(f"the pair runs on as process {pair.pid}; `kill {pair.pid}` stops it")
    if not _is_last(use_lock):
        print_message("another launched client uses the pair, which is stopped when that ends; Ctrl-C stops it now")
        while not _is_last(use_lock) and not await _wait_for(hurry, PROBE_INTERVAL_S):
            pass
        hurry.clear()
    print_message("stopping the pair; Ctrl-C ends it at once")
    await pair.stop(hurry)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    with suppress(TimeoutError):
        return await asyncio.wait_for(event.wait(), timeout_s)
    return False


def _make_settings(client: LaunchableClient, config: ResolvedConfig, facts: ServerFacts) -> ClientSettings:
    """Settings of a client, whose files are written.  Raises OSError."""
    folder = Path(str(config["home"])) / FOLDER / client.name
    settings = client.make_settings(facts, folder)
    for path, text in settings.files.items():
        disk.make_folders(path.parent)
        disk.replace_file(path, text)
    if not client.fits(facts.model):
        print_message(
            f"{client.title} needs a longer context than the {facts.model.context_tokens:,} tokens of "
            f"{facts.model.name}: its requests may be refused; serve another model"
        )
    return settings


def _report(
    client: LaunchableClient, settings: ClientSettings, model: ModelFacts, key: ClientKey, arguments: Sequence[str]
) -> None:
    """Print all that is set, without the key."""
    command = [client.program, *settings.options, *arguments]
    shown = HIDDEN if key.is_secret else key.value
    text = format_client_command(settings.variables, client.key_variable, shown, command)
    files = "".join(f"with {path}\n" for path in settings.files)
    sys.stderr.write(f"{client.title} with the model {model.name}:\n{text}\n{files}")
    sys.stderr.flush()


def _prepare_home(config: ResolvedConfig) -> Home:
    home = Home(Path(str(config["home"])))
    try:
        home.prepare()
    except OSError as error:
        raise LaunchError(describe_unusable_home(home, error)) from None
    return home


@contextmanager
def _hold_use_lock(home: Home) -> Iterator[int]:
    """Descriptor of a lock that all running `launch` of this home share."""
    descriptor = open_regular(home.run / USE_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while another one stops the pair
        yield descriptor
    finally:
        os.close(descriptor)


def _is_last(use_lock: int) -> bool:
    """True where no other `launch` holds the lock; then none gets it before this process closes it."""
    try:
        fcntl.flock(use_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@asynccontextmanager
async def _hold_start_lock(home: Home) -> AsyncIterator[None]:
    holder = ""
    while True:
        try:
            with process_lock(home.run / START_LOCK):
                yield
                return
        except LockedError as error:
            if error.holder != holder:
                holder = error.holder
                print_message(f"waiting for process {holder}, which starts a pair")
            await asyncio.sleep(PROBE_INTERVAL_S)
