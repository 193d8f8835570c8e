"""Record and PERF line of a request: its waits by reason, its tokens, and the parts of its time to the first token."""

from dataclasses import dataclass

import msgspec
import pytest

from warmline_common.protocol import waits
from warmline_common.protocol.messages import GenerationResult, Timings
from warmline_proxy import request_log
from warmline_proxy.explain.waits import WAITS, report_waits
from warmline_proxy.planner import RESTORED, RequestPlan
from warmline_proxy.request_log import RequestLog, build_perf_fields, format_perf_line
from warmline_proxy.store.rows import RequestRecord, TtftParts


def make_log(**timings: object) -> RequestLog:
    """Make the log of a request whose generation has ended, with these timings."""
    result = GenerationResult(
        boot="b",
        generation=0,
        request_id="r",
        finish="stop",
        resident="",
        generated=b"",
        prefilled_until=0,
        checkpoints=[],
        positions=[],
        timings=Timings(**timings),  # type: ignore[arg-type]
    )
    log = RequestLog("chat", prompt_tokens=1000, generation_result=result, plan=RequestPlan(RESTORED, 800))
    log.record_success()
    return log


def test_queue_is_sum_of_waits_before_the_start() -> None:
    log = make_log(waits={waits.AUDIT: 13.0, waits.PLACE: 0.5, waits.TURNS: 40.0}, prefilled=200)
    log.add_waits({waits.BODY: 0.25, waits.PLACE: 1.0})
    for _ in range(2):  # pure
        record = log.build_record()
        assert record.queue_s == 14.75
        assert record.waits == {waits.BODY: 0.25, waits.PLACE: 1.5, waits.AUDIT: 13.0, waits.TURNS: 40.0}
    assert log.queue_s == 1.25, "before the generation has ended"


def test_perf_names_long_waits() -> None:
    log = make_log(waits={waits.AUDIT: 13.0, waits.STEP: 0.049}, prefilled=200)
    record = log.build_record()
    assert " queue=13.049s " in format_perf_line(record) and " waits=audit:13.000s " in format_perf_line(record)
    assert build_perf_fields(record)["waits"] == {waits.AUDIT: 13.0, waits.STEP: 0.049}
    assert " waits=" not in format_perf_line(make_log(prefilled=200).build_record())


def test_waits_are_measured_by_reason_also_where_they_fail() -> None:
    log = RequestLog("chat")
    with pytest.raises(ValueError, match="left"), log.measure_wait(waits.PLACE):
        raise ValueError("left")
    assert set(log.waits) == {waits.PLACE} and log.waits[waits.PLACE] >= 0.0


def test_every_reason_is_explained() -> None:
    reasons = {value for name, value in vars(waits).items() if name.isupper() and isinstance(value, str)}
    assert reasons == set(WAITS)
    reports = report_waits({waits.SAVE: 0.2, waits.LEADER: 3.0, waits.BODY: 0.01, "later version": 0.1})
    assert [(report.reason, report.means) for report in reports] == [
        (waits.LEADER, WAITS[waits.LEADER]),
        (waits.SAVE, WAITS[waits.SAVE]),
        ("later version", "later version"),
    ]


@pytest.mark.parametrize(("prefilled", "cached"), [(200, 800), (1000, 0), (300, 700), (50, 800), (0, 0)])
def test_reuse_is_what_computing_began_after(prefilled: int, cached: int) -> None:
    """Planned: 800 of 1000.  A request that ended before anything was computed has reused nothing."""
    record = make_log(prefilled=prefilled).build_record()
    assert (record.cached_tokens, record.restored_tokens) == (cached, cached)
    assert make_log().build_record().cached_tokens == 0


# ---- parts of the time to the first token


@dataclass
class FakeClock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(request_log.time, "monotonic", fake.monotonic)
    return fake


def test_parts_add_up_to_time_to_first_token(clock: FakeClock) -> None:
    log = make_log(prefilled=200, prefill_s=8.0, waits={waits.STEP: 0.5, waits.TURNS: 1.0})
    log.arrived_monotonic = clock.now
    for reason, seconds in ((waits.BODY, 1.0), (waits.PROMPT, 3.0)):
        with log.measure_wait(reason):
            clock.now += seconds
    log.restore_s = 2.0
    clock.now += 2.25  # the restore, and the plan
    log.mark_dispatched()
    clock.now += 10.0  # 0.5 waiting, 9.0 in prefill with others' turns, the first step
    log.ttft_s = log.elapsed_s()
    record = log.build_record()
    assert record.ttft_parts == TtftParts(
        render_s=3.0, plan_s=0.25, restore_s=2.0, wait_s=2.5, prefill_s=8.0, first_step_s=0.5
    )
    assert record.ttft_parts.total_s == record.ttft_s == 16.25
    line = format_perf_line(record)
    assert (
        " render=3.000s plan=0.250s restore=2.000s wait=2.500s prefill=8.000s first_step=0.500s ttft=16.250s " in line
    )


def test_lost_dispatch_is_a_wait(clock: FakeClock) -> None:
    log = make_log(prefilled=1000, prefill_s=5.0)
    log.arrived_monotonic = clock.now
    log.record_lost_dispatch()  # before the first
    clock.now += 1.0
    log.mark_dispatched()
    clock.now += 40.0  # until the backend is lost
    log.record_lost_dispatch()
    with log.measure_wait(waits.BACKEND):
        clock.now += 10.0
    log.mark_dispatched()
    clock.now += 6.0
    log.ttft_s = log.elapsed_s()
    parts = log.build_record().ttft_parts
    assert (parts.wait_s, parts.plan_s, parts.prefill_s, parts.first_step_s) == (50.0, 1.0, 5.0, 1.0)
    assert parts.total_s == log.ttft_s == 57.0


def test_turns_after_first_token_do_not_count(clock: FakeClock) -> None:
    """An answer that is drawn again may wait for others once more."""
    log = make_log(prefilled=1000, prefill_s=1.0, waits={waits.TURNS: 30.0})
    log.arrived_monotonic = clock.now
    log.mark_dispatched()
    clock.now += 3.0
    log.ttft_s = log.elapsed_s()
    parts = log.build_record().ttft_parts
    assert (parts.wait_s, parts.first_step_s, parts.total_s) == (2.0, 0.0, 3.0)


def test_parts_without_a_token_are_of_what_was_done() -> None:
    record = make_log(prefilled=200, prefill_s=8.0, waits={waits.PLACE: 1.0}).build_record()
    assert record.ttft_s == 0.0
    assert record.ttft_parts == TtftParts(wait_s=1.0, prefill_s=8.0)


def test_expected_parts_are_logged() -> None:
    log = make_log(prefilled=200)
    log.plan = RequestPlan(RESTORED, 800, expected=TtftParts(restore_s=0.5, prefill_s=2.0))
    record = log.build_record()
    assert record.expected_ttft_s == 2.5 and " expected=2.500s " in format_perf_line(record)
    fields = build_perf_fields(record)
    zero = {"render": 0.0, "plan": 0.0, "wait": 0.0, "first_step": 0.0}
    assert fields["expected_parts"] == zero | {"restore": 0.5, "prefill": 2.0}
    assert "expected_parts=render:0.000s,plan:0.000s,restore:0.500s,wait:0.000s," in format_perf_line(record)


def test_records_written_before_have_no_parts() -> None:
    record = make_log(prefilled=200).build_record()
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    old = {name: value for name, value in values.items() if not name.endswith("_parts")}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=RequestRecord).ttft_parts == TtftParts()
