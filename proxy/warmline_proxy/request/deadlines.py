"""How long a request may wait and stand still, and the alarm that ends it.

A request that makes progress is slow, not stuck: only `total` ends it, and that is off unless somebody asks for it.
Limits in seconds; 0 is none.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType

from warmline_common.process.redaction import quoted
from warmline_common.protocol.messages import (
    HEADER_CONNECT_TIMEOUT,
    HEADER_QUEUE_TIMEOUT,
    HEADER_STALL_TIMEOUT,
    HEADER_TOTAL_TIMEOUT,
)
from warmline_proxy.errors import ClientError, bad_request, timed_out, unavailable
from warmline_proxy.upstream.watchdog import STRETCH

BACKLOG_BYTES_MAX = 8 << 20  # of an answer that its client doesn't take
_HEADERS = {
    "connect_s": HEADER_CONNECT_TIMEOUT,
    "queue_s": HEADER_QUEUE_TIMEOUT,
    "stall_s": HEADER_STALL_TIMEOUT,
    "total_s": HEADER_TOTAL_TIMEOUT,
}


@dataclass(frozen=True)
class Limits:
    connect_s: float = 60.0  # for a backend that starts, or is started again
    queue_s: float = 0.0  # for its turn, here and at the backend
    stall_s: float = 0.0  # without a chunk or a token
    total_s: float = 0.0

    def overridden(self, headers: Mapping[str, str]) -> "Limits":
        """With what a request's own headers say.  Raises ClientError 400."""
        given = {name: _seconds(header, headers[header]) for name, header in _HEADERS.items() if header in headers}
        return replace(self, **given)


def _seconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:  # also refuses nan
        raise bad_request(
            f"The header {header} must be a number of seconds below 1e9 (0: no limit), not {quoted(text[:80])}."
        )
    return value


@dataclass
class Clock:
    """What of a request's time was waiting, and when it last made progress.  Times are time.monotonic()."""

    began: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    waiting_since: float | None = None
    progressed_at: float | None = None  # None while the engine does not work on it
    connecting_s: float = 0.0  # of its time, waiting for the backend to be there

    def waited_at(self, now: float) -> float:
        return self.waited_s + (now - self.waiting_since if self.waiting_since is not None else 0.0)

    def waits(self) -> None:
        """It stands in a queue from now on."""
        self.rests()
        self.waiting_since = time.monotonic()

    def rests(self) -> None:
        """Neither in a queue nor computed: in between."""
        self.waited_s = self.waited_at(time.monotonic())
        self.waiting_since = self.progressed_at = None

    def progresses(self) -> None:
        """A chunk, a token, or the turn itself has come."""
        self.rests()
        self.progressed_at = time.monotonic()


def overdue(limits: Limits, clock: Clock, now: float, slowest_step_s: float, running: int) -> ClientError | None:
    """Which limit is passed, in words for the client.

    A request shares the engine with `running` others, so it may stand still for as many of the slowest steps.
    """
    total_s = now - clock.began
    if limits.total_s and total_s > limits.total_s:
        return timed_out(f"not done within its total time of {limits.total_s:g} s", "deadline_exceeded")
    if limits.queue_s and clock.waiting_since is not None and clock.waited_at(now) > limits.queue_s:
        return unavailable(f"The request waited for its turn for more than {limits.queue_s:g} s.", "queue_timeout")
    if limits.stall_s and clock.progressed_at is not None:
        limit = max(limits.stall_s, STRETCH * slowest_step_s * max(1, running))
        if now - clock.progressed_at > limit:
            return timed_out(f"no progress for more than {limit:.1f} s", "stalled")
    return None


class Alarm:
    """Ends one request from outside its task: on a deadline, on a DELETE, at a shutdown.

    `async with alarm:` around the request's work raises the ClientError that `ring` was given.  `check` does so where
    the work was ended and something on the way made another error of it.
    """

    def __init__(self) -> None:
        self.reason: ClientError | None = None
        self._timeout = asyncio.timeout(None)
        self._inside = False

    def ring(self, reason: ClientError) -> None:
        """The first reason counts; no harm where the request is over."""
        self.reason = self.reason or reason
        if self._inside and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def check(self) -> None:
        if self.reason:
            raise self.reason

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._inside = True
        if self.reason:
            self.ring(self.reason)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._inside = False
        try:
            await self._timeout.__aexit__(kind, error, at)
        except TimeoutError:
            if self.reason is None:
                raise
            raise self.reason from None
