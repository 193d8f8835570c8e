"""Warm-up: all kinds of work, within the time limit, without side effects."""

from pathlib import Path

import mlx.core as mx
import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import FAMILIES, load_family, make_prompt
from support.device_memory import read_active_memory
from warmline_backend.engine import warm_up as module
from warmline_backend.engine.warm_up import prompt_lengths, warm_up
from warmline_backend.generation.rates import Rates
from warmline_backend.generation.sequence import Sequence
from warmline_backend.model.loader import ModelError
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
from warmline_backend.scheduler.scheduler import SchedulerSettings

LONG_S = 600.0


def make_settings(step: int = 32, *, exact: bool = False, budget: int = 1 << 30) -> SchedulerSettings:
    return SchedulerSettings("test", budget, step, 8, True, exact)


class CallRecorder:
    """Record of chunks, merged batches and steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chunks: list[tuple[int, int]] = []  # where it began, how long it was
        self.batches: list[int] = []  # rows of each step
        chunk, step = Sequence.prefill_chunk, DecodeGroup.step

        def watched_chunk(sequence: Sequence, tokens: int) -> int:
            start = sequence.kv.length
            done = chunk(sequence, tokens)
            self.chunks.append((start, done))
            return done

        def watched_step(group: DecodeGroup) -> object:
            self.batches.append(len(group.sequences))
            return step(group)

        monkeypatch.setattr(Sequence, "prefill_chunk", watched_chunk)
        monkeypatch.setattr(DecodeGroup, "step", watched_step)


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_up_runs_full_chunk_single_and_batched_decode(
    family: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, watched = load_family(family, root), CallRecorder(monkeypatch)
    warm_up(model, make_settings(), LONG_S)
    assert (0, 32) in watched.chunks
    assert 1 in watched.batches
    assert (2 in watched.batches) == model.layout.is_batchable


def test_warm_up_of_sparse_model_passes_selection_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = CallRecorder(monkeypatch)
    warm_up(load_family("deepseek_v32", root), make_settings(), LONG_S)  # selects from 16 tokens on
    assert {(0, 32), (32, 32), (64, 16)} <= set(watched.chunks)


def test_warm_up_in_exact_mode_shares_no_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = CallRecorder(monkeypatch)
    warm_up(load_family("llama", root), make_settings(exact=True), LONG_S)
    assert (0, 32) in watched.chunks and set(watched.batches) == {1}


@pytest.mark.parametrize(
    ("step", "index_topk", "tokens_max", "lengths"),
    [
        (2048, 0, 100_000, [16, 64, 256, 1024, 2048]),
        (2048, 2048, 100_000, [16, 64, 256, 1024, 2112]),
        (512, 2048, 100_000, [16, 64, 256, 1024, 2112]),
        (8192, 2048, 100_000, [16, 64, 256, 1024, 4096, 8192]),
        (2048, 2048, 500, [16, 64, 256, 500]),
        (2048, 0, 3, []),
        (1, 0, 100_000, []),
    ],
)
def test_prompt_lengths_grow_to_full_chunk_and_selection(
    step: int, index_topk: int, tokens_max: int, lengths: list[int]
) -> None:
    assert prompt_lengths(step, index_topk, tokens_max) == lengths


def test_warm_up_ends_at_time_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of 1 s a token: jobs that would end too late are not begun."""
    clock, chunk, batch = [0.0], Sequence.prefill_chunk, module.prefill_last_chunks

    def slow(sequence: Sequence, tokens: int) -> int:
        done = chunk(sequence, tokens)
        clock[0] += done
        return done

    def slow_batch(sequences: list[Sequence]) -> None:
        clock[0] += sum(sequence.prefill_tokens_left for sequence in sequences)
        batch(sequences)

    monkeypatch.setattr(Sequence, "prefill_chunk", slow)
    monkeypatch.setattr(module, "prefill_last_chunks", slow_batch)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    model, few, three = load_family("llama", root), 4, 4 + 5 + 4
    few_and_three = few + three
    for seconds_max, seconds in (
        (0.0, few),
        (few_and_three, few_and_three),
        (100.0, few_and_three + 16 + 32),
        (40.0, few_and_three + 16),
    ):
        began = clock[0]
        warm_up(model, make_settings(), seconds_max)
        assert clock[0] - began == seconds, seconds_max


def test_warm_up_stays_within_memory_and_context(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, watched = load_family("llama", root), CallRecorder(monkeypatch)
    warm_up(model, make_settings(2048, budget=300 * model.row_bytes), LONG_S)  # 256 rows, in whole buffers
    assert max(tokens for _, tokens in watched.chunks) == 253
    watched.chunks.clear()
    warm_up(model, make_settings(2048, budget=0), LONG_S)
    assert max(tokens for _, tokens in watched.chunks) == 4


def test_failing_device_is_reported_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(sequence: Sequence, tokens: int) -> int:
        raise RuntimeError("[metal::malloc] no memory")

    monkeypatch.setattr(Sequence, "prefill_chunk", fail)
    with pytest.raises(ModelError, match=r"can't compute 6 tokens.* no memory; a smaller --prefill-step-size"):
        warm_up(load_family("llama", root), make_settings(), LONG_S)


def test_warm_up_leaves_no_memory_and_same_answers(root: Path) -> None:
    model = load_family("llama", root)
    before = SchedulerDriver(model).run(make_prompt(40), temperature=1.0, seed=5).generated
    warm_up(model, make_settings(), LONG_S)
    held = read_active_memory()
    warm_up(model, make_settings(), LONG_S)
    assert mx.get_active_memory() == held
    assert SchedulerDriver(model).run(make_prompt(40), temperature=1.0, seed=5).generated == before


def test_warm_up_on_cpu_is_short() -> None:
    expected = module.CPU_S_MAX if mx.default_device().type == mx.DeviceType.cpu else module.GPU_S_MAX
    assert module._seconds_max() == expected


def test_slow_machine_computes_one_token(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, model, watched = [0.0], load_family("llama", root), CallRecorder(monkeypatch)
    compute = mx.eval

    def slow(*arrays: object) -> None:
        compute(*arrays)
        clock[0] += 1.0

    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.mx, "eval", slow)
    assert warm_up(model, make_settings(), 2.0) == 1
    assert watched.chunks == watched.batches == []


def test_chunks_are_measured_for_estimates_alone(root: Path) -> None:
    rates = Rates()
    warm_up(load_family("llama", root), make_settings(), LONG_S, rates)
    assert max(each.amount for each in rates.chunks.list_usual()) == 32, "a full chunk"
    assert all(each.seconds > 0 for each in rates.chunks.list_usual())
    assert rates.prefill_rates == [] and rates.step_durations.slowest_s == 0.0
