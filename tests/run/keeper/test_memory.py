"""Division of memory among models."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from warmline_common.measurement.model_memory import ModelSize
from warmline_run.keeper.memory import (
    LoadDecision,
    MemoryHolder,
    divide_memory,
    divide_usable_bytes,
    plan_load,
)

AMOUNTS = st.integers(0, 1000)
SIZES = st.builds(ModelSize, AMOUNTS, AMOUNTS, st.integers(1, 300), st.sampled_from([0, 0, 50, 500]))
FLAGS = st.booleans(), st.booleans(), st.booleans()
HOLDERS = st.builds(MemoryHolder, SIZES, AMOUNTS, AMOUNTS, *FLAGS, st.sampled_from([0, 0, 70]))
MODELS = st.dictionaries(st.sampled_from("abcdef"), HOLDERS)


def sum_held(holders: dict[str, MemoryHolder]) -> int:
    return sum(holder.held_bytes for holder in holders.values())


def with_budgets(holders: dict[str, MemoryHolder], budgets: dict[str, int]) -> dict[str, MemoryHolder]:
    return {name: replace(holder, kv_bytes=budgets[name]) for name, holder in holders.items()}


@given(MODELS, st.integers(0, 3000), st.sampled_from("abcdef"))
def test_division_stays_within_total_and_limits(holders: dict[str, MemoryHolder], spare: int, first: str) -> None:
    total = sum_held(holders) + spare
    budgets = divide_memory(holders, total, first)
    assert sum_held(with_budgets(holders, budgets)) <= total
    for name, holder in holders.items():
        assert holder.floor_bytes <= budgets[name] <= max(holder.floor_bytes, holder.limit_bytes(total))
        assert holder.can_shrink or budgets[name] >= holder.kv_bytes
        assert holder.can_grow or budgets[name] <= holder.kv_bytes


@given(MODELS, st.integers(0, 3000))
def test_growth_after_refused_shrinks_stays_within_total(holders: dict[str, MemoryHolder], spare: int) -> None:
    total = sum_held(holders) + spare
    present = {name: replace(holder, can_shrink=False) for name, holder in holders.items()}
    budgets = divide_memory(present, total)
    assert all(budgets[name] >= holder.kv_bytes for name, holder in holders.items())
    assert sum_held(with_budgets(holders, budgets)) <= total


@given(MODELS, SIZES, AMOUNTS, st.integers(0, 3000))
def test_planned_load_fits_after_division(
    others: dict[str, MemoryHolder], size: ModelSize, wish: int, spare: int
) -> None:
    total = sum_held(others) + spare
    plan = plan_load(size, wish, others, total)
    if plan.decision is LoadDecision.FITS:
        added = MemoryHolder(size, plan.start_bytes, wish, can_shrink=False)
        budgets = divide_memory({**others, "new": added}, total, "new")
        assert budgets["new"] >= plan.start_bytes >= wish
        assert sum_held({**with_budgets(others, {**budgets}), "new": replace(added, kv_bytes=budgets["new"])}) <= total
    else:
        assert plan.missing_bytes > 0


@given(MODELS, SIZES, AMOUNTS, st.integers(0, 3000))
def test_load_is_too_large_only_where_unloading_others_does_not_help(
    others: dict[str, MemoryHolder], size: ModelSize, wish: int, spare: int
) -> None:
    total = sum_held(others) + spare
    pinned = {
        name: replace(
            holder, can_shrink=True, wish_bytes=0, kv_bytes=max(holder.kv_bytes, holder.size.floor_bytes), extra_bytes=0
        )
        for name, holder in others.items()
        if holder.is_pinned
    }
    is_too_large = plan_load(size, wish, others, total).decision is LoadDecision.TOO_LARGE
    assert is_too_large == (plan_load(size, wish, pinned, total).decision is not LoadDecision.FITS)


@given(SIZES, AMOUNTS)
def test_lone_model_gets_its_largest_budget(size: ModelSize, spare: int) -> None:
    total = size.need_bytes + spare
    budgets = divide_memory({"a": MemoryHolder(size, size.floor_bytes)}, total)
    assert budgets == {"a": size.kv_max_bytes(total)}


def test_rest_is_divided_equally_and_leftovers_go_to_others() -> None:
    large, small = ModelSize(100, 10, 20), ModelSize(100, 10, 20, 50)
    holders = {"a": MemoryHolder(large, 20), "b": MemoryHolder(large, 20), "c": MemoryHolder(small, 20)}
    assert divide_memory(holders, 1300) == {"a": 325, "b": 325, "c": 50}


def test_wish_comes_before_equal_parts() -> None:
    size = ModelSize(100, 10, 20)
    holders = {"a": MemoryHolder(size, 20, wish_bytes=500), "b": MemoryHolder(size, 20)}
    assert divide_memory(holders, 1000) == {"a": 500, "b": 60}
    both = {**holders, "b": MemoryHolder(size, 20, wish_bytes=500)}
    assert divide_memory(both, 1000, "b") == {"a": 280, "b": 500}


@given(MODELS, st.integers(0, 3000))
def test_usable_bytes_are_within_total_and_cover_what_is_held(holders: dict[str, MemoryHolder], spare: int) -> None:
    total = sum_held(holders) + spare
    usable = divide_usable_bytes(holders, total)
    assert sum(usable.values()) <= total
    assert all(usable[name] >= holder.held_bytes for name, holder in holders.items())
    assert all(usable[name] == holder.held_bytes for name, holder in holders.items() if not holder.can_shrink)


def test_what_nobody_holds_may_be_used_in_equal_parts() -> None:
    holders = {"a": MemoryHolder(ModelSize(100, 10, 20), 30), "b": MemoryHolder(ModelSize(200, 10, 20), 40)}
    assert divide_usable_bytes(holders, 1000) == {"a": 445, "b": 555}
    starting = {**holders, "c": MemoryHolder(ModelSize(100, 10, 20), 20, can_shrink=False)}
    assert divide_usable_bytes(starting, 1000) == {"a": 380, "b": 490, "c": 130}
