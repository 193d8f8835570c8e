"""Compute the golden logits of GLM with PyTorch's reference implementation in transformers.

In an environment of its own, which the project itself never needs (made with torch 2.13.0, transformers 5.24.0):

    python -m venv golden && golden/bin/pip install torch==2.13.0 transformers==5.24.0
    golden/bin/python tests/support/glm/make_golden.py

Writes glm_moe_dsa.npz beside itself: for each case of `recipe.py` the reference's layer types, the tokens, and the
logits at all positions, float32, computed in one go.  Fails where a selection is so close that rounding might decide.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from support.glm.recipe import CASES, make_checkpoint, make_tokens

MARGIN_MIN = 2e-5  # between the last score that is selected, of a token or an expert, and the first that is not
MASKED = -1e30  # a score below this is that of a token that must not be seen


def build_reference(config: dict[str, Any]) -> GlmMoeDsaForCausalLM:
    """Build the reference with the recipe's weights; every one of its parameters is set."""
    settings = {name: value for name, value in config.items() if name != "model_type"}
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**settings, attn_implementation="eager")).eval()
    weights = {
        name: torch.from_numpy(array)
        for name, array in make_checkpoint(config, model.config.indexer_types, model.config.mlp_layer_types).items()
    }
    for layer, kind in enumerate(model.config.mlp_layer_types):
        if kind == "sparse":
            join_experts(weights, f"model.layers.{layer}.mlp.experts", config["n_routed_experts"])
    model.load_state_dict(weights, strict=True)
    return model


def join_experts(weights: dict[str, torch.Tensor], prefix: str, count: int) -> None:
    """Join the experts of a layer into the reference's two tensors, gates above ups."""
    parts = {
        name: [weights.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(count)]
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
    weights[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    weights[f"{prefix}.down_proj"] = torch.stack(parts["down_proj"])


class MarginRecorder:
    """Context that records the smallest margin of any selection."""

    def __init__(self) -> None:
        self.smallest = float("inf")

    def __enter__(self) -> "MarginRecorder":
        self._topk = torch.Tensor.topk
        torch.Tensor.topk = self._recording  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.Tensor.topk = self._topk  # type: ignore[method-assign]

    @property
    def _recording(self) -> Any:
        topk, margins = self._topk, self

        def noting(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
            ordered = scores.sort(dim=dim, descending=True).values
            if scores.shape[dim] > k:
                first_out = ordered[..., k]
                gaps = (ordered[..., k - 1] - first_out)[first_out > MASKED]
                margins.smallest = min(margins.smallest, *gaps.flatten().tolist())
            return topk(scores, k, dim=dim, **options)

        return noting


def main() -> None:
    kept: dict[str, Any] = {}
    for name, config in CASES.items():
        model, prompt = build_reference(config), make_tokens(name)
        with torch.no_grad(), MarginRecorder() as margins:
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
        types = model.config.indexer_types
        print(f"{name:32} {len(prompt)} tokens, {' '.join(types)}, smallest margin {margins.smallest:.1e}")
        assert margins.smallest > MARGIN_MIN, "rounding could decide a selection; change the case"
        kept |= {f"{name}.logits": logits, f"{name}.indexer_types": np.array(types), f"{name}.tokens": np.array(prompt)}
    np.savez_compressed(Path(__file__).with_name("glm_moe_dsa.npz"), **kept)


if __name__ == "__main__":
    main()
