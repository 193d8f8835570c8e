"""Coded segments restore the very bits of plain ones, in every cache family."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from support.backend.engine_driver import SchedulerDriver, cut_chain, make_loader, save_segments
from support.backend.families import FAMILIES, QUANTIZATIONS, load_family, make_prompt
from warmline_backend.kv_cache.byte_buffers import view_bytes
from warmline_backend.kv_cache.kv import KV, NamedArrays
from warmline_backend.kv_cache.segment_io import DamagedFileError, LoadedChain
from warmline_common.protocol.messages import CheckpointRef, SegmentRef
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.segment_file import read_header, verify_file

PROMPT = make_prompt(170)
CHECKPOINTS = (30, 90, 169)
CUTS = [64, 150, 170]
POOL = ThreadPoolExecutor(3)

Saved = tuple[list[SegmentRef], list[CheckpointRef]]


def read_bits(loaded: LoadedChain) -> dict[str, bytes]:
    """Bytes of restored rows, without the room behind them, and of the state."""
    rows = {
        name: mx.contiguous(buffer.unsigned[:, :, : loaded.position - buffer.shape.first])
        for name, buffer in loaded.rows.items()
    }
    mx.eval(rows)
    bits = {name: bytes(view_bytes(array)) for name, array in rows.items()}
    return bits | {name: bytes(buffer.data) for name, buffer in loaded.state.items()}


def load(driver: SchedulerDriver, folder: Path, saved: Saved, tokens: list[int], position: int) -> LoadedChain:
    chain, checkpoints = saved
    at = next((ref for ref in checkpoints if ref.position == position), None)
    loader = make_loader(driver.served, folder, POOL)
    return loader.load(pack_tokens(tokens[:position]), cut_chain(chain, position), at, lambda: False)


class Bfloat16KV:
    """KV whose rows and states are rounded to bfloat16: CPUs compute float32, and bfloat16 slowly or not at all."""

    def __init__(self, kv: KV) -> None:
        self._kv, self.tokens = kv, list(kv.tokens)
        self.checkpoints = {at: round_arrays(state) for at, state in kv.checkpoints.items()}

    def slice_rows(self, start: int, end: int) -> NamedArrays:
        return round_arrays(self._kv.slice_rows(start, end))


def round_arrays(arrays: NamedArrays) -> NamedArrays:
    is_float = {name: mx.issubdtype(array.dtype, mx.floating) for name, array in arrays.items()}
    return {name: array.astype(mx.bfloat16) if is_float[name] else array for name, array in arrays.items()}


def compute_kv(driver: SchedulerDriver, prompt: list[int]) -> Bfloat16KV:
    turn = driver.run(prompt, 1, checkpoints=CHECKPOINTS)
    return Bfloat16KV(driver.scheduler.save_source.find_kv(1, resident_id=turn.result.resident))


@pytest.mark.parametrize("family", FAMILIES)
def test_coded_segments_restore_the_same_bits(family: str, root: Path, tmp_path: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    kv = compute_kv(driver, PROMPT)
    saves: dict[Path, Saved] = {}
    for folder, is_coded in ((tmp_path / "plain", False), (tmp_path / "coded", True)):
        folder.mkdir()
        saves[folder] = save_segments(kv, folder, CUTS, is_coded=is_coded)
        for path in folder.iterdir():
            verify_file(path)
        # Of quantized KV only the scales are floats, and too few here.
        is_any_coded = any(read_header(path).is_coded for path in folder.iterdir())
        assert is_any_coded == (is_coded and family not in QUANTIZATIONS)
    for position in CHECKPOINTS if driver.served.layout.has_states else (1, 63, 64, 65, 151, 170):
        plain, coded = (load(driver, folder, saved, kv.tokens, position) for folder, saved in saves.items())
        assert read_bits(plain) == read_bits(coded) and read_bits(plain), position
        assert plain.stats.bytes_decoded == coded.stats.bytes_decoded == plain.stats.bytes_read
        assert coded.stats.bytes_read < plain.stats.bytes_read or family in QUANTIZATIONS
        assert coded.build(driver.served.layout).length == position


def test_bfloat16_segments_take_three_quarters(root: Path, tmp_path: Path) -> None:
    kv = compute_kv(SchedulerDriver(load_family("llama", root)), make_prompt(1000))
    save_segments(kv, tmp_path, [1000], is_coded=True)
    header = read_header(next(tmp_path.iterdir()))
    tensors = header.select_kv_tensors().values()
    assert all(tensor.is_coded for tensor in tensors)
    assert sum(tensor.stored_bytes for tensor in tensors) <= 0.76 * sum(tensor.bytes_count for tensor in tensors)


def test_damage_of_a_coded_segment_is_named(root: Path, tmp_path: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    kv = compute_kv(driver, PROMPT)
    saved = save_segments(kv, tmp_path, CUTS, is_coded=True)
    path = tmp_path / f"{saved[0][1].id}.safetensors"
    header, whole = read_header(path), path.read_bytes()
    tensor = header.tensors["1.0.values"]
    for at in (tensor.offset, tensor.offset + 4, tensor.offset + 40, tensor.offset + tensor.stored_bytes - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(DamagedFileError) as caught:
            load(driver, tmp_path, saved, kv.tokens, 170)
        assert (caught.value.reason, caught.value.good_prefix) == ("checksum", 64), at
