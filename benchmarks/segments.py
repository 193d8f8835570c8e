"""How fast KV goes to disk and comes back, beside mlx-lm's own prompt cache files and the bare disk.

Builds a llama with random weights in memory (an 8B model's shape by default; `--tiny` for a CPU), prefills, and then in
turn, `--repeats` times, medians shown:

  save       our segment files (fsync'ed, checksummed)      mlx_lm.save_prompt_cache
  restore    files to evaluated KV, checksums verified      mlx_lm.load_prompt_cache, evaluated
  limit      writing and fsync'ing the same bytes           reading the same files into one buffer

Files are in the page cache when they are read, for all alike.

Usage: .venv/bin/python benchmarks/segments.py [--tiny] [--tokens N] [--repeats N]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from rich.console import Console
from rich.table import Table

from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.segment_io import ChainLoader, expose_bytes, write_segment_file
from warmline_common.protocol.messages import SegmentRef
from warmline_common.protocol.tokens import SEGMENT_TOKENS_MAX, pack_tokens, prefix_digest
from warmline_common.storage import disk
from warmline_common.storage.segment_file import FileMeta

SHAPES = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32},
    "tiny": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024, "num_attention_heads": 8},
}
CHUNK = 2048
READERS = 4
FINGERPRINT = "benchmark"


def build_model(shape: str) -> llama.Model:
    config = {**SHAPES[shape], "num_key_value_heads": SHAPES[shape]["num_attention_heads"] // 4}
    model = llama.Model(
        llama.ModelArgs.from_dict({"model_type": "llama", "vocab_size": 32000, "rms_norm_eps": 1e-5, **config})
    )
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


def prefill(model: llama.Model, layout: CacheLayout, tokens: list[int]) -> KV:
    kv = KV(layout, [], layout.make_empty_cache())
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        model(mx.array([chunk]), cache=kv.layers)
        mx.eval([layer.state for layer in kv.layers])
        kv.tokens += chunk
    return kv


def measure_median_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def save_segments(kv: KV, folder: Path) -> list[SegmentRef]:
    chain = []
    for start in range(0, kv.length, SEGMENT_TOKENS_MAX):
        end = min(kv.length, start + SEGMENT_TOKENS_MAX)
        name = f"{start:032x}"
        prefix = prefix_digest(b"", pack_tokens(kv.tokens[:start]))
        meta = FileMeta(kind="segment", id=name, fingerprint=FINGERPRINT, root="", prefix=prefix, start=start, end=end)
        tensors = expose_bytes(kv.slice_rows(start, end))
        write_segment_file(folder / f"{name}.safetensors", meta, tensors, pack_tokens(kv.tokens[start:end]))
        chain.append(SegmentRef(id=name, start=start, end=end, upto=end))
    return chain


def save_with_mlx_lm(kv: KV, path: Path) -> None:
    caches = []
    for layer in kv.layers:
        cache = KVCache()
        cache.keys, cache.values, cache.offset = layer.keys, layer.values, kv.length
        caches.append(cache)
    save_prompt_cache(str(path), caches)


def load_with_mlx_lm(path: Path) -> None:
    mx.eval([cache.state for cache in load_prompt_cache(str(path))])


def write_raw(path: Path, data: bytes) -> None:
    with FileIO(path, "wb") as file:
        disk.write(file, data)
        disk.sync(file)


def read_raw(files: list[Path], buffer: memoryview) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    shape = "tiny" if given.tiny else "8B"
    tokens = [(7 * n + n * n) % 32000 for n in range(given.tokens or (4096 if given.tiny else 32768))]
    model = build_model(shape)
    layout = CacheLayout.from_factory(lambda: make_prompt_cache(model))
    prefill(model, layout, tokens[:CHUNK])
    began = time.perf_counter()
    kv = prefill(model, layout, tokens)
    prefill_s = time.perf_counter() - began
    row_names = frozenset(kv.slice_rows(0, 1))

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(READERS) as pool:
        folder, theirs, raw = Path(name), Path(name) / "prompt_cache.safetensors", Path(name) / "raw"
        chain = save_segments(kv, folder)
        files = [folder / f"{link.id}.safetensors" for link in chain]
        size = sum(path.stat().st_size for path in files)
        loader = ChainLoader(
            layout, row_names, FINGERPRINT, lambda segment: folder / f"{segment}.safetensors", pool, lambda work: work()
        )
        packed, blob = pack_tokens(tokens), bytes(size)
        buffer = memoryview(bytearray(64 << 20))
        rows = [
            ("save, ours", measure_median_s(lambda: save_segments(kv, folder), given.repeats)),
            ("save, mlx_lm", measure_median_s(lambda: save_with_mlx_lm(kv, theirs), given.repeats)),
            ("save, limit (write + fsync)", measure_median_s(lambda: write_raw(raw, blob), given.repeats)),
            (
                "restore, ours",
                measure_median_s(lambda: loader.load(packed, chain, None, lambda: False).build(layout), given.repeats),
            ),
            ("restore, mlx_lm", measure_median_s(lambda: load_with_mlx_lm(theirs), given.repeats)),
            ("restore, limit (one reader)", measure_median_s(lambda: read_raw(files, buffer), given.repeats)),
        ]
    table = Table("", "s", "GB/s", "x of cold prefill", title=f"{shape}, {len(tokens)} tokens, {size / 1e9:.2f} GB")
    for label, seconds in rows:
        table.add_row(label, f"{seconds:.3f}", f"{size / 1e9 / seconds:.2f}", f"{prefill_s / seconds:.0f}")
    console = Console(width=100)
    console.print(f"{mx.device_info().get('device_name', 'CPU')}; cold prefill {prefill_s:.2f} s")
    console.print(table)


if __name__ == "__main__":
    main()
