"""Reuse in all figures for people: a cancelled try counts by the tokens that it reached."""

from typing import Any

import msgspec
import pytest

from support.cachectl.top_status import make_status
from warmline_cachectl.doctor.checks import check_hit_rate
from warmline_cachectl.views.top import build_snapshot
from warmline_cachectl.views.values import build_stats
from warmline_proxy.dashboard.history import build_history
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.store.rows import IndexSnapshot, RequestRecord, Totals

TOTALS = Totals(**(dict.fromkeys(Totals.__struct_fields__, 0)))
PROMPT, CHUNK = 115_000, 11_500


def make_record(outcome: str, cached: int, prefilled: int, prompt: int = PROMPT) -> RequestRecord:
    return RequestRecord(
        id="r",
        at=100.0,
        endpoint="chat",
        client_model="m",
        outcome=outcome,
        source="resident" if cached else "cold",
        prompt_tokens=prompt,
        cached_tokens=cached,
        prefilled_tokens=prefilled,
    )


# Each try continues where the one before was cancelled.
RETRIES = [make_record("cancelled", number * CHUNK, CHUNK) for number in range(9)]
ANSWER = make_record("ok", 9 * CHUNK, CHUNK)
CASES: dict[str, tuple[list[RequestRecord], int, int]] = {  # records, reached, reused
    "retries and their answer": ([*RETRIES, ANSWER], 55 * CHUNK, 45 * CHUNK),
    "retries alone": (RETRIES, 45 * CHUNK, 36 * CHUNK),
    "cancelled while it waited": ([ANSWER, make_record("cancelled", 0, 0)], PROMPT, 9 * CHUNK),
    "failed in its prefill": ([make_record("error", 0, CHUNK)], CHUNK, 0),
    "cancelled while it answered": ([make_record("cancelled", 9 * CHUNK, CHUNK)], PROMPT, 9 * CHUNK),
    "answered by an earlier version": ([make_record("ok", 60, 0, prompt=100)], 100, 60),
    "none": ([], 0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_cancelled_try_counts_by_what_it_reached(case: str) -> None:
    records, reached, reused = CASES[case]
    share = reused / reached if reached else 0.0
    snapshot = IndexSnapshot(segments={}, checkpoints={}, sessions={}, usage={}, quarantined={})
    stats = build_stats(TOTALS, records, snapshot)["requests"]
    assert (stats["prompt_tokens"], stats["cached_tokens"], stats["cached_share"]) == (reached, reused, share)
    history = build_history(records, 100.0)
    assert (history.prompt_tokens, history.cached_tokens) == (reached, reused)
    view: dict[str, Any] = build_snapshot(make_status(100.0), [msgspec.to_builtins(each) for each in records])
    assert (view["reuse"]["prompt_tokens"], view["reuse"]["share"]) == (reached, share)
    if reached:
        facts: Any = type("Facts", (), {"index": type("Index", (), {"records": records})})
        assert check_hit_rate(facts).seen.startswith(f"{share:.0%} of the prompts")


def test_metrics_count_tokens_of_cancelled_tries() -> None:
    metrics = ProxyMetrics()
    for record in RETRIES:
        metrics.record_request(record, "none")
    text = metrics.render_exposition()[0].decode()
    assert f'warmline_prompt_tokens_total{{source="computed"}} {float(9 * CHUNK)}' in text
    assert f'warmline_prompt_tokens_total{{source="resident"}} {float(36 * CHUNK)}' in text
