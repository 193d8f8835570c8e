"""Fake keeper with the real protocol on a real socket: its backends are fake ones, started and ended at once."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from support.proxy.fake_backend import FakeBackend
from support.proxy.harness import ProxyHarness, serve
from warmline_common.protocol.keeper import (
    HOLDS_MEMORY,
    LoadRequest,
    ModelsReply,
    ModelStage,
    ModelStatus,
    PinModelRequest,
)
from warmline_common.protocol.messages import ErrorBody, ErrorReply, decode, encode
from warmline_common.settings.models import ModelConfig, format_models
from warmline_common.storage.home import Home
from warmline_proxy.app import build_app
from warmline_proxy.config import ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.listener import listen


class FakeKeeper:
    """Keeper scripted by its attributes; `calls` lists the loads and unloads in their order."""

    def __init__(self, home: Home, sizes: Mapping[str, int], memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.backends = {name: FakeBackend(home, name, hashlib.sha256(name.encode()).hexdigest()) for name in sizes}
        self.status = {
            name: ModelStatus(
                name=name,
                instance=name,
                stage=ModelStage.UNLOADED,
                pinned=False,
                need_bytes=size,
                kv_min_bytes=10**6,
            )
            for name, size in sizes.items()
        }
        self.calls: list[str] = []
        self.wishes: dict[str, int] = {}  # KV bytes by name, as last asked for
        self.ready = True
        self.prepared: list[str] = []
        self.peak_bytes = 0
        self.load_failures: dict[str, str] = {}  # reasons by name, once each
        self.stopping_replies = 0  # loads that are refused, since the keeper stops
        self.loading_allowed = asyncio.Event()
        self.loading_allowed.set()
        self.stopping_allowed = asyncio.Event()
        self.stopping_allowed.set()
        self.boot, self.version = "keeper-1", 0
        self._runners: dict[str, web.AppRunner] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    def make_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/keeper/models", self._get_models)
        app.router.add_post("/keeper/models/{name:.+}/load", self._load)
        app.router.add_post("/keeper/models/{name:.+}/unload", self._unload)
        app.router.add_post("/keeper/models/{name:.+}/prepare", self._prepare)
        app.router.add_post("/keeper/models/{name:.+}/pin", self._pin)
        return app

    @property
    def loaded(self) -> list[str]:
        return [name for name, status in self.status.items() if status.stage is ModelStage.LOADED]

    @property
    def held_bytes(self) -> int:
        return sum(each.need_bytes for each in self.status.values() if each.stage in HOLDS_MEMORY)

    def can_grow(self, name: str, kv_bytes: int) -> bool:
        """True where a loaded model may have this KV budget: the others have the least that they need."""
        return self.held_bytes + kv_bytes - self.status[name].kv_min_bytes <= self.memory_bytes

    async def wait_for_call(self, call: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: call in self.calls)

    async def wait_until_prepared(self, name: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: name in self.prepared)

    async def load(self, name: str) -> None:
        """Load a model at once, as at a keeper's start."""
        await self.publish(name, stage=ModelStage.STARTING)
        await self._finish_load(name)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for runner in self._runners.values():
            await runner.cleanup()

    async def publish(self, name: str, **changes: Any) -> None:
        """Publish a status with these changes."""
        async with self._changed:
            self.status[name] = msgspec.structs.replace(self.status[name], **changes)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            self.version += 1
            self._changed.notify_all()

    def _reply(self) -> web.Response:
        models = list(self.status.values())
        reply = ModelsReply(
            boot=self.boot, version=self.version, memory_bytes=self.memory_bytes, models=models, ready=self.ready
        )
        return web.Response(body=encode(reply), content_type="application/json")

    async def _get_models(self, request: web.Request) -> web.Response:
        seen, wait_s = int(request.query["version"]), float(request.query["wait_s"])
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self.version != seen)
            except TimeoutError:
                pass
        return self._reply()

    async def _record(self, call: str) -> None:
        async with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    async def _prepare(self, request: web.Request) -> web.Response:
        async with self._changed:
            self.prepared.append(request.match_info["name"])
            self._changed.notify_all()
        return self._reply()

    async def _load(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], decode(await request.read(), LoadRequest)
        self.wishes[name] = body.kv_bytes
        if self.status[name].stage is ModelStage.LOADED and not body.kv_bytes:
            return self._reply()  # it keeps what others don't need
        await self._record(f"load {name}" + (f" {body.kv_bytes}" if body.kv_bytes else ""))
        if self.stopping_replies:
            self.stopping_replies -= 1
            error = ErrorBody(message="Warmline stops", code="stopping")
            return web.Response(status=503, body=encode(ErrorReply(error=error)))
        status = self.status[name]
        if status.stage is ModelStage.LOADED and self.can_grow(name, body.kv_bytes):
            await self.publish(name, kv_bytes=body.kv_bytes)
            return self._reply()
        if status.stage is ModelStage.LOADED or status.need_bytes > self.memory_bytes - self.held_bytes:
            error = ErrorBody(message=f"{name} does not fit now", code="no_room")
            return web.Response(status=409, body=encode(ErrorReply(error=error)))
        await self.publish(name, stage=ModelStage.STARTING)
        self._spawn(self._finish_load(name))
        return self._reply()

    async def _finish_load(self, name: str) -> None:
        await self.loading_allowed.wait()
        if self.status[name].stage is not ModelStage.STARTING:
            return  # unloaded meanwhile
        if reason := self.load_failures.pop(name, ""):
            return await self.publish(name, stage=ModelStage.FAILED, reason=reason)
        runner, port = await serve(self.backends[name].make_app())
        self._runners[name] = runner
        kv_bytes = self.status[name].kv_bytes or 10**6
        await self.publish(name, stage=ModelStage.LOADED, port=port, load_s=0.5, kv_bytes=kv_bytes)

    async def _unload(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._record(f"unload {name}")
        await self.publish(name, stage=ModelStage.STOPPING)
        self._spawn(self._finish_unload(name))
        return self._reply()

    async def end_process(self, name: str) -> None:
        if (runner := self._runners.pop(name, None)) is not None:
            await runner.cleanup()
        self.backends[name].restart()

    async def _finish_unload(self, name: str) -> None:
        await self.stopping_allowed.wait()
        await self.end_process(name)
        await self.publish(name, stage=ModelStage.UNLOADED, port=0, kv_bytes=0)

    async def _pin(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], decode(await request.read(), PinModelRequest)
        await self.publish(name, pinned=body.pinned)
        return self._reply()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass
class ModelsHarness(ProxyHarness):
    """Proxy in front of a fake keeper; `backend` is the first model's."""

    keeper: FakeKeeper = field(kw_only=True)

    async def ask(self, model: str, text: str = "What is the capital of France?", **fields: Any) -> Any:
        """Answer of a model: its HTTP status, or 200 and the backend's name by its records."""
        return await self.chat(text, **{"model": model, **fields})

    async def models(self) -> dict[str, Any]:
        """Reply of GET /warmline/models, the models by their names."""
        return await self.as_owner("GET", "")

    async def wait_for_keeper(self) -> None:
        """Wait until the proxy has the keeper's first reply."""
        while not (await self.models())["memory_bytes"]:
            pass

    async def get_ready(self) -> dict[str, Any]:
        async with self.client.get(f"{self.url}/ready") as response:
            answer: dict[str, Any] = await response.json()
            assert answer["ready"] == (response.status == 200)
            return answer

    async def as_owner(self, method: str, path: str, status: int = 200, **body: Any) -> Any:
        headers, url = {"Authorization": f"Bearer {self.home.load_secret()}"}, f"{self.url}/warmline/models{path}"
        async with self.client.request(method, url, headers=headers, json=body or None) as response:
            assert response.status == status, await response.text()
            return await response.json()


def list_served(harness: ModelsHarness) -> dict[str, int]:
    """Generations by model."""
    return {name: len(backend.calls["generate"]) for name, backend in harness.keeper.backends.items()}


async def hold(harness: ModelsHarness, model: str, text: str = "held") -> "asyncio.Task[Any]":
    """Start a request that the model's backend holds after its first chunk."""
    backend = harness.keeper.backends[model]
    backend.hold_after = 1
    backend.holding.clear()
    backend.may_continue.clear()
    running = asyncio.create_task(harness.ask(model, text))
    await backend.holding.wait()
    return running


def release(harness: ModelsHarness, model: str) -> None:
    harness.keeper.backends[model].hold_after = None
    harness.keeper.backends[model].may_continue.set()


async def wait_until_waiting(harness: ModelsHarness, model: str, count: int = 1) -> None:
    while True:
        reports = {each["name"]: each for each in (await harness.models())["models"]}
        if reports[model]["waiting"] >= count:
            return
        await asyncio.sleep(0.01)


async def wait_for_stage(harness: ModelsHarness, model: str, stage: str) -> None:
    while True:
        reports = {each["name"]: each for each in (await harness.models())["models"]}
        if reports[model]["stage"] == stage:
            return
        await asyncio.sleep(0.01)


@asynccontextmanager
async def run_models(
    folder: Path, sizes: Mapping[str, int], memory_bytes: int, loaded: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[ModelsHarness]:
    """Run a proxy with models of these sizes; `fields` of ModelConfig by name are in `configs`."""
    home, configs = Home(folder / "home"), settings.pop("configs", {})
    home.prepare()
    keeper = FakeKeeper(home, sizes, memory_bytes)
    for name in loaded:
        await keeper.load(name)
    for name, fields in configs.items():
        keeper.status[name].pinned = fields.get("pinned", False)
    models = [replace(ModelConfig(name, f"/models/{name}"), **configs.get(name, {})) for name in sizes]
    runner, port = await serve(keeper.make_app())
    settings = {"port": 0, "audit_fraction": 0.0, "model_stay_s": 0.0, **settings}
    url = f"http://127.0.0.1:{port}"
    config = ProxyConfig(home=home, backend_url=url, models=format_models(models), **settings)
    with Index(home, config.disk_budget_bytes) as index:
        app = build_app(config, home.load_secret(), index)
        async with listen(app, config) as listener, aiohttp.ClientSession() as client:
            first = keeper.backends[next(iter(sizes))]
            yield ModelsHarness(
                app,
                first,
                index,
                home,
                url,
                f"http://127.0.0.1:{listener.port}",
                client,
                runner.cleanup,
                listener.close,
                keeper=keeper,
            )
    await keeper.close()
    await runner.cleanup()
