"""Decode groups: sequences that share one batch.  Engine thread.

A batch pads every row to its longest, so sequences share one only while the padding stays small; other groups take
turns.  A sequence alone may get several tokens a step, where a draft of them is right.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.sequence import Sequence, make_decode_batch
from warmline_backend.kv_cache.codecs import flatten, rebuild
from warmline_backend.speculation.draft import Draft
from warmline_backend.speculation.pass_costs import PASS_TOKENS_MAX
from warmline_common.measurement.scheduling import is_padding_small

STEP_TOKENS_MAX = 2  # of a single step after a read
SampledToken = tuple[Sequence, int, mx.array]  # with its id and its log-probabilities [vocabulary]


def can_share_batch(sequences: list[Sequence]) -> bool:
    """True where a batch is possible, and its padding small once all prompts are computed."""
    lengths = [max(each.kv.length, len(each.inputs) - 1) for each in sequences]
    return sequences[0].kv.layout.is_batchable and is_padding_small(lengths)


def count_tokens_left(sequence: Sequence) -> int:
    """Tokens that an answer may still get after the next one."""
    return sequence.answer_tokens_max - sequence.answer.token_count - 1


@dataclass(eq=False)
class DecodeGroup:
    """Sequences in one batch: `sequences[i]` is row i, and its KV reads the batch's cache."""

    batch: DecodeBatch
    sequences: list[Sequence] = field(default_factory=list)
    has_verified: bool = False  # its last step was a pass that verified a draft

    @classmethod
    def from_sequences(cls, sequences: list[Sequence]) -> "DecodeGroup":
        """Make a group of one sequence, or of all that were prefilled in one batch; computes its first step."""
        group = cls(make_decode_batch(sequences), list(sequences))
        group._attach_sequences()
        return group

    def can_accept(self, newcomers: list[Sequence]) -> bool:
        """True where the padding stays small with `newcomers` added."""
        return can_share_batch([*self.sequences, *newcomers])

    def merge(self, other: "DecodeGroup") -> None:
        """Take over all sequences of another group."""
        self._capture_windows(PASS_TOKENS_MAX)
        other._capture_windows(PASS_TOKENS_MAX)
        self.batch.extend(other.batch)
        self.sequences += other.sequences
        self._attach_sequences()

    def split(self, sequence: Sequence) -> "DecodeGroup":
        """Take one sequence out, into a group of its own, where it goes on."""
        row = self.sequences.index(sequence)
        for each in self.sequences:
            each.kv.capture_window()
        alone = DecodeGroup(self.batch.split(row), [sequence])
        self.sequences = [each for each in self.sequences if each is not sequence]
        mx.eval([layer.state for layer in alone.batch.prompt_cache])
        for group in (self, alone):
            group._attach_sequences()
        return alone

    def step(self) -> list[SampledToken]:
        """Sample a token for each sequence, or several for one that is alone; call `commit` afterwards."""
        self._count_pass()
        draft = self._propose_draft()
        self.has_verified = draft is not None or bool(self.batch.uncomputed)
        if self.has_verified:
            return self._verify(draft)
        self._capture_windows(STEP_TOKENS_MAX)
        if len(self.sequences) == 1 and (drafter := self.sequences[0].drafter) is not None:
            drafter.record_pass(1, 1)
        responses = self.batch.next()
        return [
            (sequence, response.token, response.logprobs)
            for sequence, response in zip(self.sequences, responses, strict=True)
        ]

    def commit(self, count: int) -> None:
        """Keep the rows of the first `count` tokens of the last step; those of single steps are kept already."""
        self.batch.commit(count)

    def _count_pass(self) -> None:
        for sequence in self.sequences:
            sequence.timings.passes += 1
            sequence.timings.shared_passes += len(self.sequences) > 1

    def _propose_draft(self) -> Draft | None:
        """Propose a draft for a sequence that is alone; its first token is a guess where the next one is not known."""
        sequence, batch = self.sequences[0], self.batch
        if len(self.sequences) > 1 or sequence.drafter is None or batch.is_read:
            return None
        following = batch.uncomputed if batch.next_token is None else [*batch.uncomputed, batch.next_token]
        most = count_tokens_left(sequence)
        if most < 1:
            return None
        return sequence.drafter.propose(sequence.kv.tokens, following, most, is_next_drawn=batch.next_token is None)

    def _verify(self, draft: Draft | None) -> list[SampledToken]:
        sequence, is_guess = self.sequences[0], self.batch.next_token is None
        drafted = draft.tokens[is_guess:] if draft is not None else []
        self._capture_windows(len(self.batch.uncomputed) + 1 + len(drafted))
        verified = self.batch.verify(drafted)
        accepted = len(verified) - 1
        if draft is not None and sequence.drafter is not None:
            is_right = not is_guess or verified[0][0] == draft.tokens[0]
            sequence.drafter.record(draft, is_guess + accepted if is_right else 0)
            sequence.timings.record_draft(draft.source, len(drafted), accepted)
            sequence.drafter.record_pass(len(verified), 1 + len(drafted))
        return [(sequence, token, logprobs) for token, logprobs in verified]

    def read_sampled(self) -> list[SampledToken]:
        """As `step`, but of the tokens that are sampled already, and without beginning the step after them."""
        self._count_pass()
        tokens, logprobs = self.batch.read_sampled()
        return list(zip(self.sequences, tokens, logprobs, strict=True))

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out together; the KV of each owns its layers afterwards."""
        rows = {self.sequences.index(sequence): sequence for sequence in sequences}
        self.batch.compute_rows()
        if any(sequence.answer_tokens_max > 1 for sequence in sequences):  # else no row of an answer is worth a step
            self.batch.complete_read()
        for sequence in sequences:
            sequence.kv.capture_window()
        held = list(self.batch.prompt_cache)  # moved: `filter` clears only the batch's own list
        is_alone = len(self.sequences) == 1 and sequences[0].kv.has_single_windows
        extracted = {row: held if is_alone else self._extract_layers(row) for row in rows}
        # Of the last sequence, too: `filter` left it lazy, with the batch.
        mx.eval([layer.state for layers in extracted.values() for layer in layers])
        for row, sequence in rows.items():
            sequence.kv.index, sequence.kv.layers = 0, extracted[row]
        self.batch.filter([row for row in range(len(self.batch.uids)) if row not in rows])
        # Last: if `filter` fails, `sequences` still matches the batch's rows.
        self.sequences = [sequence for row, sequence in enumerate(self.sequences) if row not in rows]
        self._attach_sequences()

    def _extract_layers(self, row: int) -> list[Any]:
        """Lazy copies of one row's layers."""
        layout = self.sequences[row].kv.layout
        batched = (leaf for _, leaf in flatten(self.batch.prompt_cache))
        alone = (leaf.codec.extract_sequence(held, row) for leaf, held in zip(layout.leaves, batched, strict=True))
        return rebuild(layout.template, alone)

    def dissolve(self) -> list[Sequence]:
        """Return all sequences and drop their rows, also for other holders of this group."""
        sequences, self.sequences = self.sequences, []
        self.batch.prompt_cache.clear()
        return sequences

    def _capture_windows(self, tokens: int) -> None:
        """Capture windows that `tokens` more could push rows out of."""
        for sequence in self.sequences:
            if sequence.kv.needs_capture(tokens):
                sequence.kv.capture_window()

    def _attach_sequences(self) -> None:
        for n, sequence in enumerate(self.sequences):
            sequence.kv.index, sequence.kv.layers = n, self.batch.prompt_cache
