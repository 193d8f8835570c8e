"""Decode groups: sequences that share one batch.  Engine thread.

A batch pads every row to its longest, so sequences share one only while the padding stays small; other groups take
turns.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.sequence import Sequence, make_decode_batch
from warmline_backend.kv_cache.codecs import flatten, rebuild
from warmline_common.measurement.scheduling import is_padding_small

SampledToken = tuple[Sequence, int, mx.array]  # with its id and its log-probabilities [vocabulary]


def can_share_batch(sequences: list[Sequence]) -> bool:
    """True where a batch is possible, and its padding small once all prompts are computed."""
    lengths = [max(each.kv.length, len(each.inputs) - 1) for each in sequences]
    return sequences[0].kv.layout.is_batchable and is_padding_small(lengths)


@dataclass(eq=False)
class DecodeGroup:
    """Sequences in one batch: `sequences[i]` is row i, and its KV reads the batch's cache."""

    batch: DecodeBatch
    sequences: list[Sequence] = field(default_factory=list)

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
        self._capture_windows()
        other._capture_windows()
        self.batch.extend(other.batch)
        self.sequences += other.sequences
        self._attach_sequences()

    def step(self) -> list[SampledToken]:
        """Sample one token for each sequence."""
        self._capture_windows()
        responses = self.batch.next()
        return [
            (sequence, response.token, response.logprobs)
            for sequence, response in zip(self.sequences, responses, strict=True)
        ]

    def read_sampled(self) -> list[SampledToken]:
        """As `step`, but of the tokens that are sampled already, and without beginning the step after them."""
        tokens, logprobs = self.batch.read_sampled()
        return list(zip(self.sequences, tokens, logprobs, strict=True))

    def remove(self, sequences: list[Sequence]) -> None:
        """Take sequences out together; the KV of each owns its layers afterwards."""
        rows = {self.sequences.index(sequence): sequence for sequence in sequences}
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

    def _capture_windows(self) -> None:
        for sequence in self.sequences:
            if sequence.kv.needs_capture:
                sequence.kv.capture_window()

    def _attach_sequences(self) -> None:
        for n, sequence in enumerate(self.sequences):
            sequence.kv.index, sequence.kv.layers = n, self.batch.prompt_cache
