"""`--prefill-step-size auto`: the choice, the extent of measuring, and that it is remembered."""

import asyncio
import json
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support import tiny_models
from support.backend.families import load_family
from warmline_backend.__main__ import _make_scheduler
from warmline_backend.config import BackendConfigError, parse_config
from warmline_backend.engine import chunk_size, remembered
from warmline_backend.engine.chunk_size import (
    CHUNK_S_MAX,
    STEPS,
    ChunkLimits,
    ChunkTiming,
    choose_grid,
    choose_step_size,
    make_chunk_memory,
    measure_speeds,
    resolve_step_size,
)
from warmline_backend.engine.engine import Engine
from warmline_backend.generation.chunk_memory import MARGIN, USABLE_SHARE, ChunkMemory
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import MemoryLimits, get_machine_bytes
from warmline_backend.model.step_memory import StepMemory
from warmline_backend.server.service import Service
from warmline_common.storage import disk
from warmline_common.storage.home import Home

ROOMY = ChunkLimits(tokens_max=1 << 20, working_bytes_max=1 << 40)
MEMORY = MemoryLimits(get_machine_bytes(), 1 << 30, get_machine_bytes())


class FakeMachine:
    """Chunks of `tokens` take `seconds(tokens)` each from an empty context, and `bytes_` a token of their length."""

    def __init__(self, seconds: Callable[[int], float], bytes_: int = 0) -> None:
        self._seconds, self._bytes, self.calls = seconds, bytes_, list[list[int]]()

    def __call__(self, lengths: Sequence[int]) -> ChunkTiming:
        self.calls.append(list(lengths))
        return ChunkTiming(sum(map(self._seconds, lengths)), self._bytes * max(lengths))

    @property
    def longest(self) -> int:
        return max(max(lengths) for lengths in self.calls)


# ---- the choice


@pytest.mark.parametrize(
    ("speeds", "step"),
    [
        ({256: 100.0, 512: 150.0, 1024: 180.0}, 1024),
        ({256: 100.0, 512: 150.0, 1024: 153.0}, 512),  # not worth keeping everybody waiting
        ({256: 150.0, 512: 152.0, 1024: 153.0}, 256),
        ({256: 100.0, 512: 150.0, 1024: 90.0}, 512),
        ({256: 7.0}, 256),
        ({}, 256),
    ],
)
def test_smallest_step_near_best_is_chosen(speeds: dict[int, float], step: int) -> None:
    assert choose_step_size(speeds) == step


def test_steps_are_compared_over_same_tokens() -> None:
    """Attention makes later tokens slower, which is no reason against longer steps: each chunk costs 0.1 s beside it.

    By tokens/s from an empty context, 1,024 would seem to be best.
    """

    class Attending(FakeMachine):
        def __call__(self, lengths: Sequence[int]) -> ChunkTiming:
            self.calls.append(list(lengths))
            return ChunkTiming(0.1 * len(lengths) + 1e-7 * sum(lengths) ** 2, 0)

    speeds = measure_speeds(Attending(lambda _: 0.0), ROOMY)
    assert list(speeds) == list(STEPS) and choose_step_size(speeds) == 4096


def test_linear_machine_has_constant_speed() -> None:
    speeds = measure_speeds(FakeMachine(lambda tokens: 0.1 + tokens / 2000), ROOMY)
    assert speeds == pytest.approx({step: step / (0.1 + step / 2000) for step in STEPS if step / 2000 + 0.1 < 10})


# ---- how far it goes


def test_no_step_exceeds_time_limit() -> None:
    slow = FakeMachine(lambda tokens: 1 + tokens / 150)  # a very large model: 1,024 tokens take eight seconds
    assert list(measure_speeds(slow, ROOMY)) == [256, 512, 1024]
    assert slow.longest == 1024

    sudden = FakeMachine(lambda tokens: 0.1 + 0.004 * tokens if tokens < 1024 else 2 * CHUNK_S_MAX)
    assert 1024 not in measure_speeds(sudden, ROOMY), "what took too long after all is not chosen"
    assert sudden.longest == 1024


def test_slow_machine_measures_little() -> None:
    snail = FakeMachine(lambda tokens: tokens / 7)
    assert measure_speeds(snail, ROOMY) == {} and snail.calls == [[64]]


@pytest.mark.parametrize(("tokens_max", "longest"), [(100_000, 8192), (8191, 4096), (600, 512), (256, 256)])
def test_no_step_exceeds_context_and_memory(tokens_max: int, longest: int) -> None:
    machine = FakeMachine(lambda _: 0.1)
    assert max(measure_speeds(machine, ChunkLimits(tokens_max, 1 << 40))) == machine.longest == longest
    assert measure_speeds(machine, ChunkLimits(255, 1 << 40)) == {}


def test_no_step_exceeds_working_memory() -> None:
    machine = FakeMachine(lambda _: 0.1, bytes_=1000)
    assert list(measure_speeds(machine, ChunkLimits(1 << 20, 2_500_000))) == [256, 512, 1024]


def test_measuring_ends_when_longer_is_not_faster() -> None:
    machine = FakeMachine(lambda tokens: tokens / 1000 if tokens <= 512 else tokens / 900)
    speeds = measure_speeds(machine, ROOMY)
    assert choose_step_size(speeds) == 256 and machine.longest == 512


# ---- with a model


def test_real_model_is_measured_once_and_remembered(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunk_size, "STEPS", (32, 64))
    caplog.set_level("INFO")
    model = load_family("llama", root)
    step = resolve_step_size(model, "f" * 64, MEMORY, tmp_path)
    assert step in (32, 64) and "tokens/s by step: 32: " in caplog.text
    monkeypatch.setattr(chunk_size, "time_chunks", lambda *_: pytest.fail("measured again"))
    assert resolve_step_size(model, "f" * 64, MEMORY, tmp_path) == step
    assert stat.S_IMODE((tmp_path / chunk_size.FILE).stat().st_mode) == 0o600


def test_rotating_recurrent_and_sparse_models_are_measured(root: Path) -> None:
    for family in ("gemma3", "qwen3_5", "deepseek_v32"):
        model = load_family(family, root)
        assert chunk_size.time_chunks(model, [40, 8]).seconds > 0
        assert chunk_size.compute_limits(model, MEMORY).tokens_max == model.context_tokens_max


@pytest.fixture
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    machine = FakeMachine(lambda tokens: 0.1 + tokens / 2000)
    monkeypatch.setattr(chunk_size, "time_chunks", lambda _, lengths: machine(lengths))
    return machine


def test_other_model_device_or_mlx_is_measured_anew(
    root: Path, tmp_path: Path, fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts = load_family("llama", root), []
    for fingerprint, device in (("a", "x"), ("a", "x"), ("b", "x"), ("b", "y"), ("a", "x"), ("b", "y")):
        fake_machine.calls.clear()
        monkeypatch.setattr(remembered, "describe_device", lambda device=device: device)
        assert resolve_step_size(model, fingerprint, MEMORY, tmp_path) == 4096
        counts.append(bool(fake_machine.calls))
    assert counts == [True, False, True, True, False, False]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"KEY": "2048"}',
        b'{"KEY": 7}',
        b'{"KEY": true}',
        b'{"KEY": null}',
        b"[" * 100_000,
    ],
)
def test_damaged_file_is_replaced(root: Path, tmp_path: Path, fake_machine: FakeMachine, damage: bytes) -> None:
    key = f"a {remembered.describe_device()}"
    (tmp_path / chunk_size.FILE).write_bytes(damage.replace(b"KEY", key.encode()))
    assert resolve_step_size(load_family("llama", root), "a", MEMORY, tmp_path) == 4096
    assert json.loads((tmp_path / chunk_size.FILE).read_text()) == {key: 4096}


def test_read_only_home_only_loses_the_memory(
    root: Path,
    tmp_path: Path,
    fake_machine: FakeMachine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_durable", full)
    assert resolve_step_size(load_family("llama", root), "a", MEMORY, tmp_path) == 4096
    assert "will be measured again at the next start" in caplog.text


def test_drafts_are_deleted_and_oldest_models_dropped(
    root: Path, tmp_path: Path, fake_machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "MODELS_MAX", 2)
    (tmp_path / ".prefill_steps.0123.tmp").write_text("half")
    for fingerprint in ("a", "b", "c"):
        resolve_step_size(load_family("llama", root), fingerprint, MEMORY, tmp_path)
    (left,) = tmp_path.iterdir()
    assert [key[0] for key in json.loads(left.read_text())] == ["b", "c"]


def test_device_failure_message_has_remedy(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ChunkTiming:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(chunk_size, "time_chunks", fail)
    with pytest.raises(ModelError, match="measuring the prefill step failed: out of memory; give one"):
        resolve_step_size(load_family("llama", root), "a", MEMORY, tmp_path)


# ---- the flag


def test_prefill_step_size_takes_auto_or_a_number() -> None:
    base = ["--home", "h", "--model", "m", "--prefill-step-size"]
    assert parse_config([*base, "auto"]).prefill_step_size == 0
    assert parse_config([*base, "auto", "--reuse", "exact"]).prefill_step_size == 0
    assert parse_config([*base, "512"]).prefill_step_size == 512
    assert parse_config(base[:-1]).prefill_step_size == 2048
    for bad in ("0", "-1", "fast", "1.5"):
        with pytest.raises(BackendConfigError, match=rf"{bad}: expected a whole number from 1 to \d+, or auto"):
            parse_config([*base[:-1], f"--prefill-step-size={bad}"])
    with pytest.raises(BackendConfigError, match="expected at least 2"):
        parse_config([*base, "1", "--reuse", "exact"])


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_process_uses_and_reports_step(reuse: str, root: Path, tmp_path: Path, fake_machine: FakeMachine) -> None:
    folder = tiny_models.build("llama", root / "llama")
    home = Home(tmp_path)
    home.prepare()
    flags = ["--home", str(tmp_path), "--model", str(folder), "--reuse", reuse, "--prefill-step-size", "auto"]
    config = parse_config(flags)
    statuses = []

    async def start() -> None:
        engine = Engine(lambda: _make_scheduler(config, home, "boot"))
        service = Service(config, home, engine, "boot")
        engine.start()
        assert service.read_status().prefill_step_size == 0
        await service.wait_until_loaded()
        statuses.append(service.read_status())
        service.close()
        engine.stop()
        await asyncio.wrap_future(engine.ended)

    for _ in range(2):
        asyncio.run(start())
        fake_machine.calls.clear()
    first, second = statuses
    assert first.prefill_step_size == second.prefill_step_size == 4096
    assert first.fingerprint == second.fingerprint
    assert first.layout is not None and first.layout.grid == (4096 if reuse == "exact" else 0)


def test_grid_is_chosen_for_longest_prompt(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In exact mode no chunk can be shorter than the others."""
    served = replace(load_family("llama", root), context_tokens_max=10_000)
    budget = served.kv_bytes(20_000)
    reckoned = StepMemory((32, 2048), (0, 10_000), (0, 0), (32 * 10_000, 2048 * 10_000))
    chunks = ChunkMemory(reckoned, 0)  # others have all of the memory now, which changes no grid
    assert choose_grid(served, chunks, 2048, MemoryLimits(1 << 40, budget, 0)) == 2048 and caplog.messages == []
    for room, grid in ((1000, 512), (0, 256)):
        usable = served.kv_bytes(10_000) + int(room * 10_000 * MARGIN)
        tight = MemoryLimits(served.weight_bytes + int(usable / USABLE_SHARE), budget, 0)
        assert choose_grid(served, chunks, 2048, tight) == grid
        assert f"prefill step {grid} instead of 2048" in caplog.messages[-1]
        assert "after 10000 tokens" in caplog.messages[-1]
    assert choose_grid(served, chunks, 200, tight) == 200, "as it was set"
    assert choose_grid(replace(served, context_tokens_max=500), chunks, 2048, tight) == 2048


def test_step_is_measured_and_used_within_what_other_models_leave(root: Path) -> None:
    served, total = load_family("llama", root), 1 << 30
    alone, shared = MemoryLimits(total, 1 << 29, total), MemoryLimits(total, 1 << 29, served.weight_bytes + 1_000_000)
    assert chunk_size.compute_limits(served, alone).working_bytes_max == pytest.approx(0.3 * total, rel=0.01)
    assert chunk_size.compute_limits(served, shared).working_bytes_max == 950_000
    assert make_chunk_memory(served, 256, shared).usable_bytes == served.weight_bytes + 950_000


def test_reckoned_memory_covers_the_step_at_the_longest_prompt(root: Path) -> None:
    served = load_family("llama", root)
    memory = make_chunk_memory(served, 256, MEMORY)
    assert 0 < memory.reckon_bytes(32, 1000) < memory.reckon_bytes(256, 1000) < memory.reckon_bytes(256, 50_000)
