"""Exact mode: whatever a request starts from and whoever runs beside it, each row of its log-probabilities is a cold
run's, bit for bit.

Run by test_exact.py, in a process that has OpenBLAS: with the reference BLAS most of this would hold by luck.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from drive import Drive, Heard, cut_chain, loader, save
from families import FAMILIES, mixed, prompt_of, served
from numpy.typing import NDArray
from oracle import cold_logprobs

from warmline_backend.decode import DecodeGroup
from warmline_backend.kv import RowsGone
from warmline_backend.model import ServedModel
from warmline_backend.residents import ResidentMismatch
from warmline_wire.keys import pack_tokens
from warmline_wire.messages import Settled

Rows = list[NDArray[np.float32]]

ALL = [*FAMILIES, "baichuan_m1", "mamba2"]
GRID = 48  # more than the windows of 32; with 24, two chunks fill one
LENGTH = 205  # 4 whole chunks and 13 tokens
ANSWER = 12
POOL = ThreadPoolExecutor(2)


def model_of(family: str, root: Path) -> ServedModel:
    return mixed(root) if family == "baichuan_m1" else served(family, root)


def drive_of(family: str, root: Path, step: int = GRID) -> Drive:
    return Drive(model_of(family, root), step=step, exact=True)


class Recorder:
    """All log-probabilities that each request's tokens were chosen from."""

    def __init__(self) -> None:
        self._told: list[tuple[object, NDArray[np.float32]]] = []  # by the list of events of whom it was told

    def note(self, listener: Any, row: mx.array) -> None:
        self._told.append((listener.__self__, np.array(row.astype(mx.float32))))

    def of(self, heard: Heard) -> Rows:
        return [row for events, row in self._told if events is heard.events]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder, step = Recorder(), DecodeGroup.step

    def noted(group: DecodeGroup) -> list[tuple[object, int, mx.array]]:
        told = step(group)
        for sequence, _, row in told:
            recorder.note(sequence.request.listener, row)
        return told  # type: ignore[return-value]

    monkeypatch.setattr(DecodeGroup, "step", noted)
    yield recorder


class Truth:
    """Cold answers, each by an engine that reuses nothing, alone."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def rows(self, like: Drive, prompt: list[int], tokens: int = ANSWER) -> Rows:
        step = like.scheduler.settings.prefill_step_size
        return self._recorder.of(Drive(like.served, step=step, keeps=False).run(prompt, tokens))


@pytest.fixture
def truth(recorder: Recorder) -> Truth:
    return Truth(recorder)


def same(one: Rows, other: Rows) -> bool:
    return len(one) == len(other) > 0 and all(map(np.array_equal, one, other))


def floor(position: int, step: int = GRID) -> int:
    return position // step * step


def other_end(length: int, shared: int, seed: int = 9) -> list[int]:
    """A prompt that shares its first tokens with `prompt_of`."""
    return prompt_of(length)[:shared] + prompt_of(length - shared, seed)


# ---- the rule itself


@pytest.mark.parametrize("family", ALL)
def test_a_cold_run_is_mlx_lms_own_in_chunks_on_the_grid(family: str, root: Path, recorder: Recorder) -> None:
    drive = drive_of(family, root)
    heard = drive.run(prompt_of(LENGTH), ANSWER)
    layers = None
    if family == "quantized":
        layers = drive.served.layout.fresh()
    run = cold_logprobs(drive.served.model, prompt_of(LENGTH), GRID, ANSWER, layers)
    assert same(recorder.of(heard), run.logprobs) and heard.chunks == [48, 96, 144, 192, 204]


@pytest.mark.parametrize("family", ALL)
def test_what_is_left_ends_on_the_grid(family: str, root: Path) -> None:
    drive = drive_of(family, root)
    for length, left in ((LENGTH, 192), (193, 192), (192, 144), (49, 48), (48, 0), (5, 0)):
        settled = drive.run(prompt_of(length), 60).settled
        assert (settled.prefilled_until, settled.generated) == (left, b"")
        assert bool(settled.resident) == bool(left)
        assert set(settled.checkpoints) == ({left} if left and drive.served.layout.has_states else set())
        assert not settled.positions or settled.positions[-1] == left


def test_positions_off_the_grid_cut_nothing(root: Path) -> None:
    heard = drive_of("qwen3_5", root).run(prompt_of(LENGTH), 2, checkpoints=(30, 96, 100, 200))
    assert heard.chunks == [48, 96, 144, 192, 204] and heard.settled.checkpoints == [96, 192]
    plain = Drive(served("qwen3_5", root), step=GRID, keeps=False).run(prompt_of(LENGTH), 2, checkpoints=(30, 96))
    assert plain.chunks == heard.chunks


def test_residents_are_not_continued_off_the_grid(root: Path) -> None:
    drive = drive_of("llama", root)
    resident = drive.run(prompt_of(LENGTH), 4).settled.resident
    for position in (192 - 1, 100, 193):
        with pytest.raises(ResidentMismatch, match=f"can't be continued at {position}"):
            drive.submit(prompt_of(LENGTH), resident=resident, reuse=position, keep=True)
    assert drive.run(prompt_of(LENGTH), 4, resident=resident, reuse=96).reused == 96


# ---- warm starts


@pytest.mark.parametrize("step", [GRID, 24])
@pytest.mark.parametrize("family", ALL)
def test_turn_after_turn(family: str, step: int, root: Path, recorder: Recorder, truth: Truth) -> None:
    """What was decoded is prefilled again; the window has wrapped by then."""
    drive, prompt, settled = drive_of(family, root, step), prompt_of(100), Settled
    heard = drive.run(prompt, 40)
    for turn in range(3):
        settled = heard.settled
        assert settled.prefilled_until == floor(len(prompt) - 1, step)
        prompt = [*prompt, *(int(row.argmax()) for row in recorder.of(heard)), *prompt_of(31 + turn, turn + 3)]
        heard = drive.run(prompt, 40, resident=settled.resident, reuse=settled.prefilled_until)
        assert heard.reused == settled.prefilled_until
        assert same(recorder.of(heard), truth.rows(drive, prompt, 40))


@pytest.mark.parametrize("family", ALL)
def test_a_prompt_that_ends_right_after_the_grid(
    family: str, root: Path, recorder: Recorder, truth: Truth
) -> None:
    """The first decode step continues the grid itself."""
    drive = drive_of(family, root)
    prompt = prompt_of(193)
    first = drive.run(prompt, 50)
    again = drive.run(prompt, 50, resident=first.settled.resident, reuse=192)
    onward = drive.run(other_end(240, 193), 50, resident=again.settled.resident, reuse=192)
    assert again.chunks == [] and again.settled.prefilled_until == 192
    assert same(recorder.of(again), recorder.of(first)) and same(recorder.of(first), truth.rows(drive, prompt, 50))
    assert same(recorder.of(onward), truth.rows(drive, other_end(240, 193), 50))


@pytest.mark.parametrize("family", ALL)
def test_a_branch_and_its_trunk(family: str, root: Path, recorder: Recorder, truth: Truth) -> None:
    drive = drive_of(family, root)
    trunk = drive.run(prompt_of(LENGTH), ANSWER, checkpoints=(96,))
    resident, places = trunk.settled.resident, trunk.settled.positions
    at = 96 if not places or 96 in places else 192
    both = [
        drive.submit(prompt, 40, resident=resident, reuse=reuse, keep=keep)[1]
        for prompt, reuse, keep in ((other_end(250, at), at, True), (other_end(220, 192, 4), 192, False))
    ]
    drive.until(lambda: all(one.over for one in both))
    assert same(recorder.of(both[0]), truth.rows(drive, other_end(250, at), 40))
    assert same(recorder.of(both[1]), truth.rows(drive, other_end(220, 192, 4), 40))


@pytest.mark.parametrize("family", ALL)
def test_from_disk(family: str, root: Path, recorder: Recorder, truth: Truth, tmp_path: Path) -> None:
    drive = drive_of(family, root)
    resident = drive.run(prompt_of(LENGTH), ANSWER, checkpoints=(48, 96)).settled.resident
    chain, checkpoints = save(drive.scheduler.kv_of(192, resident=resident), tmp_path, [64, 130, 192])
    fresh = drive_of(family, root)
    for position in (48, 96, 192):
        prompt = other_end(LENGTH, position)
        at = next((each for each in checkpoints if each.position == position), None)
        links = cut_chain(chain, position)
        read = loader(drive.served, tmp_path, POOL).load(
            pack_tokens(prompt[:position]), links, at, lambda: False
        )
        restored = fresh.scheduler.install("", read.build(drive.served.layout))
        heard = fresh.run(prompt, 40, resident=restored, reuse=position)
        assert heard.reused == position and same(recorder.of(heard), truth.rows(drive, prompt, 40))


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("chunks", [2, 5])
def test_after_a_cancel_in_prefill(
    family: str, chunks: int, root: Path, recorder: Recorder, truth: Truth
) -> None:
    """Between two whole chunks, and after the partial one."""
    drive, prompt = drive_of(family, root), prompt_of(LENGTH)
    name, cut = drive.submit(prompt, ANSWER)
    work = drive.scheduler.turn
    while len(cut.chunks) < chunks:
        next(iter(work()))
    settled = drive.scheduler.cancel(name)
    assert settled is not None and settled.prefilled_until == min(chunks, 4) * GRID
    again = drive.run(prompt, ANSWER, resident=settled.resident, reuse=settled.prefilled_until)
    assert same(recorder.of(again), truth.rows(drive, prompt))


@pytest.mark.parametrize("family", ALL)
def test_after_a_cancel_while_decoding(family: str, root: Path, recorder: Recorder, truth: Truth) -> None:
    """Past the next place of the grid: what was decoded there is given up too."""
    drive, prompt = drive_of(family, root), prompt_of(140)
    name, cut = drive.submit(prompt, 500)
    drive.until(lambda: len(recorder.of(cut)) > 2 * GRID)
    settled = drive.scheduler.cancel(name)
    assert settled is not None and settled.prefilled_until == 96
    again = drive.run(prompt, ANSWER, resident=settled.resident, reuse=96)
    assert same(recorder.of(again), truth.rows(drive, prompt)) and same(recorder.of(again), recorder.of(cut)[:ANSWER])


@pytest.mark.parametrize("family", ALL)
def test_following(family: str, root: Path, recorder: Recorder, truth: Truth) -> None:
    """From its leader's place on the grid before the wanted one, and from a leader that has long gone on."""
    drive = drive_of(family, root)
    name, leader = drive.submit(prompt_of(LENGTH), 80)
    prompts = [other_end(230, shared, shared) for shared in (130, 200)]
    followers = [
        drive.submit(prompt, ANSWER, follow=name, reuse=shared)[1]
        for prompt, shared in zip(prompts, (130, 200), strict=True)
    ]
    drive.until(lambda: len(recorder.of(leader)) > 40)
    _, late = drive.submit(other_end(240, 203), ANSWER, follow=name, reuse=203)
    drive.until(lambda: leader.over and late.over and all(each.over for each in followers))
    assert [each.reused for each in (*followers, late)] == [96, 192, 192]
    for prompt, heard in zip([*prompts, other_end(240, 203)], [*followers, late], strict=True):
        assert same(recorder.of(heard), truth.rows(drive, prompt))
    assert same(recorder.of(leader), truth.rows(drive, prompt_of(LENGTH), 80))
    assert leader.settled.prefilled_until == 192


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("others", [1, 7])
def test_beside_others(family: str, others: int, root: Path, recorder: Recorder, truth: Truth) -> None:
    drive, prompts = drive_of(family, root), [prompt_of(60 + n, n + 2) for n in range(others)]
    beside = [drive.submit(prompt, 40)[1] for prompt in prompts]
    drive.until(lambda: all(len(recorder.of(one)) > 3 for one in beside))
    first = drive.run(prompt_of(LENGTH), ANSWER)
    again = drive.run(prompt_of(LENGTH), ANSWER, resident=first.settled.resident, reuse=192)
    drive.until(lambda: all(one.over for one in beside))
    expected = truth.rows(drive, prompt_of(LENGTH))
    assert same(recorder.of(first), expected) and same(recorder.of(again), expected)
    for prompt, one in zip(prompts, beside, strict=True):
        assert same(recorder.of(one), truth.rows(drive, prompt, 40))


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_seeded_sampling(family: str, root: Path, recorder: Recorder, truth: Truth) -> None:
    drive = drive_of(family, root)
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    cold = drive.run(prompt_of(LENGTH), 30, **options)
    warm = drive.run(prompt_of(LENGTH), 30, resident=cold.settled.resident, reuse=192, **options)
    assert warm.text == cold.text and same(recorder.of(warm), recorder.of(cold))


# ---- saving


@pytest.mark.parametrize("family", ALL)
def test_nothing_past_the_grid_is_saved(family: str, root: Path) -> None:
    drive = drive_of(family, root)
    name, running = drive.submit(prompt_of(LENGTH), 300)
    drive.until(lambda: running.chunks[-1:] == [144])
    assert drive.scheduler.kv_of(144, running=name).length == 144
    drive.until(lambda: bool(drive.scheduler._lineup.groups))
    for _ in range(30):
        drive.turn()
    kv = drive.scheduler.kv_of(192, running=name)
    assert kv.length > 240 and {array.shape[2] for array in kv.rows(0, 192).values()} <= {192}
    for until in (193, 204, 240):
        with pytest.raises(RowsGone, match=f"192 tokens can be saved, {until} were asked for"):
            drive.scheduler.kv_of(until, running=name)
    assert all(end <= 192 for _, end, _ in kv.journal) and all(at <= 192 for at in kv.checkpoints)
    drive.scheduler.saved("", name, 192)
    drive.scheduler.cancel(name)
    assert drive.run(prompt_of(LENGTH), 4, resident=running.settled.resident, reuse=192).reused == 192


# ---- that all this proves something


@cache
def _fast_differs(family: str, root: Path) -> bool:
    """Whether fast mode's warm answer differs from its cold one in any bit."""
    recorded: Rows = []
    step = DecodeGroup.step

    def noted(group: DecodeGroup) -> list[tuple[object, int, mx.array]]:
        told = step(group)
        recorded.append(np.array(told[0][2].astype(mx.float32)))
        return told  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeGroup, "step", noted)
        drive = Drive(model_of(family, root), step=GRID)
        first = drive.run(prompt_of(LENGTH), 30)
        prompt = prompt_of(LENGTH) + first.generated + prompt_of(30, 4)
        recorded.clear()
        drive.run(prompt, ANSWER, resident=first.settled.resident, reuse=len(prompt) - 30)
        warm = list(recorded)
        recorded.clear()
        Drive(model_of(family, root), step=GRID, keeps=False).run(prompt, ANSWER)
        return not same(warm, recorded)


def test_fast_mode_is_told_from_a_cold_run(root: Path) -> None:
    differing = [family for family in ALL if _fast_differs(family, root)]
    assert len(differing) >= len(ALL) - 2, f"only {differing} differ: this BLAS rounds alike whatever it is given"
