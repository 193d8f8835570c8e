"""Drafts of a small model that reads what the served model reads.  Engine thread.

Its KV is part of each sequence's cache: a pass of the served model computes its rows, too.  To draft, it goes on from
them, token by token, and is waited for once, at the end; what it writes meanwhile is dropped, and the pass that
verifies the draft writes the rows of all its tokens.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from warmline_backend.kv_cache.codecs import flatten, rebuild
from warmline_backend.model.drafted_model import DraftModel
from warmline_backend.speculation.pass_costs import DraftOffer, PassCosts, StepCosts

MODEL_TOKENS_MAX = 16  # of a draft
TRIAL_TOKENS = 4  # of a draft that is tried though none is worth it by what is known
TRIAL_ACCEPTANCE = 0.9  # nothing is tried where not even this many right tokens would be worth it
PAUSE_TOKENS_MIN, PAUSE_TOKENS_MAX = 64, 1024  # between two trials: it doubles with each that fails


def is_worth_asking(costs: PassCosts) -> bool:
    """True where TRIAL_ACCEPTANCE would gain something by these costs: else it may be asked where steps take longer."""
    return bool(costs.choose_length(1, [DraftOffer(TRIAL_TOKENS, TRIAL_ACCEPTANCE)], token_cost=costs.draft_step))


class ModelDrafter:
    """Drafter of one draft model, for all answers.  `vocabulary_size`: ids that the served model knows."""

    def __init__(self, draft: DraftModel, vocabulary_size: int) -> None:
        self._draft, self._vocabulary_size = draft, vocabulary_size

    def make_lengths(self, costs: StepCosts, position: int) -> "ModelDraftLengths":
        """Make the lengths of the drafts of an answer that begins at this position."""
        return ModelDraftLengths(costs, position, self._draft.context_tokens_max)

    def propose(self, layers: list[Any], following: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Likeliest `count` tokens of each sequence after those of `layers`, a cache of both models, and then those
        `following`, which have no rows yet.  The cache stays as it is.
        """
        layout = self._draft.layout
        own = [leaf for _, leaf in flatten(self._draft.select_layers(layers))]
        scratch = [leaf.codec.make_scratch(held) for leaf, held in zip(layout.leaves, own, strict=True)]
        drafting = rebuild(layout.template, iter(scratch))
        tokens, drafted = mx.array([list(row) for row in following]), []
        for _ in range(count):
            logits = self._draft.compute(tokens, drafting)[:, -1, : self._vocabulary_size]
            for leaf, held, written in zip(layout.leaves, own, scratch, strict=True):
                leaf.codec.share_buffers(held, written)
            tokens = mx.argmax(logits, axis=-1, keepdims=True)
            mx.async_eval(tokens)  # type: ignore[no-untyped-call]  # while the graph of the next one is made
            drafted.append(tokens)
        ids: list[list[int]] = mx.concatenate(drafted, axis=1).tolist()  # type: ignore[assignment]
        return ids


class ModelDraftLengths:
    """Lengths of a model's drafts for one answer, and trials where none is worth it by what is known.

    Text may become foreseeable again, which only a draft shows.  So one is tried after a while, which doubles with each
    trial that fails; after one that was right altogether, the next follows at once.  `position` counts tokens.
    """

    def __init__(self, costs: StepCosts, position: int, context_tokens_max: int = 0) -> None:
        """`context_tokens_max`: of the draft model; 0 where it is unknown."""
        self._costs, self._context_tokens_max = costs, context_tokens_max
        self._pause, self._next_trial, self._is_trial = PAUSE_TOKENS_MIN, position + PAUSE_TOKENS_MIN, False

    def is_in_context(self, position: int) -> bool:
        """True where the draft model's context has room for a draft."""
        return not self._context_tokens_max or position + MODEL_TOKENS_MAX <= self._context_tokens_max

    def choose(self, position: int, known: int, most: int, acceptance: float, sequences: int = 1) -> int:
        """Length of a draft after `position` tokens, of which `known` have to be computed; 0 for none."""
        if not self.is_in_context(position):
            return 0
        most = min(most, MODEL_TOKENS_MAX)
        length = self.choose_best(known, most, acceptance, sequences)
        self._is_trial = not length and position >= self._next_trial
        if not self._is_trial:
            return length
        return self.choose_best(known, min(most, TRIAL_TOKENS), TRIAL_ACCEPTANCE, sequences)

    def choose_best(self, known: int, most: int, acceptance: float, sequences: int = 1) -> int:
        """Length that is best by what is known, where all sequences of a batch draft alike; 0 for none."""
        return self._costs.choose_length(known, [DraftOffer(most, acceptance)] * sequences, sequences, by_model=True)

    def record_trial(self, position: int, *, is_right: bool) -> None:
        """Record the last draft if it was a trial; `is_right`: all of its tokens were."""
        if not self._is_trial:
            return
        if is_right:
            self._pause, self._next_trial = PAUSE_TOKENS_MIN, position
        else:
            self._next_trial = position + self._pause
            self._pause = min(2 * self._pause, PAUSE_TOKENS_MAX)
