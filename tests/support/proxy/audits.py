"""Conversation with the fake backend, and its audits."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from support.proxy.fake_backend import FakeBackend
from support.proxy.harness import ProxyHarness
from warmline_common.protocol.messages import HEADER_BACKGROUND
from warmline_proxy.audit.quiet import QuietEngine
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.store.rows import RequestRecord

TEXT = "word " * 40
RENDERED = f"<user>{TEXT}\n<assistant>"
QUESTIONS = ["And of Spain?", "And of Italy?", "And of Peru?"]
COLLAPSED = ["!"] * 80


class FakeTime:
    """A clock that sleeping advances; `events` are called when their time has come."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()
        await asyncio.sleep(0)


def make_quiet_engine(fake_time: FakeTime | None = None, registry: Any = None) -> QuietEngine:
    """Make an engine without requests, by a clock of its own."""
    fake_time = fake_time or FakeTime()
    if registry is None:
        registry = RequestRegistry()
        registry.emptied_at = fake_time.now
    return QuietEngine(registry, SimpleNamespace(is_up=True), fake_time.clock, fake_time.sleep)  # type: ignore[arg-type]


def make_turn(number: int, backend: FakeBackend) -> dict[str, Any]:
    """Make the request body of a turn: 0 is cold, later ones continue the conversation."""
    answer = "".join(backend.answer)
    messages = [{"role": "user", "content": TEXT}]
    for question in QUESTIONS[:number]:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return {"messages": messages}


async def ask_turns(proxy: ProxyHarness, turns: int = 2) -> list[str]:
    """Ask the first turns; their cache sources."""
    return [
        (await proxy.chat(**make_turn(number, proxy.backend))).headers["X-Warmline-Cache"] for number in range(turns)
    ]


def make_metric_reader(proxy: ProxyHarness, sample: str) -> Callable[[], Any]:
    async def value() -> float:
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(sample))

    return value


async def wait_for_audits(proxy: ProxyHarness, count: int = 1) -> None:
    """Wait until `count` audits have ended."""
    counted = make_metric_reader(proxy, "warmline_audits_total{")
    while await counted() < count:
        pass


async def list_records(proxy: ProxyHarness) -> list[RequestRecord]:
    """List request records, oldest first."""
    return (await proxy.wait_until_saved())[::-1]


def count_audits(backend: FakeBackend) -> int:
    return sum(HEADER_BACKGROUND in headers for headers in backend.calls["generate"])
