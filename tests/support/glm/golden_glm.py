"""GLM of the golden tests, built by our own classes from the recipe's checkpoint."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from support.glm.recipe import CASES, make_checkpoint
from warmline_backend.model.architectures.glm_moe_dsa import Model, ModelArgs
from warmline_backend.model.loader import check_parameters

# Float32's last bits: the reference's and ours add in another order.  Logits are about 2.
TOLERANCE = 5e-5
GOLDEN = Path(__file__).with_name("glm_moe_dsa.npz")


@cache
def read_golden(case: str, what: str) -> Any:
    """Read golden "logits" (positions, vocabulary), "tokens", or "indexer_types" as the reference derived them."""
    with np.load(GOLDEN) as arrays:
        return arrays[f"{case}.{what}"]


def assert_equals_reference(case: str, logits: mx.array, at: Any = slice(None)) -> None:
    """Compare at all positions, or at those that `at` picks."""
    np.testing.assert_allclose(np.array(logits), read_golden(case, "logits")[at], rtol=0, atol=TOLERANCE)


def make_arguments(config: dict[str, Any]) -> ModelArgs:
    args: ModelArgs = ModelArgs.from_dict(config)
    return args


def make_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    """Make the checkpoint as published, before renaming and joining."""
    args = make_arguments(config)
    assert args.indexer_types is not None and args.mlp_layer_types is not None
    made = make_checkpoint(config, args.indexer_types, args.mlp_layer_types)
    return {name: mx.array(array) for name, array in made.items()}


@cache
def build_model(case: str) -> Model:
    return load_weights(Model(make_arguments(CASES[case])), make_weights(CASES[case]))


def load_weights(made: Model, held: dict[str, mx.array]) -> Model:
    sane = made.sanitize(held)
    check_parameters(made, sane)
    made.load_weights(list(sane.items()))
    return made


def write_folder(config: dict[str, Any], folder: Path) -> Path:
    """Write a folder like a downloaded one, but without a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), make_weights(config), {"format": "mlx"})
    return folder


def compute_in_chunks(made: Model, tokens: list[int], size: int, steps: int = 0) -> mx.array:
    """Compute logits (positions, vocabulary) in chunks of `size` tokens, the last `steps` tokens one by one."""
    caches = made.make_cache()
    prompt, parts = len(tokens) - steps, []
    ends = [*range(size, prompt, size), *range(prompt, len(tokens) + 1)]
    for start, end in pairwise([0, *ends]):
        parts.append(made(mx.array([tokens[start:end]]), cache=caches)[0])
        mx.eval(parts[-1], [layer.state for layer in caches])
    return mx.concatenate(parts)
