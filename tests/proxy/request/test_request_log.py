"""Record and PERF line of a request: its waits by reason, and the tokens that it reached."""

import pytest

from warmline_common.protocol import waits
from warmline_common.protocol.messages import GenerationResult, Timings
from warmline_proxy.explain.waits import WAITS, report_waits
from warmline_proxy.planner import RESTORED, RequestPlan
from warmline_proxy.request_log import RequestLog, build_perf_fields, format_perf_line


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
