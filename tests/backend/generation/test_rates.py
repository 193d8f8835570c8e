"""Measured rates of steps and transfers."""

import pytest

from warmline_backend.generation.rates import SAMPLE_BYTES_MIN, Rates


def test_short_chunk_does_not_distort_prefill_rate() -> None:
    rates = Rates()
    for tokens, seconds in ((2048, 2.0), (2048, 2.0), (1, 0.1), (2048, 2.0)):
        rates.record_prefill(4096, tokens, seconds)
    (rate,) = rates.prefill_rates
    assert rate.tokens == 4096 and rate.tokens_per_s == pytest.approx(1024, rel=0.03), "not 10 tokens a second"
    rates.record_prefill(8192, 2048, 4.0)
    for _ in range(20):
        rates.record_prefill(8192, 2048, 1.0)
    assert rates.prefill_rates[1].tokens_per_s == pytest.approx(2048, rel=0.01), "a slow one does not count"


def test_prefill_rate_is_estimated_at_next_longer_context() -> None:
    rates = Rates()
    assert rates.estimate_prefill_rate(0) == 0.0
    rates.record_prefill(2048, 2048, 2.0)
    rates.record_prefill(8192, 2048, 8.0)
    for length, expected in ((0, 1024), (2047, 1024), (2048, 256), (8191, 256), (100_000, 256)):
        assert round(rates.estimate_prefill_rate(length)) == expected


def test_small_restores_do_not_distort_restore_rate() -> None:
    """Otherwise a conversation of 1 GB would be prefilled again after a few restores of some kB."""
    rates = Rates()
    for _ in range(20):
        rates.restore.add(100_000, 0.02)
        rates.save.add(100_000, 0.02)
    assert rates.restore.per_second == 0 and rates.save.per_second == 0
    rates.restore.add(2_000_000_000, 1.0)
    rates.save.add(SAMPLE_BYTES_MIN, 0.1)
    rates.restore.add(SAMPLE_BYTES_MIN - 1, 10.0)
    assert rates.restore.per_second == 2e9 and rates.save.per_second == SAMPLE_BYTES_MIN / 0.1
