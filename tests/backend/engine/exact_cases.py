"""Exact mode: warm or batched, each row of a request's log-probabilities equals a cold run's bit for bit.

Run by test_exact.py, in a process that has OpenBLAS: with the reference BLAS most of this would hold by luck.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from support.backend.cold_runs import cold_logprobs
from support.backend.engine_driver import EventLog, SchedulerDriver, cut_chain, make_loader, save_segments
from support.backend.families import FAMILIES, QUANTIZATIONS, load_family, make_prompt
from support.speculation.draft_models import INEXACT, load_drafted, make_model_speculation
from warmline_backend.generation.events import GenerationEvent
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import ResidentMismatchError
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup, SampledToken
from warmline_backend.speculation.draft import DRAFT_MODEL
from warmline_backend.speculation.speculation import Speculation
from warmline_common.protocol.tokens import pack_tokens

Rows = list[NDArray[np.float32]]
Sample = Callable[[DecodeGroup], list[SampledToken]]
Note = Callable[[list[GenerationEvent], NDArray[np.float32]], object]

ALL = [*FAMILIES, "baichuan_m1", "mamba2"]
GRID = 48  # more than the windows of 32; with 24, two chunks fill one
LENGTH = 205  # 4 whole chunks and 13 tokens
ANSWER = 8
POOL = ThreadPoolExecutor(2)


def make_driver(family: str, root: Path, step: int = GRID) -> SchedulerDriver:
    return SchedulerDriver(load_family(family, root), step=step, exact=True)


def record_rows(patch: pytest.MonkeyPatch, note: Note) -> None:
    """Have decode groups also record each sequence's row."""
    for name in ("step", "read_sampled"):
        patch.setattr(DecodeGroup, name, _make_recorded(getattr(DecodeGroup, name), note))


def _make_recorded(sample: Sample, note: Note) -> Sample:
    def recorded(group: DecodeGroup) -> list[SampledToken]:
        sampled = sample(group)
        for sequence, _, row in sampled:
            events: Any = sequence.request.listener  # the bound `append` of an EventLog's events
            note(events.__self__, np.array(row.astype(mx.float32)))
        return sampled

    return recorded


class RowRecorder:
    """Log-probabilities that each request's tokens were chosen from."""

    def __init__(self) -> None:
        self._rows: list[tuple[list[GenerationEvent], NDArray[np.float32]]] = []

    def record(self, events: list[GenerationEvent], row: NDArray[np.float32]) -> None:
        self._rows.append((events, row))

    def list_rows(self, log: EventLog) -> Rows:
        return [row for events, row in self._rows if events is log.events]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RowRecorder:
    recorder = RowRecorder()
    record_rows(monkeypatch, recorder.record)
    return recorder


@cache
def compute_cold_rows(model: str, root: Path, step: int, prompt: tuple[int, ...], tokens: int) -> Rows:
    """Compute the rows of a cold answer, alone on an engine without reuse."""
    rows: Rows = []
    with pytest.MonkeyPatch.context() as patch:
        record_rows(patch, lambda _, row: rows.append(row))
        SchedulerDriver(load_family(model, root), step=step, keeps=False).run(list(prompt), tokens)
    return rows


def assert_cold(found: Rows, driver: SchedulerDriver, root: Path, prompt: list[int]) -> None:
    """Assert that these rows equal a cold run's in all bits."""
    step = driver.scheduler.settings.prefill_step_size
    assert_same(found, compute_cold_rows(driver.served.name, root, step, tuple(prompt), len(found)))


def assert_same(found: Rows, expected: Rows) -> None:
    differing = [n for n, pair in enumerate(zip(found, expected, strict=True)) if not np.array_equal(*pair)]
    if not found or differing:
        at = differing[0] if differing else 0
        largest = np.abs(found[at] - expected[at]).max() if differing else 0.0
        pytest.fail(f"{len(differing)} of {len(found)} rows differ, from token {at} on, there by {largest}")


def make_branch_prompt(length: int, shared: int, seed: int = 9) -> list[int]:
    """Make a prompt that shares its first tokens with `make_prompt`."""
    return make_prompt(length)[:shared] + make_prompt(length - shared, seed)


# ---- the rule itself


@pytest.mark.parametrize("family", ALL)
def test_cold_run_equals_mlx_lm_in_grid_chunks(family: str, root: Path, recorder: RowRecorder) -> None:
    driver, prompt = make_driver(family, root), make_prompt(LENGTH)
    log = driver.run(prompt, ANSWER)
    caches = driver.served.layout.make_empty_cache() if family in QUANTIZATIONS else None
    assert log.chunks == [48, 96, 144, 192, 204]
    assert_same(recorder.list_rows(log), cold_logprobs(driver.served.model, prompt, GRID, ANSWER, caches).logprobs)
    assert_cold(recorder.list_rows(log), driver, root, prompt)


@pytest.mark.parametrize("family", ALL)
def test_residents_end_on_grid(family: str, root: Path) -> None:
    driver = make_driver(family, root)
    for length, answer, left in ((LENGTH, 2, 192), (193, 4, 192), (192, 2, 144), (49, 2, 48), (48, 4, 0)):
        result = driver.run(make_prompt(length), answer).result
        assert (result.prefilled_until, result.generated) == (left, b"")
        assert bool(result.resident) == bool(left)
        assert result.checkpoints == ([left] if left and driver.served.layout.has_states else [])
        assert not result.positions or result.positions[-1] == left


def test_checkpoints_off_grid_cut_no_chunk(root: Path) -> None:
    log = make_driver("qwen3_5", root).run(make_prompt(LENGTH), 2, checkpoints=(30, 96, 100, 200))
    assert log.chunks == [48, 96, 144, 192, 204] and log.result.checkpoints == [96, 192]
    plain = SchedulerDriver(load_family("qwen3_5", root), step=GRID, keeps=False).run(
        make_prompt(LENGTH), 2, checkpoints=(30, 96)
    )
    assert plain.chunks == log.chunks


def test_residents_are_not_continued_off_grid(root: Path) -> None:
    driver = make_driver("llama", root)
    resident = driver.run(make_prompt(LENGTH), 4).result.resident
    for position in (100, 191, 193):
        with pytest.raises(ResidentMismatchError, match=f"can't be continued at {position}"):
            driver.submit(make_prompt(LENGTH), resident=resident, reuse=position, keep=True)
    assert driver.run(make_prompt(LENGTH), 4, resident=resident, reuse=96).reused == 96


# ---- warm starts


@pytest.mark.parametrize(
    ("family", "step"), [*((family, GRID) for family in ALL), ("gemma3", 24), ("baichuan_m1", 24), ("gemma3", 7)]
)
def test_consecutive_turns(family: str, step: int, root: Path, recorder: RowRecorder) -> None:
    """Decoded tokens are prefilled again; the window has wrapped by then."""
    driver, prompt = make_driver(family, root, step), make_prompt(100)
    log = driver.run(prompt, 40)  # past the next place of the grid
    for turn in range(2):
        result = log.result
        assert result.prefilled_until == (len(prompt) - 1) // step * step
        prompt = [*prompt, *(int(row.argmax()) for row in recorder.list_rows(log)), *make_prompt(31 + turn, turn + 3)]
        log = driver.run(prompt, ANSWER, resident=result.resident, reuse=result.prefilled_until)
        assert log.reused == result.prefilled_until
        assert_cold(recorder.list_rows(log), driver, root, prompt)


@pytest.mark.parametrize("family", ALL)
def test_drafts_depend_on_tokens_alone(family: str, root: Path, recorder: RowRecorder) -> None:
    """An answer of three words repeats itself, so passes of many widths compute it; warm ones have a cold one's."""
    words, found = (40, 41, 42), []
    prompt = [*make_prompt(120), *words * 4]
    for earlier in ([], [prompt[:100]], [prompt]):
        driver = SchedulerDriver(load_family(family, root), step=GRID, exact=True, speculation=Speculation(None))
        log = None
        for text in (*earlier, prompt):
            start = {} if log is None else {"resident": log.result.resident, "reuse": log.result.prefilled_until}
            log = driver.run(text, 60, allowed_token_ids=words, **start)
        assert log is not None and bool(log.reused) == bool(earlier)
        assert log.result.timings.drafts["prompt_lookup"].accepted and log.result.timings.passes < 60
        found.append((recorder.list_rows(log), log.result.timings))
    for rows, timings in found[1:]:
        assert_same(rows, found[0][0])
        assert (timings.passes, timings.drafts) == (found[0][1].passes, found[0][1].drafts)


@pytest.mark.parametrize(("family", "draft"), [("llama", INEXACT), ("qwen3_5", "gemma3"), ("gemma3", INEXACT)])
def test_drafts_of_a_model_depend_on_tokens_alone(
    family: str, draft: str, root: Path, recorder: RowRecorder, tmp_path: Path
) -> None:
    """Cold, warm in memory, and restored from disk, passes have the same drafts."""
    served, prompt, found = load_drafted(family, draft, root), make_prompt(150), []
    for start in ("cold", "resident", "disk"):
        driver = SchedulerDriver(served, step=GRID, exact=True, speculation=make_model_speculation(served, None))
        options: dict[str, Any] = {}
        if start != "cold":
            resident = driver.run(prompt[:120], ANSWER, checkpoints=(96,)).result.resident
            options = {"resident": resident, "reuse": 96}
        if start == "disk":
            kv = driver.scheduler.save_source.find_kv(96, resident_id=resident)
            chain, checkpoints = save_segments(kv, tmp_path, [64, 96])
            read = make_loader(served, tmp_path, POOL).load(
                pack_tokens(prompt[:96]), chain, next(iter(checkpoints), None), lambda: False
            )
            driver = SchedulerDriver(served, step=GRID, exact=True, speculation=make_model_speculation(served, None))
            options["resident"] = driver.scheduler.install_resident("", read.build(served.layout))
        log = driver.run(prompt, 60, **options)
        assert log.reused == options.get("reuse", 0) and log.result.timings.drafts[DRAFT_MODEL].drafted
        found.append((recorder.list_rows(log), log.result.timings))
    for rows, timings in found[1:]:
        assert_same(rows, found[0][0])
        assert (timings.passes, timings.drafts) == (found[0][1].passes, found[0][1].drafts)


@pytest.mark.parametrize(("family", "length"), [*((family, 193) for family in ALL), ("gemma3", 194), ("qwen3_5", 194)])
def test_prompt_ends_right_after_grid(family: str, length: int, root: Path, recorder: RowRecorder) -> None:
    """The first decode step, or a chunk of one token, continues the grid itself."""
    driver, prompt = make_driver(family, root), make_prompt(length)
    first = driver.run(prompt, ANSWER)
    again = driver.run(prompt, ANSWER, resident=first.result.resident, reuse=192)
    onward = driver.run(make_branch_prompt(210, length), ANSWER, resident=again.result.resident, reuse=192)
    assert again.chunks == [193][: length - 193] and again.result.prefilled_until == 192
    assert_same(recorder.list_rows(again), recorder.list_rows(first))
    assert_cold(recorder.list_rows(first), driver, root, prompt)
    assert_cold(recorder.list_rows(onward), driver, root, make_branch_prompt(210, length))


@pytest.mark.parametrize("family", ALL)
def test_copy_and_original_resident(family: str, root: Path, recorder: RowRecorder) -> None:
    """Both continue at once."""
    driver = make_driver(family, root)
    trunk = driver.run(make_prompt(LENGTH), ANSWER, checkpoints=(96,))
    resident, places = trunk.result.resident, trunk.result.positions
    at = 96 if not places or 96 in places else 192
    prompts = (make_branch_prompt(250, at), make_branch_prompt(220, 192, 4))
    branch = driver.submit(prompts[0], ANSWER, resident=resident, reuse=at, keep=True)[1]
    onward = driver.submit(prompts[1], ANSWER, resident=resident, reuse=192)[1]
    driver.run_until(lambda: branch.is_ended and onward.is_ended)
    assert (branch.reused, onward.reused) == (at, 192)
    assert_cold(recorder.list_rows(branch), driver, root, prompts[0])
    assert_cold(recorder.list_rows(onward), driver, root, prompts[1])


@pytest.mark.parametrize("family", ALL)
def test_restored_from_disk(family: str, root: Path, recorder: RowRecorder, tmp_path: Path) -> None:
    driver, fresh = make_driver(family, root), make_driver(family, root)
    resident = driver.run(make_prompt(LENGTH), ANSWER, checkpoints=(48, 96)).result.resident
    chain, checkpoints = save_segments(
        driver.scheduler.save_source.find_kv(192, resident_id=resident), tmp_path, [64, 130, 192]
    )
    for position in (48, 96, 192):
        prompt = make_branch_prompt(LENGTH, position)
        at = next((each for each in checkpoints if each.position == position), None)
        tokens, links = pack_tokens(prompt[:position]), cut_chain(chain, position)
        read = make_loader(driver.served, tmp_path, POOL).load(tokens, links, at, lambda: False)
        restored = fresh.scheduler.install_resident("", read.build(driver.served.layout))
        log = fresh.run(prompt, ANSWER, resident=restored, reuse=position)
        assert log.reused == position
        assert_cold(recorder.list_rows(log), driver, root, prompt)


@pytest.mark.parametrize("family", ALL)
def test_resumed_after_cancel_in_prefill(family: str, root: Path, recorder: RowRecorder) -> None:
    """Between two whole chunks, and after the partial one."""
    driver, prompt = make_driver(family, root), make_prompt(LENGTH)
    for chunks, left in ((2, 96), (5, 192)):
        name, cut = driver.submit(prompt, ANSWER)
        while len(cut.chunks) < chunks:
            next(driver.scheduler.step())
        result = driver.scheduler.cancel(name)
        assert result is not None and result.prefilled_until == left
        again = driver.run(prompt, ANSWER, resident=result.resident, reuse=left)
        assert_cold(recorder.list_rows(again), driver, root, prompt)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_detached_prefill_ends_with_last_savable_token(family: str, root: Path) -> None:
    driver = make_driver(family, root)
    name, alone = driver.submit(make_prompt(LENGTH), ANSWER)
    driver.run_until(lambda: alone.chunks == [48])
    assert driver.scheduler.detach(name)
    driver.run_until(lambda: alone.is_ended)
    assert alone.chunks == [48, 96, 144, 192] and alone.result.prefilled_until == 192
    name, alone = driver.submit(make_prompt(LENGTH), ANSWER)
    driver.run_until(lambda: alone.chunks[-1:] == [192])
    assert not driver.scheduler.detach(name), "nothing is left to be done that would be kept"


@pytest.mark.parametrize("family", ALL)
def test_resumed_after_cancel_in_decode(family: str, root: Path, recorder: RowRecorder) -> None:
    """Past the next multiple of the grid, decoded rows there are dropped too."""
    driver, prompt = make_driver(family, root), make_prompt(140)
    name, cut = driver.submit(prompt, 500)
    driver.run_until(lambda: len(recorder.list_rows(cut)) > GRID)
    result = driver.scheduler.cancel(name)
    assert result is not None and result.prefilled_until == 96
    again = driver.run(prompt, ANSWER, resident=result.resident, reuse=96)
    assert_cold(recorder.list_rows(again), driver, root, prompt)
    assert_same(recorder.list_rows(again), recorder.list_rows(cut)[:ANSWER])


@pytest.mark.parametrize("family", ALL)
def test_follower(family: str, root: Path, recorder: RowRecorder) -> None:
    """From the leader's last grid position before the requested one, also long after the leader has passed it."""
    driver = make_driver(family, root)
    name, leader = driver.submit(make_prompt(LENGTH), 30)
    prompts = [make_branch_prompt(230, shared, shared) for shared in (130, 200, 203)]
    followers = [
        driver.submit(prompt, ANSWER, follow=name, reuse=shared)[1]
        for prompt, shared in zip(prompts[:2], (130, 200), strict=True)
    ]
    driver.run_until(lambda: len(recorder.list_rows(leader)) > 10)
    followers.append(driver.submit(prompts[2], ANSWER, follow=name, reuse=203)[1])
    driver.run_until(lambda: leader.is_ended and all(each.is_ended for each in followers))
    assert [each.reused for each in followers] == [96, 192, 192]
    for prompt, log in zip(prompts, followers, strict=True):
        assert_cold(recorder.list_rows(log), driver, root, prompt)
    assert_cold(recorder.list_rows(leader)[:ANSWER], driver, root, make_prompt(LENGTH))
    assert leader.result.prefilled_until == 192


def test_follower_off_grid_is_refused(root: Path) -> None:
    driver = make_driver("llama", root)
    name, _ = driver.submit(make_prompt(LENGTH), 4)
    with pytest.raises(ResidentMismatchError, match="can't be copied at 0 tokens"):
        driver.submit(make_branch_prompt(230, 40), 4, follow=name, reuse=40)


@pytest.mark.parametrize(("family", "others"), [*((family, 2) for family in ALL), ("llama", 1), ("llama", 7)])
def test_concurrent_requests(family: str, others: int, root: Path, recorder: RowRecorder) -> None:
    """All of one length, which would share a batch in fast mode."""
    driver, prompts = make_driver(family, root), [make_prompt(100, n + 2) for n in range(others)]
    beside = [driver.submit(prompt, 5_000) for prompt in prompts]
    driver.run_until(lambda: all(len(recorder.list_rows(log)) > 1 for _, log in beside))
    assert [len(group.sequences) for group in driver.scheduler._queues.groups] == [1] * others
    first = driver.run(make_prompt(LENGTH), ANSWER)
    again = driver.run(make_prompt(LENGTH), ANSWER, resident=first.result.resident, reuse=192)
    for name, _ in beside:
        driver.scheduler.cancel(name)
    for log in (first, again):
        assert_cold(recorder.list_rows(log), driver, root, make_prompt(LENGTH))
    for prompt, (_, log) in zip(prompts[:2], beside, strict=False):
        assert_cold(recorder.list_rows(log)[:ANSWER], driver, root, prompt)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_seeded_sampling(family: str, root: Path, recorder: RowRecorder) -> None:
    driver, options = make_driver(family, root), {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    first = driver.run(make_prompt(LENGTH), 30, **options)
    warm = driver.run(make_prompt(LENGTH), 30, resident=first.result.resident, reuse=192, **options)
    assert warm.text == first.text
    assert_same(recorder.list_rows(warm), recorder.list_rows(first))


# ---- saving


@pytest.mark.parametrize("family", ALL)
def test_nothing_past_grid_is_saved(family: str, root: Path) -> None:
    driver = make_driver(family, root)
    name, running = driver.submit(make_prompt(LENGTH), 300)
    driver.run_until(lambda: running.chunks[-1:] == [144])
    assert driver.scheduler.save_source.find_kv(144, running_id=name).length == 144
    driver.run_until(lambda: driver.scheduler._queues.find(name).kv.length > 240)  # type: ignore[union-attr]
    kv = driver.scheduler.save_source.find_kv(192, running_id=name)
    assert all(array.shape[2] == 192 for array in kv.slice_rows(0, 192).values())
    for until in (193, 204, 240):
        with pytest.raises(RowsUnavailableError, match=f"192 tokens can be saved, {until} were asked for"):
            driver.scheduler.save_source.find_kv(until, running_id=name)
    assert all(end <= 192 for _, end, _ in kv.journal) and all(at <= 192 for at in kv.checkpoints)
    driver.scheduler.save_source.mark_saved("", name, 192)
    driver.scheduler.cancel(name)
    assert driver.run(make_prompt(LENGTH), 4, resident=running.result.resident, reuse=192).reused == 192


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("gemma3", "qwen3_5")])
def test_long_answer_leaves_small_buffers(family: str, root: Path, recorder: RowRecorder) -> None:
    """Only a part of it is kept: memory for the rest would evict others."""
    driver = make_driver(family, root)
    resident = driver.run(make_prompt(100), 200).result.resident  # its room ends at 512
    kv = driver.scheduler.residents.find_kv(resident)
    assert kv is not None and kv.buffer_rows == kv.length == 96
    assert driver.scheduler.residents.bytes_held < 1.1 * driver.served.kv_bytes(96) + driver.served.state_bytes
    again = driver.run(make_prompt(LENGTH), ANSWER, resident=resident, reuse=96)
    assert_cold(recorder.list_rows(again), driver, root, make_prompt(LENGTH))


@pytest.mark.parametrize("family", ["gemma3", "baichuan_m1"])
def test_rollback_point_is_counted_and_released(family: str, root: Path) -> None:
    driver = make_driver(family, root)
    name, log = driver.submit(make_prompt(LENGTH), 60)
    driver.run_until(lambda: len(driver.scheduler._queues.groups) == 1)
    kv = driver.scheduler.save_source.find_kv(1, running_id=name)
    kept = sum(array.nbytes for array in kv.rollback_window[1].values())
    assert kept == driver.served.window_bytes > 0
    with_it, kv.rollback_window = driver.scheduler.running_bytes, (0, {})
    assert with_it - driver.scheduler.running_bytes == kept
    kv.journal = []  # as after a save
    driver.scheduler.cancel(name)
    assert log.result.resident == "", "without them there is no way back"
    left = driver.run(make_prompt(LENGTH), 60).result.resident
    resident = driver.scheduler.residents.find_kv(left)
    assert resident is not None and resident.rollback_window == (0, {})


# ---- that all this proves something


@pytest.mark.parametrize("family", ALL)
def test_fast_mode_differs_from_cold_run(family: str, root: Path, recorder: RowRecorder) -> None:
    """Control: a BLAS that rounds alike for all shapes would pass all other cases."""
    driver = SchedulerDriver(load_family(family, root), step=GRID)
    first = driver.run(make_prompt(LENGTH), 30)
    prompt = make_prompt(LENGTH) + first.generated + make_prompt(5, 4)
    warm = driver.run(prompt, ANSWER, resident=first.result.resident, reuse=len(prompt) - 5)
    with pytest.raises(pytest.fail.Exception, match="rows differ"):
        assert_cold(recorder.list_rows(warm), driver, root, prompt)
