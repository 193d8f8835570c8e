"""Followers: requests that wait for another's prefill instead of computing the same tokens.  Engine thread.

A follower holds no KV while it waits.  It starts from a copy of its leader's first rows once they are computed.  Where
its leader ends before that, one of the followers leads: it goes on with the leader's KV, and the others follow it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from warmline_backend.generation.events import PrefillProgress
from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.residents import ResidentMismatchError

HEIRS_MAX = 256  # ended leaders whose heir is remembered


class PrefixFollowers:
    """All followers; a leader stands before its own followers, else they are in order of arrival."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []
        self._heir_ids: OrderedDict[str, str] = OrderedDict()  # by the id of the leader that has ended

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, leader: Sequence) -> None:
        """Have `sequence` wait for the first `reuse_tokens` tokens of `leader`, or as many as it can still be given.

        Raises ResidentMismatchError where tenant or tokens differ, or the leader can't be copied there any more.
        """
        self._assign_leader(sequence, leader, sequence.request.reuse_tokens)
        self._waiting.append(sequence)

    def _assign_leader(self, sequence: Sequence, leader: Sequence, reuse_tokens: int) -> None:
        """As `add`, without a change of the order."""
        request = sequence.request
        position = sequence.kv.floor_to_grid(reuse_tokens)
        while leader.leader is not None and position <= leader.fork_position:
            leader = leader.leader  # rows before a follower's fork position are its own leader's
        name = leader.request.id
        if leader.request.root != request.root:
            raise ResidentMismatchError(f"request {name} is of another tenant")
        is_prefix = leader.all_tokens[:position] == request.prompt[:position]
        if not (0 < reuse_tokens < len(request.prompt) and is_prefix):
            raise ResidentMismatchError(f"request {name} does not compute the prompt's first {position} tokens")
        if leader.kv.layout.problem or not position or not (fork_position := leader.choose_fork_position(position)):
            raise ResidentMismatchError(f"request {name} can't be copied at {position} tokens, or not any more")
        sequence.leader, sequence.fork_position = leader, fork_position

    def remove(self, sequence: Sequence) -> None:
        """Remove a follower, and the state that its leader kept for it alone."""
        self._waiting.remove(sequence)
        leader, sequence.leader = sequence.leader, None
        if leader and not any(
            each.leader is leader and each.fork_position == sequence.fork_position for each in self._waiting
        ):
            leader.remove_fork_position(sequence.fork_position)

    def find_heir(self, leader: Sequence) -> Sequence | None:
        """Find the follower that shares most with a leader: what it computes is of use to all others."""
        direct = (each for each in self._waiting if each.leader is leader)
        return max(direct, key=lambda each: each.request.reuse_tokens, default=None)

    def replace_leader(self, ended: Sequence, heir: Sequence, leader: Sequence | None) -> None:
        """Have the followers of an `ended` leader follow `heir`, one of them.

        The heir itself follows `leader`, which the ended one followed; without one it is removed, to be queued with the
        KV that it has got.  Followers for which this is impossible still follow the ended leader.  Raises
        ResidentMismatchError where the heir can't follow `leader`; nothing has changed then.
        """
        place = next(place for place, each in enumerate(self._waiting) if each.leader is ended)
        if leader is not None:
            reuse_tokens = min(heir.request.reuse_tokens, ended.request.reuse_tokens)
            self._assign_leader(heir, leader, reuse_tokens)
            heir.request = replace(heir.request, reuse_tokens=reuse_tokens)
        self._waiting.remove(heir)
        if leader is None:
            heir.leader = None
        else:
            self._waiting.insert(place, heir)
        for each in self._waiting:
            if each.leader is ended:
                with suppress(ResidentMismatchError):
                    self._assign_leader(each, heir, each.request.reuse_tokens)
        heir.keep_fork_positions(each.fork_position for each in self._waiting if each.leader is heir)
        self._heir_ids[ended.request.id] = heir.request.id
        if len(self._heir_ids) > HEIRS_MAX:
            self._heir_ids.popitem(last=False)

    def find_leader_id(self, request_id: str) -> str:
        """Find the id of the request that leads in the place of `request_id`, which may have ended; else that id."""
        for _ in range(HEIRS_MAX):
            if (heir_id := self._heir_ids.get(request_id)) is None:
                break
            request_id = heir_id
        return request_id

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
