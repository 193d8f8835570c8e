"""How fast KV goes to disk and comes back, beside mlx-lm's own prompt cache files and the bare disk.

Builds a llama with random weights in memory (an 8B model's shape by default; `--tiny` for a CPU) and KV of random rows.
It saves this, sides taking turns, `--repeats` times, medians shown:

  save, ours         segment files, fsync'ed and checksummed, in slices copied on a thread of their own
  save, mlx_lm       mlx_lm.save_prompt_cache, which does not fsync
  save, limit        writing and fsync'ing the same bytes
  step               decode steps alone, and with a slice between any two of them

and restores in `--restarts` processes of each side, as after a kill: all memory is fresh, files are in the page cache.

  restore, ours      its parts, and the first chunk of CHUNK_AFTER tokens on what was restored, against the same chunk
                     once more, as in a session
  restore, mlx_lm    mlx_lm.load_prompt_cache, evaluated, and the same chunk
  restore, limit     reading the same files into fresh memory by one thread, and the chunk as in a session

Usage: .venv/bin/python benchmarks/segments.py [--tiny] [--tokens N] [--repeats N] [--restarts N] [--json FILE]
       [--quick]
"""

import argparse
import json
import mmap
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import xxhash
from common.results import make_parser, write_json
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from rich.console import Console
from rich.table import Table

from warmline_backend.engine.kv_transfer import READER_THREADS
from warmline_backend.engine.save_slices import SaveSlices
from warmline_backend.generation.rates import Rates
from warmline_backend.kv_cache.batch_caches import round_up_to_buffer
from warmline_backend.kv_cache.codecs import CacheLayout, flatten
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.segment_io import ChainLoader, LoadedChain, write_segment_file
from warmline_backend.kv_cache.tensor_reader import READ_BYTES_MAX
from warmline_backend.scheduler.capacity import ANSWER_TOKENS_RESERVED
from warmline_common.protocol.messages import SegmentRef
from warmline_common.protocol.tokens import SEGMENT_TOKENS_MAX, pack_tokens, prefix_digest
from warmline_common.storage import disk
from warmline_common.storage.segment_file import FileMeta, read_header

SHAPES = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
    "tiny": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 8},
}
STEPS_MIN = 8  # alone, and beside saves
CHUNK_AFTER = 40  # tokens of a next turn
THEIRS = "prompt_cache.safetensors"
FINGERPRINT = "benchmark"


def build_model(shape: str) -> llama.Model:
    config = {**SHAPES[shape], "num_key_value_heads": SHAPES[shape]["num_attention_heads"] // 4}
    model = llama.Model(
        llama.ModelArgs.from_dict({"model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, **config})
    )
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def make_kv(model: llama.Model, layout: CacheLayout, tokens: list[int]) -> KV:
    """KV of random rows, in the shapes and types of the model's."""
    one = KV(layout, [], layout.make_empty_cache())
    one.prefill(model, tokens[:1])
    leaves = []
    for leaf, (_, held) in zip(layout.leaves, flatten(one.layers), strict=True):
        fields = {}
        for name, row in leaf.codec.rows(held, 0, 1, 0, 1).items():
            _, heads, _, width = row.shape
            fields[name] = mx.random.normal((1, heads, round_up_to_buffer(len(tokens)), width), row.dtype)
        mx.eval(fields)
        leaves.append(leaf.codec.build(fields, len(tokens), leaf.template))
    return KV.from_leaves(layout, list(tokens), iter(leaves))


def measure_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class EngineThread:
    """Thread that copies slices, as the engine's does: one between any two decode steps, where it is given steps."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]]] = queue.SimpleQueue()
        self.scheduler: Any = SimpleNamespace(rates=Rates(), is_decoding=False, is_prefilling=False)
        self.longest_s = 0.0  # of the works
        self.step: Callable[[], None] | None = None
        self.steps_s: list[float] = []  # from each step's end to the next one's
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._works.put((work, future))
        return future

    def set_step(self, step: Callable[[], None] | None) -> None:
        def change(scheduler: Any) -> None:
            self.step, self.steps_s, self.longest_s = step, [], 0.0
            scheduler.is_decoding = step is not None

        self.submit(change).result()

    def _run(self) -> None:
        ended = time.perf_counter()
        while True:
            for _ in range(self._works.qsize() if self.step else 1):
                work, future = self._works.get()
                began = time.perf_counter()
                try:
                    future.set_result(work(self.scheduler))
                except Exception as error:  # noqa: BLE001  it belongs to the caller
                    future.set_exception(error)
                self.longest_s = max(self.longest_s, time.perf_counter() - began)
            if self.step is not None:
                self.scheduler.rates.record_decode(1, measure_s(self.step))
                self.steps_s.append(time.perf_counter() - ended)
            ended = time.perf_counter()


def list_spans(length: int) -> list[tuple[str, int, int]]:
    starts = range(0, length, SEGMENT_TOKENS_MAX)
    return [(f"{start:032x}", start, min(length, start + SEGMENT_TOKENS_MAX)) for start in starts]


def save_segments(kv: KV, folder: Path, thread: Any) -> None:
    view_pool = ThreadPoolExecutor(1)
    for name, start, end in list_spans(kv.length):
        prefix = prefix_digest(b"", pack_tokens(kv.tokens[:start]))
        meta = FileMeta(kind="segment", id=name, fingerprint=FINGERPRINT, root="", prefix=prefix, start=start, end=end)
        slices = SaveSlices(thread, view_pool, lambda _: kv, partial(read_rows, start, end), start, end)
        thread.submit(slices.begin).result()
        stream = slices.open_stream(lambda copied: copied.result().result())
        write_segment_file(folder / f"{name}.safetensors", meta, stream, pack_tokens(kv.tokens[start:end]))


def read_rows(start: int, end: int, kv: KV, leaves: Any, piece: Any) -> dict[str, mx.array]:
    return kv.slice_rows(start, end, leaves, piece)


def save_with_mlx_lm(kv: KV, path: Path) -> None:
    caches = []
    for layer in kv.layers:
        cache = KVCache()
        cache.keys, cache.values, cache.offset = layer.keys, layer.values, kv.length
        caches.append(cache)
    save_prompt_cache(str(path), caches)


def write_raw(path: Path, data: bytes) -> None:
    with FileIO(path, "wb") as file:
        disk.write(file, data)
        disk.sync(file)


def read_raw(files: list[Path]) -> None:
    """Read whole files into memory that was never used."""
    size = sum(path.stat().st_size for path in files)
    with mmap.mmap(-1, size) as fresh, memoryview(fresh) as view:
        at = 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(view[at : at + READ_BYTES_MAX]):
                    at += count


# ---- restores, each in a process of its own


def restore_segments(layout: CacheLayout, tokens: list[int], folder: Path) -> tuple[KV, dict[str, float]]:
    """KV of the files, and the seconds of each part."""
    marks: dict[str, float] = {}

    def allocate(work: Callable[[], Any]) -> Any:
        marks["open"] = time.perf_counter()
        buffers = work()
        marks["allocate"] = time.perf_counter()
        return buffers

    spans = list_spans(len(tokens))
    row_names = frozenset(read_header(folder / f"{spans[0][0]}.safetensors").select_kv_tensors())
    chain = [SegmentRef(id=name, start=start, end=end, upto=end) for name, start, end in spans]
    with ThreadPoolExecutor(READER_THREADS) as pool:
        loader = ChainLoader(
            layout, row_names, FINGERPRINT, lambda each: folder / f"{each}.safetensors", pool, allocate
        )
        began, room = time.perf_counter(), len(tokens) + CHUNK_AFTER + ANSWER_TOKENS_RESERVED
        loaded = loader.load(pack_tokens(tokens), chain, None, lambda: False, b"", room)
        marks["read and verify"] = time.perf_counter()
        kv = loaded.build(layout)
        marks["build"] = time.perf_counter()
    times = dict(zip(marks, (b - a for a, b in pairwise([began, *marks.values()])), strict=True))
    times["verify alone, one core"] = measure_s(partial(verify_rows, loaded))
    return kv, times


def verify_rows(loaded: LoadedChain) -> None:
    for buffer in loaded.rows.values():
        xxhash.xxh3_64_intdigest(buffer.data)


def measure_restore(model: llama.Model, layout: CacheLayout, tokens: list[int], folder: Path) -> dict[str, float]:
    """Seconds of the parts of one restore, and of chunks after it."""
    kv, times = restore_segments(layout, tokens, folder)
    restore_s = sum(times[part] for part in ("open", "allocate", "read and verify", "build"))
    chunks_s = []
    for _ in range(4):
        kv.truncate(len(tokens))
        chunks_s.append(measure_s(partial(kv.prefill, model, tokens[:CHUNK_AFTER])))
    return times | {
        "restore": restore_s,
        "first chunk": chunks_s[0],
        "chunk in session": statistics.median(chunks_s[1:]),
        "first token": restore_s + chunks_s[0],
    }


def measure_mlx_lm(model: llama.Model, tokens: list[int], folder: Path) -> dict[str, float]:
    began = time.perf_counter()
    caches = load_prompt_cache(str(folder / THEIRS))
    mx.eval([cache.state for cache in caches])
    restored = time.perf_counter()
    mx.eval(model(mx.array([tokens[:CHUNK_AFTER]]), cache=caches))
    return {"restore": restored - began, "first token": time.perf_counter() - began}


def run_restart(side: str, shape: str, tokens: list[int], folder: Path) -> dict[str, float]:
    """Measure one restore in this process."""
    if side == "raw":
        return {
            "restore": measure_s(
                lambda: read_raw([folder / f"{name}.safetensors" for name, *_ in list_spans(len(tokens))])
            )
        }
    model = build_model(shape)
    layout = CacheLayout.from_factory(partial(make_prompt_cache, model))
    warm_up = KV(layout, [], layout.make_empty_cache())
    for _ in range(2):
        warm_up.prefill(model, tokens[:CHUNK_AFTER])
    del warm_up
    if side == "mlx_lm":
        return measure_mlx_lm(model, tokens, folder)
    return measure_restore(model, layout, tokens, folder)


def restart(side: str, given: argparse.Namespace, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--restart", side, "--folder", str(folder), "--tokens", str(given.tokens)]
    done = subprocess.run([*command, *(["--tiny"] if given.tiny else [])], capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def take_medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


# ---- the whole


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, has_model=False, has_peer=False)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--restart", choices=["ours", "mlx_lm", "raw"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.tiny, given.repeats, given.restarts = True, 1, 1
        given.tokens = given.tokens or 512
    given.tokens = given.tokens or (4096 if given.tiny else 24000)
    return given


def measure_saves(kv: KV, folder: Path, repeats: int, thread: EngineThread) -> dict[str, Any]:
    save_segments(kv, folder, thread)
    thread.longest_s, size = 0.0, sum(path.stat().st_size for path in folder.iterdir())
    data = os.urandom(1 << 20) * (size >> 20)  # zeros would be read from the processor's cache
    works = {
        "ours": partial(save_segments, kv, folder, thread),
        "mlx_lm": partial(save_with_mlx_lm, kv, folder / THEIRS),
        "limit": partial(write_raw, folder / "raw", data),
    }
    saves = []
    for _ in range(repeats):
        saves.append({})
        for side, work in works.items():
            for path in list(folder.iterdir()):  # to overwrite a file is slower
                if side != "mlx_lm" or path.name == THEIRS:
                    path.unlink()
            saves[-1][side] = measure_s(work)
    save_segments(kv, folder, thread)  # for the restores
    save_with_mlx_lm(kv, folder / THEIRS)
    ratio = statistics.median(each["limit"] / each["ours"] for each in saves)
    return {"bytes": size, "save_s": take_medians(saves), "save_ratio": ratio, "longest_slice_s": thread.longest_s}


def measure_steps(
    model: llama.Model, layout: CacheLayout, kv: KV, thread: EngineThread, repeats: int
) -> dict[str, float]:
    """Seconds from a decode step's end to the next one's: alone, and while `kv` is saved."""
    decoding = KV(layout, [], layout.make_empty_cache())
    decoding.prefill(model, kv.tokens[:CHUNK_AFTER])
    found: dict[str, list[float]] = {"alone": [], "saving": []}
    slices_s: list[float] = []
    for _ in range(repeats):
        for side, steps_s in found.items():
            thread.set_step(partial(decoding.prefill, model, kv.tokens[:1]))
            with tempfile.TemporaryDirectory() as name:
                began = time.perf_counter()
                while len(thread.steps_s) < STEPS_MIN or time.perf_counter() - began < 1.0:
                    if side == "saving":
                        save_segments(kv, Path(name), thread)
                    else:
                        time.sleep(0.01)
            steps_s += thread.steps_s[1:]
            slices_s.append(thread.longest_s)
            thread.set_step(None)
    return {
        "step alone": statistics.median(found["alone"]),
        "longest step alone": max(found["alone"]),
        "step while saving": statistics.median(found["saving"]),
        "longest step while saving": max(found["saving"]),
        "longest slice between steps": max(slices_s),
    }


def measure(given: argparse.Namespace, shape: str, tokens: list[int], folder: Path) -> dict[str, Any]:
    model = build_model(shape)
    layout = CacheLayout.from_factory(partial(make_prompt_cache, model))
    thread, kv = EngineThread(), make_kv(model, layout, tokens)
    found = measure_saves(kv, folder, given.repeats, thread)
    found["steps_s"] = measure_steps(model, layout, kv, thread, given.repeats)
    del kv
    mx.clear_cache()  # for the processes of the restores
    sides = ("raw", "ours", "mlx_lm")
    restarts = [{side: restart(side, given, folder) for side in sides} for _ in range(given.restarts)]
    return {
        "device": str(mx.device_info().get("device_name", "CPU")),
        "shape": shape,
        "tokens": len(tokens),
        **found,
        "restart_s": {side: take_medians([each[side] for each in restarts]) for side in sides},
    }


def print_report(found: dict[str, Any]) -> None:
    size = found["bytes"] / 1e9
    table = Table("", "s", "GB/s", title=f"{found['shape']}, {found['tokens']} tokens, {size:.2f} GB")

    def add(label: str, seconds: float, *, moves_all: bool = False) -> None:
        table.add_row(label, f"{seconds:.3f}", f"{size / seconds:.2f}" if moves_all else "")

    for side, seconds in found["save_s"].items():
        add(f"save, {side}", seconds, moves_all=True)
    add("longest slice of a save", found["longest_slice_s"])
    for label, seconds in found["steps_s"].items():
        add(label, seconds)
    ours, theirs, raw = (found["restart_s"][side] for side in ("ours", "mlx_lm", "raw"))
    for part, seconds in ours.items():
        add(f"ours: {part}", seconds, moves_all=part in ("restore", "read and verify", "verify alone, one core"))
    for part, seconds in theirs.items():
        add(f"mlx_lm: {part}", seconds, moves_all=part == "restore")
    add("limit: raw read into fresh memory", raw["restore"], moves_all=True)
    limit_s = raw["restore"] + ours["chunk in session"]
    add("limit: the same and the chunk in session", limit_s)
    console = Console(width=100)
    console.print(found["device"])
    console.print(table)
    console.print(f"save: {found['save_ratio']:.2f} of the limit's rate")
    console.print(f"first token after a kill: {ours['first token'] / limit_s:.2f} of the limit's time")


def main() -> None:
    given = parse_arguments()
    shape = "tiny" if given.tiny else "8B"
    tokens = [(7 * n + n * n) % 32000 for n in range(given.tokens)]
    if given.restart:
        print(json.dumps(run_restart(given.restart, shape, tokens, given.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        found = measure(given, shape, tokens, Path(name))
    write_json(given.json, found)
    print_report(found)


if __name__ == "__main__":
    main()
