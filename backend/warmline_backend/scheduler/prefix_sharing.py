"""Requests that wait for another one's prefill instead of computing the same tokens again.  Engine thread.

A follower holds nothing while it waits.  It starts from a copy of its leader's first rows, as soon as those are there.
"""

from collections.abc import Iterator

from warmline_backend.generation.events import PrefillProgress
from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.residents import ResidentMismatchError


class PrefixFollowers:
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
        request = sequence.request
        wanted = sequence.kv.floor_to_grid(request.reuse_tokens)
        while leader.leader is not None and wanted <= leader.fork_position:
            leader = leader.leader  # a follower starts where they meet: what lies before is its own leader's to give
        name = leader.request.id
        if leader.request.root != request.root:
            raise ResidentMismatchError(f"request {name} is of another tenant")
        if not 0 < request.reuse_tokens < len(request.prompt) or leader.all_tokens[:wanted] != request.prompt[:wanted]:
            raise ResidentMismatchError(f"request {name} does not compute the prompt's first {wanted} tokens")
        if leader.kv.layout.problem or not wanted or not (meeting := leader.choose_fork_position(wanted)):
            raise ResidentMismatchError(f"request {name} can't be copied at {wanted} tokens, or not any more")
        sequence.leader, sequence.fork_position = leader, meeting
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It no longer waits; what its leader kept for it alone is given up."""
        self._waiting.remove(sequence)
        leader, sequence.leader = sequence.leader, None
        if leader and not any(
            each.leader is leader and each.fork_position == sequence.fork_position for each in self._waiting
        ):
            leader.remove_fork_position(sequence.fork_position)

    def has_followers(self, sequence: Sequence) -> bool:
        return any(each.leader is sequence for each in self._waiting)

    def is_unattended(self, sequence: Sequence) -> bool:
        """Whether nobody waits for what it computes, neither a client nor a follower."""
        return (sequence.detached or sequence.request.background) and not self.has_followers(sequence)

    @property
    def ready(self) -> list[Sequence]:
        """Those whose leader can be copied now."""
        return [each for each in self._waiting if _has_leader_reached(each) and _find_fork_position(each)]

    @property
    def stale(self) -> list[Sequence]:
        """Those whose leader has gone on and can't be copied there any more."""
        return [each for each in self._waiting if _has_leader_reached(each) and not _find_fork_position(each)]

    def pop_followers(self, leader: Sequence) -> list[Sequence]:
        """Forget, and return, all that wait for one that has ended, those that wait for them too."""
        gone: set[Sequence | None] = {leader}
        for sequence in self._waiting:
            if sequence.leader in gone:
                gone.add(sequence)
        lost = [sequence for sequence in self._waiting if sequence in gone]
        self._waiting = [sequence for sequence in self._waiting if sequence not in lost]
        return lost

    def notify_progress(self, leader: Sequence) -> None:
        """Tell all that wait for it, and for one another behind it, how far a leader's prefill has come."""
        done: dict[Sequence | None, int] = {leader: leader.kv.length}
        for sequence in self._waiting:
            if sequence.leader in done:
                done[sequence] = min(done[sequence.leader], sequence.fork_position)
                sequence.request.listener(PrefillProgress(done[sequence], len(sequence.request.prompt)))


def _has_leader_reached(sequence: Sequence) -> bool:
    return sequence.leader is not None and sequence.leader.kv.length >= sequence.fork_position


def _find_fork_position(sequence: Sequence) -> int:
    return sequence.leader.kv.find_continue_position(sequence.fork_position) if sequence.leader else 0
