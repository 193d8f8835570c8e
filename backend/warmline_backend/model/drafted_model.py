"""A model and its draft model as one: each pass computes the logits of the one, and the KV of both.

The cache has the layers of the model first, then those of the draft model.  So whatever is done with a conversation's
KV (a save, a restore, a copy, a batch) is done with both.  Engine thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.kv_cache.codecs import CacheLayout, flatten
from warmline_backend.model.loader import ModelError

DIFFERENCES_SHOWN_MAX = 3
TOKEN_CHARS_MAX = 40  # of a token that is shown
PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  def area(width: int, height: int) -> int:\n\treturn width * height  # 1234567 * 89\r\n\n\n",
    '{"name": "Ødegård", "price": 12.50, "tags": ["naïve", "日本語", "Привет", "🙂👩‍👩‍👧"]}',
)


@dataclass(frozen=True)
class DraftModel:
    """A small model that drafts tokens for a larger one with the same tokenizer."""

    model: nn.Module
    path: Path
    layout: CacheLayout  # of its own cache
    vocabulary_size: int  # rows of its embedding
    context_tokens_max: int  # 0: unknown

    def compute(self, tokens: mx.array, layers: list[Any]) -> mx.array:
        """Logits [sequences, count, vocabulary] after `tokens`, whose rows are written to its own `layers`; lazy."""
        # Ids that are in no tokenizer, but in the padding of the larger model's embedding, may come in a prompt.
        logits: mx.array = self.model(mx.minimum(tokens, self.vocabulary_size - 1), cache=layers)
        return logits

    def select_layers(self, layers: list[Any]) -> list[Any]:
        """Its own layers of a cache of both models."""
        return layers[len(layers) - len(self.layout.template) :]


class DraftedModel(nn.Module):  # type: ignore[misc]  # mlx has no types
    """Model that computes the KV of its draft model in each pass.

    Logits of the draft model are not computed.  Its rows are evaluated with the model's logits, so that no graph grows
    from step to step.
    """

    def __init__(self, target: nn.Module, target_layout: CacheLayout, draft: DraftModel) -> None:
        super().__init__()
        self.target, self.draft = target, draft.model
        self._target_layout, self._draft_model = target_layout, draft

    @property
    def parts(self) -> tuple[tuple[nn.Module, CacheLayout], ...]:
        """Both models, each with the layout of its own cache."""
        return (self.target, self._target_layout), (self.draft, self._draft_model.layout)

    def make_cache(self) -> list[Any]:
        return [layer for _, layout in self.parts for layer in layout.make_cache()]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        own = self._draft_model.select_layers(cache)
        logits = self.target(inputs, cache=cache[: len(cache) - len(own)])
        self._draft_model.compute(inputs, own)
        written = [array for _, leaf in flatten(own) for _, array in tree_flatten(vars(leaf)) if _is_array(array)]
        tied: mx.array = mx.depends(logits, written)
        return tied


def _is_array(value: object) -> bool:
    return isinstance(value, mx.array)


def check_tokenizers(target: TokenizerWrapper, draft: TokenizerWrapper, target_rows: int, draft_rows: int) -> None:
    """Raise ModelError, which says what differs, unless an id is the same token in both, and texts become the same ids.

    An added token that only one of them has does no harm: ids are always those of the `target`.  `target_rows`,
    `draft_rows`: rows of the models' embeddings, which may have more of them than the tokenizer has tokens.
    """
    mine, others = target.get_vocab(), draft.get_vocab()
    differing = list(islice(_describe_differences(target, draft), DIFFERENCES_SHOWN_MAX + 1))
    if differing:
        shown = "; ".join([*differing[:DIFFERENCES_SHOWN_MAX], *["..."][: len(differing) - DIFFERENCES_SHOWN_MAX]])
        raise ModelError(
            f"its tokenizer is another one than the model's (of {len(others):,} tokens, the model's of {len(mine):,}): "
            f"{shown}; choose a draft model of the same family"
        )
    for text in PROBE_TEXTS:
        ids, other_ids = (each.encode(text, add_special_tokens=False) for each in (target, draft))
        if ids != other_ids:
            raise ModelError(
                f"its tokenizer is another one than the model's, with the same tokens: {_quote(text)} becomes "
                f"{_format_ids(other_ids)}, not {_format_ids(ids)}; choose a draft model of the same family"
            )
    last = max((number for token, number in mine.items() if token in others and number < target_rows), default=0)
    if last >= draft_rows:
        raise ModelError(f"its tokenizer has ids up to {last}, and its embedding {draft_rows} rows; download it again")


def _describe_differences(target: TokenizerWrapper, draft: TokenizerWrapper) -> Iterator[str]:
    """Texts about tokens that have other ids, and about tokens without equal that are no added ones."""
    mine, others = target.get_vocab(), draft.get_vocab()
    added, others_added = target.get_added_vocab(), draft.get_added_vocab()
    tokens_by_id = {number: token for token, number in mine.items()}
    for token, number in sorted(mine.items(), key=_get_id):
        if (other := others.get(token)) != number and not (other is None and token in added):
            yield f"{_quote(token)} is {'missing' if other is None else other}, not {number}"
    for token, number in sorted(others.items(), key=_get_id):
        if token not in mine and (number in tokens_by_id or token not in others_added):
            instead = f", which is {_quote(tokens_by_id[number])} of the model" if number in tokens_by_id else ""
            yield f"{_quote(token)} ({number}{instead}) is none of the model's"


def _get_id(item: tuple[str, int]) -> int:
    return item[1]


def _quote(text: str) -> str:
    return repr(text if len(text) <= TOKEN_CHARS_MAX else text[:TOKEN_CHARS_MAX] + "...")


def _format_ids(ids: list[int]) -> str:
    return f"{ids[:8]}" if len(ids) <= 8 else f"{[*ids[:8]]} and {len(ids) - 8} more"
