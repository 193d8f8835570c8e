"""Estimator: it learns from records that tell something, and forgets another model's."""

import msgspec
import pytest

from support.proxy.fake_backend import make_layout
from warmline_common.measurement.recent_durations import WorkDuration
from warmline_common.protocol.messages import BackendStatus
from warmline_proxy.estimate.costs import Costs
from warmline_proxy.estimate.estimator import DurationEstimator, list_lone_prefills
from warmline_proxy.store.rows import RequestRecord, TtftParts

PARTS = TtftParts(render_s=0.04, plan_s=0.02, restore_s=0.5, wait_s=9.0, prefill_s=7.0, first_step_s=0.3)


NUMBERS = (
    *("context_tokens_max", "memory_budget_bytes", "resident_bytes", "running_bytes", "residents", "running", "queued"),
    *("decode_tokens_per_s", "restore_bytes_per_s", "save_bytes_per_s", "slowest_recent_step_s"),
)


def make_status(**facts: object) -> BackendStatus:
    usual = {
        "boot": "b",
        "model": "m",
        "model_path": "/m",
        "fingerprint": "f",
        "layout": make_layout(),
        "prefill_rates": [],
    }
    numbers = dict.fromkeys(NUMBERS, 0) | {"prefill_step_size": 512}
    return BackendStatus(generation=0, ready=True, **usual | numbers | facts)  # type: ignore[arg-type]


def make_record(**facts: object) -> RequestRecord:
    usual = {"id": "r", "at": 1.0, "endpoint": "chat", "client_model": "", "outcome": "ok", "source": "restored"}
    numbers = {"prompt_tokens": 1_000, "restored_tokens": 900, "prefilled_tokens": 100, "ttft_s": PARTS.total_s}
    return RequestRecord(**usual | numbers | {"ttft_parts": PARTS} | facts)  # type: ignore[arg-type]


def test_parts_are_learned_from_records() -> None:
    estimator = DurationEstimator()
    estimator.update_status(make_status())
    for _ in range(3):
        estimator.record_request(make_record())
    estimator.record_request(
        make_record(ttft_parts=TtftParts(render_s=4.0, plan_s=2.0, restore_s=50.0, first_step_s=30.0))
    )
    costs, restored_bytes = estimator.costs, 900 * make_layout().row_bytes
    assert costs.render.estimate_s(1_000) == pytest.approx(0.04, rel=0.05)
    assert costs.plan.estimate_s(1_000) == pytest.approx(0.02, rel=0.05)
    assert costs.first_step.estimate_s(1_000) == pytest.approx(0.3, rel=0.05)
    assert costs.restore.estimate_s(restored_bytes) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    "facts",
    [{"outcome": "cancelled"}, {"dispatches": 2}, {"ttft_s": 0.0}, {"prefilled_tokens": 0}],
    ids=["it failed", "it was sent again", "without a token", "nothing was computed"],
)
def test_other_records_teach_nothing(facts: dict[str, object]) -> None:
    estimator = DurationEstimator()
    estimator.record_request(make_record(**facts))
    assert estimator.costs == Costs()


def test_backend_measurements_are_used_at_once() -> None:
    estimator = DurationEstimator()
    chunk = WorkDuration(amount=512, context=256, seconds=2.0, count=9)
    estimator.update_status(make_status(prefill_step_size=0))  # the model is loading
    assert estimator.costs == Costs()
    estimator.update_status(make_status(chunk_durations=[chunk], decode_step_s=0.5, restore_bytes_per_s=1e6))
    costs = estimator.costs
    assert costs.estimate_prefill_s(0, 512) == pytest.approx(2.0, rel=0.01) and costs.step_tokens == 512
    assert costs.first_step.estimate_s(10) == pytest.approx(0.5, abs=0.01), "a prior before the first request"
    assert costs.restore.estimate_s(10**6) == pytest.approx(1.0, abs=0.02)
    slower = msgspec.structs.replace(chunk, seconds=6.0)
    for _ in range(3):
        estimator.record_chunks([slower])
    assert estimator.costs.estimate_prefill_s(0, 512) == pytest.approx(6.0, rel=0.01), "chunks of requests come later"
    estimator.update_status(make_status(chunk_durations=[chunk]))
    assert estimator.costs.estimate_prefill_s(0, 512) == pytest.approx(6.0, rel=0.01), "the same backend is known"


def test_other_model_is_learned_anew() -> None:
    estimator = DurationEstimator()
    estimator.update_status(make_status())
    prior = estimator.costs
    estimator.record_request(make_record())
    assert estimator.costs != prior
    estimator.update_status(make_status())
    assert estimator.costs != prior
    estimator.update_status(make_status(fingerprint="g", boot="c"))
    assert estimator.costs == prior


def test_history_is_learned_once_the_model_is_known() -> None:
    asked = []

    def list_history(fingerprint: str) -> list[RequestRecord]:
        asked.append(fingerprint)
        long = {"source": "cold", "restored_tokens": 0, "prefilled_tokens": 1_001, "prefill_s": 4.0, "ttft_s": 4.5}
        batch = [make_record(at=at, **{**long, "prefill_s": 9.0}) for at in (10.0, 10.1, 11.0)]
        alone = [make_record(at=at, **long) for at in (20.0, 30.0, 40.0)]
        return [make_record(prefilled_tokens=1)] * 3 + batch + alone if fingerprint == "f" else []

    estimator = DurationEstimator(list_history)
    estimator.update_status(make_status(layout=None))
    assert not asked, "the model is loading"
    for _ in range(2):
        estimator.update_status(make_status())
    assert asked == ["f"]
    costs = estimator.costs
    assert costs.render.estimate_s(1_000) == pytest.approx(0.04, rel=0.05)
    assert costs.estimate_prefill_s(0, 1_000) == pytest.approx(4.0, rel=0.05)
    estimator.update_status(make_status(fingerprint="g", boot="c"))
    assert asked == ["f", "g"] and estimator.costs != costs


def test_prefill_beside_one_that_was_cancelled_is_not_a_lone_one() -> None:
    facts = {"prefill_s": 1.0, "ttft_s": 2.0, "total_s": 3.0}
    cancelled = make_record(id="left", at=20.0, **{**facts, "outcome": "cancelled", "ttft_s": 0.0})
    records = [make_record(id=str(at), at=at, **facts) for at in (10.0, 22.0, 30.0, 40.0, 41.0)]
    assert [each.id for each in list_lone_prefills([*records, cancelled])] == ["10.0", "30.0"]
