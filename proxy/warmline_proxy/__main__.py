"""`python -m warmline_proxy`: start, serve until a signal, end cleanly."""

import asyncio
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from warmline_proxy.app import build
from warmline_proxy.config import Config, ConfigError, parse
from warmline_proxy.index import Index, IndexFailure
from warmline_proxy.lock import HomeLocked, home_lock
from warmline_proxy.reconcile import reconcile
from warmline_wire.home import write_private
from warmline_wire.lifeline import end_with_parent

log = logging.getLogger("warmline_proxy")

GRACE_S = 2.0  # for answers under way at a shutdown; aiohttp waits it twice
LOCK_WAIT_S = 10.0  # a predecessor that is ending, or cachectl
DESCRIPTORS_WANTED = 8_192  # a non-login macOS shell gives 256


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 after a signal, 2 for bad settings or a home that another proxy holds, 1 for other failures."""
    try:
        config = parse(arguments)
    except ConfigError as error:
        print(f"warmline_proxy: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a call says nothing that PERF doesn't
    end_with_parent()
    try:
        run(config)
    except HomeLocked as error:  # starting again would not help
        print(f"warmline_proxy: {error}", file=sys.stderr)
        return 2
    except (IndexFailure, OSError) as error:
        print(f"warmline_proxy: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: Config) -> None:
    """Own the home, put the index in order, serve.  Raises HomeLocked, IndexFailure or OSError."""
    raise_descriptor_limit()
    config.home.prepare()
    with home_lock(config.home, LOCK_WAIT_S), Index(config.home, config.disk_budget_bytes) as index:
        report = reconcile(index)
        log.info("index: %s", report)
        asyncio.run(serve(config, index))


async def serve(config: Config, index: Index) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = build(config, config.home.secret(), index)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        port = runner.addresses[0][1]
        with announced(config, port):
            log.info("listening on http://%s:%d, backend %s", config.host, port, config.backend_url)
            await stop.wait()
            log.info("stopping")
            await runner.cleanup()
    finally:
        await runner.cleanup()


@contextmanager
def announced(config: Config, port: int) -> Iterator[None]:
    """While the proxy listens, its pid and address can be read from the run directory."""
    files = (config.home.pid_file("proxy"), config.home.run / "proxy.json")
    write_private(files[1], json.dumps({"pid": os.getpid(), "url": local_url(config.host, port)}))
    write_private(files[0], f"{os.getpid()}\n")
    try:
        yield
    finally:
        remove(files)


def local_url(host: str, port: int) -> str:
    """Where a process on this machine reaches the proxy."""
    if host in ("", "0.0.0.0"):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def remove(files: Sequence[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
