"""Decode groups: sequences that share one batch.  Engine thread.

A batch pads every row to its longest, so sequences share one only while the padding stays small; other groups take
turns.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.codecs import flatten, rebuild

PADDING_MAX = 1.25  # rows computed / rows needed


@dataclass(eq=False)
class DecodeGroup:
    """Sequences in one batch: `sequences[i]` is row i, and its KV reads the batch's cache."""

    batch: DecodeBatch
    sequences: list[Sequence] = field(default_factory=list)

    @classmethod
    def from_sequence(cls, sequence: Sequence) -> "DecodeGroup":
        """Make a group of one; computes its first step."""
        group = cls(sequence.make_decode_batch(), [sequence])
        group._attach_sequences()
        return group

    def can_accept(self, sequence: Sequence) -> bool:
        """True where the padding stays within PADDING_MAX with `sequence` added."""
        lengths = [member.kv.length for member in self.sequences] + [sequence.kv.length]
        return sequence.kv.layout.is_batchable and len(lengths) * max(lengths) <= PADDING_MAX * sum(lengths)

    def merge(self, other: "DecodeGroup") -> None:
        """Take over all sequences of another group."""
        self.batch.extend(other.batch)
        self.sequences += other.sequences
        self._attach_sequences()

    def step(self) -> list[tuple[Sequence, int, mx.array]]:
        """Sample one token for each sequence: (sequence, token id, log-probabilities [vocabulary])."""
        for sequence in self.sequences:
            if sequence.kv.needs_capture:
                sequence.kv.capture_window()
        responses = self.batch.next()
        return [
            (sequence, response.token, response.logprobs)
            for sequence, response in zip(self.sequences, responses, strict=True)
        ]

    def remove(self, sequence: Sequence) -> None:
        """Take one sequence out; its KV owns its layers afterwards."""
        row = self.sequences.index(sequence)
        sequence.kv.capture_window()
        layers = list(self.batch.prompt_cache)  # moved: `filter` clears only the batch's own list
        if len(self.sequences) > 1:
            layout = sequence.kv.layout
            batched = (leaf for _, leaf in flatten(layers))
            alone = (leaf.codec.extract_sequence(held, row) for leaf, held in zip(layout.leaves, batched, strict=True))
            layers = rebuild(layout.template, alone)
        mx.eval([layer.state for layer in layers])  # of the last sequence, too: `filter` left it lazy, with the batch
        sequence.kv.index, sequence.kv.layers = 0, layers
        self.batch.filter([n for n in range(len(self.batch.uids)) if n != row])
        del self.sequences[row]  # last: if `filter` fails, `sequences` still matches the batch's rows
        self._attach_sequences()

    def dissolve(self) -> list[Sequence]:
        """Return all sequences and drop their rows, also for other holders of this group."""
        sequences, self.sequences = self.sequences, []
        self.batch.prompt_cache.clear()
        return sequences

    def _attach_sequences(self) -> None:
        for n, sequence in enumerate(self.sequences):
            sequence.kv.index, sequence.kv.layers = n, self.batch.prompt_cache
