"""Sharing of batches: sequences share one where that is faster than drafts of their own, and fits.  Engine thread.

A batch computes a token for each of its sequences in one pass.  A sequence that is alone may get several in one, while
a text repeats.  What both yield is compared by the measured costs of passes; a batch of n sequences costs what a pass
of n tokens does.
"""

from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup, count_tokens_left, propose_draft
from warmline_backend.scheduler.finish import Finisher
from warmline_backend.scheduler.queues import Queues
from warmline_backend.speculation.pass_costs import PassYield, StepCosts, UsualPass

SPLIT_GAIN_MIN = 1.2  # of the tokens for the time: its rows are copied, and may have to be copied back
SPLIT_TOKENS_MIN = 32  # that its answer may still get


class GroupMerger:
    """Merges and splits groups of one engine; in exact mode none: a row's bits depend on the number of rows.

    `costs`: None where nothing is drafted.
    """

    def __init__(
        self, queues: Queues, residents: Residents, finisher: Finisher, costs: StepCosts | None, *, is_exact: bool
    ) -> None:
        self._queues, self._residents, self._finisher = queues, residents, finisher
        self._costs, self._is_exact = costs, is_exact

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
        if self._costs is None:
            return True
        one, other = _find_usual(host, self._costs), _find_usual(newcomer, self._costs)
        count = len(host.sequences) + len(newcomer.sequences)
        together = [self._costs.expect_yield(count)]
        if host.sequences[0].kv.layout.has_rows_alone:  # their drafts go on
            cost = self._costs.pass_cost(count, round(count * max(one.width, other.width)))
            together.append(PassYield(one.average.tokens + other.average.tokens, cost))
        return max(each.speed for each in together) >= (one.average + other.average).speed

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
            if self._costs is not None and len(group.sequences) > 1:
                self._split(self._costs, group)

    def _split(self, costs: StepCosts, group: DecodeGroup) -> None:
        rest = _expect_rest(group, costs)
        for sequence in group.sequences:
            alone = _expect_alone(sequence, costs)
            if alone is None:
                continue
            together = _expect_together(group, alone, costs)
            if (rest + alone.average).speed < SPLIT_GAIN_MIN * together.speed:
                continue
            if not self._residents.make_room(self._queues.bytes_held + self._queues.bytes_to_remove([sequence])):
                continue
            try:
                own = group.split(sequence)
            except Exception as error:  # noqa: BLE001  half split, none of them can be trusted
                members = [*group.dissolve()]
                self._queues.groups.remove(group)
                self._finisher.discard(members if sequence in members else [*members, sequence], error)
            else:
                own.usual = alone
                self._queues.groups.append(own)
            return


def _find_usual(group: DecodeGroup, costs: StepCosts) -> UsualPass:
    """The usual pass of a group; before its first one, a step without drafts."""
    return group.usual or UsualPass(costs.expect_yield(len(group.sequences)), 1)


def _expect_together(group: DecodeGroup, alone: UsualPass, costs: StepCosts) -> PassYield:
    """Expected yield of a group's passes: as of late, or where all get as many tokens as one would `alone`."""
    usual = _find_usual(group, costs).average
    if not group.sequences[0].kv.layout.has_rows_alone:
        return usual
    count = len(group.sequences)
    tokens = max(count - 1 + alone.average.tokens, usual.tokens)
    drafted = PassYield(tokens, costs.pass_cost(count, round(count * alone.width)))
    return max(usual, drafted, key=lambda each: each.speed)


def _expect_rest(group: DecodeGroup, costs: StepCosts) -> PassYield:
    """Expected yield of a group's passes without one of its sequences."""
    count, usual = len(group.sequences) - 1, _find_usual(group, costs)
    plain = costs.expect_yield(count)
    if usual.width <= 1:
        return plain
    tokens = usual.average.tokens * count / (count + 1)
    drafted = PassYield(tokens, costs.pass_cost(count, round(count * usual.width)))
    return max(plain, drafted, key=lambda each: each.speed)


def _expect_alone(sequence: Sequence, costs: StepCosts) -> UsualPass | None:
    """Expected passes of the sequence alone; None where it drafts nothing, or is about to end."""
    if count_tokens_left(sequence) < SPLIT_TOKENS_MIN:
        return None
    proposed = propose_draft(sequence, [], is_next_drawn=True)
    if proposed is not None:
        return UsualPass(*costs.expect_pass(proposed.offer))
    by_model = sequence.drafter.offer_by_model() if sequence.drafter is not None else None
    return UsualPass(*costs.expect_pass(by_model, by_model=True)) if by_model is not None else None
