"""Background requests: computed only on an idle engine; and the first token's distribution is reported."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from support.backend.cold_runs import cold_logprobs
from support.backend.engine_driver import Drive
from support.backend.families import FAMILIES, prompt_of, served, tolerance
from warmline_backend.generation.events import TokenEvent
from warmline_common.protocol.messages import FirstLogits


def unpack_first_logits(first: FirstLogits | None) -> tuple[list[int], "np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    assert first is not None
    return np.frombuffer(first.ids, "<u4").tolist(), np.frombuffer(first.logprobs, "<f4")


@pytest.mark.parametrize("family", FAMILIES)
def test_first_logits_are_the_models_own(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    plain = drive.run(prompt_of(70), 3).result.first
    ids, logprobs = unpack_first_logits(plain)
    assert len(ids) == 32 and list(logprobs) == sorted(logprobs, reverse=True)
    processed = drive.run(prompt_of(70), 3, logit_bias={ids[0]: -100.0}, repetition_penalty=1.5, presence_penalty=1.0)
    assert processed.generated[0] != ids[0], "its processors were at work"
    assert processed.result.first == plain, "but it is told what was there before them, to the last bit"


def test_first_logits_digest_covers_whole_row(root: Path) -> None:
    served_model = served("llama", root)
    row = np.array(cold_logprobs(served_model.model, prompt_of(70), 50, 1).logprobs[0], dtype="<f4")
    first = Drive(served_model, step=50).run(prompt_of(70), 1).result.first
    ids, logprobs = unpack_first_logits(first)
    assert first is not None and first.digest == xxhash.xxh3_128_hexdigest(row.tobytes())
    assert ids == np.argsort(-row, kind="stable")[:32].tolist() and np.array_equal(logprobs, row[ids])


def test_no_first_logits_without_token(root: Path) -> None:
    drive = Drive(served("llama", root), step=20)
    name, log = drive.submit(prompt_of(100), 3)
    drive.until(lambda: len(log.chunks) == 1)
    drive.scheduler.cancel(name)
    assert log.result.first is None


@pytest.mark.parametrize("family", FAMILIES)
def test_background_request_equals_cold_and_leaves_no_resident(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    warm = drive.run(prompt_of(130), 2)
    drive.scheduler.residents.delete(warm.result.resident)
    again = drive.run(prompt_of(130), 1, background=True)
    assert again.result.first == warm.result.first
    assert (again.result.finish, again.result.resident) == ("length", "")
    assert drive.scheduler.is_idle and not drive.scheduler.residents.bytes_held


def test_background_request_waits_for_all_others(root: Path) -> None:
    drive = Drive(served("llama", root), step=20)
    _, alone = drive.submit(prompt_of(100), 1, background=True)
    drive.until(lambda: len(alone.chunks) == 2)
    _, other = drive.submit(prompt_of(200, 2), 50)
    while not other.is_ended:
        for _ in drive.scheduler.step():
            assert other.is_ended or len(alone.chunks) == 2, "not one more chunk, though it is the shorter one"
    drive.until(lambda: alone.is_ended)
    assert alone.result.finish == "length"


def test_background_request_does_not_start_beside_others(root: Path) -> None:
    drive = Drive(served("llama", root), step=20)
    _, other = drive.submit(prompt_of(60, 2), 20)
    _, alone = drive.submit(prompt_of(30), 1, background=True)
    _, later = drive.submit(prompt_of(60, 3), 20)
    drive.until(lambda: other.is_ended and later.is_ended)
    assert not alone.events
    drive.until(lambda: alone.is_ended)
    assert alone.result.first


def test_background_request_yields_memory(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=20, budget=model.row_bytes * 1024)
    _, alone = drive.submit(prompt_of(600), 1, background=True)
    drive.until(lambda: len(alone.chunks) == 2)
    _, other = drive.submit(prompt_of(600, 2), 2)
    drive.until(lambda: other.is_ended)
    assert (alone.result.finish, other.result.finish) == ("cancelled", "length")


def test_background_request_yields_place(root: Path) -> None:
    drive = Drive(served("llama", root), step=20, places=1)
    _, alone = drive.submit(prompt_of(100), 1, background=True)
    drive.until(lambda: len(alone.chunks) == 2)
    _, other = drive.submit(prompt_of(60, 2), 2)
    drive.until(lambda: other.is_ended)
    assert alone.result.finish == "cancelled"


def test_waiting_background_request_yields_resident_to_restore(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=20, budget=model.row_bytes * 1024)
    resident = drive.mark_saved(drive.run(prompt_of(400), 2))
    _, stream = drive.submit(prompt_of(20, 2), 40)
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in stream.events))
    _, alone = drive.submit(prompt_of(420), 1, background=True, resident=resident, reuse=400)
    granted: list[bool] = []
    drive.scheduler.admission.reserve("restore", model.row_bytes * 256, lambda: granted.append(True))
    assert granted and alone.result.finish == "cancelled" and not stream.is_ended


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_background_request_equals_cold(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    before = drive.run(prompt_of(90), 4)
    resident, prompt = drive.mark_saved(before), [*prompt_of(90), *before.generated, 7, 8, 9]
    warm = drive.run(prompt, 1, background=True, resident=resident, reuse=len(prompt) - 3, keep=True)
    cold = drive.run(prompt, 1, background=True)
    assert warm.reused == len(prompt) - 3 and resident in drive.scheduler.residents
    (mine, values), (theirs, others) = unpack_first_logits(warm.result.first), unpack_first_logits(cold.result.first)
    common = dict(zip(theirs, others, strict=True))
    assert mine[0] == theirs[0] and abs(values[0] - common[mine[0]]) <= tolerance(family)


def test_background_request_evicts_no_resident(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=20, budget=model.row_bytes * 1024)
    kept = drive.mark_saved(drive.run(prompt_of(500), 2))
    _, alone = drive.submit(prompt_of(700, 2), 1, background=True)
    drive.until(lambda: alone.is_ended)
    assert kept in drive.scheduler.residents and alone.result.finish == "cancelled"


def test_background_request_evicts_ranked_residents(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=20, budget=model.row_bytes * 1024)
    kept = drive.mark_saved(drive.run(prompt_of(500), 2))
    drive.scheduler.residents.set_eviction_order([kept])
    _, alone = drive.submit(prompt_of(700, 2), 1, background=True)
    drive.until(lambda: alone.is_ended)
    assert kept not in drive.scheduler.residents and alone.result.finish == "length"


def test_background_request_ends_before_residents_are_evicted(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=20, budget=model.row_bytes * 1536)
    kept = drive.mark_saved(drive.run(prompt_of(200), 2))
    _, alone = drive.submit(prompt_of(600), 1, background=True)
    drive.until(lambda: len(alone.chunks) == 2)
    _, other = drive.submit(prompt_of(600, 2), 2)
    drive.until(lambda: other.is_ended)
    assert kept in drive.scheduler.residents
    assert (alone.result.finish, other.result.finish) == ("cancelled", "length")


def test_waiting_background_request_with_resident_ends_first(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=200, budget=model.row_bytes * 1536)
    resident = drive.mark_saved(drive.run(prompt_of(500), 2))
    _, stream = drive.submit(prompt_of(20, 2), 200)
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in stream.events))
    _, alone = drive.submit(prompt_of(520), 1, background=True, resident=resident, reuse=500)
    _, other = drive.submit(prompt_of(800, 3), 2)
    drive.until(lambda: other.is_ended)
    assert not stream.is_ended, "it did not wait for that"
    assert alone.result.finish == "cancelled"
