"""Deadlines of a request, and the scope that cancels it.

A request that makes progress is slow, not stuck: only `total_s` ends it, which is off by default.  Limits are in
seconds; 0 is none.  Event loop thread.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType

from warmline_common.process.redaction import quote_text
from warmline_common.protocol import messages
from warmline_proxy.errors import ClientError, bad_request, gateway_timeout, service_unavailable
from warmline_proxy.upstream.watchdog import SLOWEST_STEP_FACTOR

BACKLOG_BYTES_MAX = 8 << 20  # of an answer that its client does not read
# float() alone also reads other scripts' digits, signs, inf, nan and 1_0.
_SECONDS_PATTERN = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?(e[0-9]{1,2})?")
_HEADERS = {
    "connect_s": messages.HEADER_CONNECT_TIMEOUT,
    "queue_s": messages.HEADER_QUEUE_TIMEOUT,
    "stall_s": messages.HEADER_STALL_TIMEOUT,
    "total_s": messages.HEADER_TOTAL_TIMEOUT,
}


@dataclass(frozen=True)
class RequestTimeouts:
    connect_s: float = 60.0  # for a backend that starts or restarts
    queue_s: float = 0.0  # in the queues of proxy and backend
    stall_s: float = 0.0  # without a chunk or a token
    total_s: float = 0.0

    def override_by_headers(self, headers: Mapping[str, str]) -> "RequestTimeouts":
        """These timeouts with those of a request's headers.  Raises ClientError 400."""
        given = {name: header for name, header in _HEADERS.items() if header in headers}
        return replace(self, **{name: _parse_seconds(header, headers[header]) for name, header in given.items()})


def _parse_seconds(header: str, text: str) -> float:
    value = float(text) if _SECONDS_PATTERN.fullmatch(text) else -1.0
    if not 0 <= value < 1e9:
        shown = quote_text(text[:80])
        raise bad_request(f"The header {header} must be a number of seconds below 1e9 (0: no limit), not {shown}.")
    return value


@dataclass
class Clock:
    """Waiting time and last progress of a request.  Times are time.monotonic()."""

    started_at: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    waiting_since: float | None = None
    progressed_at: float | None = None  # None while the engine does not work on the request
    connecting_s: float = 0.0  # waiting for the backend to be up
    blocked_since: float | None = None  # it needs the engine, which has not begun to work on it

    def total_waited_s(self, now: float) -> float:
        return self.waited_s + (now - self.waiting_since if self.waiting_since is not None else 0.0)

    def mark_waiting(self) -> None:
        """The request is in a queue from now on."""
        self.mark_idle()
        self.waiting_since = now = time.monotonic()
        self.blocked_since = now if self.blocked_since is None else self.blocked_since

    def mark_idle(self) -> None:
        """The request is neither in a queue nor computed."""
        self.waited_s = self.total_waited_s(time.monotonic())
        self.waiting_since = self.progressed_at = None

    def mark_progress(self) -> None:
        """A chunk or a token has come, or the engine has started."""
        self.mark_idle()
        self.progressed_at, self.blocked_since = time.monotonic(), None

    def reset(self) -> None:
        """The request is dispatched again, to a backend that may be a new one."""
        self.mark_idle()
        self.blocked_since = None


@dataclass(frozen=True)
class EnginePace:
    """Speed of the engine, as far as deadlines depend on it."""

    slowest_step_s: float = 0.0  # of late, without outliers
    running_count: int = 0  # requests that take turns: each may pause for as many of the slowest steps
    stalled_s: float = 0.0  # time without the end of a step, while there is work


def find_missed_deadline(
    timeouts: RequestTimeouts, clock: Clock, now: float, pace: EnginePace = EnginePace(), wait_reason: str = ""
) -> ClientError | None:
    """Error for the limit that is passed; None where none is.  `wait_reason` completes the message about the queue.

    A request that waits for the engine has not stalled: the engine may work on others.  It has where the engine itself
    has not finished a step for so long.
    """
    total_s = now - clock.started_at
    if timeouts.total_s and total_s > timeouts.total_s:
        return gateway_timeout(f"not done within its total time of {timeouts.total_s:g} s", "deadline_exceeded")
    if timeouts.queue_s and clock.waiting_since is not None and clock.total_waited_s(now) > timeouts.queue_s:
        why = f": {wait_reason}" if wait_reason else ""
        message = f"The request waited for its turn for more than {timeouts.queue_s:g} s{why}."
        return service_unavailable(message, "queue_timeout")
    if timeouts.stall_s and clock.progressed_at is not None:
        limit = max(timeouts.stall_s, SLOWEST_STEP_FACTOR * pace.slowest_step_s * max(1, pace.running_count))
        if now - clock.progressed_at > limit:
            return gateway_timeout(f"no progress for more than {limit:.1f} s", "stalled")
    if timeouts.stall_s and clock.blocked_since is not None:
        limit = max(timeouts.stall_s, SLOWEST_STEP_FACTOR * pace.slowest_step_s)
        if min(pace.stalled_s, now - clock.blocked_since) > limit:
            reason = f"the engine has not finished a step for {pace.stalled_s:.0f} s, and the request waits for it"
            return gateway_timeout(reason, "stalled")
    return None


class CancelScope:
    """Cancels one request from outside its task: on a deadline, on a DELETE, at a shutdown.

    `async with scope:` around the request's work raises the ClientError given to `cancel`.  `raise_if_cancelled` is
    for retries, where code on the way has turned the cancel into another error.
    """

    def __init__(self) -> None:
        self.reason: ClientError | None = None
        self._timeout = asyncio.timeout(None)
        self._is_entered = False

    def cancel(self, reason: ClientError) -> None:
        """Cancel; the first reason counts, and after the end of the scope nothing happens."""
        self.reason = self.reason or reason
        if self._is_entered and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def raise_if_cancelled(self) -> None:
        if self.reason:
            raise self.reason

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._is_entered = True
        if self.reason:
            self.cancel(self.reason)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._is_entered = False
        try:
            await self._timeout.__aexit__(kind, error, at)
        except TimeoutError:
            if self.reason is None:
                raise
            raise self.reason from None
