"""Proxy with a real index in front of a fake backend, on real sockets in one event loop."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec

import aiohttp
from aiohttp import web

from support.proxy.fake_backend import FakeBackend
from warmline_common.storage.home import Home
from warmline_proxy.app import REQUEST_REGISTRY, build_app
from warmline_proxy.config import GB, ProxyConfig
from warmline_proxy.index.index import Index
from warmline_proxy.index.responses import ResponseLimits
from warmline_proxy.listener import listen
from warmline_proxy.store.rows import RequestRecord

PASSED_S = 0.01  # a total time that any request has passed

P = ParamSpec("P")
TEST_TIMEOUT_S = 20.0


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a fresh event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TEST_TIMEOUT_S))

    return run


@dataclass
class ProxyHarness:
    app: web.Application
    backend: FakeBackend
    index: Index
    home: Home
    backend_url: str
    url: str
    client: aiohttp.ClientSession
    stop_backend: Callable[[], Coroutine[Any, Any, None]]
    stop_proxy: Callable[[], Coroutine[Any, Any, None]]

    async def chat(
        self, text: str = "What is the capital of France?", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> aiohttp.ClientResponse:
        """Complete response to one user message, or to the `messages` and `stream` in `fields`."""
        body = {"model": "any", "messages": [{"role": "user", "content": text}], **fields}
        response = await self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        await response.read()
        return response

    async def status(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.home.load_secret()}"}
        async with self.client.get(f"{self.url}/warmline/status", headers=headers) as response:
            status: dict[str, Any] = await response.json()
            return status

    def pass_total_timeouts(self) -> None:
        """Let all requests reach their total time soon, however long this machine took for what came before."""
        for request in self.app[REQUEST_REGISTRY]:
            request.timeouts = replace(request.timeouts, total_s=PASSED_S)

    async def wait_until_saved(self) -> list[RequestRecord]:
        """Wait until all answered requests are saved; the records, newest first."""
        while (await self.status())["settling"]:
            pass
        self.index.flush()
        return self.index.requests()


async def serve(app: web.Application, port: int = 0) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner, runner.addresses[0][1]


@asynccontextmanager
async def run_proxy(folder: Path, **settings: Any) -> AsyncIterator[ProxyHarness]:
    home = Home(folder / "home")
    home.prepare()
    backend = FakeBackend(home)
    backend_runner, backend_port = await serve(backend.make_app())
    budget_gb = settings.pop("disk_budget_bytes", GB) / GB
    settings = {"disk_budget_gb": budget_gb, "port": 0, "audit_fraction": 0.0, "audit_quiet_s": 0.0, **settings}
    config = ProxyConfig(home=home, backend_url=f"http://127.0.0.1:{backend_port}", **settings)
    days, megabytes = config.responses_keep_days, config.responses_keep_mb
    limits = ResponseLimits.from_settings(days, megabytes, config.disk_budget_bytes)
    with Index(home, config.disk_budget_bytes, response_limits=limits) as index:
        app = build_app(config, home.load_secret(), index)
        async with listen(app, config) as listener, aiohttp.ClientSession() as client:
            yield ProxyHarness(
                app,
                backend,
                index,
                home,
                config.backend_url,
                f"http://127.0.0.1:{listener.port}",
                client,
                backend_runner.cleanup,
                listener.close,
            )
    await backend_runner.cleanup()


def perf_lines(caplog: Any) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("PERF ")]


logging.getLogger("warmline_proxy").setLevel(logging.INFO)
