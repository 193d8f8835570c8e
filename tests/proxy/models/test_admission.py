"""Admission: order of the places, and refusals."""

import asyncio

import pytest

from support.proxy.harness import on_loop
from warmline_proxy.errors import ClientError
from warmline_proxy.models.admission import AdmissionQueue, Ticket


def make_queue(running: int, queue: int) -> AdmissionQueue:
    return AdmissionQueue(running, queue, lambda: 7)


class WaitingRequest:
    """Request that waits for a ticket; `order` lists the names of admitted ones."""

    order: list[str]

    def __init__(self, admission: AdmissionQueue, name: str, order: list[str]) -> None:
        self.ticket = admission.issue_ticket(name[0])

        async def enter() -> Ticket:
            await self.ticket.acquire()
            order.append(name)
            return self.ticket

        self.task = asyncio.create_task(enter())


async def run_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@on_loop
async def test_places_are_fair_between_callers() -> None:
    admission, order = make_queue(2, 10), list[str]()
    many = [WaitingRequest(admission, f"a{n}", order) for n in range(5)]
    await run_tasks()
    other = WaitingRequest(admission, "b0", order)
    await run_tasks()
    assert order == ["a0", "a1"] and admission.running_count == 2 and admission.queued_count == 4
    many[0].ticket.release()
    await run_tasks()
    assert order == ["a0", "a1", "b0"], "the caller with fewer running comes first"
    other.ticket.release()
    await run_tasks()
    assert order[3:] == ["a2"]


@on_loop
async def test_full_admissionraises_429_with_retry_after() -> None:
    admission, order = make_queue(1, 1), list[str]()
    WaitingRequest(admission, "a0", order)
    WaitingRequest(admission, "a1", order)
    await run_tasks()
    with pytest.raises(ClientError) as refused:
        admission.issue_ticket("a")
    assert refused.value.status == 429 and refused.value.retry_after_s == 7


@on_loop
async def test_full_admissiondisplaces_busiest_caller() -> None:
    admission, order = make_queue(1, 3), list[str]()
    greedy = [WaitingRequest(admission, f"a{n}", order) for n in range(4)]
    await run_tasks()
    WaitingRequest(admission, "b0", order)
    await run_tasks()
    with pytest.raises(ClientError):
        greedy[3].task.result()
    assert admission.queued_count == 3
    with pytest.raises(ClientError):  # equal shares: none is displaced
        await admission.issue_ticket("b").acquire()


@on_loop
async def test_cancelled_wait_leaves_queue() -> None:
    admission, order = make_queue(1, 2), list[str]()
    first, second, third = (WaitingRequest(admission, f"a{n}", order) for n in range(3))
    await run_tasks()
    second.task.cancel()
    await run_tasks()
    assert admission.queued_count == 1
    first.ticket.release()
    first.ticket.release()  # once is enough
    await run_tasks()
    assert order == ["a0", "a2"] and admission.running_count == 1
    third.ticket.release()
    assert admission.running_count == 0


@on_loop
async def test_ticket_granted_to_cancelled_wait_is_released() -> None:
    admission, order = make_queue(1, 2), list[str]()
    first, second = WaitingRequest(admission, "a0", order), WaitingRequest(admission, "a1", order)
    await run_tasks()
    second.task.cancel()
    first.ticket.release()  # before the cancelled one could run
    await run_tasks()
    assert admission.running_count == 0 and admission.queued_count == 0


@on_loop
async def test_acquire_is_idempotent_and_repeatable() -> None:
    admission = make_queue(1, 1)
    ticket = admission.issue_ticket("a")
    await ticket.acquire()
    await ticket.acquire()
    assert admission.running_count == 1
    ticket.release()
    await ticket.acquire()
    assert admission.running_count == 1


@on_loop
async def test_closed_admissionraises_503() -> None:
    admission = make_queue(1, 1)
    admission.close("The proxy is being stopped.")
    with pytest.raises(ClientError) as refused:
        admission.issue_ticket("a")
    assert refused.value.status == 503 and refused.value.retry_after_s


@on_loop
async def test_displacing_a_leaving_ticket_works() -> None:
    admission = AdmissionQueue(1, 3, lambda: 7)
    await admission.issue_ticket("a").acquire()
    waiting = [asyncio.create_task(admission.issue_ticket("a").acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    newcomer = asyncio.create_task(admission.issue_ticket("b").acquire())
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
    admission = make_queue(1, 1)
    first = admission.issue_ticket("a")
    await first.acquire()
    more = [first.issue_extra() for _ in range(3)]
    waiting = [asyncio.create_task(each.acquire()) for each in more]
    await run_tasks()
    other = WaitingRequest(admission, "b0", [])
    await run_tasks()
    assert admission.queued_count == 4, "none was refused, and the queue still has room"
    with pytest.raises(ClientError):
        admission.issue_ticket("c")
    first.release()
    await run_tasks()
    assert waiting[0].done() and not other.task.done()
    more[0].release()
    await run_tasks()
    assert waiting[1].done() and not other.task.done()
    for ticket in more[1:]:
        ticket.release()
        await run_tasks()
    await other.task
    assert admission.running_count == 1 and admission.queued_count == 0


@on_loop
async def test_extra_ticket_waits_without_queue() -> None:
    admission = make_queue(1, 0)
    first = admission.issue_ticket("a")
    await first.acquire()
    waiting = asyncio.create_task((more := first.issue_extra()).acquire())
    await run_tasks()
    first.release()
    await waiting
    assert more.is_running
