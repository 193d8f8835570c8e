"""Prometheus metrics of the proxy, counted by real requests."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.metrics_text import MetricsText
from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from support.proxy.metric_values import count_cancels, scrape, wait_until_async
from warmline_common.measurement.duration_model import DurationModel
from warmline_common.protocol.messages import HEADER_REQUEST
from warmline_proxy.admin import metrics as gauges
from warmline_proxy.errors import ClientError, bad_request, encode_error_body
from warmline_proxy.estimate.costs import Costs
from warmline_proxy.index.index import IndexStoreError
from warmline_proxy.metrics import ERROR_CODES_MAX, ProxyMetrics
from warmline_proxy.planner import PromptShape, RunningRequest, plan_request
from warmline_proxy.store.rows import PrefixMatch, RequestRecord, Totals, TtftParts

LONG = "A long question. " * 20
NOTHING = PrefixMatch(tokens=0, chain=[], checkpoints=[], end_reason="nothing stored")


def parse_metrics(metrics: ProxyMetrics) -> MetricsText:
    return MetricsText(metrics.render_exposition()[0].decode())


def make_record(**facts: Any) -> RequestRecord:
    usual = {"id": "r", "at": 1.0, "endpoint": "chat", "client_model": "any", "outcome": "ok", "source": "cold"}
    return RequestRecord(**usual | facts)


# ---- requests


def test_record_request_counts_outcome_and_times() -> None:
    metrics = ProxyMetrics()
    warm = make_record(
        source="restored",
        prompt_tokens=1000,
        cached_tokens=900,
        prefilled_tokens=100,
        generated_tokens=50,
        queue_s=1.0,
        restore_s=0.5,
        prefill_s=2.0,
        ttft_s=4.0,
        decode_s=5.0,
        total_s=9.0,
        expected_ttft_s=2.0,
        ttft_parts=TtftParts(wait_s=1.5, restore_s=0.5, prefill_s=2.0),
        expected_parts=TtftParts(wait_s=0.001, restore_s=0.999, prefill_s=1.0),
        dispatches=1,
    )
    metrics.record_request(warm, "2xx")
    metrics.record_request(make_record(endpoint="messages", outcome="cancelled", queue_s=3.0, total_s=3.0), "none")
    found = parse_metrics(metrics)
    assert found.group_by("warmline_requests_total", "api", "outcome", "source", "status") == {
        ("chat", "ok", "restored", "2xx"): 1,
        ("messages", "cancelled", "cold", "none"): 1,
    }
    assert found.group_by("warmline_prompt_tokens_total", "source") == {("restored",): 900, ("computed",): 100}
    assert found.total("warmline_generated_tokens_total") == 50
    assert {name: (found.total(f"{name}_count"), found.total(f"{name}_sum")) for name in list_histograms(found)} == {
        "warmline_request_seconds": (2, 12.0),
        "warmline_queue_seconds": (2, 4.0),
        "warmline_ttft_seconds": (1, 4.0),
        "warmline_model_load_seconds": (0, 0.0),
        "warmline_restore_seconds": (1, 0.5),
        "warmline_prefill_seconds": (1, 2.0),
        "warmline_decode_seconds": (1, 5.0),
        "warmline_time_per_output_token_seconds": (1, 0.1),
        "warmline_ttft_estimate_ratio": (1, 2.0),
        "warmline_ttft_estimate_error_ratio": (4, pytest.approx(0.5 + 1.499 / 1.5 + 0.998 + 0.5)),
    }
    counts = found.group_by("warmline_ttft_estimate_error_ratio_count", "part")
    assert counts == {(part,): 1 for part in ("all", "wait", "restore", "prefill")}, (
        "parts that took no time do not count"
    )


def list_histograms(found: MetricsText) -> list[str]:
    return [name for name, family in found.families.items() if family.type == "histogram"]


def test_redispatched_request_excluded_from_estimate() -> None:
    metrics = ProxyMetrics()
    metrics.record_request(make_record(ttft_s=4.0, expected_ttft_s=2.0, dispatches=3), "2xx")
    found = parse_metrics(metrics)
    assert found.total("warmline_dispatched_again_total") == 2
    assert found.total("warmline_ttft_estimate_ratio_count") == 0 and found.total("warmline_ttft_seconds_count") == 1


def test_prefill_buckets_cover_hours() -> None:
    metrics = ProxyMetrics()
    metrics.record_request(make_record(prefilled_tokens=1, prefill_s=7000.0), "2xx")
    assert parse_metrics(metrics).total("warmline_prefill_seconds_bucket", le="7200.0") == 1
    assert parse_metrics(metrics).total("warmline_prefill_seconds_bucket", le="3600.0") == 0


def test_each_proxy_has_its_own_registry() -> None:
    metrics = ProxyMetrics()
    metrics.record_request(make_record(), "2xx")
    assert parse_metrics(metrics).total("warmline_requests_total") == 1
    assert parse_metrics(ProxyMetrics()).total("warmline_requests_total") == 0


@on_loop
async def test_prompt_tokens_by_source_sum_to_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cold, one resident and one restored chat request, and a completion."""
    monkeypatch.setattr(gauges, "TOTALS_INTERVAL_S", 0.0)
    async with run_proxy(tmp_path) as proxy:
        answers = [await proxy.chat(LONG), await proxy.chat(LONG)]
        await proxy.wait_until_saved()
        proxy.backend.restart()
        await wait_until_async(lambda: has_boots(proxy, 2))
        answers.append(await proxy.chat(LONG))
        body = {"prompt": "Another one"}
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
        records, found = await proxy.wait_until_saved(), await scrape(proxy)
        assert [answer.headers["X-Warmline-Cache"].split()[0] for answer in answers] == ["cold", "resident", "restored"]
        assert found.group_by("warmline_requests_total", "api", "source", "outcome", "status") == {
            ("chat", "cold", "ok", "2xx"): 1,
            ("chat", "resident", "ok", "2xx"): 1,
            ("chat", "restored", "ok", "2xx"): 1,
            ("completion", "cold", "ok", "2xx"): 1,
        }
        assert found.total("warmline_prompt_tokens_total") == sum(each.prompt_tokens for each in records)
        assert found.total("warmline_prompt_tokens_total", source="restored") == records[1].restored_tokens > 0
        for name in ("request", "queue", "ttft", "prefill", "decode"):
            assert found.total(f"warmline_{name}_seconds_count") == len(records), name
        assert found.total("warmline_restore_seconds_count") == 1
        assert found.group_by("warmline_restores_total", "outcome") == {("ok",): 1}
        assert found.total("warmline_saves_total") >= 2
        assert found.total("warmline_saved_bytes_total") == 4 * found.total("warmline_stored_files", kind="segments")


async def has_boots(proxy: ProxyHarness, count: int) -> bool:
    return (await scrape(proxy)).total("warmline_upstream_boots_total") == count


# ---- plans


@on_loop
async def test_expected_ttft_recorded_and_compared(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:  # the fake backend reports one token per second
        for _ in range(2):
            await proxy.chat(LONG)
        warm, cold = await proxy.wait_until_saved()
        assert cold.expected_parts.prefill_s == pytest.approx(cold.prompt_tokens - 1, rel=0.02)
        computed = warm.prompt_tokens - 1 - warm.cached_tokens
        assert warm.source == "resident" and warm.expected_parts.prefill_s == pytest.approx(computed, rel=0.02, abs=0.1)
        assert cold.expected_ttft_s == cold.expected_parts.total_s > cold.expected_parts.prefill_s
        found = await scrape(proxy)
        assert found.group_by("warmline_ttft_estimate_ratio_count", "source") == {("cold",): 1, ("resident",): 1}
        assert 0 < found.total("warmline_ttft_estimate_ratio_sum", source="cold") < 1


def test_follower_expects_rest_of_leader_prefill() -> None:
    nothing = DurationModel()
    costs = Costs(DurationModel(unit_s=0.1), render=nothing, plan=nothing, first_step=DurationModel(0.1))
    leader = RunningRequest(request_id="leader", common_tokens=800, tokens=900, prefilled=300, started=True)
    plan = plan_request(PromptShape(1000), [], NOTHING, None, costs, running=[leader])
    assert (plan.leader_id, plan.reuse) == ("leader", 800)
    assert (plan.expected.wait_s, plan.expected.prefill_s) == pytest.approx((50.0, 19.9))
    assert plan.expected_ttft_s == pytest.approx(70.0)
    assert plan_request(PromptShape(1000), [], NOTHING, None, costs).expected_ttft_s == pytest.approx(100.0)


@on_loop
async def test_expected_ttft_without_reuse_is_full_prefill(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, reuse="off") as proxy:
        await proxy.chat(LONG)
        (only,) = await proxy.wait_until_saved()
        assert only.expected_parts.prefill_s == pytest.approx(only.prompt_tokens - 1, rel=0.02)


# ---- errors


@on_loop
async def test_errors_by_status_and_code(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1, queue_count_max=0) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        statuses = [
            (await proxy.chat()).status,
            (await proxy.chat(headers={HEADER_REQUEST: "no spaces, please"})).status,
        ]
        proxy.backend.may_continue.set()
        assert (await first).status == 200
        statuses.append((await proxy.chat(stop=5)).status)
        for path in ("/v1/nothing", "/warmline/nothing"):
            headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
            async with proxy.client.get(proxy.url + path, headers=headers) as response:
                statuses.append(response.status)
        await send_garbage(proxy)
        assert statuses == [429, 400, 400, 404, 404]
        found = await scrape(proxy)
        assert found.group_by("warmline_errors_total", "status", "code") == {
            ("429", "queue_full"): 1,
            ("400", "invalid_request_error"): 3,
            ("404", "not_found"): 2,
        }
        assert await count_cancels(proxy) == {}


async def send_garbage(proxy: ProxyHarness) -> None:
    """Send bytes that are not HTTP."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(b"\x16\x03\x01 garbage\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()


@on_loop
async def test_error_in_stream_is_counted(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut after content"]
        answer = await proxy.chat(stream=True)
        assert answer.status == 200
        await proxy.wait_until_saved()
        found = await scrape(proxy)
        assert found.group_by("warmline_requests_total", "outcome", "status") == {("error", "5xx"): 1}
        assert found.group_by("warmline_errors_total", "status") == {("502",): 1}


@on_loop
async def test_refused_connection_is_counted(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, connections_max=1) as proxy:
        port = int(proxy.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as busy:
            proxy.backend.hold_after = 0
            body = b'{"messages": [{"role": "user", "content": "Hi."}]}'
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            busy.sendall(head.encode() + body)
            await proxy.backend.holding.wait()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 503 " in await reader.readline()
            writer.close()
        await count_cancels(proxy)
        assert (await scrape(proxy)).group_by("warmline_errors_total", "status", "code") == {
            ("503", "connections_full"): 1
        }


def test_error_code_labels_are_bounded() -> None:
    metrics = ProxyMetrics()
    for number in range(ERROR_CODES_MAX + 5):
        metrics.record_error(bad_request("no", code=f"code_{number}"))
    for code in ("a code of words", "x" * 41, ""):
        metrics.record_error(ClientError(400, encode_error_body("no", "a type", code)))
    found = parse_metrics(metrics).group_by("warmline_errors_total", "code")
    assert len(found) == ERROR_CODES_MAX + 1 and found[("other",)] == 8


# ---- access and formats


@on_loop
async def test_metrics_access_for_clients_and_owner(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, client_key="sesame") as proxy:
        for key, status in (("sesame", 200), (proxy.home.load_secret(), 200), ("wrong", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with proxy.client.get(f"{proxy.url}/metrics", headers=headers) as response:
                assert response.status == status, key
        async with proxy.client.get(f"{proxy.url}/warmline/status", headers={"X-Api-Key": "wrong"}) as response:
            assert response.status == 401
        found = await scrape(proxy, Authorization="Bearer sesame")
        assert found.group_by("warmline_unauthorized_total", "door") == {("client",): 2, ("owner",): 1}
        assert found.total("warmline_errors_total", status="401") == 3


@on_loop
async def test_text_and_openmetrics_formats(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat()
        await proxy.wait_until_saved()
        headers = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
        async with proxy.client.get(f"{proxy.url}/metrics", headers=headers) as response:
            assert response.content_type == "application/openmetrics-text"
            found = MetricsText(await response.text(), openmetrics=True)
        async with proxy.client.get(f"{proxy.url}/metrics") as response:
            assert response.content_type == "text/plain"
            plain = MetricsText(await response.text())
        assert found.total("warmline_requests_total") == plain.total("warmline_requests_total") == 1
        assert not [name for name in plain.families if name.endswith("_created")]


# ---- storage


@on_loop
async def test_storage_gauges_and_evictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "TOTALS_INTERVAL_S", 0.0)
    async with run_proxy(tmp_path) as proxy:
        for text in (LONG, "Another one. " * 20):
            await proxy.chat(text)
        await proxy.wait_until_saved()
        found, totals = await scrape(proxy), proxy.index.totals()
        assert found.total("warmline_stored_bytes") == totals.bytes_used
        assert found.total("warmline_stored_bytes", kind="segments") == totals.bytes_segments == 4 * totals.segments > 0
        assert found.total("warmline_stored_files", kind="segments") == totals.segments
        assert found.total("warmline_stored_tokens") == totals.tokens
        assert found.total("warmline_stored_sessions") == totals.sessions == 2
        assert found.total("warmline_disk_budget_bytes") == proxy.index.budget_bytes
        assert found.total("warmline_residents") == 2 and found.total("warmline_residents_unsaved") == 0
        evicted = await asyncio.to_thread(proxy.index.free_bytes, 1)
        proxy.index.budget_bytes = 1
        evicted += (rest := await asyncio.to_thread(proxy.index.make_room))
        found = await scrape(proxy)
        assert len(evicted) == totals.segments and rest
        assert found.group_by("warmline_evictions_total", "why") == {
            ("disk_full",): len(evicted) - len(rest),
            ("budget",): len(rest),
        }
        assert found.total("warmline_evicted_bytes_total") == totals.bytes_segments
        assert found.total("warmline_stored_files") == 0


@on_loop
async def test_failed_restore_is_counted(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(LONG)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.restore_refusals = ["checksum"]
        assert (await proxy.chat(LONG)).status == 200
        found = await scrape(proxy)
        assert found.group_by("warmline_restores_total", "outcome") == {("failed",): 1}
        assert found.group_by("warmline_quarantined_total", "reason") == {("checksum",): 1}


@on_loop
async def test_unreadable_index_omits_storage_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "TOTALS_INTERVAL_S", 0.0)
    async with run_proxy(tmp_path) as proxy:
        assert "warmline_stored_bytes" in (await scrape(proxy)).families

        def broken() -> None:
            raise IndexStoreError("as scripted")

        monkeypatch.setattr(proxy.index, "totals", broken)
        found = await scrape(proxy)
        assert "warmline_stored_bytes" not in found.families and "warmline_disk_budget_bytes" in found.families


@on_loop
async def test_concurrent_scrapes_share_one_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        reads, read = list[int](), proxy.index.totals

        def counted() -> Totals:
            reads.append(1)
            return read()

        monkeypatch.setattr(proxy.index, "totals", counted)
        found = await asyncio.gather(*(scrape(proxy) for _ in range(4)))
        assert all("warmline_stored_bytes" in each.families for each in found)
        assert len(reads) == 1


@on_loop
async def test_gauges_of_running_requests(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy, aiohttp.ClientSession() as other:
        await wait_until_async(lambda: has_boots(proxy, 1))
        proxy.backend.saving_allowed.clear()
        assert (await proxy.chat()).status == 200
        await proxy.backend.wait_for_calls("save")
        async with other.get(f"{proxy.url}/health"):
            found = await scrape(proxy)
        assert found.total("warmline_requests_settling") == 1 and found.total("warmline_requests_running") == 0
        assert found.total("warmline_connections") == 2 and found.total("warmline_upstream_up") == 1
        assert found.total("warmline_residents_unsaved") == 1 and found.total("warmline_wedges_total") == 0
        assert found.total("warmline_tasks") > 1 and found.total("warmline_threads") > 1
        assert (
            found.total("warmline_build_info") == 1
            and found.families["warmline_build_info"].samples[0].labels["version"]
        )
        proxy.backend.saving_allowed.set()
