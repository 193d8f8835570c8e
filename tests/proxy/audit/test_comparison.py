"""Comparison of first tokens: differences, tolerances by dtype, unstable cold runs."""

import math
import struct
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.fake_backend import make_layout
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


def make_logits(row: dict[int, float], digest: str = "") -> FirstLogits:
    """Make first-token logits, likeliest first, as the backend sends them."""
    ranked = sorted(row, key=lambda token: -row[token])
    values = struct.pack(f"<{len(row)}f", *(row[token] for token in ranked))
    return FirstLogits(digest=digest or str(row), ids=pack_tokens(ranked), logprobs=values)


ONE = {5: -0.3, 7: -1.5, 9: -6.0}


@dataclass(frozen=True)
class Case:
    other: dict[int, float]
    difference: float


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


def test_max_difference_of_likely_tokens() -> None:
    for name, case in CASES.items():
        difference = max_difference(make_logits(ONE), make_logits(case.other))
        assert difference == pytest.approx(case.difference, abs=1e-6), name
        assert difference == max_difference(make_logits(case.other), make_logits(ONE)), name


def test_equal_digests_are_equal() -> None:
    assert compare(make_logits({}, "x"), make_logits({}, "x"), make_layout()).outcome == EQUAL


TOLERATED = [
    ("float32", 9e-4, WITHIN),
    ("float32", 1.2e-3, DIFFERS),
    ("q8", 0.35, WITHIN),
    ("q8", 0.45, DIFFERS),
    ("q6", 5.5, WITHIN),
    ("q8,4", 5.5, WITHIN),
    ("q8+q8,6", 6.5, DIFFERS),
    ("q2", 11.0, WITHIN),
    ("q2", 13.0, DIFFERS),
    ("q4", 5.5, WITHIN),
    ("q4", 6.5, DIFFERS),
    ("q3", 5.5, WITHIN),
    ("float16", 0.12, WITHIN),
    ("float16", 0.14, DIFFERS),
    ("bfloat16", 1.9, WITHIN),
    ("bfloat16", 2.1, DIFFERS),
    ("something new", 1.9, WITHIN),
    ("something new", 2.1, DIFFERS),
]


def test_tolerance_depends_on_kv_dtype() -> None:
    for dtype, difference, outcome in TOLERATED:
        verdict = compare(make_logits(ONE), make_logits({**ONE, 7: ONE[7] - difference}), make_layout(dtype=dtype))
        assert verdict.outcome == outcome, (dtype, difference)
        assert verdict.difference == pytest.approx(difference, rel=1e-3)


def test_tolerance_depends_on_coarser_logits_dtype() -> None:
    """A bfloat16 model rounds its logits whatever dtype its KV has."""
    coarse, moved = {5: -0.25, 7: -1.5}, {5: -0.25, 7: -1.875}
    assert (
        detect_dtype(make_logits(coarse)) == "bfloat16" and detect_dtype(make_logits({5: -0.250244140625})) == "float16"
    )
    assert detect_dtype(make_logits(ONE)) == "float32"
    assert compare(make_logits(coarse), make_logits(moved), make_layout(dtype="q8")).outcome == WITHIN


def test_configured_tolerance_replaces_default() -> None:
    moved = make_logits({**ONE, 7: ONE[7] + 0.1})
    assert compare(make_logits(ONE), moved, make_layout(dtype="float32"), 0.2).outcome == WITHIN
    assert compare(make_logits(ONE), moved, make_layout(dtype="bfloat16"), 0.05).outcome == DIFFERS


def test_exact_mode_tolerates_no_difference() -> None:
    """Also where the listed tokens are equal: the others differ, as the digest shows."""
    verdict = compare(make_logits(ONE, "a"), make_logits(ONE, "b"), make_layout(grid=64, dtype="bfloat16"), 1.0)
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
def test_cold_noise_raises_tolerance_by_its_factor(warm: float, again: float, outcome: str) -> None:
    def moved(by: float) -> FirstLogits:
        return make_logits({**ONE, 7: ONE[7] + by})

    assert judge(moved(warm), make_logits(ONE), moved(again), make_layout(dtype="float32")).outcome == outcome


@pytest.mark.parametrize(
    ("warm", "again", "outcome"), [("w", "c", DIFFERS), ("w", "d", UNSTABLE), ("w", "w", UNSTABLE)]
)
def test_differing_cold_runs_are_unstable_in_exact_mode(warm: str, again: str, outcome: str) -> None:
    verdict = judge(
        make_logits(ONE, warm), make_logits(ONE, "c"), make_logits(ONE, again), make_layout(grid=64, dtype="float32")
    )
    assert verdict.outcome == outcome


rows = st.dictionaries(st.integers(0, 40), st.floats(-30, 0, width=32), min_size=1, max_size=32)


@given(rows, rows)
def test_max_difference_is_symmetric(one: dict[int, float], other: dict[int, float]) -> None:
    assert (
        max_difference(make_logits(one), make_logits(other))
        == max_difference(make_logits(other), make_logits(one))
        >= 0.0
    )


@given(rows)
def test_max_difference_to_itself_is_zero(row: dict[int, float]) -> None:
    assert max_difference(make_logits(row), make_logits(row)) == 0.0
