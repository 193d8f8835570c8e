"""Restores of coded and of plain segments from a simulated disk."""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from kv_samples import compute_smollm2
from mlx_lm.models.cache import KVCache
from rich.console import Console
from rich.table import Table

from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.kv_cache.segment_io import ChainLoader, expose_bytes, write_segment_file
from warmline_common.protocol.messages import SegmentRef
from warmline_common.protocol.tokens import pack_tokens, prefix_digest
from warmline_common.storage import disk
from warmline_common.storage.segment_file import FileMeta

LAYERS, HEADS, WIDTH = 32, 8, 128  # of an 8B model
SEGMENT_TOKENS = 2048
FINGERPRINT = "benchmark"
RAW_READ_BYTES = 4 << 20

Figures = dict[str, list[float]]


class SimulatedDisk:
    """Disk that delivers so many bytes a second to all of its readers together; 0: files are read as they are."""

    def __init__(self, gigabytes_per_s: float) -> None:
        self._rate, self._lock, self._free_at = gigabytes_per_s * 1e9, threading.Lock(), 0.0

    def wait_for(self, bytes_count: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + bytes_count / self._rate
            left = self._free_at - now
        time.sleep(left)

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Read all segment files from this disk."""
        real, simulated = disk.open_to_read, self

        class SlowFile(FileIO):
            def readinto(self, buffer: Any) -> int:
                count = super().readinto(buffer)
                simulated.wait_for(count)
                return count

        disk.open_to_read = lambda path: SlowFile(path, "rb")
        try:
            yield
        finally:
            disk.open_to_read = real


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table of restores, and return its rows."""
    layout = CacheLayout.from_factory(lambda: [KVCache() for _ in range(LAYERS)])
    tensors = _make_tensors(given.kv_tokens, given.home)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(given.readers) as pool:
        folders = {"plain": Path(name) / "plain", "coded": Path(name) / "coded"}
        chains = {side: _write(folder, tensors, given.tokens, side == "coded") for side, folder in folders.items()}
        sizes = {side: sum(path.stat().st_size for path in folder.iterdir()) for side, folder in folders.items()}
        memory = memoryview(bytearray(sizes["plain"]))
        for rate in given.disk_gb_s:
            simulated = SimulatedDisk(rate)
            work = {
                "raw read of the plain bytes": lambda: _read_raw(folders["plain"], memory, pool),
                "restore, plain": lambda: _restore(layout, folders["plain"], chains["plain"], given.tokens, pool),
                "restore, coded": lambda: _restore(layout, folders["coded"], chains["coded"], given.tokens, pool),
            }
            with simulated.attach():
                seconds, cpu_s = _take_turns(work, given.repeats)
            raw_s = statistics.median(seconds["raw read of the plain bytes"])
            table = Table("", "s", "from", "to", "CPU s", "raw read / this", title=_describe(rate, sizes, given))
            for label, each in seconds.items():
                median, cpu = statistics.median(each), statistics.median(cpu_s[label])
                ratio = raw_s / median
                found.append({"disk_gb_s": rate, "work": label, "seconds": each, "cpu_s": cpu, "ratio": ratio})
                table.add_row(label, *(f"{cell:.3f}" for cell in (median, min(each), max(each), cpu, ratio)))
            Console(width=120).print(table)
    return found


def _describe(rate: float, sizes: dict[str, int], given: argparse.Namespace) -> str:
    where = f"a disk of {rate:g} GB/s" if rate else "the page cache"
    share = sizes["coded"] / sizes["plain"]
    return f"{sizes['plain'] / 1e6:.0f} MB from {where}, {given.readers} readers; coded files have {share:.3f} of it"


def _make_tensors(kv_tokens: int, home: Path) -> dict[str, mx.array]:
    """A segment's tensors, filled with SmolLM2's KV again and again."""
    bits = np.concatenate([array.ravel() for array in compute_smollm2(kv_tokens, home)])
    tensors, shape = {}, (1, HEADS, SEGMENT_TOKENS, WIDTH)
    for number in range(2 * LAYERS):
        values = np.resize(np.roll(bits, -number * 12345), shape)
        name = f"{number // 2}.0.{('keys', 'values')[number % 2]}"
        tensors[name] = mx.array(values).view(mx.bfloat16)
    mx.eval(tensors)
    return tensors


def _write(folder: Path, tensors: dict[str, mx.array], tokens: int, is_coded: bool) -> list[SegmentRef]:
    chain, ids = [], pack_tokens(range(tokens))
    for start in range(0, tokens, SEGMENT_TOKENS):
        end = start + SEGMENT_TOKENS
        prefix = prefix_digest(b"", ids[: 4 * start])
        name = f"{start:032x}"
        meta = FileMeta(kind="segment", id=name, fingerprint=FINGERPRINT, root="", prefix=prefix, start=start, end=end)
        write_segment_file(folder / name, meta, expose_bytes(tensors), ids[4 * start : 4 * end], is_coded)
        chain.append(SegmentRef(id=name, start=start, end=end, upto=end))
    return chain


def _restore(layout: CacheLayout, folder: Path, chain: list[SegmentRef], tokens: int, pool: ThreadPoolExecutor) -> None:
    names = frozenset(f"{leaf.name}.{field}" for leaf in layout.leaves for field in ("keys", "values"))
    loader = ChainLoader(layout, names, FINGERPRINT, lambda name: folder / name, pool, lambda work: work())
    loader.load(pack_tokens(range(tokens)), chain, None, lambda: False).build(layout)


def _read_raw(folder: Path, memory: memoryview, pool: ThreadPoolExecutor) -> None:
    """Read the files into memory that is used again, with as many readers as restores have."""

    def read_piece(path: Path, start: int, into: memoryview) -> None:
        with disk.open_to_read(path) as file:
            file.seek(start)
            file.readinto(into)

    jobs, at = [], 0
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        for start in range(0, size, RAW_READ_BYTES):
            into = memory[at + start : at + min(size, start + RAW_READ_BYTES)]
            jobs.append(pool.submit(read_piece, path, start, into))
        at += size
    for job in jobs:
        job.result()


def _take_turns(work: dict[str, Callable[[], None]], repeats: int) -> tuple[Figures, Figures]:
    """Seconds and CPU seconds of each turn of each work, but for the first one, which warms up."""
    seconds: Figures = {label: [] for label in work}
    cpu_s: Figures = {label: [] for label in work}
    for turn in range(repeats + 1):
        for label, each in work.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            each()
            if turn:
                seconds[label].append(time.perf_counter() - began)
                cpu_s[label].append(time.process_time() - cpu_began)
    return seconds, cpu_s
