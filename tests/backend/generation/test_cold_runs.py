"""Cold runs: repeatable, equal in other chunks within a tolerance, and correctly compared."""

from pathlib import Path

import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from support.backend.cold_runs import cold_logprobs, compare_greedy

PROMPT = [(7 * i + i * i) % 256 for i in range(70)]


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3", "deepseek_v32"])
def test_chunks_do_not_change_cold_answer(tiny_folder: object, family: str) -> None:
    model, *_ = load(str(tiny_folder(family)))  # type: ignore[operator]
    one, other = cold_logprobs(model, PROMPT, 16, 12), cold_logprobs(model, PROMPT, 33, 12)
    assert len(one.tokens) == len(one.margins) == len(one.logprobs) == 12
    assert compare_greedy(one.tokens, other.tokens, one.margins, 1e-3)
    assert np.abs(one.logprobs[0] - other.logprobs[0]).max() < 1e-3
    again = cold_logprobs(model, PROMPT, 16, 12)
    assert again.tokens == one.tokens and all(
        np.array_equal(a, b) for a, b in zip(again.logprobs, one.logprobs, strict=True)
    )


def test_plain_run_agrees_with_batch_classes(tiny_folder: object) -> None:
    model, *_ = load(str(Path(tiny_folder("llama"))))  # type: ignore[operator]
    one = cold_logprobs(model, PROMPT, 16, 12)
    plain = cold_logprobs(model, PROMPT, 16, 12, make_prompt_cache(model))
    assert compare_greedy(one.tokens, plain.tokens, one.margins, 1e-3)


def test_only_near_tie_excuses_difference() -> None:
    assert compare_greedy([1, 2, 3], [1, 2, 3], [1.0, 1.0, 1.0], 0.1).equal
    tie = compare_greedy([1, 2, 3], [1, 5, 9], [1.0, 0.05, 1.0], 0.1)
    assert tie and not tie.equal and (tie.at, tie.margin) == (1, 0.05)
    assert not compare_greedy([1, 2, 3], [1, 5, 3], [1.0, 0.2, 1.0], 0.1)
    short = compare_greedy([1, 2, 3], [1, 2], [1.0, 1.0, 0.0], 0.1)
    assert not short and short.at == 2
