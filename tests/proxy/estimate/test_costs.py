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
    assert EngineLoad(2.0).estimate_prefill(0, 100, costs) == (2.0, 1.0)
    shorter, longer = PrefillLeft("a", 50, 100), PrefillLeft("b", 0, 1_000)
    assert EngineLoad(2.0, [shorter, longer]).estimate_prefill(0, 100, costs)[0] == pytest.approx(2.0 + 0.5 + 0.5)
    assert EngineLoad(0.0, [longer]).follow("b", 10.0).estimate_prefill(0, 100, costs) == (10.0, 1.0)


def test_followers_with_nothing_to_compute_wait_for_no_step_of_each_other() -> None:
    costs = Costs(DurationModel(unit_s=0.01), decode_step_s=0.25)
    followers = [PrefillLeft(str(n), 99, 99) for n in range(3)]
    assert EngineLoad(2.0, followers).estimate_prefill(99, 99, costs) == (2.0, 0.0)


def test_wait_includes_share_of_decoding() -> None:
    costs = Costs(DurationModel(unit_s=0.01), decode_step_s=0.25)
    assert EngineLoad(decoding_count=3).estimate_prefill(0, 600, costs)[0] == pytest.approx(2.0), "a quarter of 8 s"
    assert EngineLoad(decoding_count=3).estimate_prefill(9, 9, costs)[0] == 0.25, "the step that runs"


@pytest.mark.parametrize(
    ("others", "wait_s", "prefill_s"),
    [
        (0, 0.0, 0.9),
        (1, 0.0, 1.3),  # both together
        (4, 2.35, 2.1),  # four, the step that follows them, and the fifth: five at once would take hardly less
        (5, 2.75, 2.5),
        (11, 3.55, 3.3),
    ],
)
def test_similar_prompts_share_batches(others: int, wait_s: float, prefill_s: float) -> None:
    costs = Costs(DurationModel(fixed_s=0.5, unit_s=0.01), step_tokens=2_048, decode_step_s=0.25)
    load = EngineLoad(prefills=[PrefillLeft(str(n), 0, 40 + n % 2) for n in range(others)])
    assert load.estimate_prefill(0, 40, costs) == (pytest.approx(wait_s), pytest.approx(prefill_s))
