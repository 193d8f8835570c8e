"""Answers that follow a given text: the work of each pass is real, the token that is drawn is the text's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx

from warmline_backend.generation import sampling
from warmline_backend.generation.sampling import Sampler, SamplerFault, SeededSampler
from warmline_backend.request.params import GenerationParams


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


@contextmanager
def scripted_answers(texts: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """Have requests of these seeds answer with these texts."""

    def make_sampler(params: GenerationParams, fault: SamplerFault) -> Sampler:
        assert params.seed is not None
        return ScriptedSampler(params, fault, texts[params.seed])

    with patch.object(sampling, "make_sampler", make_sampler):
        yield
