"""Table of codings: share of bytes that is stored, GB/s of decoded bytes."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
from candidates import CANDIDATES, Candidate
from kv_samples import Bits, compute_random, compute_smollm2
from rich.console import Console
from rich.table import Table

from warmline_common.storage.segment_coding import BLOCK_VALUES

Clock = Callable[[], float]


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table for each KV, and return its rows."""
    found: list[dict[str, Any]] = []
    console = Console(width=120)
    for label, kv in (
        ("SmolLM2", compute_smollm2(given.kv_tokens, given.home)),
        ("random weights", compute_random(given.kv_tokens)),
    ):
        values = np.concatenate([array.ravel() for array in kv])
        blocks = [values[start : start + BLOCK_VALUES] for start in range(0, len(values), BLOCK_VALUES)]
        rows = _measure_all(blocks, values.nbytes, given.repeats, given.threads)
        headings = ("coding", "stored", "encode", "decode", f"encode x{given.threads}", f"decode x{given.threads}")
        table = Table(*headings, title=f"{label}, {values.nbytes / 1e6:.0f} MB; GB/s of decoded bytes")
        for row in rows:
            rates = (row[key] for key in ("encode", "decode", "encode_threads", "decode_threads"))
            table.add_row(row["coding"], f"{row['stored']:.3f}", *(f"{rate:.2f}" for rate in rates))
        console.print(table)
        found += [{"kv": label, **row} for row in rows]
    return found


def _measure_all(blocks: Sequence[Bits], size: int, repeats: int, threads: int) -> list[dict[str, Any]]:
    """Measure all candidates, taking turns."""
    stored = {each.name: [each.encode(block) for block in blocks] for each in CANDIDATES}
    for each in CANDIDATES:
        _check(each, blocks, stored[each.name])
    times: dict[str, dict[str, list[float]]] = {each.name: {} for each in CANDIDATES}
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            for each in CANDIDATES:
                coded = stored[each.name]
                own = times[each.name]
                own.setdefault("encode", []).append(_measure_s(lambda e=each: [e.encode(b) for b in blocks]))
                own.setdefault("decode", []).append(
                    _measure_s(lambda e=each, c=coded: [e.decode(s, len(b)) for s, b in zip(c, blocks, strict=True)])
                )
                if "mlx" in each.name:  # its device has one stream
                    continue
                own.setdefault("encode_threads", []).append(
                    _measure_s(lambda e=each: list(pool.map(e.encode, blocks)), time.perf_counter)
                )
                own.setdefault("decode_threads", []).append(
                    _measure_s(lambda e=each, c=coded: list(pool.map(e.decode, c, map(len, blocks))), time.perf_counter)
                )
    return [
        {
            "coding": each.name,
            "stored": sum(map(each.count_bytes, stored[each.name])) / size,
            **dict.fromkeys(("encode_threads", "decode_threads"), 0.0),
            **{key: size / 1e9 / statistics.median(seconds) for key, seconds in times[each.name].items()},
        }
        for each in CANDIDATES
    ]


def _check(candidate: Candidate, blocks: Sequence[Bits], stored: Sequence[Any]) -> None:
    for block, coded in zip(blocks, stored, strict=True):
        decoded = candidate.decode(coded, len(block))
        if isinstance(decoded, mx.array):
            decoded = np.array(decoded)
        assert bytes(decoded) == block.tobytes(), candidate.name


def _measure_s(work: Callable[[], object], clock: Clock = time.process_time) -> float:
    """Seconds of this process's processors, or of the wall: mlx computes on threads of its own."""
    began = clock()
    work()
    return clock() - began
