"""Chunks in one step and layer by layer have the same bits, and one without memory leaves no trace."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from support.backend.families import FAMILIES, load_family, make_prompt
from warmline_backend.kv_cache import batch_caches
from warmline_backend.kv_cache.chunk_draft import OutOfMemoryError
from warmline_backend.kv_cache.codecs import CodecKind, flatten
from warmline_backend.kv_cache.kv import KV
from warmline_backend.model.model import ServedModel

BUFFER_STEP_TOKENS = 16
CHUNKS = (20, 20, 5)  # more than the windows of 32; the second one makes buffers grow, the third one does not
ROOM_TOKENS = 64
EVALUATIONS_MAX = 100
OUT_OF_MEMORY = "[malloc] Unable to allocate 11811160064 bytes."
EVERY_FAMILY = [*FAMILIES, "quantized_apart", "mamba2", "baichuan_m1"]

Rows = dict[str, bytes]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_caches, "BUFFER_STEP_TOKENS", BUFFER_STEP_TOKENS)


class FailingDevice:
    """Device whose evaluation after the next `evaluations_left` finds no memory; -1: none does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.evaluations_left = -1
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, self._wrap(getattr(mx, name)))

    def _wrap(self, evaluate: Any) -> Any:
        def wrapped(*arrays: Any) -> None:
            if self.evaluations_left >= 0:
                self.evaluations_left -= 1
                if self.evaluations_left < 0:
                    raise RuntimeError(OUT_OF_MEMORY)
            evaluate(*arrays)

        return wrapped


def make_kv(served: ServedModel) -> KV:
    return KV(served.layout, [], served.layout.make_empty_cache())


def prefill_chunks(kv: KV, served: ServedModel, room_tokens: int = 0, *, by_layers: bool = False) -> list[Rows]:
    """Compute CHUNKS; the rows after each of them."""
    tokens, found = make_prompt(sum(CHUNKS)), []
    for count in CHUNKS:
        chunk = tokens[kv.length : kv.length + count]
        if by_layers:
            assert len(list(kv.prefill_by_layers(served.model, chunk))) == len(served.layout.leaves)
        else:
            kv.prefill(served.model, chunk)
        kv.reserve_rows(room_tokens)
        found.append(read_rows(kv))
    return found


def read_rows(kv: KV) -> Rows:
    """Bytes of the rows, windows and states of a KV."""
    read = {}
    for leaf, (_, held) in zip(kv.layout.leaves, flatten(kv.layers), strict=True):
        if leaf.codec.kind is CodecKind.STATE:
            fields = leaf.codec.state(held, 0)
        else:
            is_window = leaf.codec.kind is CodecKind.WINDOW
            start = max(0, kv.length - leaf.template.max_size) if is_window else 0
            fields = leaf.codec.rows(held, 0, kv.length, start, kv.length) if kv.length else {}
        read |= {f"{leaf.name}.{name}": np.array(array).tobytes() for name, array in fields.items()}
    return read


@pytest.mark.parametrize("room_tokens", [0, ROOM_TOKENS], ids=["without room", "with room"])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_rows_by_layers_equal_rows_in_one_step(family: str, room_tokens: int, root: Path) -> None:
    served = load_family(family, root)
    by_layers = prefill_chunks(make_kv(served), served, room_tokens, by_layers=True)
    assert by_layers == prefill_chunks(make_kv(served), served, room_tokens) and all(by_layers)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_chunk_without_memory_leaves_kv(family: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever evaluation fails: of a first chunk, of one within the buffers, or of one that makes them grow."""
    served = load_family(family, root)
    cold = prefill_chunks(make_kv(served), served)
    device, kv, tokens = FailingDevice(monkeypatch), make_kv(served), make_prompt(sum(CHUNKS))
    for expected, count in zip(cold, CHUNKS, strict=True):
        before, length = read_rows(kv), kv.length
        for evaluations in range(EVALUATIONS_MAX):
            device.evaluations_left = evaluations
            try:
                kv.prefill(served.model, tokens[length : length + count])
                break
            except OutOfMemoryError:
                assert kv.length == length and read_rows(kv) == before, evaluations
        assert device.evaluations_left >= 0 and evaluations, "each evaluation has failed once, then none"
        device.evaluations_left = -1
        assert read_rows(kv) == expected
