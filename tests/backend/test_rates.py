"""What is remembered of how long steps take."""

from warmline_backend.rates import RECENT_CHUNKS, RECENT_DECODE_STEPS, Rates


def test_many_decode_steps_do_not_hide_how_long_a_chunk_takes() -> None:
    rates = Rates()
    assert rates.slowest_recent_step_s == 0.0
    rates.prefilled(2048, 2048, 30.0)
    for _ in range(10 * RECENT_DECODE_STEPS):
        rates.decoded(1, 0.05)
    assert rates.slowest_recent_step_s == 30.0
    for _ in range(RECENT_CHUNKS):
        rates.prefilled(4096, 2048, 2.0)
    assert rates.slowest_recent_step_s == 2.0


def test_a_slow_decode_step_counts_until_it_is_long_ago() -> None:
    rates = Rates()
    rates.prefilled(64, 64, 1.0)
    rates.decoded(4, 7.0)
    assert rates.slowest_recent_step_s == 7.0
    for _ in range(RECENT_DECODE_STEPS):
        rates.decoded(4, 0.5)
    assert rates.slowest_recent_step_s == 1.0
