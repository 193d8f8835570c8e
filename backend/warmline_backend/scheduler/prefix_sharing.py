"""Followers: requests that wait for another's prefill instead of computing the same tokens.  Engine thread.

A follower holds no KV while it waits.  It starts from a copy of its leader's first rows once they are computed.
"""

from collections.abc import Iterator

from warmline_backend.generation.events import PrefillProgress
from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.residents import ResidentMismatchError


class PrefixFollowers:
    """All followers in order of arrival: a leader stands before its own followers."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, leader: Sequence) -> None:
        """Have `sequence` wait for the first `reuse_tokens` tokens of `leader`, or as many as it can still be given.

        Raises ResidentMismatchError where tenant or tokens differ, or the leader can't be copied there any more.
        """
        request = sequence.request
        position = sequence.kv.floor_to_grid(request.reuse_tokens)
        while leader.leader is not None and position <= leader.fork_position:
            leader = leader.leader  # rows before a follower's fork position are its own leader's
        name = leader.request.id
        if leader.request.root != request.root:
            raise ResidentMismatchError(f"request {name} is of another tenant")
        is_prefix = leader.all_tokens[:position] == request.prompt[:position]
        if not (0 < request.reuse_tokens < len(request.prompt) and is_prefix):
            raise ResidentMismatchError(f"request {name} does not compute the prompt's first {position} tokens")
        if leader.kv.layout.problem or not position or not (fork_position := leader.choose_fork_position(position)):
            raise ResidentMismatchError(f"request {name} can't be copied at {position} tokens, or not any more")
        sequence.leader, sequence.fork_position = leader, fork_position
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a follower, and the state that its leader kept for it alone."""
        self._waiting.remove(sequence)
        leader, sequence.leader = sequence.leader, None
        if leader and not any(
            each.leader is leader and each.fork_position == sequence.fork_position for each in self._waiting
        ):
            leader.remove_fork_position(sequence.fork_position)

    def has_followers(self, sequence: Sequence) -> bool:
        return any(each.leader is sequence for each in self._waiting)

    def is_unattended(self, sequence: Sequence) -> bool:
        """True where neither a client nor a follower waits for the sequence's KV."""
        return (sequence.detached or sequence.request.background) and not self.has_followers(sequence)

    @property
    def ready(self) -> list[Sequence]:
        """Followers whose leader can be copied now."""
        return [each for each in self._waiting if _has_leader_reached(each) and _find_fork_position(each)]

    @property
    def stale(self) -> list[Sequence]:
        """Followers whose leader is past their position and can't be copied there any more."""
        return [each for each in self._waiting if _has_leader_reached(each) and not _find_fork_position(each)]

    def pop_followers(self, leader: Sequence) -> list[Sequence]:
        """Remove and return all direct and indirect followers of an ended leader."""
        ended: set[Sequence | None] = {leader}
        for sequence in self._waiting:
            if sequence.leader in ended:
                ended.add(sequence)
        orphaned = [sequence for sequence in self._waiting if sequence in ended]
        self._waiting = [sequence for sequence in self._waiting if sequence not in orphaned]
        return orphaned

    def notify_progress(self, leader: Sequence) -> None:
        """Send a leader's prefill progress to its direct and indirect followers."""
        done: dict[Sequence | None, int] = {leader: leader.kv.length}
        for sequence in self._waiting:
            if sequence.leader in done:
                done[sequence] = min(done[sequence.leader], sequence.fork_position)
                sequence.request.listener(PrefillProgress(done[sequence], len(sequence.request.prompt)))


def _has_leader_reached(sequence: Sequence) -> bool:
    return sequence.leader is not None and sequence.leader.kv.length >= sequence.fork_position


def _find_fork_position(sequence: Sequence) -> int:
    return sequence.leader.kv.find_continue_position(sequence.fork_position) if sequence.leader else 0
