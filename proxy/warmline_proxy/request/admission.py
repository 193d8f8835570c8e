"""How many may be in at once, and who is next.  All state belongs to the event loop."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from warmline_proxy.auth.principals import Client, extract_client_key, hash_key
from warmline_proxy.errors import ClientError, service_unavailable, too_many_requests

CLOSED_RETRY_AFTER_S = 5  # by then another proxy may listen


def identify_caller(client: Client, headers: Mapping[str, str], remote: str | None) -> str:
    """Whom a request counts for: the key's holder; without keys the key that it shows all the same, or its machine.

    A digest: such keys are kept nowhere.
    """
    return hash_key(
        f"key {client.key_tenant}" if client.key_tenant else extract_client_key(headers) or f"at {remote}"
    ).hex()[:16]


class Ticket:
    """One request's place: in the queue, then at the backend.  `turn` and `release` may be called again and again."""

    def __init__(self, admission: "AdmissionQueue", caller: str, extra: bool = False) -> None:
        self.caller = caller
        self.extra = extra  # one more place for a request that was let in: its waiting counts for nobody
        self.is_running = False
        self.waiter: asyncio.Future[None] | None = None
        self._admission = admission

    async def acquire(self) -> None:
        """Wait for it.  Raises ClientError 429 where the queue is full, now or later: see Admission."""
        if not self.is_running:
            await self._admission._enqueue(self)

    def release(self) -> None:
        if self.is_running:
            self._admission._release(self)

    def issue_extra(self) -> "Ticket":
        """One more place for the same request.  It waits for its turn as all do, but is never refused."""
        return Ticket(self._admission, self.caller, extra=True)


class AdmissionQueue:
    """At most `running_count_max` requests at the backend and `queue_count_max` waiting; fair between callers.

    A free place goes to the caller with the fewest running requests, among its own and among equals to the one that
    waited longest.  In a full queue, a caller with fewer waiting than another takes the place of that one's last.
    """

    def __init__(self, running_count_max: int, queue_count_max: int, retry_after_s: Callable[[], int]) -> None:
        self._running_count_max = running_count_max
        self._queue_count_max = queue_count_max
        self._retry_after_s = retry_after_s
        self._running: Counter[str] = Counter()  # by caller
        self._waiting: list[Ticket] = []  # in order of arrival
        self.closed_reason = ""

    def close(self, reason: str) -> None:
        """Let nobody in any more."""
        self.closed_reason = reason

    @property
    def running_count(self) -> int:
        return self._running.total()

    @property
    def queued_count(self) -> int:
        return len(self._waiting)

    def issue_ticket(self, caller: str) -> Ticket:
        """Raises ClientError: 429 where a new request of this caller would find no place, 503 once closed."""
        if self.closed_reason:
            raise service_unavailable(self.closed_reason, "shutting_down", CLOSED_RETRY_AFTER_S)
        if self._is_full and self._find_displaced(caller) is None:
            raise self._queue_full_error()
        return Ticket(self, caller)

    async def _enqueue(self, ticket: Ticket) -> None:
        if self._is_full and not ticket.extra:
            if (other := self._find_displaced(ticket.caller)) is None or other.waiter is None:
                raise self._queue_full_error()
            self._waiting.remove(other)
            if not other.waiter.done():  # else it leaves in this moment
                other.waiter.set_exception(self._queue_full_error())
        ticket.waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._admit_waiting()
        try:
            await ticket.waiter
        except BaseException:
            if ticket.is_running:  # its turn came in the moment in which it was given up
                self._release(ticket)
            elif ticket in self._waiting:
                self._waiting.remove(ticket)
            raise
        finally:
            ticket.waiter = None

    def _release(self, ticket: Ticket) -> None:
        ticket.is_running = False
        self._running[ticket.caller] -= 1
        self._running += Counter()  # forgets those that have none
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
        """The last of the caller with the most waiting, where that is more than this one would have."""
        tickets = self._waiting_requests
        waiting = Counter(ticket.caller for ticket in tickets)
        busiest, most = max(waiting.items(), key=lambda item: item[1], default=("", 0))
        if most <= waiting[caller] + 1:
            return None
        return next(ticket for ticket in reversed(tickets) if ticket.caller == busiest)

    def _queue_full_error(self) -> ClientError:
        return too_many_requests(
            f"{self.running_count} requests are running and {self.queued_count} are waiting; try again later.",
            self._retry_after_s(),
        )
