"""The step loop: answers equal mlx-lm's, whatever else runs, is cancelled or fails."""

from pathlib import Path

import pytest

from support.backend.cold_runs import compare_greedy
from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import FAMILIES, compute_cold, get_tolerance, load_family, make_prompt
from warmline_backend.generation.events import PrefillProgress, TokenEvent
from warmline_backend.generation.sequence import GenerationRequest, find_chunk_end
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import ResidentMismatchError, ResidentNotFoundError
from warmline_backend.request.params import GenerationParams


@pytest.mark.parametrize("family", FAMILIES)
def test_concurrent_requests_equal_cold_runs(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=24)
    prompts = [make_prompt(length, seed) for seed, length in enumerate((20, 90, 61, 64, 33, 70), start=1)]
    log = [driver.submit(prompt, 16)[1] for prompt in prompts]
    driver.run_until(lambda: all(one.is_ended for one in log))
    for prompt, one in zip(prompts, log, strict=True):
        truth = compute_cold(driver.served, family, prompt, 16)
        assert compare_greedy(truth.tokens, one.generated, truth.margins, get_tolerance(family)), prompt
        assert one.result.prefilled_until == len(prompt) + 16
        assert one.result.timings.prefilled == len(prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_next_turn_prefills_only_new_tokens(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    first = driver.run(make_prompt(80), 12)
    prompt = make_prompt(80) + first.generated + make_prompt(30, 5)
    second = driver.run(prompt, 12, resident=first.result.resident, reuse=92)
    truth = compute_cold(driver.served, family, prompt, 12)
    assert compare_greedy(truth.tokens, second.generated, truth.margins, get_tolerance(family))
    assert second.result.timings.prefilled == 30
    assert first.result.resident not in driver.scheduler.residents, "its only continuation took it over"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
def test_copied_resident_is_unchanged(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=64)
    shared, first = make_prompt(70), make_prompt(400)
    first[:70] = shared
    trunk = driver.run(first, 4, checkpoints=(70,))
    branch = shared + make_prompt(40, 9)
    other = driver.run(branch, 10, resident=trunk.result.resident, reuse=70, keep=True)
    truth = compute_cold(driver.served, family, branch, 10)
    assert compare_greedy(truth.tokens, other.generated, truth.margins, get_tolerance(family))
    assert other.result.timings.prefilled == 40
    onward = first + trunk.generated + make_prompt(5, 3)
    again = driver.run(onward, 10, resident=trunk.result.resident, reuse=404)
    truth = compute_cold(driver.served, family, onward, 10)
    assert compare_greedy(truth.tokens, again.generated, truth.margins, get_tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_copy_and_original_do_not_interfere(family: str, root: Path) -> None:
    """A copy and its original continue at once with different tokens, in one batch where possible."""
    driver = SchedulerDriver(load_family(family, root))
    trunk = driver.run(make_prompt(60), 10)
    held = make_prompt(60) + trunk.generated
    prompts = [held + make_prompt(20, seed) for seed in (3, 4)]
    resident = trunk.result.resident
    both = [
        driver.submit(prompt, 20, resident=resident, reuse=70, keep=keep)[1]
        for prompt, keep in zip(prompts, (True, False), strict=True)
    ]
    driver.run_until(lambda: all(one.is_ended for one in both))
    for prompt, one in zip(prompts, both, strict=True):
        truth = compute_cold(driver.served, family, prompt, 20)
        assert compare_greedy(truth.tokens, one.generated, truth.margins, get_tolerance(family))
        assert one.result.timings.prefilled == 20


def test_mismatching_residents_are_refused(root: Path) -> None:
    driver = SchedulerDriver(load_family("gemma3", root))
    held = driver.mark_saved(driver.run(make_prompt(60), 4))  # its journal is gone
    with pytest.raises(ResidentNotFoundError):
        driver.submit(make_prompt(80), resident="nobody", reuse=10)
    with pytest.raises(ResidentMismatchError, match="other tokens"):
        driver.submit(make_prompt(80, 2), resident=held, reuse=64)
    with pytest.raises(ResidentMismatchError, match="can't be continued at 10"):
        driver.submit(make_prompt(80), resident=held, reuse=10)  # the window has passed it
    with pytest.raises(ResidentMismatchError):
        driver.submit(make_prompt(60), resident=held, reuse=60)  # nothing would be left to compute
    assert held in driver.scheduler.residents and driver.scheduler.is_idle


def test_state_without_its_window_is_unusable(root: Path) -> None:
    driver = SchedulerDriver(load_family("baichuan_m1", root), step=50)
    first = driver.run(make_prompt(200), 8, checkpoints=(20, 100))
    assert (first.result.checkpoints, first.result.positions) == ([20, 100, 208], [208])
    with pytest.raises(ResidentMismatchError, match="can't be continued at 100"):
        driver.submit(make_prompt(100) + make_prompt(10, 4), resident=first.result.resident, reuse=100)
    onward = make_prompt(200) + first.generated + make_prompt(10, 4)
    more = driver.run(onward, 12, resident=first.result.resident, reuse=208)
    truth = compute_cold(driver.served, "baichuan_m1", onward, 12)
    assert compare_greedy(truth.tokens, more.generated, truth.margins, get_tolerance("baichuan_m1"))


def test_state_within_window_is_usable(root: Path) -> None:
    driver = SchedulerDriver(load_family("baichuan_m1", root), step=50)
    first = driver.run(make_prompt(25), 2, checkpoints=(20,))
    assert first.result.positions == [20, 27]
    branch = make_prompt(20) + make_prompt(40, 4)
    more = driver.run(branch, 12, resident=first.result.resident, reuse=20)
    truth = compute_cold(driver.served, "baichuan_m1", branch, 12)
    assert compare_greedy(truth.tokens, more.generated, truth.margins, get_tolerance("baichuan_m1"))


def test_unlike_lengths_decode_in_separate_batches(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    lone = [driver.submit(make_prompt(length), 100)[1] for length in (600, 20, 22, 24)]
    driver.run_until(lambda: all(any(isinstance(event, TokenEvent) for event in one.events) for one in lone))
    sizes = sorted(len(group.sequences) for group in driver.scheduler._queues.groups)
    assert sizes == [1, 3]
    assert driver.scheduler.running_bytes == 512 * (768 + 3 * 256), "a buffer grows by 256 rows"


@pytest.mark.parametrize("family", FAMILIES)
def test_cancelled_prefill_is_kept_and_resumed(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=20)
    name, cut = driver.submit(make_prompt(150), 8)
    driver.run_until(lambda: len(cut.chunks) == 3)
    result = driver.scheduler.cancel(name)
    assert result is not None and result == cut.result
    assert (result.finish, result.prefilled_until, result.generated) == ("cancelled", 60, b"")
    again = driver.run(make_prompt(150), 8, resident=result.resident, reuse=60)
    truth = compute_cold(driver.served, family, make_prompt(150), 8)
    assert compare_greedy(truth.tokens, again.generated, truth.margins, get_tolerance(family))
    assert again.result.timings.prefilled == 90


@pytest.mark.parametrize("family", FAMILIES)
def test_cancel_in_shared_batch_affects_no_other(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root))
    prompts = [make_prompt(40 + n, n + 1) for n in range(4)]
    running = [driver.submit(prompt, 40) for prompt in prompts]
    driver.run_until(lambda: all(len(log.events) > 10 for _, log in running))
    gone = driver.scheduler.cancel(running[1][0])
    driver.run_until(lambda: all(log.is_ended for _, log in running))
    assert gone is not None and gone.finish == "cancelled"
    for n, (_, log) in enumerate(running):
        truth = compute_cold(driver.served, family, prompts[n], 40)
        tokens = truth.tokens[: len(log.generated)] if n == 1 else truth.tokens
        assert compare_greedy(tokens, log.generated, truth.margins, get_tolerance(family)), n
    held = prompts[1] + running[1][1].generated
    onward = held + make_prompt(9, 9)
    more = driver.run(onward, 6, resident=gone.resident, reuse=len(held))
    truth = compute_cold(driver.served, family, onward, 6)
    assert compare_greedy(truth.tokens, more.generated, truth.margins, get_tolerance(family))


def test_cancel_takes_effect_after_present_step(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=16)
    running = [driver.submit(make_prompt(length), 500) for length in (20, 400, 300)]
    driver.run_until(lambda: all(log.chunks for _, log in running))
    for name, log in running:
        work = driver.scheduler.step()
        next(work)
        before, result = len(log.events), driver.scheduler.cancel(name)
        for _ in work:
            pass
        assert result is not None and result.finish == "cancelled"
        assert log.is_ended and len(log.events) == before + 1, "not another token, not another chunk"
    assert driver.scheduler.is_idle


def test_commands_between_steps_may_end_all(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=16)
    running = [driver.submit(make_prompt(length), 50) for length in (20, 22, 300, 200)]
    driver.run_until(lambda: len(running[1][1].events) > 5 and bool(running[2][1].chunks))
    for _ in driver.scheduler.step():
        for name, _ in running:
            driver.scheduler.cancel(name)
    assert all(log.result.finish == "cancelled" for _, log in running) and driver.scheduler.is_idle


def test_cancel_of_unknown_request_returns_none(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    assert driver.scheduler.cancel("nobody") is None
    name, log = driver.submit(make_prompt(30), 5)
    result = driver.scheduler.cancel(name)  # still queued
    assert result is not None and result.prefilled_until == 0 and log.is_ended and driver.scheduler.is_idle


def test_reuse_off_leaves_no_resident(root: Path) -> None:
    driver = SchedulerDriver(load_family("gemma3", root), keeps=False)
    log = driver.run(make_prompt(100), 5)
    assert log.result.resident == "" and len(driver.scheduler.residents) == 0


def test_stop_words_eos_and_length_end_answers(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    plain = driver.run(make_prompt(50), 20)
    word = plain.text[5:7]
    stopped = driver.run(make_prompt(50), 20, stop=(word,))
    assert stopped.result.finish == "stop" and stopped.text == plain.text[: plain.text.index(word)]
    assert plain.result.finish == "length" and len(plain.generated) == 20


def test_seed_gives_same_text_alone_and_batched(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    wanted = {"temperature": 1.0, "seed": 11}
    alone = driver.run(make_prompt(50), 20, **wanted)
    together = [
        driver.submit(make_prompt(50 + n), 20, **(wanted if n == 0 else {"temperature": 1.0}))[1] for n in range(3)
    ]
    driver.run_until(lambda: all(one.is_ended for one in together))
    assert together[0].text == alone.text
    assert driver.run(make_prompt(50), 20, temperature=1.0, seed=12).text != alone.text


def test_logprobs_equal_cold_run(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    log = driver.run(make_prompt(50), 6, logprobs=True, top_logprobs=3)
    truth = compute_cold(driver.served, "llama", make_prompt(50), 6)
    expected = [float(row[token]) for row, token in zip(truth.logprobs, truth.tokens, strict=True)]
    assert log.logprobs == pytest.approx(expected, abs=1e-4)
    pieces = [event for event in log.events if isinstance(event, TokenEvent) and event.logprobs]
    assert all(piece.logprobs and piece.logprobs.top[0][0] == piece.logprobs.token for piece in pieces)


def test_progress_is_sent_per_chunk(root: Path) -> None:
    log = SchedulerDriver(load_family("llama", root), step=32).run(make_prompt(100), 1)
    assert [(e.done, e.total) for e in log.events if isinstance(e, PrefillProgress)] == [
        (0, 100),
        (32, 100),
        (64, 100),
        (96, 100),
        (99, 100),
    ]


@pytest.mark.parametrize(
    ("start", "end", "checkpoints", "cut"),
    [(0, 99, (), 32), (90, 99, (), 99), (0, 99, (10, 50), 10), (10, 99, (10, 50), 42), (42, 99, (10, 50), 50)],
)
def test_chunks_end_at_checkpoints(start: int, end: int, checkpoints: tuple[int, ...], cut: int) -> None:
    assert find_chunk_end(start, end, 32, checkpoints) == cut


def test_save_after_takeover_excludes_new_owners_tokens(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    first = driver.run(make_prompt(80), 20)
    resident = first.result.resident
    name, _ = driver.submit(
        make_prompt(90) + make_prompt(200, 7), 5, resident=resident, reuse=80
    )  # leaves its tail behind
    driver.run_until(lambda: bool(driver.scheduler._queues.groups))
    assert driver.scheduler.save_source.find_kv(80, resident_id=resident).tokens[:80] == make_prompt(80)
    with pytest.raises(RowsUnavailableError):
        driver.scheduler.save_source.find_kv(100, resident_id=resident)
    assert driver.scheduler.save_source.find_kv(280, running_id=name).length > 280


def test_request_without_resident_leaves_none(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    log = EventLog()
    params = GenerationParams(max_tokens=3, ignore_eos=True)
    driver.scheduler.submit(
        GenerationRequest("direct", make_prompt(30), params, log.events.append, leaves_resident=False)
    )
    driver.run_until(lambda: log.is_ended)
    assert log.result.resident == "" and len(driver.scheduler.residents) == 0


def test_groups_merge_once_their_lengths_are_alike(root: Path) -> None:
    driver, prompts = SchedulerDriver(load_family("llama", root)), [make_prompt(60), make_prompt(30, 2)]
    logs = [driver.submit(prompt, 60)[1] for prompt in prompts]
    sizes = set()
    while not all(log.is_ended for log in logs):
        driver.step()
        sizes.add(tuple(len(group.sequences) for group in driver.scheduler._queues.groups))
    assert {(1, 1), (2,)} <= sizes
    for prompt, log in zip(prompts, logs, strict=True):
        truth = compute_cold(driver.served, "llama", prompt, 60)
        assert compare_greedy(truth.tokens, log.generated, truth.margins, get_tolerance("llama"))


def test_answer_of_one_token_leaves_its_prompt(root: Path) -> None:
    """Its row would take one more step."""
    driver, prompt = SchedulerDriver(load_family("llama", root)), make_prompt(40)
    log = driver.run(prompt, 1)
    assert (log.result.prefilled_until, log.generated, log.result.finish) == (40, [], "length")
    assert driver.scheduler.step_stats.decoded_tokens == 1
    onward = [*prompt, *make_prompt(9, 2)]
    more, truth = (
        driver.run(onward, 4, resident=log.result.resident, reuse=40),
        compute_cold(driver.served, "llama", onward, 4),
    )
    assert more.reused == 40
    assert compare_greedy(truth.tokens, more.generated, truth.margins, get_tolerance("llama"))
