"""Times of audits: after real quiet by a fake clock, never beside a request, a few tries at most."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.proxy.audits import FakeTime, make_quiet_engine
from support.proxy.fake_backend import make_first_logits, make_layout, pack_text
from support.proxy.harness import on_loop
from warmline_common.protocol.messages import FirstLogits
from warmline_common.storage.home import Home
from warmline_proxy.audit.auditor import TRIES_MAX, Auditor
from warmline_proxy.audit.quiet import CONVERSATIONS_MAX, QUIET_S_MAX, TurnPauses
from warmline_proxy.config import ProxyConfig
from warmline_proxy.metrics import ProxyMetrics

QUIET_S = 10.0


class FakeRegistry:
    """Requests on their way, by the fake clock."""

    def __init__(self, fake_time: FakeTime) -> None:
        self.count, self.emptied_at, self._time = 0, fake_time.now, fake_time
        self.arrival = asyncio.Event()

    @property
    def has_foreground(self) -> bool:
        return self.count > 0

    async def wait_for_arrival(self) -> None:
        await self.arrival.wait()

    def add(self) -> None:
        self.count += 1
        self.arrival.set()
        self.arrival = asyncio.Event()

    def discard(self) -> None:
        self.count, self.emptied_at = self.count - 1, self._time.now


class AuditedProxy:
    """An auditor with a probe whose runs take `run_s`, and turns of conversations at chosen times."""

    def __init__(self, folder: Path, run_s: float = 5.0) -> None:
        self.time = FakeTime()
        self.registry, self.run_s = FakeRegistry(self.time), run_s
        self.runs: list[tuple[float, float]] = []  # beginning and end; also those that were cut short
        self.completed: list[str] = []
        self.recorded: list[tuple[str, str]] = []
        index: Any = SimpleNamespace(record_audit=lambda name, audit, _: self.recorded.append((name, audit)))
        probe: Any = SimpleNamespace(compute_cold=self._compute_cold)
        self.auditor = Auditor(
            config=ProxyConfig(home=Home(folder), audit_fraction=1.0, audit_quiet_s=QUIET_S),
            index=index,
            probe=probe,
            quarantine=SimpleNamespace(),  # type: ignore[arg-type]
            engine=make_quiet_engine(self.time, self.registry),
            metrics=ProxyMetrics(),
            rng=random.Random(1),
        )

    async def _compute_cold(self, root: bytes, tokens: bytes, *, chunk_end: int = 0) -> FirstLogits:
        began = self.time.now
        try:
            while self.time.now < began + self.run_s:
                await self.time.sleep(0.5)
        finally:
            self.runs.append((began, self.time.now))
        return make_first_logits(-1.0)

    def schedule_turn(self, name: str, at: float, seconds: float = 1.0, conversation: str = "talk") -> None:
        """Have a turn arrive `at`, and end `seconds` later."""
        self.time.events += [(at, self.registry.add), (at + seconds, lambda: self._end_turn(name, conversation, at))]
        self.time.events.sort(key=lambda event: event[0])

    def _end_turn(self, name: str, conversation: str, arrived_at: float) -> None:
        log = SimpleNamespace(
            id=name,
            collapse="",
            outcome="ok",
            plan=SimpleNamespace(reuse=10),
            generation_result=SimpleNamespace(first=make_first_logits(-1.0)),
            session=conversation,
            arrived_monotonic=arrived_at,
            total_s=self.time.now - arrived_at,
        )
        prompt = SimpleNamespace(tokens=pack_text(name.encode()))
        request: Any = SimpleNamespace(log=log, is_cacheable=True, prompt=prompt, layout=make_layout(), root=b"root")
        self.auditor.consider_request(request)
        self.registry.discard()

    async def run_until(self, at: float) -> None:
        """Let the time pass."""
        self.auditor.start()
        while self.time.now < at:
            await self.time.sleep(0.1)
        await self.auditor.stop()


@on_loop
async def test_turns_without_real_quiet_are_not_audited_between(tmp_path: Path) -> None:
    proxy = AuditedProxy(tmp_path)
    for number in range(10):
        proxy.schedule_turn(f"turn {number}", 1000.0 + number * 4.0)
    await proxy.run_until(1060.0)
    first_began = min(began for began, _ in proxy.runs)
    assert first_began >= 1037.0 + QUIET_S, "the last turn ended then"
    assert all(audit == "equal" for _, audit in proxy.recorded[:1])


@on_loop
async def test_quiet_is_longer_than_pauses_between_turns(tmp_path: Path) -> None:
    """Turns 30 s apart: 10 s of quiet are no sign that the conversation is over."""
    proxy = AuditedProxy(tmp_path, run_s=1.0)
    for number in range(2, 8):
        proxy.schedule_turn(f"turn {number}", 1000.0 + 31.0 * number)
    proxy.schedule_turn("turn 1", 1000.0)
    await proxy.run_until(1400.0)
    ends = [1001.0 + 31.0 * number for number in range(2, 8)]
    began = [began for began, _ in proxy.runs if began > 1062.0]
    assert began and all(not any(began_at - 60 < end < began_at for end in ends) for began_at in began)
    assert {name for name, _ in proxy.recorded} == {f"turn {number}" for number in range(1, 8)}


@on_loop
async def test_audit_ends_when_request_arrives_and_is_retried_a_few_times(tmp_path: Path) -> None:
    proxy = AuditedProxy(tmp_path, run_s=60.0)
    proxy.schedule_turn("long", 1000.0)
    arrivals = [1020.0 + 30.0 * number for number in range(6)]
    for number, at in enumerate(arrivals):
        proxy.schedule_turn(f"other {number}", at, conversation=f"other {number}")
    await proxy.run_until(1200.0)
    cut_short = [(began, end) for began, end in proxy.runs if end - began < 60.0]
    assert len(cut_short) >= TRIES_MAX
    for began, end in cut_short[: len(arrivals)]:
        arrived = next(at for at in arrivals if at > began)
        assert end <= arrived + 3.0, "it ends with the request's arrival"
    assert ("long", "abandoned") in proxy.recorded
    tries = [began for began, _ in proxy.runs]
    assert all(any(at + 1.0 + QUIET_S <= began for at in [1000.0, *arrivals] if at < began) for began in tries)


@on_loop
async def test_case_with_shorter_quiet_does_not_wait_for_others(tmp_path: Path) -> None:
    proxy = AuditedProxy(tmp_path, run_s=1.0)
    proxy.schedule_turn("slow 1", 1000.0, conversation="slow")
    proxy.schedule_turn("slow 2", 1300.0, conversation="slow")
    proxy.schedule_turn("quick", 1302.0, conversation="quick")
    await proxy.run_until(1330.0)
    names = [name for name, audit in proxy.recorded if audit == "equal"]
    assert names == ["slow 1", "quick"], "the pauses of the slow one are 300 s long"


@on_loop
async def test_stop_abandons_run_and_waiting_cases(tmp_path: Path) -> None:
    proxy = AuditedProxy(tmp_path, run_s=600.0)
    proxy.schedule_turn("one", 1000.0)
    proxy.schedule_turn("two", 1002.0)
    await proxy.run_until(1030.0)
    assert sorted(proxy.recorded) == [("one", "abandoned"), ("two", "abandoned")] and len(proxy.runs) == 1


@on_loop
async def test_engine_is_not_quiet_while_backend_is_down_or_request_is_on_its_way() -> None:
    fake_time = FakeTime()
    registry: Any = FakeRegistry(fake_time)
    engine = make_quiet_engine(fake_time, registry)
    fake_time.now += 7.0
    assert engine.quiet_s == 7.0
    registry.add()
    assert engine.quiet_s is None
    registry.discard()
    assert engine.quiet_s == 0.0
    engine.watchdog.is_up = False  # type: ignore[misc]
    assert engine.quiet_s is None


@on_loop
async def test_works_of_several_kinds_run_one_after_the_other_and_only_in_quiet() -> None:
    fake_time = FakeTime()
    registry: Any = FakeRegistry(fake_time)
    one = make_quiet_engine(fake_time, registry)
    other = replace(one)
    running: list[str] = []

    async def work(name: str) -> str:
        running.append(name)
        assert len(running) == 1, "the other has ended"
        await fake_time.sleep(5.0)
        registry.add()  # ends this work, and keeps the other waiting
        fake_time.events.append((fake_time.now + 3.0, registry.discard))
        await asyncio.sleep(0)
        running.remove(name)
        return name

    both = await asyncio.gather(*(each.run(work(name), lambda: 1.0) for each, name in ((one, "one"), (other, "other"))))
    assert fake_time.now - 1000.0 >= 2 * (1.0 + 5.0) + 3.0 and set(both) <= {"one", "other", None}


@on_loop
async def test_errors_of_quiet_work_pass(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ValueError("as scripted")

    with pytest.raises(ValueError, match="as scripted"):
        await make_quiet_engine().run(fail(), lambda: 3.0)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([], 10.0),
        ([(0.0, 5.0)], 10.0),
        ([(0.0, 5.0), (6.0, 9.0)], 10.0),
        ([(0.0, 5.0), (25.0, 29.0), (30.0, 31.0)], 40.0),
        ([(0.0, 5.0), (2.0, 4.0), (10.0, 11.0)], 10.0),  # at the same time
        ([(0.0, 5.0), (1e6, 1e6 + 1)], QUIET_S_MAX),
    ],
)
def test_required_quiet_follows_longest_pause(turns: list[tuple[float, float]], expected: float) -> None:
    pauses = TurnPauses(QUIET_S)
    for arrived_at, ended_at in turns:
        pauses.record_turn("talk", arrived_at, ended_at)
    assert pauses.required_quiet_s("talk") == expected
    assert pauses.required_quiet_s("another") == expected, "the next request may be of the conversation that was last"
    pauses.record_turn("another", 2e6, 2e6 + 1)
    assert (pauses.required_quiet_s("talk"), pauses.required_quiet_s("another")) == (expected, QUIET_S)


def test_zero_requires_no_quiet_and_conversations_are_bounded() -> None:
    pauses = TurnPauses(0.0)
    for number in range(2 * CONVERSATIONS_MAX):
        pauses.record_turn(str(number), 0.0, 1.0)
        pauses.record_turn(str(number), 100.0, 101.0)
    assert pauses.required_quiet_s("0") == 0.0 and len(pauses._turns) == CONVERSATIONS_MAX
