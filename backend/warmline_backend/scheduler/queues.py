"""Who waits, prefills and decodes, and what all of them hold.  Engine thread."""

from collections.abc import Iterator

from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.codecs import CodecKind
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import request_bytes, sequence_bytes
from warmline_backend.scheduler.decode_group import DecodeGroup
from warmline_backend.scheduler.prefix_sharing import PrefixFollowers
from warmline_backend.scheduler.reservations import Reservations

STEPS_PER_BUDGET_CHECK = 32  # how often the budget is looked at while answers grow
# Joining copies a group layer by layer, each old layer freed on the way: at most 1.7 layers were measured on top
# (llama, qwen3_5, deepseek_v32 and a llama of 8 layers, 3,000 tokens each).
LAYERS_COPIED_AT_ONCE = 2


class Queues:
    """All requests of one model by what they do.

    Bytes are counted as buffers are allocated: rows in whole multiples of ROOM_TOKENS, a batch as long as its longest.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.waiting: list[Sequence] = []
        self.followers = PrefixFollowers()
        self.prefilling: list[Sequence] = []
        self.groups: list[DecodeGroup] = []
        self.reservations = Reservations()  # of restores

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.waiting
        yield from self.followers
        yield from self.running

    @property
    def running(self) -> list[Sequence]:
        return [*self.prefilling, *(member for group in self.groups for member in group.sequences)]

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self if sequence.request.id == request_id), None)

    def find_group(self, sequence: Sequence) -> DecodeGroup | None:
        return next((group for group in self.groups if sequence in group.sequences), None)

    @property
    def unattended(self) -> list[Sequence]:
        """Prefills that nobody waits for."""
        return [each for each in self.prefilling if self.followers.is_unattended(each)]

    @property
    def background(self) -> list[Sequence]:
        """Those that hold something until somebody else wants it, whether they compute or wait."""
        holding = [*self.prefilling, *(each for each in self.waiting if each.kv.length)]
        return [each for each in holding if each.request.background]

    @property
    def expendable(self) -> list[Sequence]:
        """All whose end frees memory that nobody would miss."""
        nobodys = self.unattended
        return [*nobodys, *(each for each in self.background if each not in nobodys)]

    @property
    def prefill_candidates(self) -> list[Sequence]:
        """Those that somebody waits for; where there are none, those that go on alone; those in the background only
        where nothing else is computed at all.
        """
        nobodys = self.unattended
        wanted = [each for each in self.prefilling if each not in nobodys]
        alone = [each for each in nobodys if not each.request.background]
        return wanted or alone or ([] if self.has_foreground else nobodys)

    @property
    def has_foreground(self) -> bool:
        """Whether anything is computed that is not in the background."""
        return any(not each.request.background for each in self.running)

    def remove(self, sequence: Sequence) -> None:
        """Take one out, wherever it is; its KV is its own from then on."""
        if (group := self.find_group(sequence)) is not None:
            group.remove(sequence)
            self.groups = [group for group in self.groups if group.sequences]
        else:
            self._remove_unbatched(sequence)

    def discard_batch(self, sequence: Sequence) -> list[Sequence]:
        """Forget one with all that share its batch, whose rows can't be trusted any more, and the rows too.

        Returns them.
        """
        if (group := self.find_group(sequence)) is None:
            self._remove_unbatched(sequence)
            return [sequence]
        self.groups.remove(group)
        return group.dissolve()

    def _remove_unbatched(self, sequence: Sequence) -> None:
        for holding in (self.waiting, self.prefilling, self.followers):
            if sequence in holding:
                holding.remove(sequence)

    # ---- bytes

    @property
    def bytes_held(self) -> int:
        """KV of all requests, padding, the rest of their prompts and what is reserved for restores counted."""
        decoding = sum(map(self._bytes_of_group, self.groups))
        waiting = sum(map(self._bytes_now, self.waiting))
        prefilling = sum(map(self._bytes_of_request, self.prefilling))
        return decoding + waiting + prefilling + self.reservations.bytes_granted

    @property
    def bytes_to_copy(self) -> int:
        """What taking one out of its batch takes on top, for a moment, at most."""
        return max((self.bytes_to_remove(group.sequences[0]) for group in self.groups), default=0)

    def bytes_to_remove(self, sequence: Sequence) -> int:
        """What taking this one out takes on top: it is copied out of a batch, but moved where it is alone."""
        group = self.find_group(sequence)
        return self._bytes_per_row(group) if group and len(group.sequences) > 1 else 0

    def bytes_to_admit(self, sequence: Sequence) -> int:
        """What starting one that waits takes on top of what it holds."""
        return self._bytes_of_request(sequence) - self._bytes_now(sequence)

    @property
    def bytes_expendable(self) -> int:
        """What the end of all that make way would free."""
        return sum(self._bytes_freed(each) for each in self.expendable)

    def _bytes_freed(self, sequence: Sequence) -> int:
        held = self._bytes_of_request(sequence) if sequence in self.prefilling else self._bytes_now(sequence)
        return held - self._bytes_to_save(sequence)

    def _bytes_to_save(self, sequence: Sequence) -> int:
        """What stays of a prefill that is ended, to be saved first: all that it has, and its last state."""
        if self._served.layout.problem or not sequence.request.leaves_resident:
            return 0
        return self._bytes_now(sequence) + self._served.state_bytes

    def bytes_to_merge(self, host: DecodeGroup, newcomer: DecodeGroup) -> int:
        """What one batch of both takes on top of the two of them: padding, and copying at the time or later."""
        hosts, newcomers = len(host.sequences), len(newcomer.sequences)
        before = hosts * self._bytes_per_row(host) + newcomers * self._bytes_per_row(newcomer)
        each = max(self._bytes_per_row(host), self._bytes_per_row(newcomer))
        together = (hosts + newcomers) * each
        layers = max(1, len(self._served.layout.leaves_of_kind(CodecKind.ROWS)))
        return together - before + max(LAYERS_COPIED_AT_ONCE * together // layers, each)

    def _bytes_of_group(self, group: DecodeGroup) -> int:
        rows = len(group.sequences) * self._bytes_per_row(group)
        return rows + sum(map(self._bytes_of_states, group.sequences))

    def _bytes_per_row(self, group: DecodeGroup) -> int:
        """What each row of a batch takes, grown as it will have before the budget is looked at again."""
        soon = (min(each.kv.length + STEPS_PER_BUDGET_CHECK, each.tokens_max) for each in group.sequences)
        return sequence_bytes(self._served, max(group.sequences[0].kv.buffer_rows, *soon))

    def _bytes_now(self, sequence: Sequence) -> int:
        """What one holds that does not decode yet."""
        if not sequence.kv.length:
            return 0
        return sequence_bytes(self._served, sequence.kv.buffer_rows) + self._bytes_of_states(sequence)

    def _bytes_of_states(self, sequence: Sequence, *, include_pending: bool = False) -> int:
        """States at places before its end, and the windows at the one that it will come back to; with those to come."""
        states = len(sequence.kv.checkpoints) + (sequence.pending_checkpoint_count if include_pending else 0)
        windows = bool(sequence.kv.rollback_window[0]) or (include_pending and sequence.needs_rollback_point)
        return states * self._served.state_bytes + windows * self._served.window_bytes

    def _bytes_of_request(self, sequence: Sequence) -> int:
        """What it will hold when a part of its answer is there; at least what it does now."""
        request = sequence.request
        needed = request_bytes(self._served, len(request.prompt), request.params.max_tokens)
        rows = max(sequence_bytes(self._served, sequence.kv.buffer_rows), needed)
        return rows + self._bytes_of_states(sequence, include_pending=True)
