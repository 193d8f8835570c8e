"""Choice among the places to which a stored chain can be restored, against all of them tried one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.proxy.fake_backend import make_layout
from warmline_common.measurement.duration_model import DurationModel
from warmline_common.protocol.messages import CheckpointRef, KvLayout, SegmentRef
from warmline_proxy.estimate.costs import Costs
from warmline_proxy.estimate.restore_choice import (
    RECOMPUTED_S_MAX,
    RECOMPUTED_S_MIN,
    RECOMPUTED_SHARE_MIN,
    RECOMPUTED_TOKENS_MIN,
    RESTORE_CUTS_MAX,
    RESTORED_SHARE_MIN,
    choose_restore_position,
)
from warmline_proxy.planner import PromptShape, RequestPlan, list_restore_cuts, plan_request
from warmline_proxy.store.rows import PrefixMatch


def make_match(ends: list[int], checkpoints: list[int]) -> PrefixMatch:
    starts = [0, *ends[:-1]]
    chain = [SegmentRef(id=f"s{end}", start=start, end=end, upto=end) for start, end in zip(starts, ends, strict=True)]
    states = [CheckpointRef(id=f"c{at}", position=at) for at in checkpoints]
    return PrefixMatch(tokens=ends[-1], chain=chain, checkpoints=states, end_reason="differs")


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, PrefixMatch, KvLayout, Costs]:
    ends = sorted(draw(st.sets(st.integers(1, 900), min_size=1, max_size=6)))
    has_states, grid = draw(st.booleans()), draw(st.sampled_from((0, 64)))
    checkpoints = sorted(draw(st.sets(st.integers(1, ends[-1]), max_size=5))) if has_states else []
    state_bytes = draw(st.sampled_from((0, 10**5, 10**7))) if has_states else 0
    layout = make_layout(has_states=has_states, grid=grid, row_bytes=1_000, state_bytes=state_bytes)
    rate = st.floats(0.0, 1e-2)
    chunk = DurationModel(draw(rate), draw(rate), draw(st.floats(0.0, 1e-4)))
    costs = Costs(
        chunk, DurationModel(draw(rate), draw(st.floats(0.0, 1e-5))), step_tokens=draw(st.sampled_from((64, 512)))
    )
    return draw(st.integers(2, 1_000)), make_match(ends, checkpoints), layout, costs


def is_possible(position: int, tokens: int, match: PrefixMatch, layout: KvLayout) -> bool:
    if position == 0:
        return True
    if position > min(match.tokens, tokens - 1) or (layout.grid and position % layout.grid):
        return False
    return not layout.has_states or position in {each.position for each in match.checkpoints}


def time_start(position: int, tokens: int, layout: KvLayout, costs: Costs) -> float:
    """Seconds of restore and prefill, chunk by chunk."""
    seconds, at = 0.0, position
    if position:
        size = position * layout.row_bytes + (layout.state_bytes if layout.has_states else 0)
        seconds = costs.restore.fixed_s + size * costs.restore.unit_s
    while at < tokens - 1:
        count = min(costs.step_tokens, tokens - 1 - at)
        seconds += costs.chunk.estimate_s(count, at + count / 2)
        at += count
    return seconds


@settings(max_examples=200)
@given(cases())
def test_choice_is_soonest_of_all_places(case: tuple[int, PrefixMatch, KvLayout, Costs]) -> None:
    tokens, match, layout, costs = case
    plan = plan_request(PromptShape(tokens), [], match, layout, costs)
    assert is_possible(plan.reuse, tokens, match, layout)
    assert sum(link.upto - link.start for link in plan.chain) == plan.reuse
    ends = {min(link.end, tokens - 1) for link in match.chain} | {each.position for each in match.checkpoints}
    ends |= {end - end % layout.grid for end in ends} if layout.grid else set()
    possible = {end for end in ends | {0} if is_possible(end, tokens, match, layout)}
    seconds = {end: time_start(end, tokens, layout, costs) for end in possible}
    longest, soonest_s = max(possible), min(seconds.values())
    if longest < min(RECOMPUTED_TOKENS_MIN, RESTORED_SHARE_MIN * tokens):
        assert plan.reuse == 0
        return
    margin_s = max(RECOMPUTED_S_MIN, RECOMPUTED_SHARE_MIN * seconds[longest])
    if plan.reuse == longest:
        margin_s = max(margin_s, RECOMPUTED_S_MAX)
        assert seconds[longest] - soonest_s <= margin_s * (1 + 1e-9), "nothing else is clearly sooner"
    else:
        assert seconds[plan.reuse] == pytest.approx(soonest_s), "a shorter restore is the soonest start"
        assert seconds[longest] - soonest_s >= margin_s * (1 - 1e-9), "by a margin"


LAYOUT = make_layout(row_bytes=1_000)


def test_part_of_chain_is_restored_where_the_rest_is_sooner_computed() -> None:
    layout = make_layout(row_bytes=100_000)
    chunk = DurationModel(0.0, 0.001, 0.0)  # 1 ms a token, whatever its context
    cheap, dear = DurationModel(0.0, 5e-9), DurationModel(0.0, 2e-8)  # 0.5 and 2 ms a token
    match = make_match([200, 400, 600], [])
    assert plan_request(PromptShape(700), [], match, layout, Costs(chunk, cheap)).reuse == 600
    plan = plan_request(PromptShape(700), [], match, layout, Costs(chunk, dear))
    assert (plan.source, plan.why_not_warmer) == ("cold", "restoring 600 tokens would take longer")
    # Chunks have a fixed cost: from 600 a whole one is left, as from 450.
    layout, slow = (
        make_layout(row_bytes=100_000),
        Costs(DurationModel(2.0, 0.0001), DurationModel(0.0, 4e-8), step_tokens=256),
    )
    plan = plan_request(PromptShape(700), [], make_match([200, 450, 600], []), layout, slow)
    assert (plan.source, plan.reuse) == ("restored", 450)
    assert plan.why_not_warmer == "restoring 600 tokens would take longer"
    assert [(link.start, link.upto) for link in plan.chain] == [(0, 200), (200, 450)]


def test_noise_does_not_throw_restore_away() -> None:
    costs = Costs(DurationModel(unit_s=0.001), DurationModel(unit_s=1.05e-6))  # restoring takes 5 % longer
    assert choose_restore_position([500, 1_000], 1_001, LAYOUT, costs) == 1_000
    clear = replace(costs, restore=DurationModel(unit_s=1.6e-6))
    assert choose_restore_position([500, 1_000], 1_001, LAYOUT, clear) == 0
    short = replace(costs, restore=DurationModel(0.004))
    assert choose_restore_position([1], 2, LAYOUT, short) == 1, "nor some milliseconds"
    slow = replace(costs, restore=DurationModel(0.4))
    assert choose_restore_position([75], 76, LAYOUT, slow) == 0
    assert choose_restore_position([85], 86, LAYOUT, slow) == 85, "computing takes more than a fifth as long"
    busy = Costs(DurationModel(unit_s=0.0001), DurationModel(0.5))  # a tiny model, while others use the machine
    assert choose_restore_position([1_250], 1_300, LAYOUT, busy) == 1_250
    slower = replace(busy, restore=DurationModel(0.7))
    assert choose_restore_position([1_250], 1_300, LAYOUT, slower) == 0


def test_few_tokens_are_not_worth_a_restore() -> None:
    costs = Costs(DurationModel(unit_s=1.0))
    assert choose_restore_position([6], 700, LAYOUT, costs) == 0
    assert choose_restore_position([6], 50, LAYOUT, costs) == 6, "a good part of a short prompt"
    assert choose_restore_position([64], 7_000, LAYOUT, costs) == 64


def test_places_compared_are_bounded() -> None:
    cuts = list(range(10, 100_010, 10))
    calls = 0

    class CountedCosts(Costs):
        def estimate_prefill_s(self, start: int, end: int, chunk_ends: object = ()) -> float:
            nonlocal calls
            calls += 1
            return super().estimate_prefill_s(start, end)

    assert choose_restore_position(cuts, 200_000, LAYOUT, CountedCosts()) == cuts[-1]
    assert calls <= RESTORE_CUTS_MAX + 2


def test_old_and_foreign_places_are_left_out() -> None:
    match = make_match([100, 200, 300], [50, 128, 192, 290])
    exact = make_layout(has_states=True, grid=64)
    assert [cut.position for cut in list_restore_cuts(290, match, exact)] == [128, 192]
    assert [cut.position for cut in list_restore_cuts(290, match, make_layout(has_states=True))] == [50, 128, 192]
    assert [cut.position for cut in list_restore_cuts(290, match, make_layout(grid=64))] == [64, 192, 256]
    assert [cut.position for cut in list_restore_cuts(290, match, make_layout())] == [100, 200, 289]
    assert list_restore_cuts(290, match, make_layout(persistent=False)) == []
    assert RequestPlan("cold", 0).expected_ttft_s == 0.0
