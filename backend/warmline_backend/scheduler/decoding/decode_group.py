"""Decode groups: sequences that share one batch.  Engine thread.

A batch computes every row as long as its longest, so sequences share one only while the padding stays small; other
groups take turns.  A step may give a sequence several tokens, where a draft of them is right: in a batch, too, unless
the model has layers that can't take back another number of tokens of each sequence.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from warmline_backend.generation.decode_batch import DecodeBatch
from warmline_backend.generation.sequence import Sequence, make_decode_batch
from warmline_backend.kv_cache.codecs import flatten, rebuild
from warmline_backend.speculation.draft import Draft
from warmline_backend.speculation.drafter import ProposedDraft
from warmline_backend.speculation.model_drafter import ModelDrafter
from warmline_backend.speculation.pass_costs import PASS_TOKENS_MAX, PassYield, StepCosts, UsualPass
from warmline_common.measurement.scheduling import is_padding_small

log = logging.getLogger(__name__)

STEP_TOKENS_MAX = 2  # of a single step after a read
SEARCHES_MAX = 8  # in a step, for drafts of sequences that had none of late
SampledToken = tuple[Sequence, int, mx.array]  # with its id and its log-probabilities [vocabulary]


def can_share_batch(sequences: list[Sequence]) -> bool:
    """True where a batch is possible, and its padding small once all prompts are computed."""
    lengths = [max(each.kv.length, len(each.inputs) - 1) for each in sequences]
    return sequences[0].kv.layout.is_batchable and is_padding_small(lengths)


def propose_draft(sequence: Sequence, following: list[int], *, is_next_drawn: bool) -> ProposedDraft | None:
    """Propose a draft for a sequence after tokens `following` those computed; see `Drafter.propose`.

    A failure of its sources, such as its grammar, takes its drafts from this sequence alone.
    """
    most = count_tokens_left(sequence)
    if sequence.drafter is None or most < 1:
        return None
    try:
        return sequence.drafter.propose(sequence.kv.tokens, following, most, is_next_drawn=is_next_drawn)
    except Exception:
        log.warning("request %s gets no drafts any more", sequence.request.id, exc_info=True)
        sequence.drafter = None
        return None


def count_tokens_left(sequence: Sequence) -> int:
    """Tokens that an answer may still get after the next one."""
    return sequence.answer_tokens_max - sequence.answer.token_count - 1


@dataclass(eq=False)
class DecodeGroup:
    """Sequences in one batch: `sequences[i]` is row i, and its KV reads the batch's cache."""

    batch: DecodeBatch
    sequences: list[Sequence] = field(default_factory=list)
    has_verified: bool = False  # its last step was a pass that verified drafts
    _verified: list[tuple[Sequence, str, int, int]] = field(default_factory=list)  # drafts of the last step, by source
    _model_tokens: int = 0  # that the draft model drafted of each sequence for the last step
    _last_step: tuple[StepCosts, int, int, float] | None = None  # sequences, width, and cost of a pass, by PassCosts
    usual: UsualPass | None = None  # of its steps of late; None where nothing is drafted, or before the first step

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
        self.usual = None
        self._attach_sequences()

    def split(self, sequence: Sequence) -> "DecodeGroup":
        """Take one sequence out, into a group of its own, where it goes on."""
        row = self.sequences.index(sequence)
        for each in self.sequences:
            each.kv.capture_window()
        alone = DecodeGroup(self.batch.split(row), [sequence])
        self.sequences = [each for each in self.sequences if each is not sequence]
        self.usual = None
        mx.eval([layer.state for layer in alone.batch.prompt_cache])
        for group in (self, alone):
            group._attach_sequences()
        return alone

    def step(self) -> list[SampledToken]:
        """Sample a token or more for each sequence; call `commit` afterwards."""
        self._count_pass()
        self._model_tokens = 0
        drafts = self._choose_drafts()
        self.has_verified = any(drafts) or bool(self.batch.uncomputed)
        if self.has_verified:
            return self._verify(drafts)
        self._capture_windows(STEP_TOKENS_MAX)
        self._record_usual(len(self.sequences), width=1)
        responses = self.batch.next()
        return [
            (sequence, response.token, response.logprobs)
            for sequence, response in zip(self.sequences, responses, strict=True)
        ]

    def commit(self, counts: Mapping[Sequence, int]) -> None:
        """Keep the rows of so many tokens of the last step; those of single steps are kept already."""
        self.batch.commit([counts[sequence] for sequence in self.sequences])
        for sequence, source, drafted, accepted in self._verified:
            sequence.timings.record_draft(source, drafted, max(0, min(accepted, counts[sequence] - 1)))
        self._verified.clear()

    def _count_pass(self) -> None:
        for sequence in self.sequences:
            sequence.timings.passes += 1
            sequence.timings.shared_passes += len(self.sequences) > 1

    @property
    def can_draft(self) -> bool:
        """True where a pass may verify drafts: of one sequence, or where each can take back what is wrong."""
        is_drafting = any(sequence.drafter is not None for sequence in self.sequences)
        return is_drafting and (len(self.sequences) == 1 or self.sequences[0].kv.layout.has_rows_alone)

    def _choose_drafts(self) -> list[Draft | None]:
        """Choose the drafts of the next pass, by sequence, as long as they yield most for the time."""
        batch, speculation = self.batch, self.sequences[0].speculation
        nothing: list[Draft | None] = [None] * len(self.sequences)
        if batch.is_read or speculation is None or not self.can_draft:
            return nothing
        proposed = [self._propose(row) if self._is_searched(row) else None for row in range(len(self.sequences))]
        offers = [each.offer for each in proposed if each is not None]
        length = speculation.costs.choose_length(len(batch.uncomputed) + 1, offers, len(self.sequences))
        drafts = [each.cut(length) if each is not None else None for each in proposed] if length else nothing
        if speculation.model is None or (any(drafts) and batch.next_tokens is None):  # these begin with a guess
            return drafts
        return self._add_model_drafts(speculation.model, drafts)

    def _add_model_drafts(self, model: ModelDrafter, drafts: list[Draft | None]) -> list[Draft | None]:
        """Ask the draft model for sequences without a draft, where one is worth it."""
        batch, count = self.batch, len(self.sequences)
        lengths = [
            each.drafter.choose_model_length(len(batch.uncomputed) + 1, count_tokens_left(each), count)
            if draft is None and each.drafter is not None
            else 0
            for each, draft in zip(self.sequences, drafts, strict=True)
        ]
        if not any(lengths):
            return drafts
        next_tokens = batch.read_next()
        self._model_tokens = max(lengths)
        proposed = model.propose(batch.prompt_cache, [[*batch.uncomputed, each] for each in next_tokens], max(lengths))
        added = list(drafts)
        for row, length in enumerate(lengths):
            if length and (drafter := self.sequences[row].drafter) is not None:
                added[row] = drafter.make_model_draft(proposed[row][:length], next_tokens[row])
        return added

    def _is_searched(self, row: int) -> bool:
        """True where a draft is looked for: in each step while there are some, else in turns; a search takes time."""
        sequence, turns = self.sequences[row], -(-len(self.sequences) // SEARCHES_MAX)
        is_drafting = sequence.drafter is not None and sequence.drafter.has_proposed
        return is_drafting or row % turns == sequence.timings.passes % turns

    def _propose(self, row: int) -> ProposedDraft | None:
        """Propose a draft for a sequence; its first token is a guess where the next one is not known."""
        sequence, batch = self.sequences[row], self.batch
        is_next_drawn = batch.next_tokens is None
        following = [*batch.uncomputed, *(() if batch.next_tokens is None else [batch.next_tokens[row]])]
        return propose_draft(sequence, following, is_next_drawn=is_next_drawn)

    def _verify(self, drafts: list[Draft | None]) -> list[SampledToken]:
        is_guess = self.batch.next_tokens is None
        drafted = [draft.tokens[is_guess:] if draft is not None else [] for draft in drafts]
        width = len(self.batch.uncomputed) + 1 + max(map(len, drafted))
        self._capture_windows(width)
        verified = self.batch.verify(drafted)
        for sequence, draft, tokens in zip(self.sequences, drafts, verified, strict=True):
            if draft is not None and sequence.drafter is not None:
                accepted, is_right = len(tokens) - 1, not is_guess or tokens[0][0] == draft.tokens[0]
                sequence.drafter.record(draft, is_guess + accepted if is_right else 0)
                self._verified.append((sequence, draft.source, len(draft.tokens) - is_guess, accepted))
        self._record_usual(sum(map(len, verified)), width)
        return [(sequence, *drawn) for sequence, row in zip(self.sequences, verified, strict=True) for drawn in row]

    def _record_usual(self, tokens: int, width: int) -> None:
        """Record a step that yielded so many tokens, and computed `width` of each sequence."""
        if (speculation := self.sequences[0].speculation) is None:
            return
        costs, count = speculation.costs, len(self.sequences)
        if self.has_verified:
            cost = costs.pass_cost(count, count * width) + self._model_tokens * costs.draft_cost(count)
        else:
            cost = costs.cost(count)
        latest = UsualPass(PassYield(tokens, cost), width)
        self.usual = latest if self.usual is None else self.usual.approach(latest)
        drafting = self._model_tokens * costs.passes.find_draft_cost(count)
        self._last_step = (costs, count, width, costs.passes.cost(count * width) + drafting)

    def record_duration(self, seconds: float) -> None:
        """Record how long the last step took, until its tokens were dispatched."""
        if self._last_step is None:
            return
        costs, sequences, width, cost = self._last_step
        if self.has_verified:
            costs.record_pass(sequences, width, cost, seconds)
        else:
            costs.record_step(sequences, seconds)

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
        self.usual = None
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
