"""Background requests: computed only on an idle engine; and the first token's distribution is reported."""

from pathlib import Path

import numpy as np
import pytest
import xxhash

from support.backend.cold_runs import cold_logprobs
from support.backend.engine_driver import SchedulerDriver
from support.backend.families import FAMILIES, get_tolerance, load_family, make_prompt
from warmline_backend.generation.events import TokenEvent
from warmline_common.protocol.messages import FirstLogits


def unpack_first_logits(first: FirstLogits | None) -> tuple[list[int], "np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    assert first is not None
    return np.frombuffer(first.ids, "<u4").tolist(), np.frombuffer(first.logprobs, "<f4")


@pytest.mark.parametrize("family", FAMILIES)
def test_first_logits_are_the_models_own(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    plain = driver.run(make_prompt(70), 3).result.first
    ids, logprobs = unpack_first_logits(plain)
    assert len(ids) == 32 and list(logprobs) == sorted(logprobs, reverse=True)
    processed = driver.run(
        make_prompt(70), 3, logit_bias={ids[0]: -100.0}, repetition_penalty=1.5, presence_penalty=1.0
    )
    assert processed.generated[0] != ids[0], "its processors were at work"
    assert processed.result.first == plain, "but it is told what was there before them, to the last bit"


def test_first_logits_digest_covers_whole_row(root: Path) -> None:
    served_model = load_family("llama", root)
    row = np.array(cold_logprobs(served_model.model, make_prompt(70), 50, 1).logprobs[0], dtype="<f4")
    first = SchedulerDriver(served_model, step=50).run(make_prompt(70), 1).result.first
    ids, logprobs = unpack_first_logits(first)
    assert first is not None and first.digest == xxhash.xxh3_128_hexdigest(row.tobytes())
    assert ids == np.argsort(-row, kind="stable")[:32].tolist() and np.array_equal(logprobs, row[ids])


def test_no_first_logits_without_token(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=20)
    name, log = driver.submit(make_prompt(100), 3)
    driver.run_until(lambda: len(log.chunks) == 1)
    driver.scheduler.cancel(name)
    assert log.result.first is None


@pytest.mark.parametrize("family", FAMILIES)
def test_background_request_equals_cold_and_leaves_no_resident(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    warm = driver.run(make_prompt(130), 2)
    driver.scheduler.residents.delete(warm.result.resident)
    again = driver.run(make_prompt(130), 1, background=True)
    assert again.result.first == warm.result.first
    assert (again.result.finish, again.result.resident) == ("length", "")
    assert driver.scheduler.is_idle and not driver.scheduler.residents.bytes_held


def test_background_request_waits_for_all_others(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=20)
    _, alone = driver.submit(make_prompt(100), 1, background=True)
    driver.run_until(lambda: len(alone.chunks) == 2)
    _, other = driver.submit(make_prompt(200, 2), 50)
    while not other.is_ended:
        for _ in driver.scheduler.step():
            assert other.is_ended or len(alone.chunks) == 2, "not one more chunk, though it is the shorter one"
    driver.run_until(lambda: alone.is_ended)
    assert alone.result.finish == "length"


def test_background_request_does_not_start_beside_others(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=20)
    _, other = driver.submit(make_prompt(60, 2), 20)
    _, alone = driver.submit(make_prompt(30), 1, background=True)
    _, later = driver.submit(make_prompt(60, 3), 20)
    while not (other.is_ended and later.is_ended):
        for _ in driver.scheduler.step():
            assert not alone.events or (other.is_ended and later.is_ended)
    driver.run_until(lambda: alone.is_ended)
    assert alone.result.first


def test_background_request_yields_memory(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=20, budget=model.row_bytes * 1024)
    _, alone = driver.submit(make_prompt(600), 1, background=True)
    driver.run_until(lambda: len(alone.chunks) == 2)
    _, other = driver.submit(make_prompt(600, 2), 2)
    driver.run_until(lambda: other.is_ended)
    assert (alone.result.finish, other.result.finish) == ("cancelled", "length")


def test_background_request_yields_place(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=20, places=1)
    _, alone = driver.submit(make_prompt(100), 1, background=True)
    driver.run_until(lambda: len(alone.chunks) == 2)
    _, other = driver.submit(make_prompt(60, 2), 2)
    driver.run_until(lambda: other.is_ended)
    assert alone.result.finish == "cancelled"


def test_waiting_background_request_yields_resident_to_restore(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=20, budget=model.row_bytes * 1024)
    resident = driver.mark_saved(driver.run(make_prompt(400), 2))
    _, stream = driver.submit(make_prompt(20, 2), 40)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in stream.events))
    _, alone = driver.submit(make_prompt(420), 1, background=True, resident=resident, reuse=400)
    granted: list[bool] = []
    driver.scheduler.admission.reserve("restore", model.row_bytes * 256, lambda: granted.append(True))
    assert granted and alone.result.finish == "cancelled" and not stream.is_ended


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_background_request_equals_cold(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    before = driver.run(make_prompt(90), 4)
    resident, prompt = driver.mark_saved(before), [*make_prompt(90), *before.generated, 7, 8, 9]
    warm = driver.run(prompt, 1, background=True, resident=resident, reuse=len(prompt) - 3, keep=True)
    cold = driver.run(prompt, 1, background=True)
    assert warm.reused == len(prompt) - 3 and resident in driver.scheduler.residents
    (mine, values), (theirs, others) = unpack_first_logits(warm.result.first), unpack_first_logits(cold.result.first)
    common = dict(zip(theirs, others, strict=True))
    assert mine[0] == theirs[0] and abs(values[0] - common[mine[0]]) <= get_tolerance(family)


def test_background_request_evicts_no_resident(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=20, budget=model.row_bytes * 1024)
    kept = driver.mark_saved(driver.run(make_prompt(500), 2))
    _, alone = driver.submit(make_prompt(700, 2), 1, background=True)
    driver.run_until(lambda: alone.is_ended)
    assert kept in driver.scheduler.residents and alone.result.finish == "cancelled"


def test_background_request_evicts_ranked_residents(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=20, budget=model.row_bytes * 1024)
    kept = driver.mark_saved(driver.run(make_prompt(500), 2))
    driver.scheduler.residents.set_eviction_order([kept])
    _, alone = driver.submit(make_prompt(700, 2), 1, background=True)
    driver.run_until(lambda: alone.is_ended)
    assert kept not in driver.scheduler.residents and alone.result.finish == "length"


def test_background_request_ends_before_residents_are_evicted(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=20, budget=model.row_bytes * 1536)
    kept = driver.mark_saved(driver.run(make_prompt(200), 2))
    _, alone = driver.submit(make_prompt(600), 1, background=True)
    driver.run_until(lambda: len(alone.chunks) == 2)
    _, other = driver.submit(make_prompt(600, 2), 2)
    driver.run_until(lambda: other.is_ended)
    assert kept in driver.scheduler.residents
    assert (alone.result.finish, other.result.finish) == ("cancelled", "length")


def test_waiting_background_request_with_resident_ends_first(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=200, budget=model.row_bytes * 1536)
    resident = driver.mark_saved(driver.run(make_prompt(500), 2))
    _, stream = driver.submit(make_prompt(20, 2), 200)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in stream.events))
    _, alone = driver.submit(make_prompt(520), 1, background=True, resident=resident, reuse=500)
    _, other = driver.submit(make_prompt(800, 3), 2)
    driver.run_until(lambda: other.is_ended)
    assert not stream.is_ended, "it did not wait for that"
    assert alone.result.finish == "cancelled"
