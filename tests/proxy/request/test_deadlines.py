"""Deadlines: limits that end a request, and those that do not."""

import asyncio
import json
from pathlib import Path

import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_common.protocol.sse import DONE, encode_event
from warmline_proxy.errors import ClientError, request_cancelled
from warmline_proxy.request.deadlines import CancelScope, Clock, EnginePace, RequestTimeouts, find_missed_deadline
from warmline_proxy.upstream import watchdog

HEADERS = {
    "X-Warmline-Connect-Timeout": "1.5",
    "X-Warmline-Queue-Timeout": "2",
    "X-Warmline-Stall-Timeout": "0",
    "X-Warmline-Total-Timeout": "3e2",
}


STREAM_BODY = {"messages": [{"role": "user", "content": "Everything"}], "stream": True}


def make_stream(size: int) -> list[bytes]:
    """Stream of at least `size` bytes."""
    piece = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 100_000}}]}).encode()
    return [encode_event(piece)] * (size // 100_000) + [DONE]


def get_error_code(error: ClientError | None) -> str:
    return "" if error is None else error.body.decode().split('"code":"')[1].split('"')[0]


def test_headers_override_timeouts() -> None:
    limits = RequestTimeouts(connect_s=60, queue_s=10, stall_s=20, total_s=30)
    assert limits.override_by_headers({}) == limits
    assert limits.override_by_headers({"X-Warmline-Total-Timeout": "5"}) == RequestTimeouts(60, 10, 20, 5)
    assert limits.override_by_headers(HEADERS) == RequestTimeouts(1.5, 2, 0, 300)


@pytest.mark.parametrize(
    "text", ["soon", "-1", "-0", "+5", "nan", "inf", "1_0", "\u0665", "0x5", "1e9", "5.", ".5", ""]
)
def test_invalid_timeout_header_returns_400(text: str) -> None:
    with pytest.raises(ClientError) as refused:
        RequestTimeouts().override_by_headers({"X-Warmline-Queue-Timeout": text})
    assert refused.value.status == 400 and "X-Warmline-Queue-Timeout" in str(refused.value)


def test_total_deadline_counts_from_arrival() -> None:
    clock = Clock(started_at=100.0)
    assert find_missed_deadline(RequestTimeouts(total_s=5), clock, 105.0) is None
    assert get_error_code(find_missed_deadline(RequestTimeouts(total_s=5), clock, 105.1)) == "deadline_exceeded"
    assert find_missed_deadline(RequestTimeouts(), clock, 1e9) is None


def test_queue_deadline_sums_waiting_time() -> None:
    clock = Clock(started_at=0.0, waited_s=3.0, waiting_since=50.0)
    assert find_missed_deadline(RequestTimeouts(queue_s=5), clock, 52.0) is None
    assert get_error_code(find_missed_deadline(RequestTimeouts(queue_s=5), clock, 52.1)) == "queue_timeout"
    clock.waiting_since = None
    assert find_missed_deadline(RequestTimeouts(queue_s=5), clock, 1e9) is None


def test_stall_deadline_counts_from_last_progress() -> None:
    clock = Clock(started_at=0.0, progressed_at=1000.0)
    assert find_missed_deadline(RequestTimeouts(stall_s=10), clock, 1010.0) is None
    assert get_error_code(find_missed_deadline(RequestTimeouts(stall_s=10), clock, 1010.1)) == "stalled"


def test_stall_deadline_scales_with_slowest_step_and_running() -> None:
    clock = Clock(started_at=0.0, progressed_at=0.0)
    assert find_missed_deadline(RequestTimeouts(stall_s=10), clock, 285.0, EnginePace(57.0, 1)) is None
    assert (
        get_error_code(find_missed_deadline(RequestTimeouts(stall_s=10), clock, 285.1, EnginePace(57.0, 1)))
        == "stalled"
    )
    assert find_missed_deadline(RequestTimeouts(stall_s=10), clock, 855.0, EnginePace(57.0, 3)) is None


@pytest.mark.parametrize(
    ("waited_s", "stalled_s", "slowest_s", "is_missed"),
    [
        (11.0, 11.0, 0.0, True),
        (10.0, 1000.0, 0.0, False),  # it has not waited for so long
        (1000.0, 10.0, 0.0, False),  # the engine works, on others
        (1000.0, 0.0, 0.0, False),
        (285.1, 285.1, 57.0, True),  # each chunk takes a minute
        (285.0, 285.0, 57.0, False),
    ],
)
def test_waiting_request_stalls_with_engine(
    waited_s: float, stalled_s: float, slowest_s: float, is_missed: bool
) -> None:
    clock = Clock(started_at=0.0, waiting_since=0.0, blocked_since=0.0)
    pace = EnginePace(slowest_s, 4, stalled_s)
    error = find_missed_deadline(RequestTimeouts(stall_s=10), clock, waited_s, pace)
    assert get_error_code(error) == ("stalled" if is_missed else "")
    assert not is_missed or f"has not finished a step for {stalled_s:.0f} s" in str(error)
    assert find_missed_deadline(RequestTimeouts(), clock, waited_s, pace) is None


def test_clock_counts_blocked_time_over_queue_and_plan() -> None:
    clock = Clock()
    clock.mark_waiting()
    blocked_since = clock.blocked_since
    clock.mark_idle()  # planned
    clock.mark_waiting()  # sent
    assert clock.blocked_since == blocked_since is not None
    clock.mark_progress()
    assert clock.blocked_since is None
    clock.mark_waiting()
    clock.reset()
    assert clock.blocked_since is clock.waiting_since is None


def test_clock_separates_waiting_and_progress() -> None:
    clock = Clock()
    clock.mark_waiting()
    assert clock.waiting_since is not None and clock.progressed_at is None
    clock.mark_progress()
    assert clock.waiting_since is None and clock.progressed_at is not None
    clock.mark_idle()
    assert clock.waiting_since is None and clock.progressed_at is None


@on_loop
async def test_cancel_scope_raises_first_reason() -> None:
    scope = CancelScope()
    with pytest.raises(ClientError, match="one"):
        async with scope:
            scope.cancel(request_cancelled("one"))
            scope.cancel(request_cancelled("two"))
            await asyncio.Event().wait()
    scope.cancel(request_cancelled("late"))  # no harm


@on_loop
async def test_cancel_before_entry_raises_at_first_wait() -> None:
    scope = CancelScope()
    scope.cancel(request_cancelled("early"))
    with pytest.raises(ClientError, match="early"):
        async with scope:
            await asyncio.Event().wait()


@on_loop
async def test_cancel_scope_passes_other_errors() -> None:
    with pytest.raises(TimeoutError):
        async with CancelScope():
            raise TimeoutError


@on_loop
async def test_total_deadline_returns_504_and_cancels(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 0
        answer = await proxy.chat(headers={"X-Warmline-Total-Timeout": "1.5"})
        assert answer.status == 504 and (await answer.json())["error"]["code"] == "deadline_exceeded"
        (record,) = await proxy.wait_until_saved()
        assert proxy.backend.calls["cancel"] == [answer.headers["X-Warmline-Request"]] == [record.id]
        assert record.outcome == "error" and record.saved_tokens == record.prompt_tokens


@on_loop
async def test_stalled_stream_ends_with_error_event(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, stall_timeout_s=0.2) as proxy:
        proxy.backend.hold_after = 1
        answer = await proxy.chat(stream=True)
        text = await answer.text()
        assert answer.status == 200 and '"Par"' in text and '"code":"stalled"' in text and "[DONE]" not in text
        await proxy.wait_until_saved()
        assert proxy.backend.calls["cancel"] == [answer.headers["X-Warmline-Request"]]


@on_loop
async def test_request_queued_behind_stuck_engine_ends_within_its_stall_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.05)
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        proxy.backend.step_age_s = 1e6
        queued = await proxy.chat("Another one", headers={"X-Warmline-Stall-Timeout": "0.3"})
        assert queued.status == 504 and (await queued.json())["error"]["code"] == "stalled"
        assert "the engine has not finished a step for" in (await queued.json())["error"]["message"]
        proxy.backend.step_age_s = 0.0
        proxy.backend.may_continue.set()
        assert (await first).status == 200, "its own limit is longer"


@on_loop
async def test_queue_timeout_returns_503_with_retry_after(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1, queue_timeout_s=0.2) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat(headers={"X-Warmline-Queue-Timeout": "0"}))
        await proxy.backend.holding.wait()
        second = await proxy.chat("Another one")
        assert second.status == 503 and second.headers["Retry-After"].isdigit()
        assert (await second.json())["error"]["code"] == "queue_timeout"
        proxy.backend.may_continue.set()
        assert (await first).status == 200


@on_loop
async def test_unread_response_releases_ticket(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.raw = make_stream(4_000_000)
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=STREAM_BODY) as stuck:
            proxy.backend.raw = None
            assert (await proxy.chat("Another one")).status == 200
            assert stuck.status == 200
            while (await proxy.status())["lives"] > 1:
                pass  # until the other one is saved
            assert (await proxy.status())["lives"] == 1, "its client has not read the answer yet"


@on_loop
async def test_unread_backlog_is_limited(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.raw = make_stream(20_000_000)
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=STREAM_BODY):
            while (await proxy.status())["lives"]:
                pass
        (record,) = await proxy.wait_until_saved()
        assert record.outcome == "error" and "unread" in record.error
