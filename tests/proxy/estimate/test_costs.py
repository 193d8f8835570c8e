"""Expected durations: prefill as the sum of its chunks, and waits for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmline_common.measurement.duration_model import DurationModel
from warmline_proxy.estimate.costs import Costs, EngineLoad, PrefillLeft

COSTS = Costs(DurationModel(0.5, 0.01, 1e-5), step_tokens=100, decode_step_s=0.25)


@given(st.integers(0, 2_000), st.integers(0, 2_000), st.lists(st.integers(0, 2_500), max_size=4))
def test_prefill_is_sum_of_its_chunks(start: int, end: int, chunk_ends: list[int]) -> None:
    seconds, at = 0.0, start
    while at < end:
        stop = min([end, at + COSTS.step_tokens, *(each for each in chunk_ends if each > at)])
        seconds += COSTS.chunk.estimate_s(stop - at, at + (stop - at) / 2)
        at = stop
    assert COSTS.estimate_prefill_s(start, end, chunk_ends) == pytest.approx(seconds)


def test_wait_is_for_shorter_prompts_and_half_a_chunk_of_a_longer_one() -> None:
    costs = Costs(DurationModel(unit_s=0.01), step_tokens=100)
    assert EngineLoad(2.0).estimate_wait_s(1.0, costs) == 2.0
    shorter, longer = PrefillLeft("a", 50, 100), PrefillLeft("b", 0, 1_000)
    assert EngineLoad(2.0, [shorter, longer]).estimate_wait_s(1.0, costs) == pytest.approx(2.0 + 0.5 + 0.5)
    assert EngineLoad(0.0, [longer]).follow("b", 10.0).estimate_wait_s(1.0, costs) == 10.0


def test_wait_includes_share_of_decoding() -> None:
    costs = Costs(DurationModel(unit_s=0.01), decode_step_s=0.25)
    assert EngineLoad(decoding_count=3).estimate_wait_s(6.0, costs) == pytest.approx(2.0), "a quarter of 8 s"
    assert EngineLoad(decoding_count=3).estimate_wait_s(0.0, costs) == 0.25, "the step that runs"
