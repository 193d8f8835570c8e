"""Gate of a model: entering, waiting, refusals, and the memory that a request needs."""

import asyncio

import pytest

from support.proxy.harness import on_loop
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.models.gate import ModelGate


def make_gate(*, is_open: bool = False, waiting_count_max: int = 8) -> ModelGate:
    return ModelGate(is_open=is_open, waiting_count_max=waiting_count_max)


async def begin(gate: ModelGate, user: str, kv_bytes: int = 0) -> "asyncio.Task[None]":
    task = asyncio.create_task(gate.enter(user, kv_bytes))
    await asyncio.sleep(0)
    return task


@on_loop
async def test_request_waits_until_the_gate_is_open() -> None:
    gate = make_gate()
    entering = await begin(gate, "a")
    assert list(gate.waiting) == ["a"] and not gate.users
    gate.allow()
    await entering
    assert not gate.waiting and list(gate.users) == ["a"]
    gate.leave("a")
    gate.leave("a")
    assert not gate.users


@on_loop
async def test_closed_gate_keeps_those_inside() -> None:
    gate = make_gate(is_open=True)
    await gate.enter("a")
    gate.close()
    assert gate.try_enter("a") and not gate.try_enter("b")


@on_loop
async def test_cancelled_wait_leaves_nothing() -> None:
    gate = make_gate()
    entering = await begin(gate, "a")
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    gate.allow()
    assert not gate.waiting and not gate.users


@on_loop
async def test_refused_model_ends_all_waits() -> None:
    gate = make_gate()
    waiting = [await begin(gate, name) for name in ("a", "b")]
    gate.find_refusal = lambda _: bad_request("too large")
    gate.look_again()
    assert all(isinstance(each, ClientError) for each in await asyncio.gather(*waiting, return_exceptions=True))
    with pytest.raises(ClientError, match="too large"):
        await gate.enter("c")
    assert not gate.waiting


@on_loop
async def test_too_many_waits_are_refused_with_429() -> None:
    gate = make_gate(waiting_count_max=2)
    waiting = [await begin(gate, name) for name in ("a", "b")]
    with pytest.raises(ClientError, match="429"):
        await gate.enter("c")
    gate.allow()
    await asyncio.gather(*waiting)


@on_loop
async def test_request_that_needs_more_memory_leaves_and_waits() -> None:
    gate = make_gate()
    gate.allow(kv_bytes=100)
    await gate.enter("a")
    assert gate.try_enter("a", 100) and gate.users == {"a": 100}
    entering = await begin(gate, "a", 200)
    assert not gate.users and gate.waiting["a"].kv_bytes == 200
    gate.allow(kv_bytes=150)
    await asyncio.sleep(0)
    assert not entering.done()
    gate.allow(kv_bytes=200)
    await entering
    assert gate.users == {"a": 200}
