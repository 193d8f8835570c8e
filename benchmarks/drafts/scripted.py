"""Answers that follow a given text: the work of each pass is real, the token that is drawn is the text's."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from warmline_backend.generation import sampling
from warmline_backend.generation.sampling import Sampler, SamplerFault, SeededSampler
from warmline_backend.model.drafted_model import DraftModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.speculation.model_drafter import ModelDrafter


class ScriptedSampler(SeededSampler):
    """Sampler that draws the text's token at each place, once the logits are computed."""

    def __init__(self, params: GenerationParams, fault: SamplerFault, text: Sequence[int]) -> None:
        super().__init__(params, fault)
        self._text = [*text, *[text[-1]] * 64]

    def __call__(self, logprobs: mx.array) -> mx.array:
        rows = logprobs.shape[0]
        drawn = mx.array(self._text[self.position : self.position + rows], mx.uint32)
        self.position += rows
        return drawn + 0 * mx.argmax(logprobs, axis=-1).astype(mx.uint32)


class ScriptedModelDrafter(ModelDrafter):
    """Drafter of a draft model that foresees the texts of all requests, but for a share of their tokens."""

    def __init__(self, draft: DraftModel, vocabulary_size: int, agreement: float) -> None:
        super().__init__(draft, vocabulary_size)
        self._agreement, self._size, self._chance = agreement, vocabulary_size, random.Random(1)
        self.texts: list[list[int]] = []  # prompt and answer of each request

    def propose(self, layers: list[Any], following: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        super().propose(layers, following, count)
        lengths = layers[0].lengths
        return [self._foresee_all(length, list(known), count) for length, known in zip(lengths, following, strict=True)]

    def _foresee_all(self, length: int, known: list[int], count: int) -> list[int]:
        """Tokens of the text that has the `known` tokens at this place."""
        end = length + len(known)
        text = next((text for text in self.texts if text[length:end] == known), [])
        return [self._foresee(token) for token in [*text[end : end + count], *[0] * count][:count]]

    def _foresee(self, token: int) -> int:
        return token if self._chance.random() < self._agreement else (token + 1) % self._size


@contextmanager
def scripted_answers(texts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Have requests of these seeds answer with these texts."""

    def make_sampler(params: GenerationParams, fault: SamplerFault) -> Sampler:
        assert params.seed is not None
        return ScriptedSampler(params, fault, texts[params.seed])

    with patch.object(sampling, "make_sampler", make_sampler):
        yield
