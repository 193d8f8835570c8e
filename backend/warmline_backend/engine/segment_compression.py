"""Choice whether new segments of bfloat16 KV are coded: by rates measured here, and by how full the disk budget is."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from warmline_backend.engine.save_slices import SaveSlices
from warmline_backend.generation.rates import SAMPLE_BYTES_MIN, MedianRate
from warmline_backend.kv_cache.tensor_reader import ReadStats
from warmline_common.storage.segment_coding import CodingSample, measure
from warmline_common.storage.segment_file import CODED_DTYPE

T = TypeVar("T")

GAIN_BEGIN, GAIN_END = 1.2, 1.05  # times as fast as plain segments: to begin to code, and to go on
BUDGET_SHARE_BEGIN, BUDGET_SHARE_END = 0.9, 0.75
STORED_SHARE_MAX = 0.9  # else coding is not worth its time
RESTORE_TO_DECODE = 3.0  # time of readers to decode, read, copy and verify, against decoding alone; as measured

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WriteStats:
    """Size and time of a written file."""

    bytes_written: int
    wait_s: float  # for the disk
    sample: CodingSample | None  # of its tensors; None where none is of bfloat16


@dataclass(frozen=True)
class CompressionRates:
    """Measured rates in bytes/s; 0.0: not measured.  Those of coding are of decoded bytes."""

    disk_read: float
    disk_write: float
    encode: float  # of the writer
    decode: float  # of all readers together, with all else that a restore computes
    stored_share: float  # stored bytes of a decoded one

    @property
    def restore_gain(self) -> float:
        """Factor by which coded segments are read faster: some readers wait for the disk while others decode."""
        if not (self.disk_read and self.decode):
            return 0.0
        return (1 / self.disk_read) / max(self.stored_share / self.disk_read, 1 / self.decode)

    @property
    def save_gain(self) -> float:
        """Factor by which coded segments are written faster: one thread encodes and writes."""
        if not (self.disk_write and self.encode):
            return 0.0
        return (1 / self.disk_write) / (self.stored_share / self.disk_write + 1 / self.encode)


def should_compress(is_compressing: bool, rates: CompressionRates, budget_share: float) -> bool:
    """Say whether the next segment is to be coded, `budget_share` of the disk budget being used.

    Where the disk is the limit: coded segments are restored or saved sooner.  Where its budget is: more of them fit.
    It takes less to go on than to begin, so that rates about a threshold do not change the choice each time.
    """
    if not 0 < rates.stored_share <= STORED_SHARE_MAX:
        return False
    gain, share = (GAIN_END, BUDGET_SHARE_END) if is_compressing else (GAIN_BEGIN, BUDGET_SHARE_BEGIN)
    return budget_share >= share or max(rates.restore_gain, rates.save_gain) >= gain


class SegmentCompression:
    """Measurements of restores and saves, and the choice for the next segment.  Event loop thread."""

    def __init__(self, is_allowed: bool, readers: int) -> None:
        self._is_allowed, self._cores = is_allowed, min(readers, os.cpu_count() or 1)
        self._disk_read, self._disk_write = MedianRate(SAMPLE_BYTES_MIN), MedianRate(SAMPLE_BYTES_MIN)
        self._sample: CodingSample | None = None
        self._is_compressing = False

    @property
    def rates(self) -> CompressionRates:
        sample = self._sample
        return CompressionRates(
            disk_read=self._disk_read.per_second,
            disk_write=self._disk_write.per_second,
            encode=sample.encode_bytes_per_s if sample else 0.0,
            decode=sample.decode_bytes_per_s * self._cores / RESTORE_TO_DECODE if sample else 0.0,
            stored_share=sample.stored_share if sample else 0.0,
        )

    def record_restore(self, stats: ReadStats, seconds: float) -> None:
        """Record a restore that took `seconds`.

        Bytes of the page cache cost no waits: then the disk looks as fast as it is.  Several readers that wait at a
        time wait for the same disk.
        """
        self._disk_read.add(stats.bytes_read, min(stats.wait_s, seconds))

    def make_meter(self, slices: SaveSlices) -> "WriteMeter":
        """Meter of a file that is about to be written.  Any thread."""
        return WriteMeter(slices.find_sample(CODED_DTYPE) if self._is_allowed else None)

    def record_save(self, stats: WriteStats) -> None:
        self._disk_write.add(stats.bytes_written, stats.wait_s)
        self._sample = stats.sample or self._sample

    def choose(self, budget_share: float) -> bool:
        """Choose whether the next segment is coded; the first of a process, of which nothing is known, is not."""
        chosen = self._is_allowed and should_compress(self._is_compressing, self.rates, budget_share)
        if chosen != self._is_compressing:
            percent = round(100 * self.rates.stored_share)
            log.info(
                "segments are %s", f"compressed from here on, to {percent} %" if chosen else "no longer compressed"
            )
        self._is_compressing = chosen
        return chosen


class WriteMeter:
    """Measures how long a file's writer waits for the disk: does not compute, nor wait for the engine.  Its thread."""

    def __init__(self, sample: memoryview | None) -> None:
        self._sample = measure(sample) if sample else None
        self._began_s, self._cpu_began_s, self._excluded_s = time.monotonic(), time.thread_time(), 0.0

    def exclude(self, wait: Callable[[], T]) -> T:
        """Wait for something else than the disk."""
        began = time.monotonic()
        try:
            return wait()
        finally:
            self._excluded_s += time.monotonic() - began

    def finish(self, bytes_written: int) -> WriteStats:
        busy_s = self._excluded_s + time.thread_time() - self._cpu_began_s
        return WriteStats(bytes_written, max(0.0, time.monotonic() - self._began_s - busy_s), self._sample)
