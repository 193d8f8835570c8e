"""Service operations over a real engine: cancelled saves leave no file, cancels return results."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support import tiny_models
from warmline_backend.config import BackendConfigError, parse_config
from warmline_backend.engine.engine import Engine
from warmline_backend.engine.inflight import UnknownGenerationError
from warmline_backend.generation import rates
from warmline_backend.generation.chunk_memory import compute_usable_bytes
from warmline_backend.generation.events import EndedEvent
from warmline_backend.kv_cache import segment_io
from warmline_backend.kv_cache.batch_caches import round_up_to_buffer
from warmline_backend.kv_cache.segment_io import BadChainError, OperationCancelledError, write_segment_file
from warmline_backend.model.model import load_served_model
from warmline_backend.request.params import BadRequestError
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_backend.scheduler.scheduler import Scheduler, SchedulerSettings
from warmline_backend.server import prompt_store
from warmline_backend.server.prompt_store import UnknownPromptError
from warmline_backend.server.service import Service
from warmline_backend.structured_output.constraint import Constraint
from warmline_common.protocol.messages import (
    GenerationResult,
    MemoryShare,
    PromptRequest,
    RestoreRequest,
    SaveRequest,
    SegmentRef,
    SegmentSpec,
)
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_common.storage.home import Home

BODY = {"messages": [{"role": "user", "content": "hello " * 30}], "max_tokens": 6, "ignore_eos": True}
IDS = ["a" * 32, "b" * 32]


@asynccontextmanager
async def run_service(folder: Path, *flags: str) -> AsyncIterator[tuple[Service, Home]]:
    model = tiny_models.build("llama", folder / "model")
    config = parse_config(["--home", str(folder / "home"), "--model", str(model), *flags])
    home = Home(config.home)
    home.prepare()

    def make_scheduler() -> Scheduler:
        exact = config.reuse == "exact"
        settings = SchedulerSettings("boot", 1 << 30, config.prefill_step_size, 8, True, exact)
        return Scheduler(
            load_served_model(config.model, config.served_name, quantization=config.kv_quantization), settings
        )

    engine = Engine(make_scheduler)
    service = Service(config, home, engine, "boot")
    engine.start()
    await service.wait_until_loaded()
    try:
        yield service, home
    finally:
        service.close()
        engine.stop()
        await asyncio.wrap_future(engine.ended)


def run_in_service(tmp_path: Path, work: Callable[[Service, Home], Awaitable[None]], *flags: str) -> None:
    async def run() -> None:
        async with run_service(tmp_path, *flags) as (service, home):
            await work(service, home)

    asyncio.run(run())


async def generate(service: Service, name: str = "r") -> tuple[GenerationResult, bytes]:
    """Run a generation to its end; (result, packed prompt)."""
    prompt = await service.render_prompt("chat", BODY, 10)
    with service.accept(name) as call:
        await service.generate(call, prompt)
        while not isinstance(event := await call.events.get(), EndedEvent):
            pass
    return event.result, bytes(service.list_residents(with_ids=True).residents[-1].ids or b"")


def save_request(result: GenerationResult) -> SaveRequest:
    specs = [SegmentSpec(id=IDS[0], start=0, end=64), SegmentSpec(id=IDS[1], start=64, end=result.prefilled_until)]
    return SaveRequest(request_id="save", resident=result.resident, segments=specs)


def wait_for_writer(service: Service) -> "Future[None]":
    """Future that is done once the writer thread has done its queued work."""
    return service.runtime.kv_transfer._writer_pool.submit(lambda: None)


def list_stored(home: Home) -> list[str]:
    return sorted(path.stem for path in home.segments.rglob("*.safetensors"))


def test_failed_save_deletes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: Service, home: Home) -> None:
        result, _ = await generate(service)

        def disk_full(path: Path, *rest: object) -> object:
            if path.stem == IDS[1]:
                raise OSError(28, "No space left on device")
            return write_segment_file(path, *rest)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(segment_io, "write_segment_file", disk_full)
            with pytest.raises(OSError, match="No space left"):
                await service.save(save_request(result))
        assert list_stored(home) == []
        await service.save(save_request(result))
        assert list_stored(home) == IDS

    run_in_service(tmp_path, work)


@pytest.mark.parametrize("leaving", ["the caller is gone", "gone once it is written", "cancelled by id"])
def test_cancelled_save_deletes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaving: str) -> None:
    async def work(service: Service, home: Home) -> None:
        result, _ = await generate(service)
        writing, go_on, written = threading.Event(), threading.Event(), threading.Event()

        def slow(path: Path, *rest: object) -> object:
            writing.set()
            go_on.wait(10)
            try:
                return write_segment_file(path, *rest)  # type: ignore[arg-type]
            finally:
                written.set()

        monkeypatch.setattr(segment_io, "write_segment_file", slow)
        saving = asyncio.ensure_future(service.save(save_request(result)))
        await asyncio.to_thread(writing.wait, 10)
        if leaving == "cancelled by id":
            cancelling = asyncio.ensure_future(service.cancel("save"))
            await asyncio.sleep(0)
            go_on.set()
            assert (await cancelling).finish == "cancelled"
            with pytest.raises(OperationCancelledError):
                await saving
        else:
            if leaving == "gone once it is written":
                go_on.set()
                service.runtime.kv_transfer._writer_pool.submit(lambda: None).result(
                    10
                )  # holding the loop up, so that nobody hears of it
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            go_on.set()
        await asyncio.to_thread(written.wait, 10)
        await asyncio.get_running_loop().run_in_executor(
            service.runtime.kv_transfer._writer_pool, lambda: None
        )  # behind what was being written
        assert list_stored(home) == []

    run_in_service(tmp_path, work)


def test_prompt_store_evicts_beyond_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: Service, home: Home) -> None:
        first, *_, last = [await service.render_prompt("chat", BODY, 10) for _ in range(4)]
        assert service.prompts.get(first.id) and service.prompts.tokens_stored == 4 * len(last.tokens)
        monkeypatch.setattr(prompt_store, "PROMPTS_MAX", 4)
        await service.render_prompt("chat", BODY, 10)
        with pytest.raises(UnknownPromptError):
            service.prompts.get(first.id)
        monkeypatch.setattr(prompt_store, "PROMPT_TOKENS_MAX", 1)
        latest = await service.render_prompt("chat", BODY, 10)
        assert service.prompts.get(latest.id) and service.prompts.tokens_stored == len(latest.tokens)
        with pytest.raises(UnknownPromptError):
            service.prompts.get(last.id)
        held = replace(latest, constraint=Constraint(grammar="x" * 100 * prompt_store.CHARS_PER_TOKEN))
        assert held.weight_tokens == latest.weight_tokens + 100, "a form may be longer than its prompt"

    run_in_service(tmp_path, work)


def test_typos_are_logged_of_accepted_bodies_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(service: Service, home: Home) -> None:
        with pytest.raises(BadRequestError, match="write it 'messages'"):
            await service.render_prompt("chat", {"mesages": BODY["messages"], "temprature": 1}, 10)
        assert "no effect" not in caplog.text
        await service.render_prompt("chat", {**BODY, "temprature": 1}, 10)
        assert "did you mean 'temperature'?" in caplog.text

    run_in_service(tmp_path, work)


def test_saved_kv_is_restored_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SAMPLE_BYTES_MIN", 1)

    async def work(service: Service, home: Home) -> None:
        result, tokens = await generate(service)
        await service.save(save_request(result))
        assert await service.delete_resident(result.resident)
        end = result.prefilled_until
        chain = [SegmentRef(id=IDS[0], start=0, end=64, upto=64), SegmentRef(id=IDS[1], start=64, end=end, upto=end)]
        reply = await service.restore(RestoreRequest(request_id="x", tokens=tokens, chain=chain))
        assert reply.position == end
        assert [resident.id for resident in service.list_residents(with_ids=False).residents] == [reply.resident]
        assert service.read_status().restore_bytes_per_s > 0

    run_in_service(tmp_path, work)


def test_cancel_returns_result_of_ended_request(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        result, _ = await generate(service, "early")
        assert await service.cancel("early") == result
        with pytest.raises(UnknownGenerationError):
            await service.cancel("nobody")

    run_in_service(tmp_path, work)


def test_exact_mode_reports_grid_and_refuses_restore_off_grid(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        layout = service.read_status().layout
        assert layout is not None and (layout.grid, layout.dtype) == (64, "float32")
        result, tokens = await generate(service)
        end = result.prefilled_until
        assert end == 192 and len(tokens) == 4 * end
        await service.save(save_request(result))
        for position in (100, 128):
            chain = [
                SegmentRef(id=IDS[0], start=0, end=64, upto=64),
                SegmentRef(id=IDS[1], start=64, end=end, upto=position),
            ]
            request = RestoreRequest(request_id="r", tokens=tokens[: 4 * position], chain=chain)
            if position % 64:
                with pytest.raises(BadChainError, match="multiples of 64 tokens, the request names 100"):
                    await service.restore(request)
            else:
                assert (await service.restore(request)).position == position

    run_in_service(tmp_path, work, "--reuse", "exact", "--prefill-step-size", "64")


def test_fast_mode_has_no_grid(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        layout = service.read_status().layout
        assert layout is not None and (layout.grid, layout.dtype) == (0, "q8")

    run_in_service(tmp_path, work, "--kv-bits", "8", "--kv-group-size", "32")


def test_exact_mode_needs_steps_of_two_tokens() -> None:
    with pytest.raises(BackendConfigError, match="expected at least 2 with --reuse exact"):
        parse_config(["--home", "h", "--model", "m", "--reuse", "exact", "--prefill-step-size", "1"])


def test_restore_has_room_for_its_request_where_budget_allows(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        result, tokens = await generate(service)
        await service.save(save_request(result))
        end, served = result.prefilled_until, service.runtime.served
        chain = [SegmentRef(id=IDS[0], start=0, end=64, upto=64), SegmentRef(id=IDS[1], start=64, end=end, upto=end)]
        bytes_held = []
        for prompt_tokens in (0, end + 1_000, 100_000_000):
            request = RestoreRequest(request_id="x", tokens=tokens, chain=chain, prompt_tokens=prompt_tokens)
            reply = await service.restore(request)
            residents = {each.id: each for each in service.list_residents(with_ids=False).residents}
            bytes_held.append(residents[reply.resident].bytes_held)
            assert await service.delete_resident(reply.resident)
        assert bytes_held[0] == bytes_held[2], "more than the budget: no room"
        assert bytes_held[1] - bytes_held[0] >= served.kv_bytes(end + 1_000) - served.kv_bytes(round_up_to_buffer(end))

    run_in_service(tmp_path, work)


# ---- memory


def test_prompt_reply_has_bytes_that_admission_counts(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        prompt = await service.create_prompt(PromptRequest(request_id="p", endpoint="chat", body=BODY), 10)
        tokens = len(prompt.tokens) // TOKEN_BYTES + BODY["max_tokens"]
        assert prompt.kv_bytes == service.runtime.served.kv_bytes(round_up_to_buffer(tokens))

    run_in_service(tmp_path, work)


def test_status_shows_present_budget(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        scheduler = service._engine.scheduler
        at_start, weights = scheduler.settings.memory_budget_bytes, scheduler.served.weight_bytes
        for asked, budget in ((5_000_000, 5_000_000), (at_start + 1, at_start)):
            reply = await service.set_memory_share(MemoryShare(kv_bytes=asked, usable_bytes=7_000_000))
            assert reply.kv_bytes == service.read_status().memory_budget_bytes == budget
            assert scheduler.chunk_memory.usable_bytes == compute_usable_bytes(weights, 7_000_000)
        await service.render_prompt("chat", BODY, 10)

    run_in_service(tmp_path, work)


def test_prompt_above_present_budget_is_accepted(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        await service.set_memory_share(MemoryShare(kv_bytes=0, usable_bytes=1 << 30))
        result, _ = await generate(service)
        assert result.finish == "length"

    run_in_service(tmp_path, work)


def test_restore_above_present_budget_waits_or_is_refused(tmp_path: Path) -> None:
    async def work(service: Service, home: Home) -> None:
        result, tokens = await generate(service)
        await service.save(save_request(result))
        assert await service.delete_resident(result.resident)
        end = result.prefilled_until
        chain = [SegmentRef(id=IDS[0], start=0, end=64, upto=64), SegmentRef(id=IDS[1], start=64, end=end, upto=end)]
        request = RestoreRequest(request_id="x", tokens=tokens, chain=chain)
        await service.set_memory_share(MemoryShare(kv_bytes=1000, usable_bytes=1 << 30))
        with pytest.raises(KvTooLargeError, match="more than the memory budget"):
            await service.restore(request)
        await service._run_on_engine(lambda scheduler: scheduler.admission.reserve("other", 1000, lambda: None))
        restoring = asyncio.ensure_future(service.restore(request))
        while not await service._run_on_engine(lambda scheduler: scheduler._queues.reservations.pending):
            assert not restoring.done()
        await service.set_memory_share(MemoryShare(kv_bytes=1 << 30, usable_bytes=1 << 30))
        assert (await restoring).position == end

    run_in_service(tmp_path, work)
