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

from warmline_common.logging import log_loop_error, start_logging
from warmline_common.process import exit_codes
from warmline_common.process.console import write_line
from warmline_common.process.file_limits import DescriptorLimitError, reserve_descriptors
from warmline_common.process.parent_watch import watch_parent
from warmline_common.storage import disk
from warmline_common.storage.home import describe_unusable_home
from warmline_common.storage.permissions import set_private_umask, tighten_permissions
from warmline_proxy.app import COMPONENTS, build_app
from warmline_proxy.auth.key_store import derive_tenant
from warmline_proxy.auth.principals import prepare_keys
from warmline_proxy.config import ProxyConfig, ProxyConfigError, parse_config
from warmline_proxy.home_lock import HomeLockedError, home_lock
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.responses import ResponseLimits
from warmline_proxy.listener import listen

log = logging.getLogger("warmline_proxy")

STOP_MARGIN_S = 15.0  # beyond the drain: to release requests and flush
LOCK_WAIT_S = 10.0  # for an ending proxy, or cachectl
ADDRESS_RETRY_INTERVAL_S = 5.0  # of writing the address files
DESCRIPTOR_COUNT_TARGET = 8_192  # a non-login macOS shell gives 256


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 after a signal, 2 for bad settings or a locked home, 1 for other failures.

    For supervisors a locked home may have another code (`exit_codes.locked_home_exit_code`).
    """
    try:
        config = parse_config(arguments)
        start_logging("proxy", config.log_level, config.log_format, config.log_files, config.home)
        watch_parent(config.drain_timeout_s + STOP_MARGIN_S)
        secret = prepare_home(config)
        run(config, secret)
    except (ProxyConfigError, HomeLockedError, DescriptorLimitError, IndexStoreError, OSError) as error:
        write_line(f"warmline proxy: {error}")
        if isinstance(error, HomeLockedError):
            return exit_codes.locked_home_exit_code()
        return 2 if isinstance(error, (ProxyConfigError, DescriptorLimitError)) else 1
    return 0


def prepare_home(config: ProxyConfig) -> str:
    """Secret of the home, whose folders, permissions and keys are in order.  Raises ProxyConfigError."""
    try:
        config.home.prepare()
        secret = config.home.load_secret()
        if tightened := str(tighten_permissions(config.home)):
            log.warning("the home: %s", tightened)
        prepare_keys(config)
    except OSError as error:
        raise ProxyConfigError(describe_unusable_home(config.home, error)) from error
    return secret


def run(config: ProxyConfig, secret: str) -> None:
    """Lock the home, recover the index, serve.

    Raises DescriptorLimitError, HomeLockedError, IndexStoreError or OSError.
    """
    descriptor_count_max = reserve_descriptors(DESCRIPTOR_COUNT_TARGET)
    days, megabytes, budget_bytes = config.responses_keep_days, config.responses_keep_mb, config.disk_budget_bytes
    limits = ResponseLimits.from_settings(days, megabytes, budget_bytes)
    with (
        home_lock(config.home, LOCK_WAIT_S),
        Index(config.home, budget_bytes, response_limits=limits, keeps_texts=config.keeps_titles) as index,
    ):
        reconcile_index(index)
        asyncio.run(serve(config, secret, index, descriptor_count_max))


def reconcile_index(index: Index) -> None:
    """Recover the index; after a disk error it stays read-only, and is retried while serving."""
    if not index.read_only:
        try:
            log.info("index %s", reconcile(index))
            index.allocate_reserve()
            return
        except (IndexStoreError, OSError) as error:
            index.set_read_only(error)
    log.error("%s; serving continues with the stored KV, and nothing is saved", index.read_only)


async def serve(config: ProxyConfig, secret: str, index: Index, descriptor_count_max: int) -> None:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    signals = ShutdownSignals()
    app = build_app(config, secret, index)
    async with listen(app, config, descriptor_count_max) as listener, publish_address(config, listener.port):
        log.info("listening on http://%s:%d, backend %s", config.bind_host, listener.port, config.backend_url)
        count_max = listener.connections.count_max
        if count_max >= config.connections_max:
            log.info("at most %d connections, %d descriptors", count_max, descriptor_count_max)
        else:
            log.warning(
                "at most %d connections may be open, not %d (connections_max): the system allows this process %d "
                "descriptors, two for a connection; raise the hard limit (ulimit -Hn, LimitNOFILE=)",
                count_max, config.connections_max, descriptor_count_max,
            )  # fmt: skip
        await signals.stop.wait()
        parts, grace_s = app[COMPONENTS], config.drain_timeout_s
        if count := parts.registry.unanswered_count:
            what = "1 request has" if count == 1 else f"{count} requests have"
            log.info("stopping: %s %g s to finish; the KV computed by then is kept", what, grace_s)
        else:
            log.info("stopping")
        # New requests still connect, and get a 503 with Retry-After.
        await run_until_event(signals.stop_now, parts.drain())


class ShutdownSignals:
    """Events of signals: the first SIGTERM or SIGINT sets `stop`, the next `stop_now`."""

    def __init__(self) -> None:
        self.stop, self.stop_now = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.stop_now if self.stop.is_set() else self.stop).set()


async def run_until_event(event: asyncio.Event, coroutine: Coroutine[None, None, None]) -> None:
    """Run the coroutine, and cancel it if the event comes first."""
    waiting, working = asyncio.create_task(event.wait()), asyncio.create_task(coroutine)
    try:
        await asyncio.wait([waiting, working], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        working.cancel()
    with suppress(asyncio.CancelledError):
        await working


@asynccontextmanager
async def publish_address(
    config: ProxyConfig, port: int, retry_interval_s: float = ADDRESS_RETRY_INTERVAL_S
) -> AsyncIterator[None]:
    """Publish pid and URL while the proxy listens, as soon as the disk allows, and the settings key's tenant."""
    address = json.dumps({"pid": os.getpid(), "url": local_url(config.bind_host, port)})
    address_files = {config.home.run / "proxy.json": address, config.home.pid_file("proxy"): f"{os.getpid()}\n"}
    tenant, tenant_file = derive_tenant(config.client_key), config.home.settings_tenant
    if not tenant:
        delete_files([tenant_file])
    files = {tenant_file: f"{tenant}\n", **address_files} if tenant else address_files
    retry_task = None if _write_files(files) else asyncio.create_task(_retry_write_files(files, retry_interval_s))
    try:
        yield
    finally:
        if retry_task is not None:
            retry_task.cancel()
        delete_files(list(address_files))


def _write_files(texts: Mapping[Path, str], *, is_retry: bool = False) -> bool:
    try:
        for path, text in texts.items():
            disk.replace_file(path, text)
    except OSError as error:
        if not is_retry:
            log.warning("our address could not be written down, so cachectl will not find us: %s", error)
        return False
    return True


async def _retry_write_files(texts: Mapping[Path, str], interval_s: float) -> None:
    """Retry until written: a full or read-only disk may recover."""
    is_written = False
    while not is_written:
        await asyncio.sleep(interval_s)
        is_written = await asyncio.to_thread(_write_files, texts, is_retry=True)


def local_url(host: str, port: int) -> str:
    """URL of the proxy for processes on this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def delete_files(files: Sequence[Path]) -> None:
    for file in files:
        with suppress(OSError):
            disk.delete(file)


if __name__ == "__main__":
    set_private_umask()
    exit_codes.run_main(lambda: main(sys.argv[1:]))
