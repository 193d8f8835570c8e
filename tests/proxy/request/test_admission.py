"""Who gets the next place, and who is sent away."""

import asyncio

import pytest

from support.proxy.harness import on_loop
from warmline_proxy.errors import ClientError
from warmline_proxy.request.admission import AdmissionQueue, Ticket


def admission(running: int, queue: int) -> AdmissionQueue:
    return AdmissionQueue(running, queue, lambda: 7)


class Entering:
    """A request that wants in; `order` has those that came in, in turn."""

    order: list[str]

    def __init__(self, gate: AdmissionQueue, name: str, order: list[str]) -> None:
        self.ticket = gate.issue_ticket(name[0])

        async def enter() -> Ticket:
            await self.ticket.acquire()
            order.append(name)
            return self.ticket

        self.task = asyncio.create_task(enter())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@on_loop
async def test_places_are_fair_between_callers() -> None:
    gate, order = admission(2, 10), list[str]()
    many = [Entering(gate, f"a{n}", order) for n in range(5)]
    await settle()
    other = Entering(gate, "b0", order)
    await settle()
    assert order == ["a0", "a1"] and gate.running_count == 2 and gate.queued_count == 4
    many[0].ticket.release()
    await settle()
    assert order == ["a0", "a1", "b0"], "the caller with fewer running comes first"
    other.ticket.release()
    await settle()
    assert order[3:] == ["a2"]


@on_loop
async def test_full_queue_raises_429_with_retry_after() -> None:
    gate, order = admission(1, 1), list[str]()
    Entering(gate, "a0", order)
    Entering(gate, "a1", order)
    await settle()
    with pytest.raises(ClientError) as refused:
        gate.issue_ticket("a")
    assert refused.value.status == 429 and refused.value.retry_after_s == 7


@on_loop
async def test_full_queue_displaces_busiest_caller() -> None:
    gate, order = admission(1, 3), list[str]()
    greedy = [Entering(gate, f"a{n}", order) for n in range(4)]
    await settle()
    Entering(gate, "b0", order)
    await settle()
    with pytest.raises(ClientError):
        greedy[3].task.result()
    assert gate.queued_count == 3
    with pytest.raises(ClientError):  # one each and one more: nobody has to make way for that
        await gate.issue_ticket("b").acquire()


@on_loop
async def test_cancelled_wait_leaves_queue() -> None:
    gate, order = admission(1, 2), list[str]()
    first, second, third = (Entering(gate, f"a{n}", order) for n in range(3))
    await settle()
    second.task.cancel()
    await settle()
    assert gate.queued_count == 1
    first.ticket.release()
    first.ticket.release()  # once is enough
    await settle()
    assert order == ["a0", "a2"] and gate.running_count == 1
    third.ticket.release()
    assert gate.running_count == 0


@on_loop
async def test_ticket_granted_to_cancelled_wait_is_released() -> None:
    gate, order = admission(1, 2), list[str]()
    first, second = Entering(gate, "a0", order), Entering(gate, "a1", order)
    await settle()
    second.task.cancel()
    first.ticket.release()  # before the cancelled one could run
    await settle()
    assert gate.running_count == 0 and gate.queued_count == 0


@on_loop
async def test_acquire_is_idempotent_and_repeatable() -> None:
    gate = admission(1, 1)
    ticket = gate.issue_ticket("a")
    await ticket.acquire()
    await ticket.acquire()
    assert gate.running_count == 1
    ticket.release()
    await ticket.acquire()
    assert gate.running_count == 1


@on_loop
async def test_closed_queue_raises_503() -> None:
    gate = admission(1, 1)
    gate.close("The proxy is being stopped.")
    with pytest.raises(ClientError) as refused:
        gate.issue_ticket("a")
    assert refused.value.status == 503 and refused.value.retry_after_s


@on_loop
async def test_displacing_a_leaving_ticket_works() -> None:
    gate = AdmissionQueue(1, 3, lambda: 7)
    await gate.issue_ticket("a").acquire()
    waiting = [asyncio.create_task(gate.issue_ticket("a").acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    newcomer = asyncio.create_task(gate.issue_ticket("b").acquire())
    waiting[-1].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if newcomer.done():
        assert newcomer.exception() is None
    newcomer.cancel()
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)


@on_loop
async def test_extra_ticket_waits_and_counts_against_no_limit() -> None:
    gate = admission(1, 1)
    first = gate.issue_ticket("a")
    await first.acquire()
    more = [first.issue_extra() for _ in range(3)]
    waiting = [asyncio.create_task(each.acquire()) for each in more]
    await settle()
    other = Entering(gate, "b0", [])
    await settle()
    assert gate.queued_count == 4, "none was refused, and the queue has room for another request"
    with pytest.raises(ClientError):
        gate.issue_ticket("c")
    first.release()
    await settle()
    assert waiting[0].done() and not other.task.done()
    more[0].release()
    await settle()
    assert waiting[1].done() and not other.task.done()
    for ticket in more[1:]:
        ticket.release()
        await settle()
    await other.task
    assert gate.running_count == 1 and gate.queued_count == 0


@on_loop
async def test_extra_ticket_waits_without_queue() -> None:
    gate = admission(1, 0)
    first = gate.issue_ticket("a")
    await first.acquire()
    waiting = asyncio.create_task((more := first.issue_extra()).acquire())
    await settle()
    first.release()
    await waiting
    assert more.is_running
