"""`python -m warmline_backend`: one model behind loopback HTTP.

Exit codes: 0 after a clean stop, 2 for a fault of the configuration or the model (a restart would not help), else 1.
A supervisor may get other codes: see `warmline_common.process.exit_codes`.
"""

import asyncio
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import mlx.core as mx
from aiohttp import web

from warmline_backend.config import BackendConfig, BackendConfigError, parse_config
from warmline_backend.engine.chunk_size import choose_grid, make_chunk_memory, resolve_step_size
from warmline_backend.engine.engine import Engine
from warmline_backend.engine.pass_costs import resolve_pass_costs
from warmline_backend.engine.warm_up import warm_up
from warmline_backend.generation.chunk_memory import bound_buffer_cache
from warmline_backend.generation.rates import Rates
from warmline_backend.model.cuda_graphs import set_graph_defaults
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import MemoryLimits, ServedModel, get_machine_bytes, load_served_model
from warmline_backend.model.wired_memory import limit_wired_memory
from warmline_backend.scheduler.scheduler import Scheduler, SchedulerSettings
from warmline_backend.server.routes import make_app
from warmline_backend.server.runtime import fingerprint_served_model
from warmline_backend.server.service import Service
from warmline_backend.server.shutdown import StopSignals, drain, run_until_event
from warmline_backend.server.unreadable_requests import log_unreadable_requests_briefly
from warmline_backend.speculation.model_drafter import ModelDrafter
from warmline_backend.speculation.speculation import Speculation
from warmline_common.logging import log_loop_error, start_logging
from warmline_common.measurement.model_memory import compute_memory_budget
from warmline_common.process import exit_codes
from warmline_common.process.console import write_line
from warmline_common.process.file_limits import DescriptorLimitError, reserve_descriptors
from warmline_common.process.keeper_pipes.announcement import Announcement, Announcer
from warmline_common.process.keeper_pipes.standby import STANDBY_FLAG, read_order, wait_for_release
from warmline_common.process.parent_watch import watch_parent
from warmline_common.process_files import ProcessFiles, describe_process
from warmline_common.storage.file_lock import InstanceLock, LockedError, process_lock
from warmline_common.storage.home import Home, describe_unusable_home
from warmline_common.storage.permissions import set_private_umask

log = logging.getLogger("warmline_backend")  # run as a module, it would be called __main__

LOCK_WAIT_S = 10.0  # for a predecessor that is ending
THREAD_SWITCH_INTERVAL_S = 0.0005
DESCRIPTOR_LIMIT = 8_192  # one per connection
GRACE_AFTER_DRAIN_S = 15.0  # before the supervisor or the parent watch kills the process; includes the waits below
THREADS_WAIT_S = 4.0  # for threads to end their present work
POLL_S = 0.002  # while threads end: another model may wait for the memory
SHUTDOWN_S = 1.0  # for the last bytes of streams; aiohttp waits it twice


def main_or_standby(arguments: list[str]) -> int:
    """`main`, of a standby process once it is given an order; 0 where it is not needed."""
    if arguments != [STANDBY_FLAG]:
        return main(arguments)
    order = read_order(sys.stdin.buffer)
    return 0 if order is None else main(order.arguments, is_held=order.is_held)


def main(arguments: list[str], *, is_held: bool = False) -> int:
    """Serve, and return the exit code.  `is_held`: load nothing before the keeper says so on standard input."""
    announcer = Announcer()
    try:
        config = parse_config(arguments)
    except BackendConfigError as error:
        return _refuse_start(str(error), announcer)
    home = Home(config.home, config.instance)
    start_logging(home.backend_name, config.log_level, config.log_format, config.log_files, home)
    log_unreadable_requests_briefly()
    watch_parent(config.drain_timeout_s + GRACE_AFTER_DRAIN_S)
    try:
        log.info("%d descriptors may be open", reserve_descriptors(DESCRIPTOR_LIMIT))
    except DescriptorLimitError as error:
        return _refuse_start(str(error), announcer)
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
    set_graph_defaults()
    try:
        home.prepare()
        secret = home.load_secret()
    except OSError as error:
        return _refuse_start(describe_unusable_home(home, error), announcer)
    try:
        with _hold_lock(home) as complete_lock:
            before_weights = _wait_for_release if is_held else _go_on
            return asyncio.run(_serve(config, home, announcer, complete_lock, secret, before_weights))
    except LockedError as error:
        write_line(f"warmline backend: {home.root} is {error}, another backend; use another --home")
        return exit_codes.locked_home_exit_code()


@contextmanager
def _hold_lock(home: Home) -> Iterator[Callable[[], None]]:
    """Hold the backend's lock; yields what makes it complete, to be called until it does not raise OSError.

    Raises LockedError, OSError.
    """
    if home.instance:
        lock = InstanceLock(home.backend_lock)
        with lock.hold(LOCK_WAIT_S):
            yield lock.complete
    else:
        with process_lock(home.backend_lock, LOCK_WAIT_S) as write_pid:
            yield write_pid


def _go_on() -> None:
    """Wait for nothing: there is memory for the model."""


def _wait_for_release() -> None:
    """Wait on the engine thread until there is memory for the model; end the process where the keeper has died."""
    mx.eval(mx.zeros(1))  # the device is initialized meanwhile
    if not wait_for_release(sys.stdin.buffer):
        os._exit(0)


def _refuse_start(problem: str, announcer: Announcer) -> int:
    """Write why the process ends, and return its exit code; a restart would not help."""
    write_line(f"warmline backend: {problem}")
    announcer.announce(Announcement(failure=problem))
    return 2


async def _serve(
    config: BackendConfig,
    home: Home,
    announcer: Announcer,
    complete_lock: Callable[[], None],
    secret: str,
    before_weights: Callable[[], None],
) -> int:
    initial_threads = set(threading.enumerate())
    helpers = ThreadPoolExecutor(thread_name_prefix="helper")
    asyncio.get_running_loop().set_default_executor(helpers)
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    boot = secrets.token_hex(8)
    engine = Engine(lambda: _make_scheduler(config, home, boot, before_weights), config.gpu_keepalive_s)
    service = Service(config, home, engine, boot)
    signals = StopSignals()
    app = make_app(service, secret)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port, reuse_address=True).start()
    except OSError as error:
        where = f"{config.host} port {config.port}"
        problem = f"can't listen on {where}: {error}; stop what listens there, or use another port"
        return _refuse_start(problem, announcer)
    port = int(runner.addresses[0][1])
    announcer.announce(Announcement(port))
    engine.start()
    process_files = ProcessFiles(describe_process(home, port), [complete_lock])
    process_files.write()
    code = 1
    try:
        code = await _run_until_stopped(config, service, engine, announcer, signals, port)
    except Exception:
        log.critical("the process ends", exc_info=True)
    finally:
        await runner.cleanup()
        service.close()
        engine.stop()
        helpers.shutdown(wait=False, cancel_futures=True)
        busy = await _wait_for_threads(initial_threads)
        process_files.delete()
        if busy:  # in a step or a disk access that may hang
            log.warning("%s: still at work; the process ends without waiting", ", ".join(busy))
        logging.shutdown()
        # Python would wait for threads, and mlx's may then end the process with a signal once a GPU was used (seen with
        # CUDA), which the supervisor would take for a crash.
        os._exit(exit_codes.map_exit_code(code))


async def _wait_for_threads(excluded: set[threading.Thread]) -> list[str]:
    """Wait for at most THREADS_WAIT_S; names of the threads that still run, but for the `excluded` ones."""
    until = time.monotonic() + THREADS_WAIT_S
    while busy := [thread.name for thread in threading.enumerate() if thread not in excluded]:
        if time.monotonic() >= until:
            break
        await asyncio.sleep(POLL_S)
    return busy


async def _run_until_stopped(
    config: BackendConfig, service: Service, engine: Engine, announcer: Announcer, signals: StopSignals, port: int
) -> int:
    try:
        await run_until_event(signals.stop, service.wait_until_loaded())
    except (ModelError, FileNotFoundError, ValueError) as error:
        return _refuse_start(format_load_failure(config.model, str(error)), announcer)
    if not signals.stop.is_set():
        log.info("serving %s at http://%s:%d", config.served_name, config.host, port)
    await run_until_event(signals.stop, asyncio.wrap_future(engine.ended))
    if not signals.stop.is_set():
        return 1
    await drain(service, config.drain_timeout_s, signals.stop_now)
    return 0


def format_load_failure(model: str, reason: str) -> str:
    """Message that names the model once: most reasons do so themselves."""
    return f"can't serve: {reason}" if model in reason else f"can't serve {model}: {reason}"


def _make_scheduler(
    config: BackendConfig, home: Home, boot: str, before_weights: Callable[[], None] = _go_on
) -> Scheduler:
    """Load the model and make its scheduler on the engine thread, where all mlx arrays have to be made."""
    draft_path = config.draft_model if config.speculation != "off" else ""
    if draft_path != config.draft_model:
        log.warning(
            'the draft model %s is not loaded: speculation is off; leave out draft_model, or speculation = "off"',
            config.draft_model,
        )
    log.info("loading %s", config.model)
    began = time.monotonic()
    limit_wired_memory(config.wired_limit_bytes)
    served = load_served_model(
        config.model,
        config.served_name,
        quantization=config.kv_quantization,
        adapter_path=config.adapter_path,
        draft_path=draft_path,
        trust_remote_code=config.trust_remote_code,
        before_weights=before_weights,
    )
    machine_bytes = config.memory_limit_bytes or get_machine_bytes()
    budget_bytes = config.memory_budget_bytes or compute_memory_budget(served.weight_bytes, machine_bytes)
    budget_bytes = max(budget_bytes, config.memory_share_bytes)  # the shortest context may take more
    memory = MemoryLimits(machine_bytes, budget_bytes, config.memory_usable_bytes or machine_bytes)
    rates = Rates()
    if not (step := config.prefill_step_size):
        fingerprint = fingerprint_served_model(served, config, home)
        step = resolve_step_size(served, fingerprint, memory, home.models, rates)
    chunk_memory = make_chunk_memory(served, step, memory)
    if config.reuse == "exact":
        step = choose_grid(served, chunk_memory, step, memory)
    settings = SchedulerSettings(
        boot=boot,
        memory_budget_bytes=budget_bytes,
        prefill_step_size=step,
        running_count_max=config.running_count_max,
        keeps_residents=config.reuse != "off",
        exact=config.reuse == "exact",
    )
    bound_buffer_cache(served.weight_bytes, memory.usable_bytes, config.mlx_cache_bytes)
    log.info("loaded in %.1f s; warming up", time.monotonic() - began)
    warm_up(served, settings, config.warm_up_s or None, rates)
    speculation = _make_speculation(config, home, served)
    scheduler = Scheduler(served, settings, chunk_memory, rates, speculation)
    if config.memory_share_bytes:
        scheduler.admission.set_budget(config.memory_share_bytes)
    return scheduler


def _make_speculation(config: BackendConfig, home: Home, served: ServedModel) -> Speculation | None:
    """Measure what drafts cost; in exact mode, and for its cold runs, drafts depend on no clock."""
    if config.speculation == "off" or served.layout.problem:
        return None
    model = ModelDrafter(served.draft, served.vocabulary_size) if served.draft is not None else None
    if config.reuse != "fast":
        return Speculation(None, model)
    costs = resolve_pass_costs(served, fingerprint_served_model(served, config, home), home.models)
    return Speculation(costs, model) if costs is not None else None


if __name__ == "__main__":
    set_private_umask()
    exit_codes.run_main(lambda: main_or_standby(sys.argv[1:]))
