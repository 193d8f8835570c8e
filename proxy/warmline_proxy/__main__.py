"""`python -m warmline_proxy`: start, serve until a signal, end cleanly."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from warmline_common.logging import start_logging, tell_of_loop
from warmline_common.process import exit_codes as kept
from warmline_common.process.console import say
from warmline_common.process.file_limits import raise_descriptor_limit
from warmline_common.process.parent_watch import end_with_parent
from warmline_common.storage import disk
from warmline_common.storage.home import unusable
from warmline_common.storage.permissions import begin_private, tighten
from warmline_proxy.auth.key_store import tenant_of
from warmline_proxy.auth.principals import prepare_keys
from warmline_proxy.config import Config, ConfigError, parse
from warmline_proxy.home_lock import HomeLocked, home_lock
from warmline_proxy.http.connections import listening
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.routes.dispatch import LIVES, build, drain

log = logging.getLogger("warmline_proxy")

STOP_MARGIN_S = 15.0  # beyond the drain: to let go of what runs, and to write what is kept
LOCK_WAIT_S = 10.0  # a predecessor that is ending, or cachectl
ANNOUNCE_INTERVAL_S = 5.0  # between two tries to write our address down
DESCRIPTORS_WANTED = 8_192  # a non-login macOS shell gives 256


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 after a signal, 2 for bad settings or a home that another proxy holds, 1 for other failures.

    Who keeps us running may be told another one: see `kept`.
    """
    try:
        config = parse(arguments)
    except ConfigError as error:
        say(f"warmline proxy: {error}")
        return 2
    start_logging("proxy", config.log_level, config.log_format, config.log_files, config.home)
    end_with_parent(config.drain_timeout_s + STOP_MARGIN_S)
    try:
        config.home.prepare()
        secret = config.home.secret()
        if tightened := str(tighten(config.home)):
            log.warning("the home: %s", tightened)
        prepare_keys(config)
    except OSError as error:
        say(f"warmline proxy: {unusable(config.home, error)}")
        return 2
    except ConfigError as error:
        say(f"warmline proxy: {error}")
        return 2
    try:
        run(config, secret)
    except HomeLocked as error:
        say(f"warmline proxy: {error}")
        return kept.code_of_held()
    except (IndexFailure, OSError) as error:
        say(f"warmline proxy: {error}")
        return 1
    return 0


def run(config: Config, secret: str) -> None:
    """Own the home, put the index in order, serve.  Raises HomeLocked, IndexFailure or OSError."""
    descriptor_count_max = raise_descriptor_limit(DESCRIPTORS_WANTED)
    with home_lock(config.home, LOCK_WAIT_S), Index(config.home, config.disk_budget_bytes) as index:
        put_in_order(index)
        asyncio.run(serve(config, secret, index, descriptor_count_max))


def put_in_order(index: Index) -> None:
    """Where the disk does not let us, that is tried again while we serve."""
    if not index.read_only:
        try:
            log.info("index: %s", reconcile(index))
            index.keep_spare()
            return
        except (IndexFailure, OSError) as error:
            index.suspend(error)
    log.error("%s; serving goes on with what is stored, and nothing is saved", index.read_only)


async def serve(config: Config, secret: str, index: Index, descriptor_count_max: int) -> None:
    asyncio.get_running_loop().set_exception_handler(tell_of_loop)
    signals = Signals()
    app = build(config, secret, index)
    async with listening(app, config, descriptor_count_max) as listener, announced(config, listener.port):
        log.info("listening on http://%s:%d, backend %s", config.bind_host, listener.port, config.backend_url)
        log.info("at most %d connections, %d descriptors", listener.connections.count_max, descriptor_count_max)
        await signals.stop.wait()
        log.info(stopping(app[LIVES].unanswered, config.drain_timeout_s))
        await unless(signals.hurry, drain(app))  # while newcomers still reach us, to be told to come again


def stopping(count: int, drain_timeout_s: float) -> str:
    """`count`: of the requests that clients still wait for."""
    if not count:
        return "stopping"
    what = "1 request has" if count == 1 else f"{count} requests have"
    return f"stopping: {what} {drain_timeout_s:g} s to finish; what was computed by then is kept"


class Signals:
    """The first SIGTERM or SIGINT asks to stop, the next one to hurry."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def unless(event: asyncio.Event, work: Coroutine[None, None, None]) -> None:
    """Do it, or leave it where the event comes first."""
    waiting, working = asyncio.create_task(event.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait([waiting, working], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        working.cancel()
    with suppress(asyncio.CancelledError):
        await working


@asynccontextmanager
async def announced(config: Config, port: int, retry_interval_s: float = ANNOUNCE_INTERVAL_S) -> AsyncIterator[None]:
    """While the proxy listens, its pid and address can be read from the run directory, as soon as that takes them; and
    from then on, whose cache the settings' key has.
    """
    address = json.dumps({"pid": os.getpid(), "url": local_url(config.bind_host, port)})
    texts = {config.home.run / "proxy.json": address, config.home.pid_file("proxy"): f"{os.getpid()}\n"}
    if tenant := tenant_of(config.client_key):
        told = {config.home.settings_tenant: f"{tenant}\n", **texts}
    else:
        told = texts
        remove([config.home.settings_tenant])
    telling = None if _tell(told) else asyncio.create_task(_tell_later(told, retry_interval_s))
    try:
        yield
    finally:
        if telling is not None:
            telling.cancel()
        remove(list(texts))


def _tell(texts: Mapping[Path, str], *, again: bool = False) -> bool:
    try:
        for path, text in texts.items():
            disk.write_small(path, text)
    except OSError as error:
        if not again:
            log.warning("our address could not be written down, so cachectl will not find us: %s", error)
        return False
    return True


async def _tell_later(texts: Mapping[Path, str], interval_s: float) -> None:
    """A disk that is full, or read-only, may be mended while we serve."""
    told = False
    while not told:
        await asyncio.sleep(interval_s)
        told = await asyncio.to_thread(_tell, texts, again=True)


def local_url(host: str, port: int) -> str:
    """Where a process on this machine reaches the proxy."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def remove(files: Sequence[Path]) -> None:
    for file in files:
        with suppress(OSError):
            disk.delete(file)


if __name__ == "__main__":
    begin_private()
    kept.end(lambda: main(sys.argv[1:]))
