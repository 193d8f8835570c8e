"""Bounds of a chunk's memory while it is computed, and what is learnt from what it took."""

import mlx.core as mx
import pytest

from support.device_memory import read_active_memory
from warmline_backend.generation.chunk_memory import MARGIN, ChunkMemory
from warmline_backend.model.step_memory import CHUNK_TOKENS_MIN, StepMemory, fit_tokens, halve_chunk

MB = 1_000_000
LINEAR = StepMemory((32, 2048), (0, 100_000), (32 * MB, 2048 * MB), (64 * MB, 4096 * MB))


def allocate(size: int) -> None:
    mx.eval(mx.ones((size,), mx.uint8))


def test_chunks_between_those_read_are_interpolated() -> None:
    assert LINEAR.bytes_for(32, 0) == 32 * MB and LINEAR.bytes_for(2048, 100_000) == 4096 * MB
    assert LINEAR.bytes_for(1024, 50_000) == 1536 * MB
    assert LINEAR.bytes_for(1024, 200_000) == 3072 * MB, "deeper than was read"
    assert LINEAR.bytes_for(0, 0) >= 0


@pytest.mark.parametrize(
    ("step", "room", "chunk"), [(2048, 2048, 2048), (2048, 2047, 1024), (2048, 0, 32), (1000, 300, 250), (20, 0, 20)]
)
def test_longest_half_that_fits(step: int, room: int, chunk: int) -> None:
    assert fit_tokens(step, room, lambda tokens: tokens) == chunk
    assert halve_chunk(33) == halve_chunk(32) == CHUNK_TOKENS_MIN and halve_chunk(5) == 5


def test_limit_holds_during_a_chunk_only() -> None:
    memory = ChunkMemory(LINEAR, read_active_memory() + 8 * MB)
    default = mx.set_memory_limit(1 << 40)
    with memory.bound_chunk(32, 0, 0):
        during = mx.set_memory_limit(1 << 40)
    after = mx.set_memory_limit(default)
    assert after == 1 << 40 and during - mx.get_active_memory() == pytest.approx(32 * MB, abs=MB)
    with pytest.raises(ZeroDivisionError), memory.bound_chunk(32, 0, 0):
        raise ZeroDivisionError
    assert mx.set_memory_limit(default) == default


def test_chunk_that_takes_more_than_reckoned_is_remembered_at_its_depth() -> None:
    memory = ChunkMemory(StepMemory((32, 64), (0, 1000), (0, 0), (0, 0)), read_active_memory() + 8 * MB)
    with memory.bound_chunk(64, 500, 0):
        allocate(16 * MB)
    assert 15 * MB * MARGIN < memory.reckon_bytes(64, 600) < 18 * MB * MARGIN
    assert memory.reckon_bytes(32, 600) < 9 * MB * MARGIN
    assert memory.reckon_bytes(64, 400) == 0, "earlier tokens take less"
    with memory.bound_chunk(64, 700, 0):
        allocate(MB)
    assert memory.reckon_bytes(64, 700) == 0, "it was something else"


def test_peak_of_the_process_outlasts_a_chunk() -> None:
    memory = ChunkMemory(None, 1 << 40)
    allocate(16 * MB)
    before = memory.peak_bytes
    with memory.bound_chunk(64, 0, 0):
        allocate(MB)
    assert memory.peak_bytes == before > mx.get_peak_memory()
