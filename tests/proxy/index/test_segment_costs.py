"""Prefill cost of a segment, which eviction weighs, by the backend's speed at that time."""

from pathlib import Path

import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_proxy.upstream import backend_state as knowledge


@on_loop
async def test_segment_cost_follows_measured_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge, "RATES_INTERVAL_S", 0.0)
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat()
        await proxy.wait_until_saved()
        proxy.backend.prefill_tokens_s = 50.0  # since the last request, whose rates the proxy knows
        await proxy.chat("Another question, which shares a beginning at most.")
        await proxy.wait_until_saved()
        (first, second) = sorted(proxy.index.segments(), key=lambda row: row.created)
        assert first.prefill_s == pytest.approx(first.end - first.start, rel=0.02)
        assert second.prefill_s == pytest.approx((second.end - second.start) / 50, rel=0.02)
