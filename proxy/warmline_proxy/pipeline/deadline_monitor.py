"""Monitor of all requests, ten times a second: cancels overdue ones, sends heartbeats to waiting clients."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from warmline_common.protocol.sse import encode_comment
from warmline_proxy.api.base import PromptProgress
from warmline_proxy.errors import ClientError, gateway_timeout
from warmline_proxy.http.body_fields import strip_unprintable
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.refusals import build_down_error
from warmline_proxy.request.deadlines import BACKLOG_BYTES_MAX, EnginePace, find_missed_deadline
from warmline_proxy.request.request import Request
from warmline_proxy.response.progress import measure_progress
from warmline_proxy.tasks import BackgroundTasks

log = logging.getLogger(__name__)

TICK_S = 0.1
WORKING = "working"
HEARTBEAT_INTERVAL_S = 15.0  # to one client
LOAD_INTERVAL_S = 1.0  # to one that asked for progress, while its model is loaded


@dataclass(eq=False)
class DeadlineMonitor:
    """Owned by the event loop.  `run` is its one task."""

    list_requests: Callable[[], Iterable[Request]]
    background: BackgroundTasks
    heartbeat_after_s: float

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:  # one request's failure must not end the monitor
                log.exception("checking the deadlines failed")

    def _tick(self, now: float) -> None:
        requests = list(self.list_requests())
        running = Counter(request.assigned_backend for request in requests if request.is_computing)
        for request in requests:
            if request.release_task is not None or request.response.is_closed:
                continue
            backend = request.assigned_backend
            pace = measure_pace(backend, running[backend]) if backend else EnginePace()
            if error := self._find_violation(request, now, pace):
                request.cancel(error)
            elif self._is_heartbeat_due(request, now):
                self.background.spawn(
                    request.response.send_heartbeat(*describe_heartbeat(request)), f"heartbeat {request.log.id}"
                )

    def _find_violation(self, request: Request, now: float, pace: EnginePace) -> ClientError | None:
        if request.generation and request.generation.backlog_bytes > BACKLOG_BYTES_MAX:
            reason = f"its client left {BACKLOG_BYTES_MAX >> 20} MiB of the answer unread"
            return gateway_timeout(reason, "client_too_slow")
        error = find_missed_deadline(request.timeouts, request.clock, now, pace, describe_model_wait(request))
        return error or find_missed_load(request, now)

    def _is_heartbeat_due(self, request: Request, now: float) -> bool:
        """Due only while there is progress: of the request, or of the engine while the request waits."""
        if request.call is None or not (request.call.stream or self.heartbeat_after_s):
            return False
        interval_s = HEARTBEAT_INTERVAL_S
        if request.model_wait and (progress_s := request.call.progress_interval_s) is not None:
            interval_s = max(progress_s, LOAD_INTERVAL_S)
        if not request.call.stream:
            after_s = self.heartbeat_after_s
            interval_s = min(interval_s, after_s) if request.response.has_started else after_s
        progressed_at = request.clock.progressed_at or find_last_progress(request)
        return now - request.response.last_write_at >= interval_s and progressed_at > request.response.last_write_at


def measure_pace(backend: Backend, running_count: int) -> EnginePace:
    """Speed of a backend's engine, with so many requests that are computed."""
    return EnginePace(backend.watchdog.slowest_recent_step_s, running_count, backend.watchdog.stalled_s)


def describe_model_wait(request: Request) -> str:
    """Reason why a request waits for its model; "" where it does not."""
    backend = request.assigned_backend
    return backend.describe_load_wait() if backend and request.model_wait else ""


def find_missed_load(request: Request, now: float) -> ClientError | None:
    """Error for a request that waits for its model, which has been unable to start for longer than the limit."""
    backend, limit_s = request.assigned_backend, request.timeouts.connect_s
    if backend is None or (wait := request.model_wait) is None:
        return None
    is_missed = 0 < limit_s < backend.gate.measure_outage_s(wait, now)
    return build_down_error(backend.name, backend.gate.down_reason, limit_s) if is_missed else None


def find_last_progress(request: Request) -> float:
    """Time at which a waiting request's engine was last seen to make a step, or the load of its model to go on."""
    if (backend := request.assigned_backend) is None:
        return 0.0
    return backend.gate.progressed_at if request.model_wait else backend.watchdog.last_step_at


def describe_heartbeat(request: Request) -> tuple[bytes, PromptProgress, str]:
    """Heartbeat for a streaming client: a comment; its progress, and the model that is being loaded for it."""
    first = request.branches[0] if request.branches else request
    reuse = first.log.plan.reuse if first.log.plan else 0
    progress = measure_progress(first.log, max(first.prefilled_tokens, reuse))
    if first.log.ttft_s:
        progress = msgspec.structs.replace(progress, processed=progress.total)
    backend = request.assigned_backend
    if backend is None or (wait := request.model_wait) is None:
        return encode_comment(WORKING), progress, ""
    waited_s, name = time.monotonic() - wait.since, strip_unprintable(backend.name)
    loading = PromptProgress(progress.total, time_ms=int(waited_s * 1000))
    return encode_comment(f"loading {name}, for {waited_s:.0f} s"), loading, name
