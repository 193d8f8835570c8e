"""Followers: common prefixes are computed once, with the answers of cold runs, and no follower waits forever."""

from itertools import pairwise
from pathlib import Path

import pytest

from support.backend.cold_runs import compare_greedy
from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import FAMILIES, compute_cold, get_tolerance, load_family, make_prompt
from warmline_backend.generation.events import PrefillProgress, StartedEvent, TokenEvent
from warmline_backend.generation.sequence import FORK_DISTANCE_TOKENS_MIN
from warmline_backend.kv_cache.residents import ResidentMismatchError, ResidentNotFoundError

ANYWHERE = [family for family in FAMILIES if family not in ("gemma3", "qwen3_5", "falcon_h1")]
WITH_STATES = ["qwen3_5", "falcon_h1"]
EACH_KIND = ["llama", "qwen3_5", "gemma3"]  # rows alone, with states, with windows


def assert_as_alone(driver: SchedulerDriver, family: str, prompt: list[int], log: EventLog) -> None:
    truth = compute_cold(driver.served, family, prompt, len(log.generated))
    assert compare_greedy(truth.tokens, log.generated, truth.margins, get_tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_identical_prompts_share_one_prefill(family: str, root: Path) -> None:
    driver, prompt = SchedulerDriver(load_family(family, root), step=50), make_prompt(130)
    name, leader = driver.submit(prompt, 12)
    followers = [driver.submit(prompt, 12, follow=name, reuse=129)[1] for _ in range(2)]
    driver.step()
    assert (driver.scheduler.running_count, driver.scheduler.queued_count) == (1, 2)
    driver.run_until(lambda: all(one.is_ended for one in (leader, *followers)))
    assert leader.result.timings.prefilled == 130
    assert [(one.result.timings.prefilled, one.reused) for one in followers] == [(1, 129)] * 2
    for one in (leader, *followers):
        assert_as_alone(driver, family, prompt, one)
        assert one.result.prefilled_until == 142 and one.result.resident in driver.scheduler.residents


@pytest.mark.parametrize("family", FAMILIES)
def test_diverging_prompt_starts_at_divergence(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    trunk, branch = make_prompt(200), make_prompt(70) + make_prompt(60, 7)
    name, leader = driver.submit(trunk, 12)
    _, follower = driver.submit(branch, 12, follow=name, reuse=70)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    cuts = [50, 100, 150, 199] if family in ANYWHERE else [50, 70, 120, 170, 199]
    assert leader.chunks == cuts, "rows are never split at a boundary"
    assert (follower.reused, follower.result.timings.prefilled) == (70, 60)
    assert_as_alone(driver, family, trunk, leader)
    assert_as_alone(driver, family, branch, follower)


@pytest.mark.parametrize("family", EACH_KIND)
def test_followers_resident_can_be_continued(family: str, root: Path) -> None:
    driver, prompt = SchedulerDriver(load_family(family, root), step=50), make_prompt(130)
    name, leader = driver.submit(prompt, 4)
    _, follower = driver.submit(prompt, 4, follow=name, reuse=129)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    held = driver.scheduler.save_source.find_kv(134, resident_id=follower.result.resident)
    assert held.slice_rows(0, 134).keys() == driver.served.row_names, "all of it can be saved, windows too"
    onward = prompt + follower.generated + make_prompt(20, 5)
    more = driver.run(onward, 8, resident=follower.result.resident, reuse=134)
    assert_as_alone(driver, family, onward, more)


@pytest.mark.parametrize("family", EACH_KIND)
def test_longer_prompt_follows_to_end_of_shorter(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    short = make_prompt(90)
    name, leader = driver.submit(short, 12)
    longer = short + make_prompt(30, 3)
    _, follower = driver.submit(longer, 12, follow=name, reuse=90)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    assert (follower.reused, follower.result.timings.prefilled) == (90, 30)
    assert_as_alone(driver, family, longer, follower)


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_after_exact_chunk_end_is_copied(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    name, leader = driver.submit(make_prompt(200), 4)
    driver.run_until(lambda: leader.chunks == [50, 100])
    branch = make_prompt(100) + make_prompt(9, 4)
    _, follower = driver.submit(branch, 8, follow=name, reuse=100)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    assert follower.reused == 100
    assert_as_alone(driver, family, branch, follower)


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_leader_past_position_is_copied_there(family: str, root: Path) -> None:
    """Also out of a shared batch."""
    driver = SchedulerDriver(load_family(family, root), step=50)
    running = [driver.submit(make_prompt(60 + n, n + 1), 40) for n in range(3)]
    driver.run_until(lambda: all(len(log.events) > 8 for _, log in running))
    branch = make_prompt(61, 2)[:45] + make_prompt(40, 9)
    _, follower = driver.submit(branch, 12, follow=running[1][0], reuse=45)
    assert follower.events == [StartedEvent()]
    driver.run_until(lambda: follower.is_ended and all(log.is_ended for _, log in running))
    assert follower.reused == 45
    assert_as_alone(driver, family, branch, follower)
    for n, (_, log) in enumerate(running):
        assert_as_alone(driver, family, make_prompt(60 + n, n + 1), log)


@pytest.mark.parametrize("family", WITH_STATES)
def test_leader_past_position_uses_earlier_checkpoint(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    name, leader = driver.submit(make_prompt(200), 30, checkpoints=(30, 60))
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in leader.events))
    branch = make_prompt(75) + make_prompt(20, 4)
    _, follower = driver.submit(branch, 8, follow=name, reuse=75)
    driver.run_until(lambda: follower.is_ended)
    assert (follower.reused, follower.result.timings.prefilled) == (60, 35)
    assert_as_alone(driver, family, branch, follower)
    with pytest.raises(ResidentMismatchError, match="can't be copied at 20"):
        driver.submit(make_prompt(20) + make_prompt(20, 4), follow=name, reuse=20)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_window_past_position_is_copied_from_journal(exact: bool, root: Path) -> None:
    """Also while the leader decodes; not once the rows are on disk, where the journal has them no more."""
    driver = SchedulerDriver(load_family("gemma3", root), step=10, exact=exact)
    name, leader = driver.submit(make_prompt(200), 60)
    driver.run_until(lambda: len(leader.events) > 30)
    branch = make_prompt(70) + make_prompt(20, 4)
    for prompt, reuse in ((branch, 70), (make_prompt(200), 190)):
        _, follower = driver.submit(prompt, 8, follow=name, reuse=reuse)
        driver.run_until(lambda follower=follower: follower.is_ended)
        assert follower.reused == reuse and not leader.is_ended
        assert_as_alone(driver, "gemma3", prompt, follower)
    driver.scheduler.save_source.mark_saved("", name, 190)
    with pytest.raises(ResidentMismatchError, match="can't be copied at 70"):
        driver.submit(branch, follow=name, reuse=70)


@pytest.mark.parametrize(
    ("family", "exact", "reused"),
    [("llama", False, 99), ("llama", True, 50), ("qwen3_5", False, 90), ("gemma3", False, 99), ("gemma3", True, 50)],
)
def test_ended_leaders_resident_is_copied(family: str, exact: bool, reused: int, root: Path) -> None:
    """Also where states are kept a little before the shared tokens' end; not where they are far before it."""
    driver, name = SchedulerDriver(load_family(family, root), step=50, exact=exact), "r1"
    leader = driver.run(make_prompt(100), 4, checkpoints=(90,))
    follower = driver.run(make_prompt(100), 8, follow=name, reuse=99)
    assert (follower.reused, follower.result.timings.prefilled) == (reused, 100 - reused)
    assert leader.result.resident in driver.scheduler.residents, "it stays, for its own next turn"
    assert_as_alone(driver, family, make_prompt(100), follower)
    with pytest.raises(ResidentMismatchError, match="another model or tenant"):
        driver.submit(make_prompt(100), follow=name, reuse=99, root=b"other")
    driver.scheduler.residents.delete(leader.result.resident)
    with pytest.raises(ResidentNotFoundError, match=name):
        driver.submit(make_prompt(100), follow=name, reuse=99)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_ended_leaders_resident_is_refused_far_before_end(family: str, root: Path) -> None:
    """With states at an early position alone, or with the windows' rows on disk alone: another plan may reuse more."""
    driver = SchedulerDriver(load_family(family, root), step=50)
    leader = driver.run(make_prompt(200), 4, checkpoints=(30,))
    driver.mark_saved(leader)
    with pytest.raises(ResidentNotFoundError, match="r1"):
        driver.submit(make_prompt(180) + make_prompt(20, 4), follow="r1", reuse=180)


def test_hybrid_model_is_followed_until_position_is_passed(root: Path) -> None:
    driver = SchedulerDriver(load_family("baichuan_m1", root), step=50)
    name, leader = driver.submit(make_prompt(200), 30, checkpoints=(20, 70))
    branch = make_prompt(110) + make_prompt(10, 4)
    _, follower = driver.submit(branch, 12, follow=name, reuse=110)
    driver.run_until(lambda: follower.is_ended)
    assert follower.reused == 70, "near enough, and there is a state anyway"
    assert_as_alone(driver, "baichuan_m1", branch, follower)
    assert not leader.is_ended
    for place in (70, 110):
        with pytest.raises(ResidentMismatchError, match=f"can't be copied at {place}"):
            driver.submit(make_prompt(place) + make_prompt(20, 4), follow=name, reuse=place)


def test_fork_states_are_few_and_released(root: Path) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root), step=500)
    prompt, named = make_prompt(1000), (300, 310)
    name, leader = driver.submit(prompt, 800, checkpoints=named)
    wanted = [*range(999, 320, -40), *range(321, 999, 40)]
    driver.run_until(lambda: bool(leader.chunks))
    before = driver.scheduler.running_bytes
    followers = [driver.submit(make_prompt(at) + make_prompt(5, 2), 1, follow=name, reuse=at)[1] for at in wanted]
    (sequence,) = driver.scheduler._queues.prefilling
    cuts = [cut for cut in sequence.chunk_ends if cut < 999]
    gaps = [after - cut for cut, after in pairwise(cuts[1:])]
    assert min(gaps) >= FORK_DISTANCE_TOKENS_MIN and len(cuts) > 8
    assert driver.scheduler.running_bytes - before == (len(sequence.chunk_ends) - 2) * driver.served.state_bytes
    driver.run_until(lambda: all(one.is_ended for one in followers))
    assert not leader.is_ended and sorted(sequence.kv.checkpoints) == list(named)
    late = [at - one.reused for at, one in zip(wanted, followers, strict=True)]
    assert max(late) < 2 * FORK_DISTANCE_TOKENS_MIN
    for at, one in list(zip(wanted, followers, strict=True))[::10]:
        assert one.result.checkpoints[:2] == list(named) and one.reused not in one.result.checkpoints
        assert_as_alone(driver, "qwen3_5", make_prompt(at) + make_prompt(5, 2), one)


def test_cancelled_followers_fork_state_is_dropped(root: Path) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root), step=50)
    name, leader = driver.submit(make_prompt(200), 4)
    followers = [driver.submit(make_prompt(200), 4, follow=name, reuse=120)[0] for _ in range(2)]
    (sequence,) = driver.scheduler._queues.waiting
    driver.scheduler.cancel(followers[0])
    assert sequence.chunk_ends == [120], "the other one still wants it"
    driver.scheduler.cancel(followers[1])
    assert sequence.chunk_ends == []
    driver.run_until(lambda: leader.is_ended)
    assert leader.chunks == [50, 100, 150, 199] and leader.result.checkpoints == [204]


def test_different_prefix_refuses_follower(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    name, _ = driver.submit(make_prompt(60))
    with pytest.raises(ResidentNotFoundError, match="nobody"):
        driver.submit(make_prompt(60), follow="nobody", reuse=40)
    for prompt, reuse in ((make_prompt(60, 2), 40), (make_prompt(60), 60), (make_prompt(60), 0), (make_prompt(80), 70)):
        with pytest.raises(ResidentMismatchError, match="does not compute"):
            driver.submit(prompt, follow=name, reuse=reuse)
    assert driver.scheduler.queued_count == 1


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_can_lead(family: str, root: Path) -> None:
    driver, prompt = SchedulerDriver(load_family(family, root), step=50), make_prompt(130)
    first, leader = driver.submit(make_prompt(80) + make_prompt(100, 3), 8)
    second, middle = driver.submit(prompt, 8, follow=first, reuse=80)
    _, last = driver.submit(prompt, 8, follow=second, reuse=129)
    driver.run_until(lambda: leader.is_ended and middle.is_ended and last.is_ended)
    assert [one.result.timings.prefilled for one in (leader, middle, last)] == [180, 50, 1]
    for one in (middle, last):
        assert_as_alone(driver, family, prompt, one)


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_of_shared_rows_follows_first_leader(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    first, leader = driver.submit(make_prompt(180), 8)
    second, middle = driver.submit(make_prompt(150) + make_prompt(10, 3), 8, follow=first, reuse=150)
    branch = make_prompt(70) + make_prompt(20, 4)
    _, last = driver.submit(branch, 8, follow=second, reuse=70)
    driver.scheduler.cancel(second)
    assert middle.is_ended and not last.is_ended
    driver.run_until(lambda: leader.is_ended and last.is_ended)
    assert (last.reused, last.result.timings.prefilled) == (70, 20)
    assert_as_alone(driver, family, branch, last)


def test_followers_get_leaders_progress(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=40)
    first, _ = driver.submit(make_prompt(200), 4)
    second, middle = driver.submit(make_prompt(100) + make_prompt(50, 3), 4, follow=first, reuse=100)
    _, last = driver.submit(make_prompt(90) + make_prompt(20, 5), 4, follow=second, reuse=90)
    driver.run_until(lambda: len(middle.chunks) == 2)
    assert [(e.done, e.total) for e in middle.events if isinstance(e, PrefillProgress)] == [
        (0, 150),
        (40, 150),
        (80, 150),
    ]
    assert [(e.done, e.total) for e in last.events if isinstance(e, PrefillProgress)] == [
        (0, 110),
        (40, 110),
        (80, 110),
    ]
    assert not any(isinstance(event, StartedEvent) for event in (*middle.events, *last.events))
    driver.run_until(lambda: middle.is_ended and last.is_ended)
    assert middle.events[4] == StartedEvent() and (middle.reused, last.reused) == (100, 90)


def test_waiting_follower_costs_no_memory_and_place(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=40, places=2)
    name, leader = driver.submit(make_prompt(200), 4)
    driver.step()
    alone = driver.scheduler.running_bytes
    for _ in range(5):
        driver.submit(make_prompt(200), 4, follow=name, reuse=199)
    _, other = driver.submit(make_prompt(30, 2), 2)
    driver.step()
    assert driver.scheduler.queued_count == 5 and other.events[0] == StartedEvent()
    driver.run_until(lambda: other.is_ended)
    assert driver.scheduler.running_bytes == alone and not leader.is_ended


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("family", EACH_KIND)
def test_followers_go_on_where_leader_ended(family: str, exact: bool, root: Path) -> None:
    """Of twelve that leave one after the other, each after a chunk of its own or less, nothing is computed again."""
    driver, prompt = SchedulerDriver(load_family(family, root), step=10, exact=exact), make_prompt(131)
    requests = [driver.submit(prompt, 4, checkpoints=(50,))]
    leader = requests[0][0]
    requests += [driver.submit(prompt, 4, follow=leader, reuse=130) for _ in range(12)]
    for name, log in requests[:-1]:
        driver.step()
        result = driver.scheduler.cancel(name)
        assert result is not None and (log.result.finish, result.resident) == ("cancelled", "")
    last = requests[-1][1]
    driver.run_until(lambda: last.is_ended)
    assert sum(log.result.timings.prefilled for _, log in requests) == len(prompt)
    assert last.result.checkpoints[:1] == ([50] if driver.served.layout.has_states else [])
    assert_as_alone(driver, family, prompt, last)
    assert driver.scheduler.is_idle and len(driver.scheduler.residents) == 1


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_that_shares_most_leads(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    name, leader = driver.submit(make_prompt(250), 4)
    near, far = make_prompt(120) + make_prompt(20, 3), make_prompt(200) + make_prompt(30, 5)
    _, near_log = driver.submit(near, 4, follow=name, reuse=120)
    far_name, far_log = driver.submit(far, 4, follow=name, reuse=200)
    driver.run_until(lambda: leader.chunks == [50, 100])
    driver.scheduler.cancel(name)
    late_name, late = driver.submit(far, 4, follow=name, reuse=200)
    assert late_name and not late.is_ended, "the one that goes on is followed under the name of the one that ended"
    driver.run_until(lambda: near_log.is_ended and far_log.is_ended and late.is_ended)
    assert (far_log.result.timings.prefilled, near_log.result.timings.prefilled) == (130, 20)
    assert (near_log.reused, late.reused) == (120, 200)
    for prompt, log in ((near, near_log), (far, far_log), (far, late)):
        assert_as_alone(driver, family, prompt, log)
    assert far_name


def test_follower_of_ended_follower_follows_its_leader(root: Path) -> None:
    driver, prompt = SchedulerDriver(load_family("qwen3_5", root), step=40), make_prompt(200)
    first, leader = driver.submit(make_prompt(150) + make_prompt(50, 3), 4)
    second, middle = driver.submit(prompt, 4, follow=first, reuse=150)
    followers = [driver.submit(prompt, 4, follow=second, reuse=199)[1] for _ in range(2)]
    driver.run_until(lambda: len(leader.chunks) == 2)
    driver.scheduler.cancel(second)
    driver.run_until(lambda: all(one.is_ended for one in followers))
    assert middle.result.finish == "cancelled"
    assert [one.result.timings.prefilled for one in followers] == [50, 1]
    assert_as_alone(driver, "qwen3_5", prompt, followers[1])


def test_fork_states_of_ended_leader_are_released(root: Path) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root), step=50)
    name, leader = driver.submit(make_prompt(400), 4)
    branch = make_prompt(320) + make_prompt(40, 7)
    _, near = driver.submit(make_prompt(120) + make_prompt(30, 7), 1, follow=name, reuse=120)
    heir_name, heir = driver.submit(branch, 4, follow=name, reuse=320)
    _, last = driver.submit(branch, 4, follow=name, reuse=250)
    driver.run_until(lambda: near.is_ended)
    driver.scheduler.cancel(name)
    (sequence,) = driver.scheduler._queues.waiting
    assert sequence.request.id == heir_name and sequence.chunk_ends == [250], "what the last follower needs"
    driver.run_until(lambda: heir.is_ended and last.is_ended)
    assert heir.result.checkpoints == [364]
    assert leader.result.timings.prefilled + heir.result.timings.prefilled == 360
    assert_as_alone(driver, "qwen3_5", branch, heir)


def test_failed_leader_ends_followers_as_leaderless(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root), step=40)
    name, leader = driver.submit(make_prompt(200), 4)
    second, middle = driver.submit(make_prompt(200), 4, follow=name, reuse=199)
    _, last = driver.submit(make_prompt(200), 4, follow=second, reuse=150)
    driver.run_until(lambda: len(leader.chunks) == 2)
    (sequence,) = driver.scheduler._queues.prefilling
    monkeypatch.setattr(sequence.kv, "prefill", lambda *args: 1 / 0)
    driver.step()
    assert leader.result.finish == "discarded"
    for one in (middle, last):
        assert (one.result.finish, one.result.resident, one.result.prefilled_until) == ("leaderless", "", 0)
        assert "ended" in one.result.error
    assert driver.scheduler.is_idle


def test_follower_takes_place_of_unstarted_leader(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), places=1)
    _, running = driver.submit(make_prompt(20), 50)
    name, leader = driver.submit(make_prompt(60), 4)
    _, follower = driver.submit(make_prompt(60), 4, follow=name, reuse=59)
    driver.step()
    driver.scheduler.cancel(name)
    assert leader.result.finish == "cancelled" and not follower.is_ended
    driver.run_until(lambda: running.is_ended and follower.is_ended)
    assert_as_alone(driver, "llama", make_prompt(60), follower)


def test_cancelled_follower_does_not_affect_leader(root: Path) -> None:
    driver = SchedulerDriver(load_family("gemma3", root), step=40)
    name, leader = driver.submit(make_prompt(100), 6)
    second, follower = driver.submit(make_prompt(100), 6, follow=name, reuse=99)
    driver.step()
    driver.scheduler.cancel(second)
    assert (follower.result.finish, follower.result.resident) == ("cancelled", "")
    driver.run_until(lambda: leader.is_ended)
    assert_as_alone(driver, "gemma3", make_prompt(100), leader)


def test_followers_wait_for_memory_until_leader_ends(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=100, budget=500_000)
    name, leader = driver.submit(make_prompt(500), 20)
    _, follower = driver.submit(make_prompt(500), 20, follow=name, reuse=499)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in leader.events))
    assert driver.scheduler.queued_count == 1
    driver.run_until(lambda: leader.is_ended)
    assert follower.result.finish == "leaderless" and leader.result.resident in driver.scheduler.residents
    again = driver.run(make_prompt(500), 20, resident=leader.result.resident, reuse=499)
    assert_as_alone(driver, "llama", make_prompt(500), again)


def test_window_is_lost_without_memory_for_copy(root: Path) -> None:
    model = load_family("gemma3", root)
    driver = SchedulerDriver(model, step=100, budget=model.kv_bytes(800))
    name, leader = driver.submit(make_prompt(500), 4)
    _, follower = driver.submit(make_prompt(500), 4, follow=name, reuse=300)
    driver.run_until(lambda: leader.chunks == [100, 200, 300])
    driver.scheduler.save_source.mark_saved("", name, 300)
    driver.run_until(lambda: follower.is_ended)
    assert follower.result.finish == "leaderless" and leader.chunks == [100, 200, 300, 400]
    driver.run_until(lambda: leader.is_ended)
    assert_as_alone(driver, "gemma3", make_prompt(500), leader)


def test_failed_copy_ends_only_its_follower(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=40)
    name, leader = driver.submit(make_prompt(100), 6)
    _, follower = driver.submit(make_prompt(100), 6, follow=name, reuse=99)
    driver.step()
    sequence = next(each for each in driver.scheduler._queues if each.request.id == name)
    monkeypatch.setattr(sequence.kv, "fork", lambda *args, **kwargs: 1 / 0)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    assert follower.result.finish == "discarded" and "division" in follower.result.error
    assert_as_alone(driver, "llama", make_prompt(100), leader)
