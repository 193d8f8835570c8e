"""When two runs of one prompt agree."""

import math
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.fake_backend import layout
from warmline_common.protocol.messages import FirstLogits
from warmline_common.protocol.tokens import pack_tokens
from warmline_proxy.audit.comparison import (
    DIFFERS,
    EQUAL,
    UNSTABLE,
    WITHIN,
    compare,
    detect_dtype,
    judge,
    max_difference,
)


def first(row: dict[int, float], digest: str = "") -> FirstLogits:
    """Likeliest first, as the backend tells it."""
    ranked = sorted(row, key=lambda token: -row[token])
    values = struct.pack(f"<{len(row)}f", *(row[token] for token in ranked))
    return FirstLogits(digest=digest or str(row), ids=pack_tokens(ranked), logprobs=values)


ONE = {5: -0.3, 7: -1.5, 9: -6.0}


@dataclass(frozen=True)
class Case:
    other: dict[int, float]
    apart: float


CASES = {
    "the same": Case(ONE, 0.0),
    "a likely one moved": Case({**ONE, 7: -1.75}, 0.25),
    "an unlikely one moved": Case({**ONE, 9: -8.0}, 0.0),
    "an unlikely one became likely": Case({**ONE, 9: -2.0}, 4.0),
    "a likely one is not listed any more": Case({5: -0.3, 11: -2.0, 9: -6.0}, 4.5),
    "one is not listed that may be as likely as the last": Case({5: -0.3, 7: -1.5}, 0.0),
    "other tokens altogether": Case({1: -0.3, 2: -9.0}, 8.7),
    "not a number": Case({5: math.nan, 7: -1.5}, math.inf),
    "nothing is likely": Case({5: -math.inf, 7: -math.inf}, math.inf),
    "nothing at all": Case({}, math.inf),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_how_far_two_runs_are_apart(case: Case) -> None:
    apart = max_difference(first(ONE), first(case.other))
    assert apart == pytest.approx(case.apart, abs=1e-6) and apart == max_difference(first(case.other), first(ONE))


def test_equal_bits_are_equal_whatever_they_are() -> None:
    assert compare(first({}, "x"), first({}, "x"), layout()).outcome == EQUAL


@pytest.mark.parametrize(
    ("dtype", "apart", "outcome"),
    [
        ("float32", 9e-4, WITHIN),
        ("float32", 1.2e-3, DIFFERS),
        ("q8", 0.35, WITHIN),
        ("q8", 0.45, DIFFERS),
        ("q4", 5.5, WITHIN),
        ("q4", 6.5, DIFFERS),
        ("q3", 5.5, WITHIN),
        ("float16", 0.12, WITHIN),
        ("float16", 0.14, DIFFERS),
        ("bfloat16", 1.9, WITHIN),
        ("bfloat16", 2.1, DIFFERS),
        ("something new", 1.9, WITHIN),
        ("something new", 2.1, DIFFERS),
    ],
)
def test_what_is_tolerated_depends_on_the_kvs_type(dtype: str, apart: float, outcome: str) -> None:
    verdict = compare(first(ONE), first({**ONE, 7: ONE[7] - apart}), layout(dtype=dtype))
    assert verdict.outcome == outcome and verdict.difference == pytest.approx(apart, rel=1e-3)


def test_and_on_the_logits_type_where_that_is_coarser() -> None:
    """A model in bfloat16 rounds its logits whatever its KV is kept in."""
    coarse, moved = {5: -0.25, 7: -1.5}, {5: -0.25, 7: -1.875}
    assert detect_dtype(first(coarse)) == "bfloat16" and detect_dtype(first({5: -0.250244140625})) == "float16"
    assert detect_dtype(first(ONE)) == "float32"
    assert compare(first(coarse), first(moved), layout(dtype="q8")).outcome == WITHIN


def test_a_tolerance_that_is_set_counts_instead() -> None:
    moved = first({**ONE, 7: ONE[7] + 0.1})
    assert compare(first(ONE), moved, layout(dtype="float32"), 0.2).outcome == WITHIN
    assert compare(first(ONE), moved, layout(dtype="bfloat16"), 0.05).outcome == DIFFERS


def test_in_exact_mode_nothing_is_tolerated() -> None:
    """Not even where what is told of the row is equal: the rest of it is not."""
    verdict = compare(first(ONE, "a"), first(ONE, "b"), layout(grid=64, dtype="bfloat16"), 1.0)
    assert (verdict.outcome, verdict.difference, verdict.tolerance) == (DIFFERS, 0.0, 0.0)


@pytest.mark.parametrize(
    ("warm", "again", "outcome"),
    [
        (0.0020, 0.0000, DIFFERS),
        (0.0020, 0.0002, DIFFERS),
        (0.0020, 0.0005, WITHIN),
        (0.0020, 0.0020, UNSTABLE),
        (0.0020, 1.0000, UNSTABLE),
        (1.0000, 0.0020, DIFFERS),
    ],
)
def test_what_cold_runs_differ_by_explains_as_much_and_no_more(warm: float, again: float, outcome: str) -> None:
    def moved(by: float) -> FirstLogits:
        return first({**ONE, 7: ONE[7] + by})

    assert judge(moved(warm), first(ONE), moved(again), layout(dtype="float32")).outcome == outcome


@pytest.mark.parametrize(
    ("warm", "again", "outcome"), [("w", "c", DIFFERS), ("w", "d", UNSTABLE), ("w", "w", UNSTABLE)]
)
def test_where_no_bit_may_differ_cold_runs_that_do_are_unstable(warm: str, again: str, outcome: str) -> None:
    told = judge(first(ONE, warm), first(ONE, "c"), first(ONE, again), layout(grid=64, dtype="float32"))
    assert told.outcome == outcome


rows = st.dictionaries(st.integers(0, 40), st.floats(-30, 0, width=32), min_size=1, max_size=32)


@given(rows, rows)
def test_it_does_not_matter_which_run_comes_first(one: dict[int, float], other: dict[int, float]) -> None:
    assert max_difference(first(one), first(other)) == max_difference(first(other), first(one)) >= 0.0


@given(rows)
def test_a_run_is_not_apart_from_itself(row: dict[int, float]) -> None:
    assert max_difference(first(row), first(row)) == 0.0
