"""When a backend is past hope, and that it is ended then: a real process stands for it, so that the kill is one too."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from harness import on_loop, pair

from warmline_proxy.upstream import Unreachable, Upstream
from warmline_proxy.watchdog import WARMING_STEPS, Watchdog, limit_s, wedged
from warmline_wire.messages import Pulse


def pulse(step_age_s: float = 0.0, slowest_s: float = 0.0, steps: int = 1000) -> Pulse:
    return Pulse(
        boot="b",
        pid=1,
        ready=True,
        busy=step_age_s > 0,
        steps=steps,
        step_age_s=step_age_s,
        slowest_recent_step_s=slowest_s,
    )


def test_a_step_may_take_the_limit_or_five_of_the_slowest() -> None:
    assert limit_s(120, None) == 120
    assert limit_s(120, pulse(slowest_s=10)) == 120
    assert limit_s(120, pulse(slowest_s=57)) == 285
    assert wedged(120, pulse(step_age_s=284, slowest_s=57), 0.0) == ""
    assert "286.0 s" in wedged(120, pulse(step_age_s=286, slowest_s=57), 0.0)


def test_the_first_steps_may_compile() -> None:
    assert wedged(120, pulse(step_age_s=599, steps=WARMING_STEPS - 1), 0.0) == ""
    assert wedged(120, pulse(step_age_s=121, steps=WARMING_STEPS), 0.0) != ""


def test_silence_counts_even_where_nothing_was_ever_heard() -> None:
    assert wedged(10, None, 9.0) == ""
    assert "not answered for 11.0 s" in wedged(10, None, 11.0)
    assert wedged(10, pulse(step_age_s=100), 5.0) == "", "what it said last may be old"


@asynccontextmanager
async def process() -> AsyncIterator[asyncio.subprocess.Process]:
    """One that does nothing until it is killed."""
    code = "import signal; signal.pause()"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@on_loop
async def test_a_step_that_never_returns_ends_the_process(tmp_path: Path) -> None:
    async with process() as child, pair(tmp_path, wedge_timeout_s=0.4) as proxy:
        proxy.backend.pid, proxy.backend.step_age_s = child.pid, 1e6
        assert await child.wait() == -signal.SIGKILL
        proxy.backend.step_age_s = 0.0
        assert (await proxy.status())["backend_kills"] >= 1


@on_loop
async def test_a_process_that_takes_connections_and_says_nothing_is_ended_too(tmp_path: Path) -> None:
    async with process() as child:
        server = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        (pid_file := tmp_path / "backend.pid").write_text(f"{child.pid}\n")
        upstream = Upstream(f"http://127.0.0.1:{port}", "secret")
        watching = asyncio.create_task(Watchdog(upstream, 0.2, pid_file).run())
        assert await child.wait() == -signal.SIGKILL
        watching.cancel()
        await upstream.close()
        server.close()


@on_loop
async def test_requests_wait_for_a_backend_that_starts_and_hear_why_it_does_not(tmp_path: Path) -> None:
    async with pair(tmp_path, connect_timeout_s=0.5) as proxy:
        proxy.backend.ready = False
        await proxy.stop_backend()
        refused = await proxy.chat()
        assert refused.status == 503 and refused.headers["Retry-After"] == "2"
        assert "not reachable" in (await refused.json())["error"]["message"]


@on_loop
async def test_a_request_waits_while_the_model_loads(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        proxy.backend.ready = False
        waiting = asyncio.create_task(proxy.chat())
        while not (await proxy.status())["lives"]:
            pass
        proxy.backend.ready = True
        assert (await waiting).status == 200


@on_loop
async def test_waiting_says_what_for() -> None:
    upstream = Upstream("http://127.0.0.1:9", "secret")
    watchdog = Watchdog(upstream, 10.0, Path("none"))
    watching = asyncio.create_task(watchdog.run())
    with pytest.raises(Unreachable, match=r"not reachable.*waited 0.1 s"):
        await watchdog.up(0.1)
    watching.cancel()
    await upstream.close()
