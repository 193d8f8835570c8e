"""Cold runs by mlx-lm's own batch classes, without the product's engine: the reference for warm runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray


@dataclass(frozen=True)
class ColdRun:
    """Greedy run: at each step the token, the margin to the second likeliest, and all log-probabilities."""

    tokens: list[int]
    margins: list[float]
    logprobs: list[NDArray[np.float32]]


def cold_logprobs(
    model: nn.Module, prompt: Sequence[int], chunk: int, max_tokens: int, cache: list[Any] | None = None
) -> ColdRun:
    """Prefill `prompt` in chunks that end at multiples of `chunk`, then decode greedily; nothing ends it early.

    The last prompt token is the first decode step's, as in the engine.  `cache`: empty caches of another kind
    (quantized ones can't be batched, so such a run takes mlx-lm's model call directly).
    """
    if cache is not None:
        return _plain_run(model, prompt, chunk, max_tokens, cache)
    batch = PromptProcessingBatch(
        model, [0], [make_prompt_cache(model)], prefill_step_size=len(prompt), max_tokens=[max_tokens]
    )
    for start in range(0, len(prompt) - 1, chunk):
        batch.prompt([list(prompt[start : min(start + chunk, len(prompt) - 1)])])
    decode = batch.generate([list(prompt[-1:])])
    responses = [response for _ in range(max_tokens) for response in decode.next()]
    rows = [np.array(response.logprobs.astype(mx.float32)) for response in responses]
    return ColdRun([response.token for response in responses], [_margin(row) for row in rows], rows)


def _plain_run(model: nn.Module, prompt: Sequence[int], chunk: int, max_tokens: int, cache: list[Any]) -> ColdRun:
    for start in range(0, len(prompt) - 1, chunk):
        model(mx.array([list(prompt[start : min(start + chunk, len(prompt) - 1)])]), cache=cache)
        mx.eval([layer.state for layer in cache])
    run, token = ColdRun([], [], []), prompt[-1]
    for _ in range(max_tokens):
        logits = model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)
        row = np.array(logits - mx.logsumexp(logits))
        token = int(row.argmax())
        run.tokens.append(token)
        run.margins.append(_margin(row))
        run.logprobs.append(row)
    return run


def _margin(row: NDArray[np.float32]) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)


@dataclass(frozen=True)
class GreedyComparison:
    """Comparison of two greedy runs: `equal`, or the first difference, and whether a near tie may explain it."""

    equal: bool
    at: int = -1
    margin: float = float("inf")
    near_tie: bool = False

    def __bool__(self) -> bool:
        """True where the runs are equal or differ by a near tie."""
        return self.equal or self.near_tie


def compare_greedy(
    tokens_a: Sequence[int], tokens_b: Sequence[int], margins: Sequence[float], tolerance: float
) -> GreedyComparison:
    """Compare two greedy runs of one prompt; `margins` are the top-2 margins of the first.

    Only the first difference is judged: after it the two runs answer different prompts.  A run that is shorter differs
    where it ends, and no tie excuses that.
    """
    for at, (a, b) in enumerate(zip(tokens_a, tokens_b, strict=False)):
        if a != b:
            return GreedyComparison(False, at, margins[at], near_tie=margins[at] <= tolerance)
    if len(tokens_a) != len(tokens_b):
        return GreedyComparison(False, min(len(tokens_a), len(tokens_b)))
    return GreedyComparison(True)
