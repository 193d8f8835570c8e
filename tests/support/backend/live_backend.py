"""Backend in this process: a real engine, a tiny model and a real socket."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from warmline_backend.config import parse_config
from warmline_backend.engine.engine import Engine
from warmline_backend.engine.inflight import InflightGeneration
from warmline_backend.generation.events import EndedEvent, GenerationEvent
from warmline_backend.generation.sequence import Sequence
from warmline_backend.model.model import load_served_model
from warmline_backend.scheduler.scheduler import Scheduler, SchedulerSettings
from warmline_backend.server.routes import make_app
from warmline_backend.server.service import Service
from warmline_common.protocol.messages import (
    HEADER_PROMPT,
    HEADER_REQUEST,
    RESULT_EVENT,
    GenerationResult,
    PromptReply,
    PromptRequest,
    decode,
    encode,
)
from warmline_common.protocol.sse import SseParser
from warmline_common.storage.home import Home

WAIT_S = 20.0
SECRET = "secret"
BODY = {"messages": [{"role": "user", "content": "hello " * 30}], "max_tokens": 6, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 50_000}


class LiveBackend:
    """Engine, service, and an application on a socket."""

    def __init__(
        self, service: Service, engine: Engine, home: Home, session: aiohttp.ClientSession, listening: socket.socket
    ) -> None:
        self.service, self.engine, self.home, self.session, self.listening = service, engine, home, session, listening

    async def run_on_engine(self, work: Callable[[Scheduler], Any]) -> Any:
        return await asyncio.wrap_future(self.engine.submit(work))

    def send(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request, for `async with`; `body` is whatever `warmline_common.protocol.messages.encode` takes."""
        own = {"Authorization": f"Bearer {SECRET}", **headers}
        return self.session.request(method, path, data=None if body is None else encode(body), headers=own)

    async def request_json(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        async with self.send(method, path, body, **headers) as response:
            return response.status, await response.json()

    async def render_prompt(self, body: dict[str, Any] = BODY) -> PromptReply:
        request = PromptRequest(request_id="p", endpoint="chat", body=body)
        async with self.send("POST", "/kv/prompts", request) as response:
            assert response.status == 200, await response.text()
            return decode(await response.read(), PromptReply)

    def start_generation(
        self, request_id: str, prompt: PromptReply
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {HEADER_REQUEST: request_id, HEADER_PROMPT: prompt.prompt_id}
        return self.send("POST", "/v1/chat/completions", **headers)

    def is_in_engine(self, request_id: str) -> Awaitable[bool]:
        return self.run_on_engine(lambda scheduler: scheduler._queues.find(request_id) is not None)


@asynccontextmanager
async def run_backend(
    model: Path,
    folder: Path,
    *,
    step: int = 2048,
    budget: int = 1 << 30,
    make: Callable[[Callable[[], Scheduler]], Scheduler] = lambda build: build(),
) -> AsyncIterator[LiveBackend]:
    """Run a backend; `make` may act before or after the scheduler is built, on the engine thread."""
    config = parse_config(["--home", str(folder / "home"), "--model", str(model)])
    home = Home(config.home)
    home.prepare()

    def build() -> Scheduler:
        settings = SchedulerSettings(
            boot="boot",
            memory_budget_bytes=budget,
            prefill_step_size=step,
            running_count_max=8,
            keeps_residents=True,
        )
        return Scheduler(load_served_model(config.model, config.served_name), settings)

    engine = Engine(lambda: make(build))
    service = Service(config, home, engine, "boot")
    runner = web.AppRunner(make_app(service, SECRET), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    engine.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    timeout = aiohttp.ClientTimeout(WAIT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        try:
            yield LiveBackend(service, engine, home, session, listening)
        finally:
            await runner.cleanup()
            service.close()
            engine.stop()
            await asyncio.wrap_future(engine.ended)


def with_backend(model: Path, folder: Path, work: Callable[[LiveBackend], Awaitable[None]], **options: Any) -> None:
    """Run `work` over a backend whose model is loaded."""

    async def run() -> None:
        async with run_backend(model, folder, **options) as backend:
            await backend.service.wait_until_loaded()
            await work(backend)

    asyncio.run(run())


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  what it waits for tells nobody
            await asyncio.sleep(0)


async def read_until(response: aiohttp.ClientResponse, word: bytes) -> bytes:
    """Read a stream up to a line with `word`."""
    async for line in response.content:
        if word in line:
            return bytes(line)
    raise AssertionError(f"the stream ended without {word!r}")


async def read_result(response: aiohttp.ClientResponse) -> GenerationResult:
    """Read a stream to its closing event."""
    parser, found = SseParser(), None
    async for data in response.content.iter_any():
        for event in parser.feed(data):
            if event.name == RESULT_EVENT.encode():
                found = decode(event.data, GenerationResult)
    assert found is not None, "the stream ended without saying how"
    return found


async def next_event(call: InflightGeneration, kind: type[GenerationEvent]) -> GenerationEvent:
    """Wait for the next event of this kind."""
    while not isinstance(event := await asyncio.wait_for(call.events.get(), WAIT_S), kind):
        assert not isinstance(event, EndedEvent), event
    return event


class EngineHold:
    """Command that holds the engine, like a long step."""

    def __init__(self, engine: Engine) -> None:
        self._started, self._released = threading.Event(), threading.Event()
        self._held = engine.submit(lambda _: self._wait())

    def _wait(self) -> None:
        self._started.set()
        assert self._released.wait(WAIT_S)

    async def __aenter__(self) -> None:
        assert await asyncio.to_thread(self._started.wait, WAIT_S)

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def release(self) -> None:
        self._released.set()
        await asyncio.wrap_future(self._held)


class ChunkGate:
    """Gate that holds each prefill chunk until it is released."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._arrivals, self._pass, self.open = threading.Semaphore(0), threading.Semaphore(0), False
        real = Sequence.prefill_chunk

        def gated(sequence: Sequence, step: int) -> int:
            if not self.open:
                self._arrivals.release()
                assert self._pass.acquire(timeout=WAIT_S)
            return real(sequence, step)

        patch.setattr(Sequence, "prefill_chunk", gated)

    async def wait_for_chunk(self) -> None:
        assert await asyncio.to_thread(self._arrivals.acquire, True, WAIT_S)

    def release(self) -> None:
        self._pass.release()

    def open_for_all(self) -> None:
        self.open = True
        self._pass.release()
