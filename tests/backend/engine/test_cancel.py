"""Cancels in every phase of every call: acknowledged once no work goes on, with nothing left behind."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.backend.live_backend import (
    BODY,
    ENDLESS,
    WAIT_S,
    ChunkGate,
    EngineHold,
    LiveBackend,
    read_result,
    read_until,
    wait_until,
    with_backend,
)
from warmline_backend.engine import inflight, kv_transfer
from warmline_backend.generation.events import EndedEvent
from warmline_backend.kv_cache import segment_io
from warmline_backend.kv_cache.segment_io import write_segment_file
from warmline_common.protocol.messages import HEADER_REQUEST, RestoreRequest, SaveRequest, SegmentRef, SegmentSpec
from warmline_common.storage import segment_file

FolderOf = Callable[..., Path]
PROMPT_TOKENS = 199  # of BODY
LONG = {**BODY, "messages": [{"role": "user", "content": "hello " * 3_000}]}  # rendered on a thread of its own


def start_request(backend: LiveBackend, name: str, body: object) -> "asyncio.Task[tuple[int, Any]]":
    call = backend.request_json("POST", "/v1/chat/completions", body, **{HEADER_REQUEST: name})
    return asyncio.ensure_future(call)


async def cancel_request(backend: LiveBackend, request_id: str, query: str = "") -> tuple[int, dict[str, Any]]:
    return await backend.request_json("DELETE", f"/requests/{request_id}{query}")


async def assert_nothing_is_left(backend: LiveBackend, *, residents: int = 0) -> None:
    scheduler = backend.engine.scheduler
    assert await backend.run_on_engine(lambda _: (scheduler.is_idle, scheduler.running_bytes)) == (True, 0)
    assert len(backend.service.list_residents(with_ids=False).residents) == residents
    assert backend.service.inflight.request_ids == [] and not backend.service.runtime.kv_transfer.is_saving


async def save_conversation(backend: LiveBackend) -> RestoreRequest:
    """Save a conversation and drop it from memory; the request that restores it."""
    async with backend.start_generation("first", await backend.render_prompt()) as response:
        end = await read_result(response)
    upto, file = end.prefilled_until, "a" * 32
    (resident,) = backend.service.list_residents(with_ids=True).residents
    spec = SegmentSpec(id=file, start=0, end=upto)
    await backend.service.save(SaveRequest(request_id="save", resident=resident.id, segments=[spec]))
    assert await backend.service.delete_resident(resident.id)
    link = SegmentRef(id=file, start=0, end=upto, upto=upto)
    return RestoreRequest(request_id="restore", tokens=resident.ids or b"", chain=[link])


# ---- generations


def test_cancel_before_submit(tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: LiveBackend) -> None:
        rendering, go_on = threading.Event(), threading.Event()
        renderer, real = type(backend.service.runtime.renderer), backend.service.runtime.renderer.render

        def slow(self: object, *arguments: object) -> object:
            rendering.set()
            assert go_on.wait(WAIT_S)
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(renderer, "render", slow)
        asking = start_request(backend, "early", LONG)
        assert await asyncio.to_thread(rendering.wait, WAIT_S)
        status, reply = await cancel_request(backend, "early")
        assert status == 200 and (reply["finish"], reply["resident"]) == ("cancelled", "")
        go_on.set()
        status, reply = await asking
        assert status == 499, reply
        await assert_nothing_is_left(backend)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_cancel_during_submit(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async with EngineHold(backend.engine):
            asking = start_request(backend, "a", ENDLESS)
            await wait_until(lambda: "a" in backend.service.inflight.request_ids)
            cancelling = asyncio.ensure_future(cancel_request(backend, "a"))
            leaving = start_request(backend, "b", ENDLESS)
            await wait_until(lambda: "b" in backend.service.inflight.request_ids)
            leaving.cancel()  # its connection breaks off
            await wait_until(lambda: backend.service.inflight._by_id["b"].abandoned)
        status, reply = await cancelling
        assert status == 200 and reply["finish"] == "cancelled"
        assert (await asking)[0] == 499
        await asyncio.wait_for(backend.service.inflight.wait_until_empty(), WAIT_S)
        await assert_nothing_is_left(backend)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_cancel_in_prefill_and_decode(tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt(ENDLESS)
        async with backend.start_generation("a", prompt) as response:
            await chunks.wait_for_chunk()
            assert await read_until(response, b": ") == b": started\n"
            cancelling = asyncio.ensure_future(cancel_request(backend, "a"))
            await wait_until(lambda: not backend.engine._commands.empty())
            chunks.release()  # one, and no more
            _, reply = await cancelling
            assert (reply["finish"], reply["prefilled_until"]) == ("cancelled", 64)
            assert (await read_result(response)).resident == reply["resident"] != ""
        chunks.open_for_all()
        async with backend.start_generation("b", prompt) as response:
            await read_until(response, b'"content":"')
            status, reply = await cancel_request(backend, "b")
            assert status == 200 and reply["finish"] == "cancelled" and reply["resident"]
            end = await read_result(response)
            assert end.prefilled_until == PROMPT_TOKENS + len(end.generated) // 4
        assert (await cancel_request(backend, "b"))[1] == reply, "how it ended is remembered"
        assert (await cancel_request(backend, "nobody"))[0] == 404
        await assert_nothing_is_left(backend, residents=2)

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


def test_detached_prefill_finishes_alone(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt(ENDLESS)
        async with backend.start_generation("a", prompt):
            await chunks.wait_for_chunk()
            finishing = asyncio.ensure_future(cancel_request(backend, "a", "?finish=prefill"))
            await wait_until(lambda: not backend.engine._commands.empty())
            chunks.release()
            assert await finishing == (202, {})
        chunks.open_for_all()  # its connection is closed, and it goes on all the same
        await asyncio.wait_for(backend.service.inflight.wait_until_empty(), WAIT_S)
        (resident,) = backend.service.list_residents(with_ids=False).residents
        assert resident.tokens == PROMPT_TOKENS - 1
        status, reply = await cancel_request(backend, "a")
        assert (status, reply["finish"], reply["resident"]) == (200, "cancelled", resident.id)
        async with backend.start_generation("b", prompt) as response:
            await read_until(response, b'"content":"')
            status, reply = await cancel_request(backend, "b", "?finish=prefill")
            assert (status, reply["finish"]) == (200, "cancelled"), "it decodes already"
        status, reply = await cancel_request(backend, "b", "?finish=never")
        assert status == 400 and "expected prefill" in str(reply["error"])

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


def test_interrupted_detach_leaves_nothing_running(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both connections of the client break before the engine has got the detach."""
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        service = backend.service
        prompt = await service.render_prompt("chat", ENDLESS, 10)
        with service.accept("a") as call:
            await service.generate(call, prompt)
            await chunks.wait_for_chunk()
            finishing = asyncio.ensure_future(service.finish_prefill("a"))
            await wait_until(lambda: not backend.engine._commands.empty())
            finishing.cancel()
            await asyncio.wait({finishing})
            assert finishing.cancelled() and not call.detached
        chunks.open_for_all()
        await asyncio.wait_for(service.inflight.wait_until_empty(), WAIT_S)
        assert (await service.cancel("a")).finish == "cancelled"
        await assert_nothing_is_left(backend, residents=1)

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


def test_detach_of_closed_stream_is_cancelled(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is closed first, relying on the other call; then that call too."""
    chunks = ChunkGate(monkeypatch)

    async def work(backend: LiveBackend) -> None:
        service = backend.service
        prompt = await service.render_prompt("chat", ENDLESS, 10)
        with service.accept("a") as call:
            await service.generate(call, prompt)
            await chunks.wait_for_chunk()
            finishing = asyncio.ensure_future(service.finish_prefill("a"))
            await wait_until(lambda: call.detached)
        assert not call.cancel_sent
        finishing.cancel()
        await asyncio.wait({finishing})
        assert call.cancel_sent
        chunks.open_for_all()
        await asyncio.wait_for(service.inflight.wait_until_empty(), WAIT_S)
        await assert_nothing_is_left(backend, residents=1)

    with_backend(tiny_folder("llama"), tmp_path, work, step=64)


def test_unread_answer_is_cancelled_beyond_queue_limit(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "EVENTS_QUEUED_MAX", 50)

    async def work(backend: LiveBackend) -> None:
        prompt = await backend.service.render_prompt("chat", ENDLESS, 10)
        with backend.service.accept("a") as call:
            await backend.service.generate(call, prompt)
            await asyncio.wait_for(backend.service.inflight.wait_until_empty(), WAIT_S)
            assert call.events.qsize() == 51
            events = [call.events.get_nowait() for _ in range(51)]
        assert isinstance(events[-1], EndedEvent) and events[-1].result.finish == "error"
        assert events[-1].result.error == inflight.EVENTS_OVERFLOW
        await assert_nothing_is_left(backend, residents=1)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_second_call_with_same_id_cancels_first(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt(ENDLESS)) as first:
            await read_until(first, b'"content":"')
            async with backend.start_generation("a", await backend.render_prompt()) as second:
                assert (await read_result(first)).finish == "cancelled"
                assert (await read_result(second)).finish == "length"
        await assert_nothing_is_left(backend, residents=2)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_second_call_cancels_first_before_its_submit(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        service = backend.service
        prompt = await service.render_prompt("chat", ENDLESS, 10)
        with service.accept("a") as first, service.accept("a") as second:
            await service.generate(second, prompt)
            with pytest.raises(segment_io.OperationCancelledError):
                await service.generate(first, prompt)
            assert (await service.cancel("a")).finish == "cancelled"
            assert not await backend.is_in_engine("a"), "one DELETE ends all of that name"
        assert service.inflight.request_ids == []

    with_backend(tiny_folder("llama"), tmp_path, work)


# ---- restores and saves


async def wait_for_cancel(backend: LiveBackend) -> None:
    await wait_until(lambda: any(job.cancelled.is_set() for job in backend.service.runtime.kv_transfer._jobs))


async def check_cancel_acknowledged(backend: LiveBackend, work: "asyncio.Task[object]", name: str) -> None:
    """Cancel a restore or save by its id; both calls are answered."""
    status, reply = await cancel_request(backend, name)
    assert (status, reply["finish"]) == (200, "cancelled")
    with pytest.raises(segment_io.OperationCancelledError):
        await work


def restore_chain(backend: LiveBackend, request: RestoreRequest) -> "asyncio.Task[object]":
    return asyncio.ensure_future(backend.service.restore(request))


def test_cancel_restore_before_engine_gets_it(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        request = await save_conversation(backend)
        async with EngineHold(backend.engine):
            task = restore_chain(backend, request)
            await wait_until(lambda: not backend.engine._commands.empty())
            await check_cancel_acknowledged(backend, task, "restore")  # while the engine is still at something else
        await assert_nothing_is_left(backend)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_cancel_restore_waiting_for_memory(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        request = await save_conversation(backend)
        await backend.run_on_engine(
            lambda scheduler: scheduler.admission.reserve("other", scheduler.residents.budget_bytes, lambda: None)
        )
        task = restore_chain(backend, request)
        while not await backend.run_on_engine(lambda scheduler: scheduler.is_blocked):
            pass
        await check_cancel_acknowledged(backend, task, "restore")
        await backend.run_on_engine(lambda scheduler: scheduler.admission.release("other"))
        await assert_nothing_is_left(backend)
        assert (await backend.service.restore(request)).position == len(request.tokens) // 4
        await assert_nothing_is_left(backend, residents=1)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_cancel_restore_waiting_for_reader(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        request = await save_conversation(backend)
        go_on = threading.Event()
        busy = [
            backend.service.runtime.kv_transfer._loader_pool.submit(go_on.wait, WAIT_S)
            for _ in range(kv_transfer.LOADER_THREADS)
        ]
        task = restore_chain(backend, request)
        while not await backend.run_on_engine(lambda scheduler: scheduler.running_bytes):
            pass
        await check_cancel_acknowledged(backend, task, "restore")
        await assert_nothing_is_left(backend)
        go_on.set()
        assert all(future.result(WAIT_S) for future in busy)

    with_backend(tiny_folder("llama"), tmp_path, work)


@pytest.mark.parametrize("leaving", ["cancelled", "the caller is gone"])
def test_cancelled_restore_keeps_memory_until_reader_stops(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: str
) -> None:
    reading, go_on, real = threading.Event(), threading.Event(), segment_file.read_header

    def slow(path: Path) -> object:
        reading.set()
        assert go_on.wait(WAIT_S)
        return real(path)

    async def work(backend: LiveBackend) -> None:
        request = await save_conversation(backend)
        monkeypatch.setattr(segment_file, "read_header", slow)
        task = restore_chain(backend, request)
        assert await asyncio.to_thread(reading.wait, WAIT_S)
        if leaving == "cancelled":
            ending = asyncio.ensure_future(check_cancel_acknowledged(backend, task, "restore"))
            await wait_for_cancel(backend)
            assert not ending.done()
        else:
            task.cancel()
            ending = asyncio.ensure_future(asyncio.wait({task}))
            await ending
        assert await backend.run_on_engine(lambda scheduler: scheduler.running_bytes) > 0
        go_on.set()
        await ending
        while await backend.run_on_engine(lambda scheduler: scheduler.running_bytes):
            pass
        await assert_nothing_is_left(backend)

    with_backend(tiny_folder("llama"), tmp_path, work)


@pytest.mark.parametrize("leaving", ["cancelled", "the caller is gone"])
def test_restore_cancelled_while_installing_leaves_no_resident(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: str
) -> None:
    async def work(backend: LiveBackend) -> None:
        request = await save_conversation(backend)
        scheduler = backend.engine.scheduler
        installing, go_on, real = threading.Event(), threading.Event(), scheduler.install_resident

        def slow(*arguments: object) -> str:
            installing.set()
            assert go_on.wait(WAIT_S)
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(scheduler, "install_resident", slow)
        task = restore_chain(backend, request)
        assert await asyncio.to_thread(installing.wait, WAIT_S)
        if leaving == "cancelled":
            cancelling = asyncio.ensure_future(check_cancel_acknowledged(backend, task, "restore"))
            await wait_for_cancel(backend)
            go_on.set()
            await cancelling
        else:
            task.cancel()
            await asyncio.wait({task})
            go_on.set()
        while await backend.run_on_engine(lambda scheduler: len(scheduler.residents)):
            pass
        await assert_nothing_is_left(backend)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_cancel_save_in_each_phase(tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt()) as response:
            end = await read_result(response)
        spec = SegmentSpec(id="a" * 32, start=0, end=end.prefilled_until)
        request = SaveRequest(request_id="save", resident=end.resident, segments=[spec])

        def saving() -> "asyncio.Task[object]":
            return asyncio.ensure_future(backend.service.save(request))

        async with EngineHold(backend.engine):
            task = saving()
            await asyncio.sleep(0)
            await check_cancel_acknowledged(backend, task, "save")

        go_on = threading.Event()
        backend.service.runtime.kv_transfer._writer_pool.submit(go_on.wait, WAIT_S)  # another save is being written
        task = saving()
        await wait_until(lambda: backend.service.runtime.kv_transfer._writer_pool._work_queue.qsize() > 0)
        await check_cancel_acknowledged(backend, task, "save")
        go_on.set()

        writing, go_on = threading.Event(), threading.Event()

        def slow(*arguments: object) -> object:
            writing.set()
            assert go_on.wait(WAIT_S)
            return write_segment_file(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(segment_io, "write_segment_file", slow)
            task = saving()
            assert await asyncio.to_thread(writing.wait, WAIT_S)
            cancelling = asyncio.ensure_future(check_cancel_acknowledged(backend, task, "save"))
            await wait_for_cancel(backend)
            go_on.set()
            await cancelling
        assert list(backend.home.segments.rglob("*.safetensors")) == []
        await assert_nothing_is_left(backend, residents=1)
        await saving()
        assert [file.stem for file in backend.home.segments.rglob("*.safetensors")] == ["a" * 32]

    with_backend(tiny_folder("llama"), tmp_path, work)
