"""Choice whether segments are coded: by rates with hysteresis, only for bfloat16, and what a backend makes of it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from support import tiny_models
from support.backend.live_backend import LiveBackend, read_result, with_backend
from warmline_backend.config import parse_config
from warmline_backend.engine.segment_compression import (
    CompressionRates,
    SegmentCompression,
    WriteStats,
    should_compress,
)
from warmline_backend.kv_cache import tensor_reader
from warmline_backend.kv_cache.segment_io import expose_bytes, write_segment_file
from warmline_backend.kv_cache.tensor_reader import ReadStats
from warmline_common.protocol.messages import RestoreRequest, SaveRequest, SegmentRef, SegmentSpec
from warmline_common.storage import disk
from warmline_common.storage.segment_coding import CodingSample
from warmline_common.storage.segment_file import FileMeta, read_header, verify_file

GB = 1e9
UNKNOWN = CompressionRates(0.0, 0.0, 0.0, 0.0, 0.0)
FAST = CompressionRates(disk_read=50 * GB, disk_write=5 * GB, encode=0.8 * GB, decode=5 * GB, stored_share=0.68)
SAMPLE = CodingSample(0.68, 0.8 * GB, 2.5 * GB)


def test_nothing_measured_is_not_compressed() -> None:
    assert not should_compress(False, UNKNOWN, 1.0) and not should_compress(True, UNKNOWN, 1.0)
    assert not should_compress(False, replace(FAST, disk_read=0.0, disk_write=0.0), 0.0)


@pytest.mark.parametrize(
    ("disk_read", "begins", "goes_on"),
    [
        (0.5, True, True),
        (1.0, True, True),
        (4.0, True, True),
        (4.5, False, True),
        (5.0, False, False),
        (50, False, False),
    ],
)
def test_disk_slower_than_decoding_is_worth_it(disk_read: float, begins: bool, goes_on: bool) -> None:
    rates = replace(FAST, disk_read=disk_read * GB)
    assert (should_compress(False, rates, 0.0), should_compress(True, rates, 0.0)) == (begins, goes_on)


@pytest.mark.parametrize(
    ("disk_write", "begins", "goes_on"), [(0.05, True, True), (0.15, False, True), (0.3, False, False)]
)
def test_disk_that_writes_slower_than_encoding_is_worth_it(disk_write: float, begins: bool, goes_on: bool) -> None:
    rates = replace(FAST, disk_write=disk_write * GB)
    assert (should_compress(False, rates, 0.0), should_compress(True, rates, 0.0)) == (begins, goes_on)


@pytest.mark.parametrize(("share", "begins", "goes_on"), [(0.95, True, True), (0.8, False, True), (0.7, False, False)])
def test_budget_nearly_used_is_worth_it(share: float, begins: bool, goes_on: bool) -> None:
    assert (should_compress(False, FAST, share), should_compress(True, FAST, share)) == (begins, goes_on)


def test_what_hardly_gets_shorter_stays_as_it_is() -> None:
    assert not should_compress(True, replace(FAST, disk_read=0.1 * GB, stored_share=0.95), 1.0)


def test_gains_are_those_of_the_slower_part() -> None:
    rates = replace(FAST, disk_read=GB, disk_write=GB)
    assert rates.restore_gain == pytest.approx(1 / 0.68)
    assert replace(rates, decode=1.1 * GB).restore_gain == pytest.approx(1.1)
    assert rates.save_gain == pytest.approx(1 / (0.68 + 1 / 0.8))


def test_page_cache_looks_as_fast_as_it_is_and_readers_share_a_disk() -> None:
    compression = SegmentCompression(is_allowed=True, readers=2)
    compression.record_save(WriteStats(1 << 30, 0.1, SAMPLE))
    assert not compression.choose(0.0)
    for _ in range(5):  # a GB/s: two readers wait for it at a time
        compression.record_restore(ReadStats(1 << 30, 1 << 30, wait_s=1.9), 1.07)
    assert compression.rates.disk_read == pytest.approx((1 << 30) / 1.07)
    assert compression.choose(0.0)
    for _ in range(30):
        compression.record_restore(ReadStats(1 << 30, 1 << 30, wait_s=0.001), 0.2)
    assert not compression.choose(0.0)


def test_small_files_say_nothing_of_the_disk() -> None:
    compression = SegmentCompression(is_allowed=True, readers=2)
    compression.record_save(WriteStats(1 << 20, 5.0, SAMPLE))
    compression.record_restore(ReadStats(1 << 20, 1 << 20, wait_s=5.0), 5.0)
    assert (compression.rates.disk_read, compression.rates.disk_write) == (0.0, 0.0)
    assert compression.rates.stored_share == SAMPLE.stored_share


def test_setting_and_other_types_never_compress() -> None:
    compression = SegmentCompression(is_allowed=False, readers=2)
    compression.record_save(WriteStats(1 << 30, 100.0, SAMPLE))
    assert not compression.choose(1.0)
    assert parse_config(["--model", "m"]).segment_compression == "auto"
    assert parse_config(["--model", "m", "--segment-compression", "off"]).segment_compression == "off"


def build_model(folder: Path, dtype: mx.Dtype) -> Path:
    model = tiny_models.build("llama", folder / str(dtype))
    path = str(model / "model.safetensors")
    weights = mx.load(path)
    mx.save_safetensors(path, {name: weight.astype(dtype) for name, weight in weights.items()})  # type: ignore[union-attr,arg-type]
    return model


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_backend_codes_bfloat16_once_the_budget_is_nearly_used(dtype: mx.Dtype, tmp_path: Path) -> None:
    """From the second file on: the first one shows what coding would give."""
    ids = ["a" * 32, "b" * 32, "c" * 32]

    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt()) as response:
            ended = await read_result(response)
        kept = ended.prefilled_until
        cuts = [0, 64, 100, kept]
        specs = [SegmentSpec(id=each, start=cuts[n], end=cuts[n + 1]) for n, each in enumerate(ids)]
        save = SaveRequest(request_id="s", resident=ended.resident, segments=specs, disk_used_share=0.95)
        assert (await backend.request_json("POST", "/kv/save", save))[0] == 200
        paths = [backend.home.segment_file(each) for each in ids]
        await asyncio.to_thread(lambda: [verify_file(path) for path in paths])
        is_bfloat16 = dtype == mx.bfloat16
        assert [read_header(path).is_coded for path in paths] == [False, is_bfloat16, is_bfloat16]
        held = backend.service.list_residents(with_ids=True).residents[-1].ids or b""
        chain = [SegmentRef(id=spec.id, start=spec.start, end=spec.end, upto=spec.end) for spec in specs]
        restore = RestoreRequest(request_id="r", tokens=held[: kept * 4], chain=chain)
        status, reply = await backend.request_json("POST", "/kv/restore", restore)
        assert status == 200 and reply["position"] == kept
        assert (reply["bytes_read"] < sum(read_header(path).decoded_bytes for path in paths)) or not is_bfloat16

    with_backend(build_model(tmp_path, dtype), tmp_path, work)


def test_reads_of_the_page_cache_wait_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = FileMeta(kind="checkpoint", id="a" * 32, fingerprint="f", root="", prefix="", start=0, end=0, position=7)
    path = tmp_path / "file"
    tensors = expose_bytes({"0.0.state0": mx.zeros((1, 1 << 16))})
    write_segment_file(path, meta, tensors)
    blocks = iter([0, 0, 100, 100 + (1 << 18) // 512])
    monkeypatch.setattr(tensor_reader, "HAS_THREAD_USAGE", True)
    monkeypatch.setattr(tensor_reader, "_count_disk_blocks", lambda: next(blocks))
    monkeypatch.setattr(tensor_reader, "time", StoppedCpu())
    for waits in (False, True):
        with disk.open_to_read(path) as file:
            reader = tensor_reader.TensorReader(file, read_header(path))
            reader.read_tensor("0.0.state0")
            stats = reader.stats
        assert (stats.wait_s > 0.0) == waits
        assert stats.bytes_read == stats.bytes_decoded == (1 << 18) + 16


class StoppedCpu:
    """Clocks of a thread that only waits."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now

    def thread_time(self) -> float:
        return 0.0
