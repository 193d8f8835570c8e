"""Followers: common prefixes are computed once, with the answers of cold runs, and no follower waits forever."""

from itertools import pairwise
from pathlib import Path

import pytest

from support.backend.cold_runs import compare_greedy
from support.backend.engine_driver import Drive, EventLog
from support.backend.families import FAMILIES, cold, prompt_of, served, tolerance
from warmline_backend.generation.events import PrefillProgress, StartedEvent, TokenEvent
from warmline_backend.generation.sequence import FORK_DISTANCE_TOKENS_MIN
from warmline_backend.kv_cache.residents import ResidentMismatchError, ResidentNotFoundError

ANYWHERE = [family for family in FAMILIES if family not in ("gemma3", "qwen3_5", "falcon_h1")]
WITH_STATES = ["qwen3_5", "falcon_h1"]
EACH_KIND = ["llama", "qwen3_5", "gemma3"]  # rows alone, with states, with windows


def assert_as_alone(drive: Drive, family: str, prompt: list[int], log: EventLog) -> None:
    truth = cold(drive.served, family, prompt, len(log.generated))
    assert compare_greedy(truth.tokens, log.generated, truth.margins, tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_identical_prompts_share_one_prefill(family: str, root: Path) -> None:
    drive, prompt = Drive(served(family, root), step=50), prompt_of(130)
    name, leader = drive.submit(prompt, 12)
    followers = [drive.submit(prompt, 12, follow=name, reuse=129)[1] for _ in range(2)]
    drive.step()
    assert (drive.scheduler.running_count, drive.scheduler.queued_count) == (1, 2)
    drive.until(lambda: all(one.is_ended for one in (leader, *followers)))
    assert leader.result.timings.prefilled == 130
    assert [(one.result.timings.prefilled, one.reused) for one in followers] == [(1, 129)] * 2
    for one in (leader, *followers):
        assert_as_alone(drive, family, prompt, one)
        assert one.result.prefilled_until == 142 and one.result.resident in drive.scheduler.residents


@pytest.mark.parametrize("family", FAMILIES)
def test_diverging_prompt_starts_at_divergence(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    trunk, branch = prompt_of(200), prompt_of(70) + prompt_of(60, 7)
    name, leader = drive.submit(trunk, 12)
    _, follower = drive.submit(branch, 12, follow=name, reuse=70)
    drive.until(lambda: leader.is_ended and follower.is_ended)
    cuts = [50, 100, 150, 199] if family in ANYWHERE else [50, 70, 120, 170, 199]
    assert leader.chunks == cuts, "rows are never split at a boundary"
    assert (follower.reused, follower.result.timings.prefilled) == (70, 60)
    assert_as_alone(drive, family, trunk, leader)
    assert_as_alone(drive, family, branch, follower)


@pytest.mark.parametrize("family", EACH_KIND)
def test_followers_resident_can_be_continued(family: str, root: Path) -> None:
    drive, prompt = Drive(served(family, root), step=50), prompt_of(130)
    name, leader = drive.submit(prompt, 4)
    _, follower = drive.submit(prompt, 4, follow=name, reuse=129)
    drive.until(lambda: leader.is_ended and follower.is_ended)
    held = drive.scheduler.save_source.find_kv(134, resident_id=follower.result.resident)
    assert held.slice_rows(0, 134).keys() == drive.served.row_names, "all of it can be saved, windows too"
    onward = prompt + follower.generated + prompt_of(20, 5)
    more = drive.run(onward, 8, resident=follower.result.resident, reuse=134)
    assert_as_alone(drive, family, onward, more)


@pytest.mark.parametrize("family", EACH_KIND)
def test_longer_prompt_follows_to_end_of_shorter(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    short = prompt_of(90)
    name, leader = drive.submit(short, 12)
    longer = short + prompt_of(30, 3)
    _, follower = drive.submit(longer, 12, follow=name, reuse=90)
    drive.until(lambda: leader.is_ended and follower.is_ended)
    assert (follower.reused, follower.result.timings.prefilled) == (90, 30)
    assert_as_alone(drive, family, longer, follower)


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_after_exact_chunk_end_is_copied(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    name, leader = drive.submit(prompt_of(200), 4)
    drive.until(lambda: leader.chunks == [50, 100])
    branch = prompt_of(100) + prompt_of(9, 4)
    _, follower = drive.submit(branch, 8, follow=name, reuse=100)
    drive.until(lambda: leader.is_ended and follower.is_ended)
    assert follower.reused == 100
    assert_as_alone(drive, family, branch, follower)


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_leader_past_position_is_copied_there(family: str, root: Path) -> None:
    """Also out of a shared batch."""
    drive = Drive(served(family, root), step=50)
    running = [drive.submit(prompt_of(60 + n, n + 1), 40) for n in range(3)]
    drive.until(lambda: all(len(log.events) > 8 for _, log in running))
    branch = prompt_of(61, 2)[:45] + prompt_of(40, 9)
    _, follower = drive.submit(branch, 12, follow=running[1][0], reuse=45)
    assert follower.events == [StartedEvent()]
    drive.until(lambda: follower.is_ended and all(log.is_ended for _, log in running))
    assert follower.reused == 45
    assert_as_alone(drive, family, branch, follower)
    for n, (_, log) in enumerate(running):
        assert_as_alone(drive, family, prompt_of(60 + n, n + 1), log)


@pytest.mark.parametrize("family", WITH_STATES)
def test_leader_past_position_uses_earlier_checkpoint(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    name, leader = drive.submit(prompt_of(200), 30, checkpoints=(30, 60))
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in leader.events))
    branch = prompt_of(75) + prompt_of(20, 4)
    _, follower = drive.submit(branch, 8, follow=name, reuse=75)
    drive.until(lambda: follower.is_ended)
    assert (follower.reused, follower.result.timings.prefilled) == (60, 35)
    assert_as_alone(drive, family, branch, follower)
    with pytest.raises(ResidentMismatchError, match="can't be copied at 20"):
        drive.submit(prompt_of(20) + prompt_of(20, 4), follow=name, reuse=20)


def test_window_past_position_refuses_follower(root: Path) -> None:
    drive = Drive(served("gemma3", root), step=50)
    name, leader = drive.submit(prompt_of(200), 4)
    drive.until(lambda: leader.chunks == [50, 100])
    with pytest.raises(ResidentMismatchError, match="can't be copied at 70"):
        drive.submit(prompt_of(70) + prompt_of(20, 4), follow=name, reuse=70)


def test_hybrid_model_is_followed_until_position_is_passed(root: Path) -> None:
    drive = Drive(served("baichuan_m1", root), step=50)
    name, leader = drive.submit(prompt_of(200), 30, checkpoints=(20, 70))
    branch = prompt_of(110) + prompt_of(10, 4)
    _, follower = drive.submit(branch, 12, follow=name, reuse=110)
    drive.until(lambda: follower.is_ended)
    assert follower.reused == 70, "near enough, and there is a state anyway"
    assert_as_alone(drive, "baichuan_m1", branch, follower)
    assert not leader.is_ended
    for place in (70, 110):
        with pytest.raises(ResidentMismatchError, match=f"can't be copied at {place}"):
            drive.submit(prompt_of(place) + prompt_of(20, 4), follow=name, reuse=place)


def test_fork_states_are_few_and_released(root: Path) -> None:
    drive = Drive(served("qwen3_5", root), step=500)
    prompt, named = prompt_of(1000), (300, 310)
    name, leader = drive.submit(prompt, 800, checkpoints=named)
    wanted = [*range(999, 320, -40), *range(321, 999, 40)]
    drive.until(lambda: bool(leader.chunks))
    before = drive.scheduler.running_bytes
    followers = [drive.submit(prompt_of(at) + prompt_of(5, 2), 1, follow=name, reuse=at)[1] for at in wanted]
    (sequence,) = drive.scheduler._queues.prefilling
    cuts = [cut for cut in sequence.chunk_ends if cut < 999]
    gaps = [after - cut for cut, after in pairwise(cuts[1:])]
    assert min(gaps) >= FORK_DISTANCE_TOKENS_MIN and len(cuts) > 8
    assert drive.scheduler.running_bytes - before == (len(sequence.chunk_ends) - 2) * drive.served.state_bytes
    drive.until(lambda: all(one.is_ended for one in followers))
    assert not leader.is_ended and sorted(sequence.kv.checkpoints) == list(named)
    late = [at - one.reused for at, one in zip(wanted, followers, strict=True)]
    assert max(late) < 2 * FORK_DISTANCE_TOKENS_MIN
    for at, one in list(zip(wanted, followers, strict=True))[::10]:
        assert one.result.checkpoints[:2] == list(named) and one.reused not in one.result.checkpoints
        assert_as_alone(drive, "qwen3_5", prompt_of(at) + prompt_of(5, 2), one)


def test_cancelled_followers_fork_state_is_dropped(root: Path) -> None:
    drive = Drive(served("qwen3_5", root), step=50)
    name, leader = drive.submit(prompt_of(200), 4)
    followers = [drive.submit(prompt_of(200), 4, follow=name, reuse=120)[0] for _ in range(2)]
    (sequence,) = drive.scheduler._queues.waiting
    drive.scheduler.cancel(followers[0])
    assert sequence.chunk_ends == [120], "the other one still wants it"
    drive.scheduler.cancel(followers[1])
    assert sequence.chunk_ends == []
    drive.until(lambda: leader.is_ended)
    assert leader.chunks == [50, 100, 150, 199] and leader.result.checkpoints == [204]


def test_different_prefix_refuses_follower(root: Path) -> None:
    drive = Drive(served("llama", root))
    name, _ = drive.submit(prompt_of(60))
    with pytest.raises(ResidentNotFoundError, match="nobody"):
        drive.submit(prompt_of(60), follow="nobody", reuse=40)
    for prompt, reuse in ((prompt_of(60, 2), 40), (prompt_of(60), 60), (prompt_of(60), 0), (prompt_of(80), 70)):
        with pytest.raises(ResidentMismatchError, match="does not compute"):
            drive.submit(prompt, follow=name, reuse=reuse)
    assert drive.scheduler.queued_count == 1


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_can_lead(family: str, root: Path) -> None:
    drive, prompt = Drive(served(family, root), step=50), prompt_of(130)
    first, leader = drive.submit(prompt_of(80) + prompt_of(100, 3), 8)
    second, middle = drive.submit(prompt, 8, follow=first, reuse=80)
    _, last = drive.submit(prompt, 8, follow=second, reuse=129)
    drive.until(lambda: leader.is_ended and middle.is_ended and last.is_ended)
    assert [one.result.timings.prefilled for one in (leader, middle, last)] == [180, 50, 1]
    for one in (middle, last):
        assert_as_alone(drive, family, prompt, one)


@pytest.mark.parametrize("family", EACH_KIND)
def test_follower_of_shared_rows_follows_first_leader(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    first, leader = drive.submit(prompt_of(180), 8)
    second, middle = drive.submit(prompt_of(150) + prompt_of(10, 3), 8, follow=first, reuse=150)
    branch = prompt_of(70) + prompt_of(20, 4)
    _, last = drive.submit(branch, 8, follow=second, reuse=70)
    drive.scheduler.cancel(second)
    assert middle.is_ended and not last.is_ended
    drive.until(lambda: leader.is_ended and last.is_ended)
    assert (last.reused, last.result.timings.prefilled) == (70, 20)
    assert_as_alone(drive, family, branch, last)


def test_followers_get_leaders_progress(root: Path) -> None:
    drive = Drive(served("llama", root), step=40)
    first, _ = drive.submit(prompt_of(200), 4)
    second, middle = drive.submit(prompt_of(100) + prompt_of(50, 3), 4, follow=first, reuse=100)
    _, last = drive.submit(prompt_of(90) + prompt_of(20, 5), 4, follow=second, reuse=90)
    drive.until(lambda: len(middle.chunks) == 2)
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
    drive.until(lambda: middle.is_ended and last.is_ended)
    assert middle.events[4] == StartedEvent() and (middle.reused, last.reused) == (100, 90)


def test_waiting_follower_costs_no_memory_and_place(root: Path) -> None:
    drive = Drive(served("llama", root), step=40, places=2)
    name, leader = drive.submit(prompt_of(200), 4)
    drive.step()
    alone = drive.scheduler.running_bytes
    for _ in range(5):
        drive.submit(prompt_of(200), 4, follow=name, reuse=199)
    _, other = drive.submit(prompt_of(30, 2), 2)
    drive.step()
    assert drive.scheduler.queued_count == 5 and other.events[0] == StartedEvent()
    drive.until(lambda: other.is_ended)
    assert drive.scheduler.running_bytes == alone and not leader.is_ended


def test_ended_leader_ends_followers_as_leaderless(root: Path) -> None:
    drive = Drive(served("qwen3_5", root), step=40)
    name, leader = drive.submit(prompt_of(200), 4)
    second, middle = drive.submit(prompt_of(200), 4, follow=name, reuse=199)
    _, last = drive.submit(prompt_of(200), 4, follow=second, reuse=150)
    drive.until(lambda: len(leader.chunks) == 2)
    result = drive.scheduler.cancel(name)
    assert result is not None and result.prefilled_until == 80
    for one in (middle, last):
        assert (one.result.finish, one.result.resident, one.result.prefilled_until) == ("leaderless", "", 0)
        assert "ended" in one.result.error
    assert drive.scheduler.is_idle
    again = drive.run(prompt_of(200), 4, resident=result.resident, reuse=80)
    assert_as_alone(drive, "qwen3_5", prompt_of(200), again)


def test_unstarted_leader_ends_followers(root: Path) -> None:
    drive = Drive(served("llama", root), places=1)
    _, running = drive.submit(prompt_of(20), 50)
    name, leader = drive.submit(prompt_of(60), 4)
    _, follower = drive.submit(prompt_of(60), 4, follow=name, reuse=59)
    drive.step()
    drive.scheduler.cancel(name)
    assert (leader.result.finish, follower.result.finish) == ("cancelled", "leaderless")
    drive.until(lambda: running.is_ended)


def test_cancelled_follower_does_not_affect_leader(root: Path) -> None:
    drive = Drive(served("gemma3", root), step=40)
    name, leader = drive.submit(prompt_of(100), 6)
    second, follower = drive.submit(prompt_of(100), 6, follow=name, reuse=99)
    drive.step()
    drive.scheduler.cancel(second)
    assert (follower.result.finish, follower.result.resident) == ("cancelled", "")
    drive.until(lambda: leader.is_ended)
    assert_as_alone(drive, "gemma3", prompt_of(100), leader)


def test_followers_wait_for_memory_until_leader_ends(root: Path) -> None:
    drive = Drive(served("llama", root), step=100, budget=500_000)
    name, leader = drive.submit(prompt_of(500), 20)
    _, follower = drive.submit(prompt_of(500), 20, follow=name, reuse=499)
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in leader.events))
    assert drive.scheduler.queued_count == 1
    drive.until(lambda: leader.is_ended)
    assert follower.result.finish == "leaderless" and leader.result.resident in drive.scheduler.residents
    again = drive.run(prompt_of(500), 20, resident=leader.result.resident, reuse=499)
    assert_as_alone(drive, "llama", prompt_of(500), again)


def test_window_is_lost_without_memory_for_copy(root: Path) -> None:
    model = served("gemma3", root)
    drive = Drive(model, step=100, budget=model.kv_bytes(800))
    name, leader = drive.submit(prompt_of(500), 4)
    _, follower = drive.submit(prompt_of(500), 4, follow=name, reuse=300)
    drive.until(lambda: follower.is_ended)
    assert follower.result.finish == "leaderless" and leader.chunks == [100, 200, 300, 400]
    drive.until(lambda: leader.is_ended)
    assert_as_alone(drive, "gemma3", prompt_of(500), leader)


def test_failed_copy_ends_only_its_follower(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(served("llama", root), step=40)
    name, leader = drive.submit(prompt_of(100), 6)
    _, follower = drive.submit(prompt_of(100), 6, follow=name, reuse=99)
    drive.step()
    sequence = next(each for each in drive.scheduler._queues if each.request.id == name)
    monkeypatch.setattr(sequence.kv, "fork", lambda *args, **kwargs: 1 / 0)
    drive.until(lambda: leader.is_ended and follower.is_ended)
    assert follower.result.finish == "discarded" and "division" in follower.result.error
    assert_as_alone(drive, "llama", prompt_of(100), leader)
