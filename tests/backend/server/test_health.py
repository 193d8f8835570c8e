"""Health and readiness of an engine that loads, computes, hangs, waits or has ended."""

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from support.backend.live_backend import (
    ENDLESS,
    WAIT_S,
    ChunkGate,
    EngineHold,
    LiveBackend,
    read_result,
    read_until,
    run_backend,
    with_backend,
)
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_backend.server import health
from warmline_common.protocol.messages import BackendStatus, HealthReply, MemoryShare, decode

FolderOf = Callable[..., Path]


async def read_health(backend: LiveBackend) -> HealthReply:
    async with backend.session.get("/health") as response:  # without a secret
        assert response.status == 200
        return decode(await response.read(), HealthReply)


async def wait_until_idle(backend: LiveBackend) -> HealthReply:
    """Wait until the engine has nothing left to do."""
    async with asyncio.timeout(WAIT_S):
        while (health := await read_health(backend)).busy:
            pass
    return health


async def read_ready(backend: LiveBackend) -> tuple[int, str]:
    status, reply = await backend.request_json("GET", "/ready")
    assert reply["ready"] == (status == 200)
    return status, reply["reason"]


async def read_ready_when_idle(backend: LiveBackend) -> tuple[int, str]:
    await wait_until_idle(backend)
    return await read_ready(backend)


def test_health_while_model_loads(tiny_folder: FolderOf, tmp_path: Path) -> None:
    load_now = threading.Event()

    def make(build: Callable[[], Scheduler]) -> Scheduler:
        assert load_now.wait(WAIT_S)
        return build()

    async def run() -> None:
        async with run_backend(tiny_folder("llama"), tmp_path, make=make) as backend:
            health = await read_health(backend)
            assert (health.ready, health.busy, health.steps, health.step_age_s) == (False, False, 0, 0.0)
            assert health.failure == "the model is still loading"
            assert await read_ready(backend) == (503, "the model is still loading")
            share = MemoryShare(kv_bytes=1, usable_bytes=1)
            assert (await backend.request_json("PUT", "/kv/memory", share))[0] == 503
            load_now.set()
            await backend.service.wait_until_loaded()
            health = await read_health(backend)
            assert health.ready and health.failure == "" and health.boot == "boot"

    asyncio.run(run())


def test_health_counts_steps_and_shows_hanging_step(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt()) as response:
            assert (await read_result(response)).finish == "length"
        idle = await wait_until_idle(backend)
        assert idle.steps >= 7 and idle.step_age_s == 0.0  # a chunk and six tokens
        async with EngineHold(backend.engine):
            first, second = await read_health(backend), await read_health(backend)
            assert first.busy and first.ready and first.steps == second.steps
            assert 0 < first.step_age_s < second.step_age_s
        assert (await wait_until_idle(backend)).steps > second.steps

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_waiting_calls_get_engine_end(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt(ENDLESS)) as response:
            await read_until(response, b'"content":"')

            def break_it(scheduler: Scheduler) -> None:
                scheduler._decode_group = lambda group: 1 / 0  # type: ignore[assignment, method-assign, return-value]

            await backend.run_on_engine(break_it)
            error = await read_until(response, b'"error"')
            end = await read_result(response)
        assert b"the engine has ended: division by zero" in error and b"[DONE]" not in error
        assert (end.finish, end.resident, end.error) == ("discarded", "", "the engine has ended: division by zero")
        health = await read_health(backend)
        assert not health.ready and not health.busy and health.failure == "the engine has ended: division by zero"
        assert await read_ready(backend) == (503, health.failure)
        status, reply = await backend.request_json("DELETE", "/requests/a")
        assert (status, reply["error"]["message"]) == (503, health.failure)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_idle_engine_is_ready_after_probe(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[str] = []
    complaints: list[dict[str, object]] = []

    async def work(backend: LiveBackend) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        scheduler = backend.engine.scheduler
        real = scheduler.probe

        def counted() -> None:
            probes.append(threading.current_thread().name)
            real()

        monkeypatch.setattr(scheduler, "probe", counted)
        monkeypatch.setattr(health, "PROBE_INTERVAL_S", 1e9)
        assert [await read_ready_when_idle(backend) for _ in range(3)] == [(200, "")] * 3
        assert probes == ["engine"], "one for all who ask within the interval"

        def broken() -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(scheduler, "probe", broken)
        monkeypatch.setattr(health, "PROBE_INTERVAL_S", 0.0)
        assert await read_ready_when_idle(backend) == (503, "the engine could not compute a token: the device is gone")
        gc.collect()
        assert complaints == [], "whoever asked has heard"

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_hanging_probe_is_not_ready(tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: LiveBackend) -> None:
        started, go_on = threading.Event(), threading.Event()

        def hang() -> None:
            started.set()
            assert go_on.wait(WAIT_S)

        with monkeypatch.context() as patch:
            patch.setattr(backend.engine.scheduler, "probe", hang)
            asking = asyncio.ensure_future(read_ready_when_idle(backend))
            assert await asyncio.to_thread(started.wait, WAIT_S)
            patch.setattr(health, "PROBE_TIMEOUT_S", 0.01)
            assert await read_ready(backend) == (503, "the engine has not computed a token in 0.01 s")
            go_on.set()
            assert await asking == (200, ""), "who has asked before hears of it when it comes"
        assert await read_ready_when_idle(backend) == (200, "")

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_busy_engine_is_ready_while_step_is_young(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefill keeps it ready as long as its chunks end."""
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        monkeypatch.setattr(backend.engine.scheduler, "probe", lambda: 1 / 0)
        async with backend.start_generation("a", await backend.render_prompt()):
            await chunks.wait_for_chunk()
            assert await read_ready(backend) == (200, "")
            monkeypatch.setattr(health, "STEP_AGE_MAX_S", 0.0)
            status, reason = await read_ready(backend)
            assert status == 503 and reason.startswith("the engine's present step has been going on for ")
            chunks.open_for_all()

    with_backend(tiny_folder("llama"), tmp_path, work, step=16)


def test_shutting_down_process_is_not_ready(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        backend.service.shut_down()
        assert await read_ready(backend) == (503, "shutting down")
        async with EngineHold(backend.engine):
            health = await read_health(backend)
            assert (health.ready, health.failure) == (False, "shutting down")
            assert health.busy and health.step_age_s > 0, "its engine is alive, and watched"

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_memory_and_tasks_are_stable_over_requests(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async def read_settled_status() -> BackendStatus:
            """Process stats after the step that decoding computes ahead: it ends after its request, and holds
            memory.
            """
            await backend.run_on_engine(lambda _: mx.synchronize())
            async with backend.send("GET", "/kv/status") as response:
                return decode(await response.read(), BackendStatus)

        async def leave(name: str) -> None:
            async with backend.start_generation(name, await backend.render_prompt(ENDLESS)) as response:
                await read_until(response, b'"content":"')
                status, _ = await backend.request_json("DELETE", f"/requests/{name}")
                assert status == 200
                resident = (await read_result(response)).resident
            assert await backend.service.delete_resident(resident)

        gc.collect()  # what other tests left in this process must not go while this one weighs
        await leave("warm up")
        before = await read_settled_status()
        assert before.vitals.tasks > 0 and before.vitals.threads > 1 and before.vitals.descriptors > 3
        assert before.vitals.bytes_unaccounted >= 0
        for turn in range(3):
            await leave(str(turn))
            after = await read_settled_status()
            assert after.vitals == before.vitals and after.resident_bytes == after.running_bytes == 0

    with_backend(tiny_folder("llama"), tmp_path, work)
