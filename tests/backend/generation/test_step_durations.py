"""The slowest recent step without outliers, from which limits for stuck steps follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmline_backend.generation.step_durations import (
    LONE_STEP_FACTOR,
    RECENT_CHUNKS,
    RECENT_DECODE_STEPS,
    StepDurations,
)

LIMIT_FACTOR = 5  # of deadlines and watchdog
STEP = 2048

chunk_sizes = st.sampled_from([1, 7, 60, 500, STEP])
durations = st.floats(1e-3, 300.0)
steps = st.one_of(
    st.tuples(st.just("chunk"), st.integers(1, 200_000), chunk_sizes, durations),
    st.tuples(st.just("decode"), st.just(0), st.just(1), durations),
)


def record(recent: StepDurations, kind: str, length: int, tokens: int, seconds: float) -> None:
    if kind == "decode":
        recent.record_decode(seconds)
    else:
        recent.record_chunk(max(length, tokens), tokens, seconds)


@given(st.lists(steps, min_size=1, max_size=60))
def test_figure_lies_within_recent_steps(history: list[tuple[str, int, int, float]]) -> None:
    recent = StepDurations()
    assert recent.slowest_s == 0.0
    for step in history:
        record(recent, *step)
    seconds = [step[-1] for step in history]
    assert min(seconds) <= recent.slowest_s <= max(seconds)


@given(
    st.sampled_from(["chunk", "decode"]),
    st.floats(0.001, 100.0),
    st.lists(st.floats(0.8, 1.25), min_size=2, max_size=80),
    st.integers(0, 80),
    st.floats(2.0, 1e5),
)
def test_one_stuck_step_among_similar_ones_changes_nothing(
    kind: str, usual_s: float, noise: list[float], position: int, factor: float
) -> None:
    recent, seconds = StepDurations(), [usual_s * each for each in noise]
    stuck = min(position, len(seconds))
    for each in [*seconds[:stuck], factor * usual_s, *seconds[stuck:]]:
        record(recent, kind, 4096, STEP, each)
    assert recent.slowest_s <= max(seconds)


@given(st.integers(8, RECENT_CHUNKS), st.integers(1, 8), st.floats(0.001, 10.0))
def test_quarter_of_similar_steps_may_be_stuck(similar: int, stuck: int, usual_s: float) -> None:
    recent = StepDurations()
    stuck = min(stuck, similar // 4)
    for number in range(similar):
        recent.record_chunk(4096, STEP, 1e4 if number < stuck else usual_s)
    assert recent.slowest_s == usual_s


@given(st.floats(0.01, 300.0), chunk_sizes, st.integers(1, 100))
def test_even_steps_count_from_first_on(seconds: float, tokens: int, count: int) -> None:
    """A model whose every chunk takes a minute has its limit after the first one."""
    recent = StepDurations()
    for _ in range(count):
        recent.record_chunk(max(4096, tokens), tokens, seconds)
        assert recent.slowest_s == seconds


@given(st.floats(0.01, 60.0), st.floats(0.0, 4e-3), st.integers(1, 100))
def test_growing_context_stays_within_limit(first_s: float, slope: float, chunks: int) -> None:
    """Each chunk takes longer than the one before, up to five times as long at twice the context."""
    recent, limit_s = StepDurations(), float("inf")
    for number in range(1, chunks + 1):
        seconds = first_s * (1 + slope * STEP * number)
        assert seconds <= limit_s
        recent.record_chunk(STEP * number, STEP, seconds)
        limit_s = LIMIT_FACTOR * recent.slowest_s


def test_compiling_kernels_count_once() -> None:
    recent = StepDurations()
    recent.record_chunk(STEP, STEP, 40.0)
    assert recent.slowest_s == 40.0, "nothing else is known"
    recent.record_chunk(STEP, STEP, 2.0)
    assert recent.slowest_s == 2.0


def test_lone_stuck_chunk_counts_as_far_as_others_make_it_plausible() -> None:
    recent = StepDurations()
    for _ in range(4):
        recent.record_chunk(STEP, STEP, 2.0)
    recent.record_chunk(100_000, STEP, 60.0)
    assert recent.slowest_s == LONE_STEP_FACTOR * 2.0
    recent.record_chunk(100_000, STEP, 60.0)
    assert recent.slowest_s == 60.0, "it is no outlier"


def test_small_chunks_do_not_hide_how_long_a_full_one_takes() -> None:
    recent = StepDurations()
    recent.record_chunk(STEP, STEP, 60.0)
    for _ in range(RECENT_CHUNKS - 1):
        recent.record_chunk(100, 50, 1.0)
    assert recent.slowest_s == 60.0
    recent.record_chunk(100, 50, 1.0)
    assert recent.slowest_s == 1.0, "it is long ago"


def test_decode_steps_do_not_hide_slow_chunk() -> None:
    recent = StepDurations()
    recent.record_chunk(STEP, STEP, 30.0)
    for _ in range(10 * RECENT_DECODE_STEPS):
        recent.record_decode(0.05)
    assert recent.slowest_s == pytest.approx(30.0)


def test_slow_decode_steps_count_while_recent() -> None:
    recent = StepDurations()
    recent.record_chunk(64, 64, 1.0)
    for _ in range(RECENT_DECODE_STEPS):
        recent.record_decode(7.0)
    assert recent.slowest_s == 7.0
    for _ in range(RECENT_DECODE_STEPS):
        recent.record_decode(0.5)
    assert recent.slowest_s == 1.0
