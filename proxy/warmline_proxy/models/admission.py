"""Admission of requests: tickets for a bounded, fair queue.  Owned by the event loop."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from warmline_proxy.auth.principals import Client, extract_client_key, hash_key
from warmline_proxy.errors import ClientError, service_unavailable, too_many_requests

CLOSED_RETRY_AFTER_S = 5  # by then another proxy may be up


def identify_caller(client: Client, headers: Mapping[str, str], remote: str | None) -> str:
    """Caller for fair admission: the key's tenant, else the key that was sent all the same, else the remote address."""
    identity = f"key {client.key_tenant}" if client.key_tenant else extract_client_key(headers) or f"at {remote}"
    return hash_key(identity).hex()[:16]  # a digest, since such keys must not be stored


class Ticket:
    """A request's place in the queue, then at the backend.  `acquire` and `release` are idempotent."""

    def __init__(self, admission: "AdmissionQueue", caller: str, extra: bool = False) -> None:
        self.caller = caller
        self.extra = extra  # for an admitted request: its waiting counts against no limit
        self.is_running = False
        self.waiter: asyncio.Future[None] | None = None
        self._admission = admission

    async def acquire(self) -> None:
        """Wait for the place.  Raises ClientError 429 where the queue is full, or another caller displaces it."""
        if not self.is_running:
            await self._admission._enqueue(self)

    def release(self) -> None:
        if self.is_running:
            self._admission._release(self)

    def issue_extra(self) -> "Ticket":
        """Another ticket for the same request: it waits as all do, but is never refused."""
        return Ticket(self._admission, self.caller, extra=True)


class AdmissionQueue:
    """At most `running_count_max` requests at the backend and `queue_count_max` waiting; fair between callers.

    A free place goes to the caller with the fewest running requests, and to the longest wait among equals.  In a full
    queue a caller with fewer waiting requests displaces the last one of the caller with the most.
    """

    def __init__(self, running_count_max: int, queue_count_max: int, retry_after_s: Callable[[], int]) -> None:
        self._running_count_max = running_count_max
        self._queue_count_max = queue_count_max
        self._retry_after_s = retry_after_s
        self._running: Counter[str] = Counter()  # by caller
        self._waiting: list[Ticket] = []  # in order of arrival
        self.closed_reason = ""

    def close(self, reason: str) -> None:
        """Refuse new requests."""
        self.closed_reason = reason

    @property
    def running_count(self) -> int:
        return self._running.total()

    @property
    def queued_count(self) -> int:
        return len(self._waiting)

    def find_position(self, ticket: Ticket) -> int | None:
        """Place among the waiting tickets, 1 for the longest wait; None where it does not wait."""
        return self._waiting.index(ticket) + 1 if ticket in self._waiting else None

    def check_room(self, caller: str) -> None:
        """Raise ClientError: 429 where the queue has no place for this caller, 503 once closed."""
        if self.closed_reason:
            raise service_unavailable(self.closed_reason, "shutting_down", CLOSED_RETRY_AFTER_S)
        if self._is_full and self._find_displaced(caller) is None:
            raise self._queue_full_error()

    def issue_ticket(self, caller: str) -> Ticket:
        """Raises ClientError as `check_room`."""
        self.check_room(caller)
        return Ticket(self, caller)

    async def _enqueue(self, ticket: Ticket) -> None:
        if self._is_full and not ticket.extra:
            if (other := self._find_displaced(ticket.caller)) is None or other.waiter is None:
                raise self._queue_full_error()
            self._waiting.remove(other)
            if not other.waiter.done():  # else it is just leaving
                other.waiter.set_exception(self._queue_full_error())
        ticket.waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._admit_waiting()
        try:
            await ticket.waiter
        except BaseException:
            if ticket.is_running:  # admitted and cancelled at once
                self._release(ticket)
            elif ticket in self._waiting:
                self._waiting.remove(ticket)
            raise
        finally:
            ticket.waiter = None

    def _release(self, ticket: Ticket) -> None:
        ticket.is_running = False
        self._running[ticket.caller] -= 1
        self._running += Counter()  # drops zeros
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self.running_count < self._running_count_max:
            ticket = min(self._waiting, key=lambda each: self._running[each.caller])
            self._waiting.remove(ticket)
            ticket.is_running = True
            self._running[ticket.caller] += 1
            if ticket.waiter and not ticket.waiter.done():
                ticket.waiter.set_result(None)

    @property
    def _is_full(self) -> bool:
        return self.running_count >= self._running_count_max and len(self._waiting_requests) >= self._queue_count_max

    @property
    def _waiting_requests(self) -> list[Ticket]:
        return [ticket for ticket in self._waiting if not ticket.extra]

    def _find_displaced(self, caller: str) -> Ticket | None:
        """Last ticket of the caller with the most waiting, where that is more than this caller would have."""
        tickets = self._waiting_requests
        waiting = Counter(ticket.caller for ticket in tickets)
        busiest, most = max(waiting.items(), key=lambda item: item[1], default=("", 0))
        if most <= waiting[caller] + 1:
            return None
        return next(ticket for ticket in reversed(tickets) if ticket.caller == busiest)

    def _queue_full_error(self) -> ClientError:
        message = f"{self.running_count} requests are running and {self.queued_count} are waiting; try again later."
        return too_many_requests(message, self._retry_after_s())
