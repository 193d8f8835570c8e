"""The engine thread: commands, heartbeat, snapshot, and its end."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import load_family, make_prompt
from support.backend.live_backend import BODY, LiveBackend, with_backend
from warmline_backend.engine.engine import Engine, EngineStoppedError
from warmline_backend.generation.events import EndedEvent, GenerationEvent, PrefillProgress, TokenEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.protocol.messages import GenerationResult

FolderOf = Callable[..., Path]
WAIT_S = 20


def run_engine(root: Path) -> Engine:
    # Made on its own thread, as a model is: mlx arrays belong to the thread that computes with them.
    engine = Engine(lambda: SchedulerDriver(load_family.__wrapped__("llama", root)).scheduler)
    engine.start()
    engine.loaded.result(WAIT_S)
    return engine


def make_generation(name: str, ended: "Future[EventLog]", max_tokens: int = 5) -> GenerationRequest:
    log = EventLog()

    def listen(event: GenerationEvent) -> None:
        log.events.append(event)
        if isinstance(event, EndedEvent):
            ended.set_result(log)

    return GenerationRequest(name, make_prompt(40), GenerationParams(max_tokens=max_tokens, ignore_eos=True), listen)


def test_snapshot_shows_resident_at_end(root: Path) -> None:
    engine, ended = run_engine(root), Future[EventLog]()
    engine.submit(lambda scheduler: scheduler.submit(make_generation("a", ended))).result(WAIT_S)
    log = ended.result(WAIT_S)
    listing = engine.scheduler.residents.listing
    assert engine.snapshot.residents == 1 and [each.id for each in listing.list_residents()] == [log.result.resident]
    assert engine.submit(lambda scheduler: scheduler.residents.delete(log.result.resident)).result(WAIT_S)
    assert engine.snapshot.residents == 0 and not listing.list_residents()
    engine.stop()
    engine.ended.result(WAIT_S)


@pytest.mark.parametrize(
    ("moment", "prefilled_until"), [(PrefillProgress, 16), (TokenEvent, 41)], ids=["a chunk", "a token"]
)
def test_cancel_takes_effect_after_present_step(
    root: Path, moment: type[GenerationEvent], prefilled_until: int
) -> None:
    """Cancelled in the middle of a turn, which would go on for eight tokens."""
    engine = Engine(lambda: SchedulerDriver(load_family.__wrapped__("llama", root), step=16).scheduler)
    engine.start()
    engine.loaded.result(WAIT_S)
    ended, cancelled = Future[EventLog](), list[Future[GenerationResult | None]]()
    wanted = make_generation("a", ended, 1000)

    def listen(event: GenerationEvent) -> None:
        wanted.listener(event)
        if isinstance(event, moment) and not cancelled and getattr(event, "done", 1):
            cancelled.append(engine.submit(lambda scheduler: scheduler.cancel("a")))

    engine.submit(lambda scheduler: scheduler.submit(replace(wanted, listener=listen))).result(WAIT_S)
    log = ended.result(WAIT_S)
    assert cancelled[0].result(WAIT_S) == log.result
    assert (log.result.finish, log.result.prefilled_until) == ("cancelled", prefilled_until)
    assert sum(isinstance(event, moment) and bool(getattr(event, "done", 1)) for event in log.events) == 1
    engine.stop()
    engine.ended.result(WAIT_S)


def test_stop_takes_effect_after_present_step(root: Path) -> None:
    engine, ended = run_engine(root), Future[EventLog]()
    wanted = make_generation("a", ended, 1000)
    pieces: list[GenerationEvent] = []

    def listen(event: GenerationEvent) -> None:
        if isinstance(event, TokenEvent):
            pieces.append(event)
            engine.stop()

    engine.submit(lambda scheduler: scheduler.submit(replace(wanted, listener=listen))).result(WAIT_S)
    engine.ended.result(WAIT_S)
    assert len(pieces) == 1 and not engine.heartbeat.is_busy
    assert engine.failure == "the engine has ended"


def test_failing_command_fails_alone(root: Path) -> None:
    engine = run_engine(root)
    with pytest.raises(ZeroDivisionError):
        engine.submit(lambda scheduler: 1 / 0).result(WAIT_S)
    assert engine.submit(lambda scheduler: scheduler.is_idle).result(WAIT_S)
    engine.stop()
    engine.ended.result(WAIT_S)
    with pytest.raises(EngineStoppedError):
        engine.submit(lambda scheduler: scheduler.is_idle).result(WAIT_S)


def test_failure_outside_requests_ends_engine(root: Path) -> None:
    engine = run_engine(root)

    def break_it(scheduler: Scheduler) -> None:
        scheduler._admit = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]

    engine.submit(break_it).result(WAIT_S)
    engine.ended.result(WAIT_S)
    assert engine.failure == "the engine has ended: division by zero"
    with pytest.raises(EngineStoppedError, match=engine.failure):
        engine.submit(lambda scheduler: scheduler.is_idle).result(WAIT_S)


def test_load_failure_is_reported() -> None:
    engine = Engine(lambda: (_ for _ in ()).throw(FileNotFoundError("no such folder")))  # type: ignore[arg-type]
    engine.start()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        engine.loaded.result(WAIT_S)
    engine.ended.result(WAIT_S)


def test_slow_event_loop_does_not_block_engine(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        prompt = await backend.service.render_prompt("chat", {**BODY, "max_tokens": 200}, 10)
        ended = threading.Event()
        with backend.service.accept("a") as call:
            listener = backend.service.inflight.make_listener(call)

            def listen(event: object) -> None:
                listener(event)  # type: ignore[arg-type]
                if isinstance(event, EndedEvent):
                    ended.set()

            await backend.service.inflight.submit(call, GenerationRequest("a", prompt.tokens, prompt.params, listen))
            assert ended.wait(WAIT_S), "computed to its end, while this loop does nothing"
            await asyncio.wait_for(backend.service.inflight.wait_until_empty(), WAIT_S)
            assert call.events.qsize() > 200

    with_backend(tiny_folder("llama"), tmp_path, work)
