"""The step loop: what it computes is what mlx-lm computes, whoever else is running, whatever is cancelled or fails."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from drive import Drive, Heard
from families import FAMILIES, cold, mixed, prompt_of, served, tolerance
from oracle import compare_greedy

from warmline_backend import scheduler
from warmline_backend.decode import DecodeGroup
from warmline_backend.kv import RowsGone
from warmline_backend.params import GenerationParams
from warmline_backend.residents import ResidentGone, ResidentMismatch
from warmline_backend.scheduler import CHUNKS_PASSED_OVER_MAX, DECODE_SHARE, DECODE_STEPS_PER_CHUNK, DeviceBroken
from warmline_backend.sequence import Generation, Piece, Progress, Sequence, next_cut


@pytest.mark.parametrize("family", FAMILIES)
def test_concurrent_requests_answer_as_each_would_alone(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=24)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 90, 61, 64, 33, 70), start=1)]
    heard = [drive.submit(prompt, 16)[1] for prompt in prompts]
    drive.until(lambda: all(one.over for one in heard))
    for prompt, one in zip(prompts, heard, strict=True):
        truth = cold(drive.served, family, prompt, 16)
        assert compare_greedy(truth.tokens, one.generated, truth.margins, tolerance(family)), prompt
        assert one.settled.prefilled_until == len(prompt) + 16
        assert one.settled.timings.prefilled == len(prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_computes_only_its_own_tokens(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    first = drive.run(prompt_of(80), 12)
    prompt = prompt_of(80) + first.generated + prompt_of(30, 5)
    second = drive.run(prompt, 12, resident=first.settled.resident, reuse=92)
    truth = cold(drive.served, family, prompt, 12)
    assert compare_greedy(truth.tokens, second.generated, truth.margins, tolerance(family))
    assert second.settled.timings.prefilled == 30
    assert first.settled.resident not in drive.scheduler.residents, "its only continuation took it over"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
def test_a_branch_leaves_its_resident_as_it_was(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=64)
    shared, first = prompt_of(70), prompt_of(400)
    first[:70] = shared
    trunk = drive.run(first, 4, checkpoints=(70,))
    branch = shared + prompt_of(40, 9)
    other = drive.run(branch, 10, resident=trunk.settled.resident, reuse=70, keep=True)
    truth = cold(drive.served, family, branch, 10)
    assert compare_greedy(truth.tokens, other.generated, truth.margins, tolerance(family))
    assert other.settled.timings.prefilled == 40
    onward = first + trunk.generated + prompt_of(5, 3)
    again = drive.run(onward, 10, resident=trunk.settled.resident, reuse=404)
    truth = cold(drive.served, family, onward, 10)
    assert compare_greedy(truth.tokens, again.generated, truth.margins, tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_conversations_on_one_resident_do_not_disturb_each_other(family: str, root: Path) -> None:
    """A copy and its original go on at once, each in its own way, in one batch where they can share one."""
    drive = Drive(served(family, root))
    trunk = drive.run(prompt_of(60), 10)
    held = prompt_of(60) + trunk.generated
    prompts = [held + prompt_of(20, seed) for seed in (3, 4)]
    resident = trunk.settled.resident
    both = [
        drive.submit(prompt, 20, resident=resident, reuse=70, keep=keep)[1]
        for prompt, keep in zip(prompts, (True, False), strict=True)
    ]
    drive.until(lambda: all(one.over for one in both))
    for prompt, one in zip(prompts, both, strict=True):
        truth = cold(drive.served, family, prompt, 20)
        assert compare_greedy(truth.tokens, one.generated, truth.margins, tolerance(family))
        assert one.settled.timings.prefilled == 20


def test_residents_refuse_what_they_are_not(root: Path) -> None:
    drive = Drive(served("gemma3", root))
    held = drive.run(prompt_of(60), 4).settled.resident
    with pytest.raises(ResidentGone):
        drive.submit(prompt_of(80), resident="nobody", reuse=10)
    with pytest.raises(ResidentMismatch, match="other tokens"):
        drive.submit(prompt_of(80, 2), resident=held, reuse=64)
    with pytest.raises(ResidentMismatch, match="can't be continued at 10"):
        drive.submit(prompt_of(80), resident=held, reuse=10)  # the window has passed it
    with pytest.raises(ResidentMismatch):
        drive.submit(prompt_of(60), resident=held, reuse=60)  # nothing would be left to compute
    assert held in drive.scheduler.residents and drive.scheduler.idle


def test_a_state_is_of_no_use_without_the_window_that_belongs_to_it(root: Path) -> None:
    drive = Drive(mixed(root), step=50)
    first = drive.run(prompt_of(200), 8, checkpoints=(20, 100))
    assert (first.settled.checkpoints, first.settled.positions) == ([20, 100, 208], [208])
    with pytest.raises(ResidentMismatch, match="can't be continued at 100"):
        drive.submit(prompt_of(100) + prompt_of(10, 4), resident=first.settled.resident, reuse=100)
    onward = prompt_of(200) + first.generated + prompt_of(10, 4)
    more = drive.run(onward, 12, resident=first.settled.resident, reuse=208)
    truth = cold(drive.served, "baichuan_m1", onward, 12)
    assert compare_greedy(truth.tokens, more.generated, truth.margins, tolerance("baichuan_m1"))


def test_within_the_window_a_state_is_enough(root: Path) -> None:
    drive = Drive(mixed(root), step=50)
    first = drive.run(prompt_of(25), 2, checkpoints=(20,))
    assert first.settled.positions == [20, 27]
    branch = prompt_of(20) + prompt_of(40, 4)
    more = drive.run(branch, 12, resident=first.settled.resident, reuse=20)
    truth = cold(drive.served, "baichuan_m1", branch, 12)
    assert compare_greedy(truth.tokens, more.generated, truth.margins, tolerance("baichuan_m1"))


def test_a_running_stream_goes_on_during_a_long_prefill(root: Path) -> None:
    drive = Drive(served("llama", root), step=16)
    _, stream = drive.submit(prompt_of(10), 200)
    drive.until(lambda: len(stream.events) > 2)
    before = len(stream.events)
    _, long = drive.submit(prompt_of(161), 2)
    drive.until(lambda: len(long.chunks) == 10)
    assert len(stream.events) - before >= 9 * DECODE_STEPS_PER_CHUNK


class Clock:
    """In place of the scheduler's: a chunk takes 8 s, a decode step a tenth of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(scheduler, "time", self)
        for owner, step, seconds in ((Sequence, "prefill_chunk", 8.0), (DecodeGroup, "step", 0.1)):
            monkeypatch.setattr(owner, step, self.taking(seconds, getattr(owner, step)))

    def monotonic(self) -> float:
        return self.now

    def taking(self, seconds: float, step: Callable[..., object]) -> Callable[..., object]:
        def take(*given: object) -> object:
            self.now += seconds
            return step(*given)

        return take


def test_decoding_has_its_share_of_the_time_beside_long_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    drive = Drive(served("llama", root), step=16)
    _, stream = drive.submit(prompt_of(10), 2000)
    drive.until(lambda: len(stream.events) > 2)
    _, long = drive.submit(prompt_of(400), 2)
    drive.until(lambda: len(long.chunks) == 1)
    before = len(stream.events)
    drive.until(lambda: len(long.chunks) == 11)
    owed = 10 * 8.0 * DECODE_SHARE / (1 - DECODE_SHARE)
    assert abs((len(stream.events) - before) * 0.1 - owed) < 2.0


def test_a_newcomer_does_not_wait_for_what_decoding_is_owed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    drive = Drive(served("llama", root), step=16)
    _, stream = drive.submit(prompt_of(10), 2000)
    _, long = drive.submit(prompt_of(400), 2)
    drive.until(lambda: len(long.chunks) == 2)
    turn = drive.scheduler.turn()
    next(turn)
    _, small = drive.submit(prompt_of(12), 1)
    before = len(stream.events)
    for _ in turn:
        pass
    assert len(stream.events) - before <= DECODE_STEPS_PER_CHUNK and small.chunks == [11] and len(long.chunks) == 2


def test_a_small_request_is_answered_between_two_long_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of what decoding is owed is the newcomer's, too: it does not wait for another chunk in its midst."""
    Clock(monkeypatch)
    drive = Drive(served("llama", root), step=16)
    drive.submit(prompt_of(10), 2000)
    _, long = drive.submit(prompt_of(400), 2)
    drive.until(lambda: len(long.chunks) == 2)
    _, small = drive.submit(prompt_of(12), 20)
    while not small.over:
        for _ in drive.scheduler.turn():
            if small.over:
                break
    assert len(long.chunks) == 2


def test_short_prompts_go_first_and_long_ones_are_not_starved(root: Path) -> None:
    drive = Drive(served("llama", root), step=16)
    _, long = drive.submit(prompt_of(400), 1)
    drive.until(lambda: len(long.chunks) == 2)
    _, short = drive.submit(prompt_of(12), 1)
    drive.until(lambda: short.over)
    assert len(long.chunks) <= 3
    seen = len(long.chunks)
    shorts = [drive.submit(prompt_of(12, seed), 1)[1] for seed in range(2, 2 + 3 * (CHUNKS_PASSED_OVER_MAX + 1))]
    drive.until(lambda: all(one.over for one in shorts))
    assert len(long.chunks) >= seen + 2


def test_padding_keeps_unlike_lengths_in_batches_of_their_own(root: Path) -> None:
    drive = Drive(served("llama", root))
    lone = [drive.submit(prompt_of(length), 100)[1] for length in (600, 20, 22, 24)]
    drive.until(lambda: all(any(isinstance(event, Piece) for event in one.events) for one in lone))
    sizes = sorted(len(group.sequences) for group in drive.scheduler._lineup.groups)
    assert sizes == [1, 3]
    assert drive.scheduler.running_bytes == 512 * (768 + 3 * 256), "a buffer grows by 256 rows"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cancelled_prefill_is_kept_and_resumed(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=20)
    name, cut = drive.submit(prompt_of(150), 8)
    drive.until(lambda: len(cut.chunks) == 3)
    settled = drive.scheduler.cancel(name)
    assert settled is not None and settled == cut.settled
    assert (settled.finish, settled.prefilled_until, settled.generated) == ("cancelled", 60, b"")
    again = drive.run(prompt_of(150), 8, resident=settled.resident, reuse=60)
    truth = cold(drive.served, family, prompt_of(150), 8)
    assert compare_greedy(truth.tokens, again.generated, truth.margins, tolerance(family))
    assert again.settled.timings.prefilled == 90


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cancel_in_a_shared_batch_disturbs_nobody(family: str, root: Path) -> None:
    drive = Drive(served(family, root))
    prompts = [prompt_of(40 + n, n + 1) for n in range(4)]
    running = [drive.submit(prompt, 40) for prompt in prompts]
    drive.until(lambda: all(len(heard.events) > 10 for _, heard in running))
    gone = drive.scheduler.cancel(running[1][0])
    drive.until(lambda: all(heard.over for _, heard in running))
    assert gone is not None and gone.finish == "cancelled"
    for n, (_, heard) in enumerate(running):
        truth = cold(drive.served, family, prompts[n], 40)
        tokens = truth.tokens[: len(heard.generated)] if n == 1 else truth.tokens
        assert compare_greedy(tokens, heard.generated, truth.margins, tolerance(family)), n
    held = prompts[1] + running[1][1].generated
    onward = held + prompt_of(9, 9)
    more = drive.run(onward, 6, resident=gone.resident, reuse=len(held))
    truth = cold(drive.served, family, onward, 6)
    assert compare_greedy(truth.tokens, more.generated, truth.margins, tolerance(family))


def test_a_cancel_takes_effect_after_the_present_step(root: Path) -> None:
    drive = Drive(served("llama", root), step=16)
    running = [drive.submit(prompt_of(length), 500) for length in (20, 400, 300)]
    drive.until(lambda: all(heard.chunks for _, heard in running))
    for name, heard in running:
        work = drive.scheduler.turn()
        next(work)
        before, settled = len(heard.events), drive.scheduler.cancel(name)
        for _ in work:
            pass
        assert settled is not None and settled.finish == "cancelled"
        assert heard.over and len(heard.events) == before + 1, "not another token, not another chunk"
    assert drive.scheduler.idle


def test_what_is_asked_between_steps_may_end_everything(root: Path) -> None:
    drive = Drive(served("llama", root), step=16)
    running = [drive.submit(prompt_of(length), 50) for length in (20, 22, 300, 200)]
    drive.until(lambda: len(running[1][1].events) > 5 and bool(running[2][1].chunks))
    for _ in drive.scheduler.turn():
        for name, _ in running:
            drive.scheduler.cancel(name)
    assert all(heard.settled.finish == "cancelled" for _, heard in running) and drive.scheduler.idle


def test_cancel_of_what_is_not_running_says_so(root: Path) -> None:
    drive = Drive(served("llama", root))
    assert drive.scheduler.cancel("nobody") is None
    name, heard = drive.submit(prompt_of(30), 5)
    settled = drive.scheduler.cancel(name)  # still queued
    assert settled is not None and settled.prefilled_until == 0 and heard.over and drive.scheduler.idle


class Planted(Exception):
    pass


class FailsAt:
    """A model that raises once, at its `calls`-th call (of those with a batch of `batch`)."""

    def __init__(self, model: object, calls: int, batch: int = 0) -> None:
        self._model, self._left, self._batch = model, calls, batch

    def __call__(self, tokens: mx.array, *args: object, **kwargs: object) -> mx.array:
        if not self._batch or tokens.shape[0] == self._batch:
            self._left -= 1
            if self._left == 0:
                raise Planted("a planted fault")
        return self._model(tokens, *args, **kwargs)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def failing(root: Path, calls: int, batch: int = 0) -> Drive:
    model = served("llama", root)
    return Drive(replace(model, model=FailsAt(model.model, calls, batch)), step=1000)


def test_a_failed_step_discards_its_batch_and_no_other(root: Path) -> None:
    drive = failing(root, 5, batch=2)
    _, one = drive.submit(prompt_of(40), 30)
    _, mate = drive.submit(prompt_of(41, 2), 30)
    _, apart = drive.submit(prompt_of(400, 3), 30)
    drive.until(lambda: one.over and mate.over and apart.over)
    for heard in (one, mate):
        assert (heard.settled.finish, heard.settled.resident) == ("discarded", "")
        assert "a planted fault" in heard.settled.error
    assert apart.generated == cold(served("llama", root), "llama", prompt_of(400, 3), 30).tokens
    assert drive.run(prompt_of(40), 5).generated == cold(served("llama", root), "llama", prompt_of(40), 5).tokens


def test_a_fault_in_prefill_is_told_and_not_tried_again(root: Path) -> None:
    drive = failing(root, 1)
    heard = drive.run(prompt_of(40))
    assert heard.settled.finish == "discarded" and drive.scheduler.idle
    assert drive.run(prompt_of(40), 5).generated == cold(served("llama", root), "llama", prompt_of(40), 5).tokens


def test_a_device_that_computes_nothing_any_more_ends_the_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = failing(root, 0)
    _, heard = drive.submit(prompt_of(40), 30)
    drive.until(lambda: len(heard.events) > 3)
    monkeypatch.setattr(FailsAt, "__call__", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(DeviceBroken, match="division by zero"):
        drive.turn()
    assert heard.settled.finish == "discarded"
    with pytest.raises(ZeroDivisionError):
        drive.scheduler.probe()


def decoding_together(drive: Drive) -> tuple[str, Heard, Heard]:
    """Two in one batch.  The first one's name, and both."""
    (name, one), (_, other) = (drive.submit(prompt_of(60, seed), 50) for seed in (1, 2))
    drive.until(lambda: len(drive.scheduler._lineup.groups) == 1 and min(len(one.events), len(other.events)) > 5)
    return name, one, other


def can_not_be_left(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = drive.scheduler._lineup.groups
    monkeypatch.setattr(group.batch.prompt_cache[0], "filter", lambda keep: 1 / 0)


def test_who_stays_in_a_batch_that_could_not_be_left_is_discarded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go on with the rows of the one that has left."""
    drive = Drive(served("llama", root))
    name, one, other = decoding_together(drive)
    can_not_be_left(drive, monkeypatch)
    settled = drive.scheduler.cancel(name)
    assert settled is not None and (settled.finish, settled.resident) == ("cancelled", "")
    assert (other.settled.finish, other.settled.resident) == ("discarded", "")
    assert cold(drive.served, "llama", prompt_of(60, 2), 50).tokens[: len(other.generated)] == other.generated
    drive.turn()
    assert one.over and drive.scheduler.idle


def test_a_fault_of_what_was_asked_at_rest_is_looked_into_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(served("llama", root))
    name, _, _ = decoding_together(drive)
    can_not_be_left(drive, monkeypatch)
    drive.scheduler.cancel(name)
    assert drive.scheduler.idle
    monkeypatch.setattr(drive.scheduler, "probe", lambda: 1 / 0)
    with pytest.raises(DeviceBroken):
        drive.turn()


def test_a_discarded_batch_is_gone_before_the_device_is_probed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What filled the memory must not keep the token from being computed that shows whether the device still does."""
    drive = Drive(served("llama", root))
    _, one, other = decoding_together(drive)
    (group,) = drive.scheduler._lineup.groups
    held = [*map(weakref.ref, group.sequences), *map(weakref.ref, group.batch.prompt_cache)]
    del group
    at_probe: list[object] = []
    monkeypatch.setattr(drive.scheduler, "probe", lambda: at_probe.extend([each() for each in held]))
    monkeypatch.setattr(DecodeGroup, "step", lambda group: 1 / 0)
    drive.until(lambda: one.over and other.over)
    assert at_probe == [None] * (2 + len(drive.served.layout.leaves))


def test_an_end_is_told_though_what_has_changed_can_not_be(root: Path) -> None:
    drive = Drive(served("llama", root))
    drive.scheduler.changed = lambda: 1 / 0  # type: ignore[assignment, return-value]
    assert drive.run(prompt_of(20), 3).settled.finish == "length"


def test_reuse_off_keeps_nothing(root: Path) -> None:
    drive = Drive(served("gemma3", root), keeps=False)
    heard = drive.run(prompt_of(100), 5)
    assert heard.settled.resident == "" and len(drive.scheduler.residents) == 0


def test_stop_words_end_of_sequence_and_length(root: Path) -> None:
    drive = Drive(served("llama", root))
    plain = drive.run(prompt_of(50), 20)
    word = plain.text[5:7]
    stopped = drive.run(prompt_of(50), 20, stop=(word,))
    assert stopped.settled.finish == "stop" and stopped.text == plain.text[: plain.text.index(word)]
    assert plain.settled.finish == "length" and len(plain.generated) == 20


def test_seeds_give_the_same_text_alone_and_in_a_batch(root: Path) -> None:
    drive = Drive(served("llama", root))
    wanted = {"temperature": 1.0, "seed": 11}
    alone = drive.run(prompt_of(50), 20, **wanted)
    together = [
        drive.submit(prompt_of(50 + n), 20, **(wanted if n == 0 else {"temperature": 1.0}))[1] for n in range(3)
    ]
    drive.until(lambda: all(one.over for one in together))
    assert together[0].text == alone.text
    assert drive.run(prompt_of(50), 20, temperature=1.0, seed=12).text != alone.text


def test_logprobs_are_those_of_the_cold_run(root: Path) -> None:
    drive = Drive(served("llama", root))
    heard = drive.run(prompt_of(50), 6, logprobs=True, top_logprobs=3)
    truth = cold(drive.served, "llama", prompt_of(50), 6)
    expected = [float(row[token]) for row, token in zip(truth.logprobs, truth.tokens, strict=True)]
    assert heard.logprobs == pytest.approx(expected, abs=1e-4)
    pieces = [event for event in heard.events if isinstance(event, Piece) and event.logprobs]
    assert all(piece.logprobs and piece.logprobs.top[0][0] == piece.logprobs.token for piece in pieces)


def test_progress_is_told_chunk_by_chunk(root: Path) -> None:
    heard = Drive(served("llama", root), step=32).run(prompt_of(100), 1)
    assert [(e.done, e.total) for e in heard.events if isinstance(e, Progress)] == [
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
    assert next_cut(start, end, 32, checkpoints) == cut


def test_a_save_after_a_takeover_never_writes_the_new_owners_tokens(root: Path) -> None:
    drive = Drive(served("llama", root))
    first = drive.run(prompt_of(80), 20)
    resident = first.settled.resident
    name, _ = drive.submit(prompt_of(90) + prompt_of(200, 7), 5, resident=resident, reuse=80)  # leaves its tail behind
    drive.until(lambda: bool(drive.scheduler._lineup.groups))
    assert drive.scheduler.kv_of(80, resident=resident).tokens[:80] == prompt_of(80)
    with pytest.raises(RowsGone):
        drive.scheduler.kv_of(100, resident=resident)
    assert drive.scheduler.kv_of(280, running=name).length > 280


def test_one_answers_fault_is_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(served("llama", root))
    _, bad = drive.submit(prompt_of(50), 30)
    _, good = drive.submit(prompt_of(50, 2), 30)
    drive.until(lambda: len(bad.events) > 3)
    sequence = next(s for s in drive.scheduler._lineup if s.request.prompt == prompt_of(50))
    monkeypatch.setattr(sequence.text, "add", lambda token: 1 / 0)
    drive.until(lambda: bad.over and good.over)
    assert bad.settled.finish == "error" and "division" in bad.settled.error
    assert good.generated == cold(drive.served, "llama", prompt_of(50, 2), 30).tokens


def test_a_request_that_asks_for_no_resident_leaves_none(root: Path) -> None:
    drive = Drive(served("llama", root))
    heard = Heard()
    params = GenerationParams(max_tokens=3, ignore_eos=True)
    drive.scheduler.submit(Generation("direct", prompt_of(30), params, heard.events.append, kept=False))
    drive.until(lambda: heard.over)
    assert heard.settled.resident == "" and len(drive.scheduler.residents) == 0


def test_a_request_that_can_not_even_be_ended_takes_only_its_batch_along(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(served("llama", root))
    _, bad = drive.submit(prompt_of(50), 30)
    _, mate = drive.submit(prompt_of(50, 2), 30)
    _, apart = drive.submit(prompt_of(400, 3), 30)
    drive.until(lambda: all(len(one.events) > 3 for one in (bad, mate, apart)))
    sequence = next(each for each in drive.scheduler._lineup if each.request.prompt == prompt_of(50))
    group = next(group for group in drive.scheduler._lineup.groups if sequence in group.sequences)
    monkeypatch.setattr(sequence.text, "add", lambda token: 1 / 0)
    monkeypatch.setattr(group, "leave", lambda sequence: 1 / 0)
    drive.until(lambda: bad.over and mate.over and apart.over)
    assert (bad.settled.finish, mate.settled.finish, apart.settled.finish) == ("error", "discarded", "length")
    assert drive.run(prompt_of(50), 5).generated == cold(drive.served, "llama", prompt_of(50), 5).tokens
