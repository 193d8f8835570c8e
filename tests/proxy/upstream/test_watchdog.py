"""Watchdog: stall limits, and kills of a real process that stands for the backend."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from support.proxy.audits import make_metric_reader
from support.proxy.harness import on_loop, run_proxy, serve
from warmline_common.process.pids import read_command_line
from warmline_common.protocol.messages import HealthReply
from warmline_common.storage.file_lock import process_lock
from warmline_common.storage.home import Home
from warmline_proxy.upstream import transport
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.watchdog import (
    BACKEND_COMMAND,
    WARM_UP_STEPS,
    StallTracker,
    Watchdog,
    is_backend,
    step_limit_s,
)


def make_pulse(step_age_s: float = 0.0, slowest_s: float = 0.0, steps: int = 1000) -> HealthReply:
    return HealthReply(
        boot="b",
        pid=1,
        ready=True,
        busy=step_age_s > 0,
        steps=steps,
        step_age_s=step_age_s,
        slowest_recent_step_s=slowest_s,
    )


def track_pulse(pulse: HealthReply | None, seconds: float, silent: bool = False) -> StallTracker:
    """Track a backend polled once a second that stays in one step, or silent."""
    tracker = StallTracker()
    if pulse:
        tracker.record_pulse(pulse, 1.0)
    for _ in range(int(seconds)):
        if silent or pulse is None:
            tracker.record_silence(1.0)
        else:
            tracker.record_pulse(pulse, 1.0)
    return tracker


def test_step_limit_is_configured_or_five_times_slowest() -> None:
    assert step_limit_s(120, None) == 120
    assert step_limit_s(120, make_pulse(slowest_s=10)) == 120
    assert step_limit_s(120, make_pulse(slowest_s=57)) == 285
    long_step = make_pulse(step_age_s=300, slowest_s=57)
    assert track_pulse(long_step, 285).find_stall_reason(120, long_step) == ""
    assert "300.0 s" in track_pulse(long_step, 286).find_stall_reason(120, long_step)


def test_warm_up_steps_have_larger_limit() -> None:
    first = make_pulse(step_age_s=1e6, steps=WARM_UP_STEPS - 1)
    assert track_pulse(first, 599).find_stall_reason(120, first) == ""
    ninth = make_pulse(step_age_s=1e6, steps=WARM_UP_STEPS)
    assert track_pulse(ninth, 121).find_stall_reason(120, ninth) != ""


def test_silence_stalls_even_without_first_pulse() -> None:
    assert track_pulse(None, 10).find_stall_reason(10, None) == ""
    assert "not answered for 11.0 s" in track_pulse(None, 11).find_stall_reason(10, None)
    assert "not answered" in track_pulse(make_pulse(), 11, silent=True).find_stall_reason(10, make_pulse())


def test_sleep_of_machine_is_no_stall() -> None:
    asleep = make_pulse(step_age_s=3600)
    tracker = StallTracker()
    tracker.record_pulse(asleep, 1.0)
    tracker.record_pulse(asleep, 3600.0)
    assert tracker.find_stall_reason(120, asleep) == ""


def test_new_step_resets_stall() -> None:
    tracker = track_pulse(make_pulse(step_age_s=100), 100)
    assert tracker.record_pulse(make_pulse(step_age_s=1, steps=1001), 1.0)
    assert tracker.stuck_s == 0.0
    assert not tracker.record_pulse(make_pulse(step_age_s=2, steps=1001), 1.0)
    assert tracker.stuck_s == 1.0


@asynccontextmanager
async def run_process(name: str = BACKEND_COMMAND) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that does nothing until it is killed, with `name` in its command line."""
    code = "import signal; print(flush=True); signal.pause()"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, name, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    await child.stdout.readline()  # its command line is set now
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def make_home(folder: Path, pid: int, instance: str = "") -> Home:
    """Home whose backend's pid file names this process."""
    home = Home(folder, instance)
    home.run.mkdir(exist_ok=True)
    home.pid_file("backend").write_text(f"{pid}\n")
    return home


@on_loop
async def test_only_the_holder_of_the_instances_lock_is_a_backend_of_it(tmp_path: Path) -> None:
    async with run_process() as child:
        assert is_backend(child.pid, make_home(tmp_path, child.pid))
        home = make_home(tmp_path, child.pid, "large")
        assert not is_backend(child.pid, home)
        with process_lock(home.backend_lock):
            assert not is_backend(child.pid, home), "another process holds it"
            home.backend_lock.write_text(f"{child.pid}\n")
            assert is_backend(child.pid, home)


@on_loop
async def test_endless_step_kills_process(tmp_path: Path) -> None:
    async with run_process() as child, run_proxy(tmp_path, wedge_timeout_s=0.4) as proxy:
        proxy.backend.pid, proxy.backend.step_age_s = child.pid, 1e6
        assert await child.wait() == -signal.SIGKILL
        proxy.backend.step_age_s = 0.0
        assert (await proxy.status())["backend_kills"] >= 1
        assert await make_metric_reader(proxy, "warmline_wedges_total ")() >= 1


@on_loop
async def test_silent_process_is_killed(tmp_path: Path) -> None:
    async with run_process() as child:
        server = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        home = make_home(tmp_path, child.pid)
        client = Upstream(f"http://127.0.0.1:{port}", "secret")
        watching = asyncio.create_task(Watchdog(client, 0.2, home).run())
        assert await child.wait() == -signal.SIGKILL
        watching.cancel()
        await client.close()
        server.close()


@on_loop
async def test_request_gets_503_with_reason_when_backend_stays_down(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, connect_timeout_s=0.5) as proxy:
        proxy.backend.ready = False
        await proxy.stop_backend()
        refused = await proxy.chat()
        assert refused.status == 503 and refused.headers["Retry-After"] == "2"
        assert "not reachable" in (await refused.json())["error"]["message"]


@on_loop
async def test_request_waits_while_model_loads(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.ready = False
        waiting = asyncio.create_task(proxy.chat())
        while not (await proxy.status())["lives"]:
            pass
        proxy.backend.ready = True
        assert (await waiting).status == 200


@on_loop
async def test_process_of_another_program_is_not_killed(tmp_path: Path) -> None:
    """A killed backend's pid file may have its pid."""
    async with run_process("somebody") as child, run_proxy(tmp_path, wedge_timeout_s=0.2) as proxy:
        assert "somebody" in read_command_line(child.pid)
        proxy.backend.pid, proxy.backend.step_age_s = child.pid, 1e6
        polls_before = proxy.backend.health_checks
        while proxy.backend.health_checks < polls_before + 20:
            await proxy.status()
        assert (await proxy.status())["backend_kills"] == 0 and child.returncode is None


@on_loop
async def test_wait_until_up_times_out_with_reason() -> None:
    client = Upstream("http://127.0.0.1:9", "secret")
    watchdog = Watchdog(client, 10.0, Home(Path("none")))
    watching = asyncio.create_task(watchdog.run())
    with pytest.raises(TimeoutError):
        await watchdog.wait_until_up(0.1)
    assert "not reachable" in watchdog.down_reason
    watching.cancel()
    await client.close()


@on_loop
async def test_connect_timeout_covers_all_dispatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X-Warmline-Connect-Timeout limits a request, not each of its three dispatches."""
    waits: list[float | None] = []
    wait_until_up = Watchdog.wait_until_up

    async def counted(self: Watchdog, timeout_s: float | None = None) -> None:
        if timeout_s:
            waits.append(timeout_s)
        await wait_until_up(self, timeout_s)

    monkeypatch.setattr(Watchdog, "wait_until_up", counted)
    async with run_proxy(tmp_path) as proxy:
        await proxy.stop_backend()
        assert (await proxy.chat(headers={"X-Warmline-Connect-Timeout": "0.2"})).status == 503
        assert sum(filter(None, waits)) <= 0.2 + 1e-6, waits


@on_loop
async def test_watchdog_survives_forbidden_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid of another namespace, or reused by another user's process."""
    tried = asyncio.Event()

    def refuse(pid: int, number: int) -> None:
        tried.set()
        raise PermissionError("not yours")

    async with run_process() as child, run_proxy(tmp_path, wedge_timeout_s=0.4, connect_timeout_s=1) as proxy:
        monkeypatch.setattr(os, "kill", refuse)
        proxy.backend.pid = child.pid
        proxy.backend.step_age_s = 1e6
        await tried.wait()
        proxy.backend.step_age_s = 0.0
        monkeypatch.undo()
        proxy.backend.generation_faults = ["cut"]  # after which the backend is polled before the next call
        assert (await proxy.chat()).status == 200


@on_loop
async def test_foreign_server_on_port_kills_no_process(tmp_path: Path) -> None:
    """The pid file of a killed backend may have the pid of any process by now."""

    async def not_found(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(status=404)

    paths: list[str] = []
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", not_found)
    runner, port = await serve(app)
    async with run_process() as innocent:
        home = make_home(tmp_path, innocent.pid)
        client = Upstream(f"http://127.0.0.1:{port}", "secret")
        watchdog = Watchdog(client, 0.2, home)
        watching = asyncio.create_task(watchdog.run())
        while len(paths) < 20 and not watchdog.kills:  # noqa: ASYNC110  a kill sets no event
            await asyncio.sleep(0.01)
        watching.cancel()
        assert watchdog.kills == 0 and innocent.returncode is None
    await client.close()
    await runner.cleanup()


@on_loop
async def test_process_with_full_backlog_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop is stuck, and connections have filled the kernel's backlog."""
    monkeypatch.setattr(transport, "CONNECT_TIMEOUT_S", 0.1)
    async with run_process() as child:
        stuck = socket.create_server(("127.0.0.1", 0), backlog=0)
        port = stuck.getsockname()[1]
        others = [socket.socket() for _ in range(8)]
        for other in others:
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
        home = make_home(tmp_path, child.pid)
        client = Upstream(f"http://127.0.0.1:{port}", "secret")
        watchdog = Watchdog(client, 0.4, home)
        watching = asyncio.create_task(watchdog.run())
        assert await child.wait() == -signal.SIGKILL
        watching.cancel()
        await client.close()
        for each in (stuck, *others):
            each.close()
