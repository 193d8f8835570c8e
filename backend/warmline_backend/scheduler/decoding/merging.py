"""Sharing of batches: sequences share one where that is faster than drafts of their own, and fits.  Engine thread.

A batch computes a token for each of its sequences in one pass.  A sequence that is alone may get several in one, while
a text repeats.  What both yield is compared by the measured costs of passes; a batch of n sequences costs what a pass
of n tokens does.
"""

import logging

from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup, count_tokens_left
from warmline_backend.scheduler.finish import Finisher
from warmline_backend.scheduler.queues import Queues
from warmline_backend.speculation.pass_costs import PassCosts, PassYield

log = logging.getLogger(__name__)

SPLIT_GAIN_MIN = 1.2  # of the tokens for the time: its rows are copied, and may have to be copied back
STEP_WEIGHT = 0.1  # of the last step, in the usual duration
SPLIT_TOKENS_MIN = 32  # that its answer may still get


class StepCosts:
    """Costs of steps of several sequences, in single steps of one: as seen of late, else as passes of that width."""

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        self._seconds: dict[int, float] = {1: costs.step_s}

    def record(self, sequences: int, seconds: float) -> None:
        usual = self._seconds.get(sequences, seconds)
        self._seconds[sequences] = usual + STEP_WEIGHT * (seconds - usual)

    def expect_yield(self, sequences: int) -> PassYield:
        """Yield of one step of so many sequences."""
        seconds = self._seconds.get(sequences)
        cost = self._costs.cost(sequences) if seconds is None else seconds / self._seconds[1]
        return PassYield(sequences, cost)


class GroupMerger:
    """Merges and splits groups of one engine; in exact mode none: a row's bits depend on the number of rows.

    `costs`: None where nothing is drafted.
    """

    def __init__(
        self, queues: Queues, residents: Residents, finisher: Finisher, costs: PassCosts | None, *, is_exact: bool
    ) -> None:
        self._queues, self._residents, self._finisher = queues, residents, finisher
        self._steps, self._is_exact = None if costs is None or is_exact else StepCosts(costs), is_exact

    def record_step(self, sequences: int, seconds: float) -> None:
        """Record the duration of a single step of so many sequences."""
        if self._steps is not None:
            self._steps.record(sequences, seconds)

    def find_host(self, newcomer: DecodeGroup) -> DecodeGroup | None:
        """The first group to merge `newcomer` into: with little padding, and with room for it and for copies."""
        groups = self._queues.groups
        if self._is_exact or newcomer not in groups or newcomer.sequences[0].request.background:
            return None
        return next((host for host in groups if host is not newcomer and self._can_merge(host, newcomer)), None)

    def _can_merge(self, host: DecodeGroup, newcomer: DecodeGroup) -> bool:
        if not host.can_accept(newcomer.sequences) or not self._is_faster_together(host, newcomer):
            return False
        queues = self._queues
        return self._residents.make_room(queues.bytes_held + queues.bytes_to_merge(host, newcomer))

    def _is_faster_together(self, host: DecodeGroup, newcomer: DecodeGroup) -> bool:
        if self._steps is None:
            return True
        together = self._steps.expect_yield(len(host.sequences) + len(newcomer.sequences))
        apart = self._find_yield(self._steps, host) + self._find_yield(self._steps, newcomer)
        return together.speed >= apart.speed

    @staticmethod
    def _find_yield(steps: StepCosts, group: DecodeGroup) -> PassYield:
        drafter = group.sequences[0].drafter
        if len(group.sequences) == 1 and drafter is not None:
            return drafter.usual_yield
        return steps.expect_yield(len(group.sequences))

    def merge(self, host: DecodeGroup, newcomer: DecodeGroup) -> None:
        """Merge `newcomer` into `host`; where that fails, the sequences of both are lost."""
        self._queues.groups.remove(newcomer)
        members = [*host.sequences, *newcomer.sequences]
        try:
            host.merge(newcomer)
        except Exception as error:  # noqa: BLE001  half merged, neither can be trusted
            self._queues.groups.remove(host)
            host.dissolve()
            newcomer.dissolve()
            self._finisher.discard(members, error)

    def split_groups(self) -> None:
        """Give sequences groups of their own, one of each group, where their drafts are worth more than the batch."""
        for group in list(self._queues.groups):
            if self._steps is not None and len(group.sequences) > 1:
                self._split(self._steps, group)

    def _split(self, steps: StepCosts, group: DecodeGroup) -> None:
        count = len(group.sequences)
        together, rest = steps.expect_yield(count), steps.expect_yield(count - 1)
        for sequence in group.sequences:
            alone = self._expect_alone(sequence)
            if alone is None or (rest + alone).speed < SPLIT_GAIN_MIN * together.speed:
                continue
            if not self._residents.make_room(self._queues.bytes_held + self._queues.bytes_to_remove([sequence])):
                continue
            try:
                self._queues.groups.append(group.split(sequence))
            except Exception as error:  # noqa: BLE001  half split, none of them can be trusted
                members = [*group.dissolve()]
                self._queues.groups.remove(group)
                self._finisher.discard(members if sequence in members else [*members, sequence], error)
            else:
                assert sequence.drafter is not None
                sequence.drafter.usual_yield = alone
            return

    def _expect_alone(self, sequence: Sequence) -> PassYield | None:
        """Expect the yield of passes of the sequence alone; None where it drafts nothing, or is about to end."""
        most = count_tokens_left(sequence)
        if sequence.drafter is None or most < SPLIT_TOKENS_MIN:
            return None
        try:
            return sequence.drafter.expect_yield(sequence.kv.tokens, most)
        except Exception:  # of its grammar: the fault of this sequence alone, and of its drafts
            log.warning("request %s gets no drafts any more", sequence.request.id, exc_info=True)
            sequence.drafter = None
            return None
