"""Metrics of both processes of a real pair agree with their work, and with each other."""

import sys
import time
from typing import Any

import pytest

from support.metrics_text import MetricsText
from support.pair.pair import POLL_S, SETTLE_TIMEOUT_S, Pair, Reply, send_request

CANARY = "heliotrope"
P = "warmline_backend_"


class BothMetrics:
    """One scrape of each process, without a key or a secret."""

    def __init__(self, pair: Pair) -> None:
        proxy, backend = (send_request(f"{url}/metrics", None, {}, "GET") for url in (pair.url, pair.backend_url))
        assert proxy.status == backend.status == 200
        self.text = (proxy.raw + backend.raw).decode()
        self.proxy, self.backend = MetricsText(proxy.raw.decode()), MetricsText(backend.raw.decode())


def test_metrics_of_both_processes_agree(warm_pair: Pair) -> None:
    pair = warm_pair
    pair.settle()
    before = BothMetrics(pair)
    messages = [{"role": "user", "content": f"{CANARY} tells of figures. " * 80}]
    options = {"max_tokens": 8, "session_id": f"{CANARY}-session"}
    replies = [pair.chat(messages, **options), pair.chat(messages, **options)]
    pair.settle()
    pair.forget_residents()
    replies.append(pair.chat(messages, **options))
    for prompt in (5, True):
        assert pair.post("/v1/completions", {"prompt": prompt}).status == 400
    pair.settle()
    after, records = BothMetrics(pair), list_records(pair, replies)
    sources = [each["source"] for each in records]
    assert sources[:2] == ["restored", "resident"]  # the first may share a template's head with others
    assert all(
        f"expected={each['expected_ttft_s']:.3f}s" in pair.perf_line(reply)
        for each, reply in zip(records[::-1], replies, strict=True)
    )

    for each in records:
        parts, expected = each["ttft_parts"], each["expected_parts"]
        assert sum(parts.values()) == pytest.approx(each["ttft_s"]) and min(parts.values()) >= 0.0
        assert sum(expected.values()) == pytest.approx(each["expected_ttft_s"])
        assert (parts["restore_s"] > 0.0) == (expected["restore_s"] > 0.0) == (each["source"] == "restored")

    def gained(name: str, **labels: str) -> float:
        old, new = (each.backend if name.startswith(P) else each.proxy for each in (before, after))
        return new.total(name, **labels) - old.total(name, **labels)

    for source in set(sources):
        assert gained("warmline_requests_total", source=source, outcome="ok") == sources.count(source)
    assert gained("warmline_errors_total", status="400") == 2
    computed, generated = (
        gained("warmline_prompt_tokens_total", source="computed"),
        gained("warmline_generated_tokens_total"),
    )
    assert gained("warmline_prompt_tokens_total") == sum(each["prompt_tokens"] for each in records)
    restored = [each for each in records if each["source"] == "restored"]
    assert gained("warmline_prompt_tokens_total", source="restored") == sum(each["cached_tokens"] for each in restored)
    assert replies[2].cached == records[0]["cached_tokens"] > 0
    assert computed == gained(f"{P}prefilled_tokens_total") == sum(each["prefilled_tokens"] for each in records)
    assert generated == gained(f"{P}decoded_tokens_total") == 24
    assert gained(f"{P}generations_total", finish="length") == 3
    assert gained("warmline_saves_total") == gained(f"{P}save_seconds_count") > 0
    assert gained("warmline_saved_bytes_total") == gained(f"{P}save_bytes_total") > 0
    assert gained("warmline_saved_tokens_total") == sum(each["saved_tokens"] for each in records) > 0
    assert gained("warmline_restores_total", outcome="ok") == gained(f"{P}restore_seconds_count") == len(restored)
    assert gained(f"{P}render_seconds_count") == 6, "two were refused, and one was planned again"
    assert 3 <= gained(f"{P}step_seconds_count", kind="decode") == gained(f"{P}decode_batch_sequences_count") <= 24
    assert CANARY not in after.text and "any/name" not in after.text


def list_records(pair: Pair, replies: list[Reply]) -> list[Any]:
    """List the records of these replies, newest first; they are written within a second."""
    ids, limit = {reply.headers["X-Warmline-Request"] for reply in replies}, time.monotonic() + SETTLE_TIMEOUT_S
    while len(found := [each for each in pair.requests() if each["id"] in ids]) < len(ids):
        assert time.monotonic() < limit, "the requests are not recorded"
        time.sleep(POLL_S)
    return found


def test_metrics_invariants_hold(warm_pair: Pair) -> None:
    warm_pair.settle()
    found = BothMetrics(warm_pair)
    proxy, backend = found.proxy, found.backend
    requests = proxy.total("warmline_requests_total")
    assert requests == proxy.total("warmline_queue_seconds_count") == proxy.total("warmline_request_seconds_count")
    assert proxy.total("warmline_ttft_seconds_count") <= requests
    for name, family in [*proxy.families.items(), *backend.families.items()]:
        if family.type == "histogram":
            source = proxy if name in proxy.families else backend
            last = source.total(f"{name}_bucket", le="+Inf")
            assert last == source.total(f"{name}_count"), name
    assert proxy.total("warmline_stored_bytes") <= proxy.total("warmline_disk_budget_bytes")
    assert backend.total(f"{P}ready") == proxy.total("warmline_upstream_up") == 1
    assert proxy.total("warmline_wedges_total") == backend.total(f"{P}failed_steps_total") == 0
    assert backend.total(f"{P}weight_bytes") < backend.total(f"{P}memory_active_bytes")
    for process in (proxy, backend) if sys.platform == "linux" else ():
        assert process.families.keys() >= {"process_cpu_seconds", "process_resident_memory_bytes"}
