"""mlx_lm's own drafts, `speculative_generate_step`, as mlx_lm.server calls it with --draft-model.

Scripted: the token that each pass draws, the text's for the model, and the text's or a wrong one for the draft model.
Real: every pass of both models, their caches, the cuts of these after rejected tokens, and the loop around them.
"""

import random
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache

from drafts.tasks import Task

DRAFT_TOKENS = 3  # mlx_lm.server's default


class ScriptedDrafts:
    """Sampler of both models.  A draft model's call has one row of log-probabilities, the model's has several.

    `agreement`: the share of tokens at which the draft model is right, each for itself.
    """

    def __init__(self, text: Sequence[int], agreement: float, seed: int) -> None:
        self._text = [*text, *[text[-1]] * (DRAFT_TOKENS + 1)]
        self._agreement, self._chance = agreement, random.Random(seed)
        self._drafted: list[int] = []
        self.position = 0  # in the text, of the next token that is not known yet

    def __call__(self, logprobs: mx.array) -> mx.array:
        rows = logprobs.shape[0]
        tokens = [self._draft()] if rows == 1 else self._text[self.position : self.position + rows]
        if rows > 1:
            self._accept(tokens)
        return mx.array(tokens, mx.uint32) + 0 * mx.argmax(logprobs, axis=-1).astype(mx.uint32)

    def _draft(self) -> int:
        token = self._text[self.position + len(self._drafted)]
        self._drafted.append(token if self._chance.random() < self._agreement else token ^ 1)
        return self._drafted[-1]

    def _accept(self, tokens: Sequence[int]) -> None:
        assert len(self._drafted) == len(tokens) - 1
        pairs = enumerate(zip(self._drafted, tokens, strict=False))
        accepted = next((n for n, (drafted, token) in pairs if drafted != token), len(self._drafted))
        self.position += accepted + 1
        self._drafted.clear()


def measure_peer(
    model: nn.Module, draft_model: nn.Module, tasks: Sequence[Task], tokens: int, agreement: float
) -> float:
    """Tokens a second of decoding: mlx_lm.server with a draft model answers one request after the other.

    Timed from the first pass's end.  The server's reads of each token's log-probability are left out.
    """
    count, seconds = 0, 0.0
    for seed, task in enumerate(tasks):
        answer = task.answer[:tokens]
        sampler = ScriptedDrafts(answer, agreement, seed)
        each = _measure(model, draft_model, task.prompt, answer, sampler)
        count, seconds = count + each[0], seconds + each[1]
    return count / seconds


def _measure(
    model: nn.Module,
    draft_model: nn.Module,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampler: Callable[[mx.array], mx.array],
) -> tuple[int, float]:
    """Tokens after those of the first pass, and the seconds that they took."""
    steps = speculative_generate_step(
        mx.array(prompt, mx.uint32),
        model,
        draft_model,
        num_draft_tokens=DRAFT_TOKENS,
        max_tokens=len(answer),
        sampler=sampler,
        prompt_cache=[*make_prompt_cache(model), *make_prompt_cache(draft_model)],
    )
    said: list[int] = []
    began, first = 0.0, 0
    for token, _, is_drafted in steps:
        said.append(int(token))
        began = began or time.perf_counter()
        first = first or (0 if is_drafted else len(said))
    seconds = time.perf_counter() - began
    assert said == list(answer), "the answer is not the text"
    return len(said) - first, seconds
