"""Prometheus metrics of a real engine, through GET /metrics."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import load_family, make_prompt
from support.backend.live_backend import BODY, SECRET, WAIT_S, LiveBackend, read_result, run_backend, with_backend
from support.metrics_text import MetricsText
from warmline_backend.generation.sequence import Sequence
from warmline_backend.generation.step_stats import StepHistogram
from warmline_backend.kv_cache import segment_io
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import ResidentNotFoundError
from warmline_backend.kv_cache.segment_io import BadChainError, OperationCancelledError
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_backend.scheduler.prefill import CHUNKS_REPORTED_MAX
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_backend.server.metrics import classify_failure
from warmline_common.protocol.messages import RestoreRequest, SaveRequest, SegmentRef, SegmentSpec

FolderOf = Callable[..., Path]
ID = "a" * 32
P = "warmline_backend_"


async def scrape(backend: LiveBackend, **headers: str) -> MetricsText:
    async with backend.session.get("/metrics", headers=headers) as response:  # without a secret
        assert response.status == 200
        return MetricsText(await response.text(), openmetrics="openmetrics" in response.content_type)


def count_values(histogram: StepHistogram) -> float:
    return histogram.buckets()[-1][1]


# ---- what is counted


def test_histogram_buckets_are_cumulative() -> None:
    spread = StepHistogram((1.0, 2.5))
    for value in (0.5, 1.0, 2.0, 9.0):
        spread.add(value)
    copied = spread.copy()
    spread.add(9.0)
    assert copied.buckets() == [("1.0", 2.0), ("2.5", 3.0), ("+Inf", 4.0)]
    assert (copied.sum, spread.buckets()[-1]) == (12.5, ("+Inf", 5.0))


def test_result_has_durations_of_last_chunks(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=16)
    short, long = (driver.run(make_prompt(tokens), 1).result.timings for tokens in (40, 400))
    assert [(each.amount, each.context) for each in short.chunks] == [(16, 8), (16, 24), (7, 35)]
    assert sum(each.seconds for each in short.chunks) == pytest.approx(short.prefill_s)
    assert len(long.chunks) == CHUNKS_REPORTED_MAX and long.chunks[-1].context == 391, "the last ones"
    usual = driver.scheduler.rates.chunks.list_usual()
    assert {(16, 8), (7, 35)} <= {(each.amount, each.context) for each in usual}


def test_step_stats_match_request_events(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=16)
    _, one = driver.submit(make_prompt(40), 60)
    _, two = driver.submit(make_prompt(40, 2), 60)
    driver.run_until(lambda: one.is_ended and two.is_ended)
    stats, timings = driver.scheduler.step_stats, [each.result.timings for each in (one, two)]
    assert stats.prefilled_tokens == sum(each.prefilled for each in timings) == 80
    assert stats.decoded_tokens == sum(each.decoded for each in timings) == 120
    assert stats.batch_sizes.sum == 120, "a token for each sequence of each step"
    assert count_values(stats.batch_sizes) == count_values(stats.decode_seconds) < 120, "two shared some steps"
    assert count_values(stats.chunk_seconds) == 6, "39 tokens, 16 at a time, twice"
    assert {finish: count for finish, count in stats.finish_counts.items() if count} == {"length": 2}
    driver.step()
    assert stats.copy() is not stats and stats.copy().finish_counts == stats.finish_counts


def test_failed_step_counts_discarded_requests(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("llama", root))

    def fail(sequence: Sequence, step: int) -> int:
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(Sequence, "prefill_chunk", fail)
    driver.run(make_prompt(40))
    assert driver.scheduler.step_stats.failed_steps == 1 and driver.scheduler.step_stats.finish_counts["discarded"] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "full"), "ENOSPC"),
        (OSError("no number"), "EIO"),
        (OperationCancelledError(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (ResidentNotFoundError("a"), "gone"),
        (RowsUnavailableError("a"), "gone"),
        (BadChainError("a"), "bad_chain"),
        (KvTooLargeError("a"), "too_large"),
        (ValueError("whose text says a secret"), "other"),
    ],
)
def test_failure_reasons_are_single_words(error: BaseException, reason: str) -> None:
    assert classify_failure(error) == reason


# ---- through its door


def test_exposition_has_all_metrics(tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt()
        tokens = len(prompt.tokens) // 4
        async with backend.start_generation("a", prompt) as response:
            ended = await read_result(response)
        kept = ended.prefilled_until
        save = SaveRequest(request_id="s", resident=ended.resident, segments=[SegmentSpec(id=ID, start=0, end=kept)])
        with monkeypatch.context() as planted:
            planted.setattr(segment_io, "write_segment_file", raise_no_space)
            assert (await backend.request_json("POST", "/kv/save", save))[0] == 507
        assert (await backend.request_json("POST", "/kv/save", save))[0] == 200
        chain = [SegmentRef(id=ID, start=0, end=kept, upto=kept)]
        held = backend.service.list_residents(with_ids=True).residents[-1].ids or b""
        for name, status in ((ID, 200), ("b" * 32, 409)):
            chain[0].id = name
            restore = RestoreRequest(request_id=name, tokens=held, chain=chain)
            assert (await backend.request_json("POST", "/kv/restore", restore))[0] == status
        constrained = {**BODY, "response_format": {"type": "json_object"}, "ignore_eos": False}
        await backend.request_json("POST", "/v1/chat/completions", constrained)
        found = await scrape(backend)
        status_now, snapshot = backend.service.read_status(), backend.engine.snapshot
        assert found.total(f"{P}prefilled_tokens_total") > tokens == ended.timings.prefilled
        assert found.total(f"{P}decoded_tokens_total") > ended.timings.decoded == 6
        assert found.group_by(f"{P}generations_total", "finish") == {("length",): 2}
        for kind in ("prefill", "decode", "other"):
            assert found.total(f"{P}step_seconds_count", kind=kind) > 0, kind
        steps = found.total(f"{P}step_seconds_count", kind="decode")
        assert found.total(f"{P}decode_batch_sequences_count") == steps == found.total(f"{P}decode_batch_sequences_sum")
        assert found.total(f"{P}restore_seconds_count") == found.total(f"{P}save_seconds_count") == 1
        file_bytes = backend.home.segment_file(ID).stat().st_size
        assert found.total(f"{P}save_bytes_total") == file_bytes
        assert 0 < found.total(f"{P}restore_bytes_total") <= file_bytes
        assert found.group_by(f"{P}restore_failures_total", "reason") == {("missing",): 1}
        assert found.group_by(f"{P}save_failures_total", "reason") == {("ENOSPC",): 1}
        assert found.total(f"{P}render_seconds_count") == 2 and found.total(f"{P}grammar_compile_seconds_count") >= 1
        assert found.total(f"{P}residents") == status_now.residents == 2
        assert found.total(f"{P}resident_bytes") == status_now.resident_bytes > 0
        assert found.total(f"{P}memory_budget_bytes") == 1 << 30
        assert found.total(f"{P}weight_bytes") == snapshot.weight_bytes > 0
        active, peak = found.total(f"{P}memory_active_bytes"), found.total(f"{P}memory_peak_bytes")
        assert snapshot.weight_bytes < active <= peak
        assert found.total(f"{P}ready") == 1 and found.total(f"{P}generations_running") == 0
        about = found.families[f"{P}model_info"].samples[0].labels
        assert about == {"model": status_now.model, "fingerprint": status_now.fingerprint, "kv_dtype": "float32"}
        assert found.total(f"{P}prefill_tokens_per_second") > 0 and found.total(f"{P}decode_tokens_per_second") > 0

    with_backend(tiny_folder("llama"), tmp_path, work)


def raise_no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_metrics_need_no_secret_on_loopback_while_loading(tiny_folder: FolderOf, tmp_path: Path) -> None:
    load_now = threading.Event()

    def make(build: Callable[[], Scheduler]) -> Scheduler:
        assert load_now.wait(WAIT_S)
        return build()

    async def run() -> None:
        async with run_backend(tiny_folder("llama"), tmp_path, make=make) as backend:
            loading = await scrape(backend)
            assert loading.total(f"{P}ready") == 0 and loading.total(f"{P}weight_bytes") == 0
            load_now.set()
            await backend.service.wait_until_loaded()
            openmetrics = await scrape(backend, Accept="application/openmetrics-text;version=1.0.0")
            assert openmetrics.total(f"{P}ready") == 1 and openmetrics.total(f"{P}weight_bytes") > 0
            rebound = {"Host": "attacker.example:8025"}
            assert await fetch_metrics_status(backend, rebound) == 401
            assert await fetch_metrics_status(backend, {**rebound, "Authorization": f"Bearer {SECRET}"}) == 200
            assert await fetch_metrics_status(backend, {"Host": "localhost:8025"}) == 200
            assert await fetch_metrics_status(backend, {"Host": "host.docker.internal:8025"}) == 200
            assert await fetch_metrics_status(backend, {**rebound, "Authorization": "Bearer \udcff"}) == 401

    asyncio.run(run())


async def fetch_metrics_status(backend: LiveBackend, headers: dict[str, str]) -> int:
    async with backend.session.get("/metrics", headers=headers) as response:
        assert isinstance(response, aiohttp.ClientResponse)
        return response.status
