"""The memory budget: evictions, waits, reservations, and leases until a save."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from support.backend.engine_driver import EventLog, SchedulerDriver, make_loader, save_segments
from support.backend.families import compute_cold, load_family, make_prompt
from support.device_memory import read_active_memory
from warmline_backend.kv_cache.codecs import STATE
from warmline_backend.scheduler.capacity import KvTooLargeError
from warmline_common.protocol.tokens import pack_tokens


def test_residents_stay_within_budget(root: Path) -> None:
    model = load_family("llama", root)
    one = 512 * 256 + 16  # a cache grows by 256 rows
    driver = SchedulerDriver(model, budget=4 * one)
    ids = [driver.mark_saved(driver.run(make_prompt(60, seed), 4)) for seed in range(1, 9)]
    held = [resident for resident in ids if resident in driver.scheduler.residents]
    assert held == ids[-len(held) :] and len(held) >= 2, "the oldest go first"
    assert driver.scheduler.residents.bytes_held <= 4 * one
    assert driver.scheduler.residents.generation == len(ids) - len(held)
    driver.scheduler.residents.set_eviction_order([held[-1]])
    driver.run(make_prompt(60, 20), 4)
    assert held[-1] not in driver.scheduler.residents, "the proxy's order comes before age"


def test_prompt_over_budget_is_refused_with_figures(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=1_000_000)
    with pytest.raises(KvTooLargeError, match=r"3000 prompt tokens .* 1\.0 MB"):
        driver.submit(make_prompt(3000))
    assert driver.scheduler.is_idle


def test_request_waits_for_memory(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=500_000)
    _, first = driver.submit(make_prompt(500), 100)
    _, second = driver.submit(make_prompt(500, 2), 5)
    driver.run_until(lambda: len(first.events) > 20)
    assert driver.scheduler.queued_count == 1 and not second.events
    driver.run_until(lambda: first.is_ended)
    driver.mark_saved(first)
    driver.run_until(lambda: second.is_ended)
    assert second.generated == compute_cold(driver.served, "llama", make_prompt(500, 2), 5).tokens


def test_saved_states_are_released(root: Path) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root))
    tokens = make_prompt(30)
    log = driver.run(tokens, 5, checkpoints=(10, 20))
    for turn in range(6):
        resident, length = log.result.resident, log.result.prefilled_until
        driver.scheduler.save_source.mark_saved(resident, "", length)
        kept = driver.scheduler.save_source.find_kv(length, resident_id=resident).checkpoints
        assert 10 in kept and length in kept and len(kept) <= 4
        tokens = tokens[: length - 5] + log.generated + make_prompt(20, turn)
        log = driver.run(tokens, 5, resident=resident, reuse=length, checkpoints=(length + 10,))


def test_failed_make_room_evicts_nothing(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=500_000)
    held = driver.mark_saved(driver.run(make_prompt(60), 4))
    _, long = driver.submit(make_prompt(400), 100)
    driver.run_until(lambda: len(long.events) > 3)
    granted: list[str] = []
    driver.scheduler.admission.reserve("a", 400_000, lambda: granted.append("a"))
    with pytest.raises(KvTooLargeError):
        driver.scheduler.admission.reserve("b", 500_001, lambda: granted.append("b"))
    assert not granted and held in driver.scheduler.residents and driver.scheduler.residents.generation == 0


def test_reservation_holds_until_installed(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=500_000)
    granted: list[str] = []

    def reserve(name: str, bytes_wanted: int) -> None:
        driver.scheduler.admission.reserve(name, bytes_wanted, lambda: granted.append(name))

    reserve("a", 400_000)
    reserve("b", 400_000)
    assert granted == ["a"], "the second waits for the first"
    _, log = driver.submit(make_prompt(400), 5)
    driver.step()
    assert driver.scheduler.queued_count == 1, "a prompt waits behind what was asked before it"
    driver.scheduler.admission.release("b")
    driver.scheduler.admission.release("a")
    driver.run_until(lambda: log.is_ended)
    driver.mark_saved(log)
    reserve("c", 400_000)
    assert granted == ["a", "c"], "residents make way"
    with pytest.raises(KvTooLargeError):
        reserve("d", 500_001)


def test_reservations_are_granted_in_order(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=500_000)
    granted: list[str] = []
    _, running = driver.submit(make_prompt(500), 40)
    driver.run_until(lambda: len(running.events) > 3)
    for name in ("first", "second"):
        driver.scheduler.admission.reserve(name, 110_000, lambda name=name: granted.append(name))  # type: ignore[misc]
    _, later = driver.submit(make_prompt(30, 2), 2)
    assert granted == []
    driver.run_until(lambda: running.is_ended)
    driver.mark_saved(running)
    driver.step()
    assert granted == ["first", "second"]
    driver.scheduler.admission.release("first")
    driver.run_until(lambda: later.is_ended)


def test_unsaved_resident_is_not_evicted_for_waiting_prompt(root: Path) -> None:
    """Otherwise several large conversations would evict each other before their saves, and all stay cold."""
    driver = SchedulerDriver(load_family("llama", root), budget=600_000)
    first = driver.run(make_prompt(500), 5)
    _, second = driver.submit(make_prompt(700, 2), 5)
    for _ in range(5):
        driver.step()
    assert driver.scheduler.is_blocked and first.result.resident in driver.scheduler.residents
    driver.mark_saved(first)
    driver.run_until(lambda: second.is_ended)
    assert first.result.resident not in driver.scheduler.residents
    assert second.generated == compute_cold(driver.served, "llama", make_prompt(700, 2), 5).tokens


def test_growing_answers_evict_residents_then_youngest_request(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=700_000)
    old = driver.mark_saved(driver.run(make_prompt(300), 2))
    _, first = driver.submit(make_prompt(200), 1000)
    _, second = driver.submit(make_prompt(210, 2), 1000)
    driver.run_until(lambda: second.is_ended)
    assert old not in driver.scheduler.residents
    assert second.result.finish == "discarded" and "memory budget" in second.result.error
    assert driver.scheduler.running_bytes <= 700_000
    driver.run_until(lambda: first.is_ended)
    assert first.result.finish == "length" and len(first.generated) == 1000


def test_answer_ends_at_budget(root: Path) -> None:
    log = SchedulerDriver(load_family("llama", root), budget=300_000).run(make_prompt(200), 5000)
    assert log.result.finish == "length" and log.result.prefilled_until == 512, "two buffers' worth of rows"


def test_granted_memory_is_not_granted_twice(root: Path) -> None:
    model = load_family("llama", root)
    trunk = SchedulerDriver(model)
    kv = trunk.scheduler.residents.find_kv(trunk.run(make_prompt(700), 1).result.resident)
    assert kv is not None
    driver = SchedulerDriver(model, budget=model.kv_bytes(1280))
    granted: list[str] = []
    for name in ("a", "b"):
        driver.scheduler.admission.reserve(name, model.kv_bytes(600), lambda name=name: granted.append(name))  # type: ignore[misc]
    resident = driver.scheduler.install_resident("a", kv.fork(600, detached=True))
    assert granted == ["a"]
    assert driver.scheduler.residents.delete(resident)
    driver.step()
    assert granted == ["a", "b"]


def test_waiting_copy_holds_only_counted_bytes(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, places=1)
    long = driver.run(make_prompt(4000), 1).result.resident
    driver.submit(make_prompt(20, 2), 400)
    driver.step()

    def unaccounted() -> int:
        mx.clear_cache()
        return read_active_memory() - driver.scheduler.residents.bytes_held - driver.scheduler.running_bytes

    _, waiting = driver.submit(make_prompt(300), 4, resident=long, reuse=200, keep=True)
    before = unaccounted()
    driver.scheduler.residents.delete(long)
    assert unaccounted() - before < model.kv_bytes(500)
    driver.run_until(lambda: waiting.is_ended)
    assert waiting.generated == compute_cold(model, "llama", make_prompt(300), 4).tokens


def test_copy_without_room_shares_residents_memory(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, places=1, budget=model.kv_bytes(1280))
    resident = driver.run(make_prompt(600), 1).result.resident  # not saved yet: it stays
    _, running = driver.submit(make_prompt(20, 2), 200)
    driver.step()
    _, waiting = driver.submit(make_prompt(620), 4, resident=resident, reuse=600, keep=True)
    assert resident in driver.scheduler.residents
    driver.run_until(lambda: running.is_ended)
    driver.mark_saved(running)
    driver.scheduler.save_source.mark_saved(resident, "", 601)
    driver.run_until(lambda: waiting.is_ended)
    assert waiting.generated == compute_cold(model, "llama", make_prompt(620), 4).tokens
    assert waiting.result.timings.prefilled == 20


def test_pending_states_are_counted(root: Path) -> None:
    model = load_family("qwen3_5", root)
    budget = model.kv_bytes(1024) + 60 * model.state_bytes
    driver = SchedulerDriver(model, step=50, budget=budget)
    scheduler = driver.scheduler
    seed = 0
    while scheduler.residents.bytes_held < 40 * model.state_bytes:
        seed += 1
        driver.mark_saved(driver.run(make_prompt(60, seed), 1, checkpoints=(20, 30, 40, 50)))
    marks = tuple(range(8, 400, 8))
    _, log = driver.submit(make_prompt(400), 4, checkpoints=marks)
    held: list[int] = []

    def is_ended() -> bool:
        held.append(scheduler.residents.bytes_held + scheduler.running_bytes)
        return log.is_ended

    driver.run_until(is_ended)
    assert max(held[1:-1]) <= budget, "while only prompts are prefilled, too"
    at_admission = model.kv_bytes(512) + len(marks) * model.state_bytes
    assert set(log.result.checkpoints) > set(marks) and min(held[1:-1]) >= at_admission


def test_residents_are_evicted_for_fork_states(root: Path) -> None:
    model = load_family("qwen3_5", root)
    driver = SchedulerDriver(model, step=50, budget=model.kv_bytes(512) + 12 * model.state_bytes)
    name, leader = driver.submit(make_prompt(400), 4)
    driver.step()
    old = driver.scheduler.residents.add(model.make_kv(journals=True), lease_s=0.0)
    driver.scheduler.residents._entries[old].bytes_held = 10 * model.state_bytes
    driver.scheduler.residents.bytes_held += 10 * model.state_bytes
    for at in (100, 200, 300):
        driver.submit(make_prompt(at) + make_prompt(5, 2), 1, follow=name, reuse=at)
    assert old in driver.scheduler.residents
    driver.step()
    assert old not in driver.scheduler.residents and not leader.is_ended


def test_request_with_memory_precedes_waiting_restore(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), budget=500_000)
    first = driver.run(make_prompt(500), 5)
    granted: list[str] = []
    driver.scheduler.admission.reserve("restore", 300_000, lambda: granted.append("restore"))
    _, fresh = driver.submit(make_prompt(100, 2), 5)
    onward = make_prompt(500) + first.generated + make_prompt(5, 3)
    _, second = driver.submit(onward, 5, resident=first.result.resident, reuse=505)
    driver.run_until(lambda: second.is_ended)
    assert granted == [] and not fresh.events
    driver.mark_saved(second)
    driver.run_until(lambda: bool(granted))
    driver.scheduler.admission.release("restore")
    driver.run_until(lambda: fresh.is_ended)


def test_batches_merge_only_with_room_to_copy(root: Path) -> None:
    model = load_family("llama", root)
    one = model.kv_bytes(512)
    for budget, sizes in ((6 * one, [2]), (2 * one, [1, 1])):  # two rows each, and two layers of both for joining
        driver = SchedulerDriver(model, budget=budget)
        running = []
        for seed in (1, 2):  # one after the other: together they would be prefilled in one batch
            running.append(log := driver.submit(make_prompt(400, seed), 50)[1])
            driver.run_until(lambda log=log: len(log.events) > 4)  # type: ignore[misc]
        assert sorted(len(group.sequences) for group in driver.scheduler._queues.groups) == sizes
        driver.run_until(lambda running=running: all(log.is_ended for log in running))  # type: ignore[misc]
        for seed, log in zip((1, 2), running, strict=True):
            assert log.generated == compute_cold(model, "llama", make_prompt(400, seed), 50).tokens


@contextmanager
def measure_peak_above(base: int) -> Iterator[Callable[[SchedulerDriver], int]]:
    mx.clear_cache()
    mx.reset_peak_memory()
    yield lambda driver: driver.scheduler.chunk_memory.peak_bytes - base


class PendingRestore:
    """Restore of a saved prompt's first 700 tokens once memory is granted, and a request that continues it."""

    def __init__(self, driver: SchedulerDriver, folder: Path) -> None:
        self._drive, self._folder = driver, folder
        self.granted = False
        trunk = SchedulerDriver(driver.served, step=16)
        kv = trunk.scheduler.residents.find_kv(trunk.run(make_prompt(705, 9), 1, checkpoints=(700,)).result.resident)
        assert kv
        self._chain, checkpoints = save_segments(kv, folder, [300, 700])
        self._checkpoint = next((ref for ref in checkpoints if ref.position == 700), None)

    def request_memory(self) -> None:
        self._drive.scheduler.admission.reserve("restore", self._drive.served.kv_bytes(700), self._grant)

    def _grant(self) -> None:
        self.granted = True

    def continue_prompt(self) -> EventLog:
        driver = self._drive
        with ThreadPoolExecutor(2) as pool:
            tokens = pack_tokens(make_prompt(700, 9))
            loaded = make_loader(driver.served, self._folder, pool).load(
                tokens, self._chain, self._checkpoint, lambda: False
            )
            resident = driver.scheduler.install_resident("restore", loaded.build(driver.served.layout))
        return driver.submit(make_prompt(700, 9) + make_prompt(30, 3), 10, resident=resident, reuse=700)[1]


def test_peak_memory_stays_within_budget_and_chunk_memory(root: Path, tmp_path: Path) -> None:
    model = load_family("llama", root)
    budget = 6 * model.kv_bytes(768)
    driver = SchedulerDriver(model, step=16, budget=budget)
    restore = PendingRestore(driver, tmp_path)
    base = read_active_memory()
    with measure_peak_above(base) as peak:
        alone = SchedulerDriver(model, step=16)
        log = alone.run(make_prompt(700), 40)
        workspace = peak(alone) - model.kv_bytes(768)
    del alone, log
    with measure_peak_above(base) as peak:
        running = [driver.submit(make_prompt(length, length), 40)[1] for length in (700, 710, 690, 400, 720, 680)]
        driver.run_until(lambda: running[3].is_ended)
        restore.request_memory()
        saved: set[int] = set()
        while not all(log.is_ended for log in running):
            driver.step()
            if restore.granted and len(running) == 6:
                running.append(restore.continue_prompt())
            for n, log in enumerate(running):
                if log.is_ended and n not in saved:
                    saved.add(n)
                    driver.mark_saved(log)
        assert len(running) == 7 and {log.result.finish for log in running} == {"length"}
        assert 0.9 * budget < peak(driver) <= budget + workspace


def test_state_keeps_no_chunk_alive(root: Path) -> None:
    driver = SchedulerDriver(load_family("falcon_h1", root), step=256)
    base = read_active_memory()
    name, log = driver.submit(make_prompt(600), 4)
    driver.run_until(lambda: log.chunks == [256])
    held = driver.scheduler.save_source.find_kv(256, running_id=name).nbytes
    assert mx.get_active_memory() - base < held + 60_000, "a view into 256 tokens' activations would hold 200 kB"


def test_requests_that_end_together_keep_no_batch_alive(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=256)
    base = read_active_memory()
    submitted = [driver.submit(make_prompt(300, number + 1), 400) for number in range(4)]
    driver.run_until(lambda: [len(group.sequences) for group in driver.scheduler._queues.groups] == [4])
    for name, _ in submitted:
        driver.scheduler.cancel(name)
    assert len(driver.scheduler.residents) == 4
    assert mx.get_active_memory() - base < driver.scheduler.residents.bytes_held + 60_000, "the batch takes 2 MB"


def test_extracted_state_keeps_no_batch_alive() -> None:
    base = read_active_memory()
    batch = ArraysCache(size=2)
    batch.cache = [mx.zeros((4, 64, 1024)), None]
    alone = STATE.extract_sequence(batch, 1)
    mx.eval(alone.cache[0])
    del batch
    assert mx.get_active_memory() - base == alone.cache[0].nbytes == 64 * 1024 * 4
