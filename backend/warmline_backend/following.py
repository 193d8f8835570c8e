"""Requests that wait for another one's prefill instead of computing the same tokens again.  Engine thread.

A follower holds nothing while it waits.  It starts from a copy of its leader's first rows, as soon as those are there.
"""

from collections.abc import Iterable, Iterator

from warmline_backend.residents import ResidentMismatch
from warmline_backend.sequence import Progress, Sequence


class Followers:
    """All that wait for a leader, in the order in which they came: a leader stands before its own followers."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, leader: Sequence) -> None:
        """Have `sequence` wait for the first `reuse` tokens of `leader`, or what of them it can still be given.

        Raises ResidentMismatch where the two differ, or the leader has passed the place and can't be copied there.
        """
        request, name = sequence.request, leader.request.id
        wanted, kv = request.reuse, leader.kv
        if not 0 < wanted < len(request.prompt) or leader.tokens_known[:wanted] != request.prompt[:wanted]:
            raise ResidentMismatch(f"request {name} does not compute the prompt's first {wanted} tokens")
        if kv.layout.problem or (kv.length >= wanted and not kv.deepest_place(wanted)):
            raise ResidentMismatch(f"request {name} can't be copied at {wanted} tokens, or not any more")
        sequence.leader, sequence.meeting = leader, kv.deepest_place(wanted) if kv.length >= wanted else wanted
        leader.cut_at(sequence.meeting)
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def of(self, leader: Sequence) -> bool:
        """Whether somebody waits for it."""
        return any(sequence.leader is leader for sequence in self._waiting)

    @property
    def ready(self) -> list[Sequence]:
        """Those whose leader can be copied now."""
        return [each for each in self._waiting if _reached(each) and _place(each)]

    @property
    def left_behind(self) -> list[Sequence]:
        """Those whose leader has gone on and can't be copied there any more."""
        return [each for each in self._waiting if _reached(each) and not _place(each)]

    def lose(self, leader: Sequence) -> list[Sequence]:
        """Forget, and return, all that wait for one that has ended, those that wait for them too."""
        gone: set[Sequence | None] = {leader}
        for sequence in self._waiting:
            if sequence.leader in gone:
                gone.add(sequence)
        lost = [sequence for sequence in self._waiting if sequence in gone]
        self._waiting = [sequence for sequence in self._waiting if sequence not in lost]
        return lost

    def hear(self, leader: Sequence) -> None:
        """Tell all that wait for it, and for one another behind it, how far a leader's prefill has come."""
        done: dict[Sequence | None, int] = {leader: leader.kv.length}
        for sequence in self._waiting:
            if sequence.leader in done:
                done[sequence] = min(done[sequence.leader], sequence.meeting)
                sequence.request.listener(Progress(done[sequence], len(sequence.request.prompt)))


def _reached(sequence: Sequence) -> bool:
    return sequence.leader is not None and sequence.leader.kv.length >= sequence.meeting


def _place(sequence: Sequence) -> int:
    return sequence.leader.kv.deepest_place(sequence.meeting) if sequence.leader else 0


def wanted_first(prefilling: list[Sequence], followers: Iterable[Sequence]) -> list[Sequence]:
    """Prompts that somebody waits for; only where there are none, those that go on alone."""
    leaders = {sequence.leader for sequence in followers}
    return [sequence for sequence in prefilling if not sequence.detached or sequence in leaders] or prefilling
