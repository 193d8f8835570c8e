"""How many may be in at once, and who is next.  All state belongs to the event loop."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from warmline_proxy.auth.principals import Client, bearer, digest
from warmline_proxy.errors import ClientError, queue_full, unavailable

CLOSED_RETRY_AFTER_S = 5  # by then another proxy may listen


def caller_of(client: Client, headers: Mapping[str, str], remote: str | None) -> str:
    """Whom a request counts for: the key's holder; without keys the key that it shows all the same, or its machine.

    A digest: such keys are kept nowhere.
    """
    return digest(f"key {client.holder}" if client.holder else bearer(headers) or f"at {remote}").hex()[:16]


class Ticket:
    """One request's place: in the queue, then at the backend.  `turn` and `release` may be called again and again."""

    def __init__(self, admission: "Admission", caller: str, extra: bool = False) -> None:
        self.caller = caller
        self.extra = extra  # one more place for a request that was let in: its waiting counts for nobody
        self.runs = False
        self.waiting: asyncio.Future[None] | None = None
        self._admission = admission

    async def turn(self) -> None:
        """Wait for it.  Raises ClientError 429 where the queue is full, now or later: see Admission."""
        if not self.runs:
            await self._admission._enter(self)

    def release(self) -> None:
        if self.runs:
            self._admission._leave(self)

    def another(self) -> "Ticket":
        """One more place for the same request.  It waits for its turn as all do, but is never refused."""
        return Ticket(self._admission, self.caller, extra=True)


class Admission:
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
        self.closed = ""

    def close(self, why: str) -> None:
        """Let nobody in any more."""
        self.closed = why

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def ticket(self, caller: str) -> Ticket:
        """Raises ClientError: 429 where a new request of this caller would find no place, 503 once closed."""
        if self.closed:
            raise unavailable(self.closed, "shutting_down", CLOSED_RETRY_AFTER_S)
        if self._is_full and self._to_make_way(caller) is None:
            raise self._refusal()
        return Ticket(self, caller)

    async def _enter(self, ticket: Ticket) -> None:
        if self._is_full and not ticket.extra:
            if (other := self._to_make_way(ticket.caller)) is None or other.waiting is None:
                raise self._refusal()
            self._waiting.remove(other)
            if not other.waiting.done():  # else it leaves in this moment
                other.waiting.set_exception(self._refusal())
        ticket.waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._fill()
        try:
            await ticket.waiting
        except BaseException:
            if ticket.runs:  # its turn came in the moment in which it was given up
                self._leave(ticket)
            elif ticket in self._waiting:
                self._waiting.remove(ticket)
            raise
        finally:
            ticket.waiting = None

    def _leave(self, ticket: Ticket) -> None:
        ticket.runs = False
        self._running[ticket.caller] -= 1
        self._running += Counter()  # forgets those that have none
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self.running < self._running_count_max:
            ticket = min(self._waiting, key=lambda each: self._running[each.caller])
            self._waiting.remove(ticket)
            ticket.runs = True
            self._running[ticket.caller] += 1
            if ticket.waiting and not ticket.waiting.done():
                ticket.waiting.set_result(None)

    @property
    def _is_full(self) -> bool:
        return self.running >= self._running_count_max and len(self._requests_waiting) >= self._queue_count_max

    @property
    def _requests_waiting(self) -> list[Ticket]:
        return [ticket for ticket in self._waiting if not ticket.extra]

    def _to_make_way(self, caller: str) -> Ticket | None:
        """The last of the caller with the most waiting, where that is more than this one would have."""
        tickets = self._requests_waiting
        waiting = Counter(ticket.caller for ticket in tickets)
        greediest, most = max(waiting.items(), key=lambda item: item[1], default=("", 0))
        if most <= waiting[caller] + 1:
            return None
        return next(ticket for ticket in reversed(tickets) if ticket.caller == greediest)

    def _refusal(self) -> ClientError:
        return queue_full(
            f"{self.running} requests are running and {self.queued} are waiting; try again later.",
            self._retry_after_s(),
        )
