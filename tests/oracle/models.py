"""Tiny models for the oracle: those of `tiny_models`, whose answers may end by themselves, and Baichuan-M1."""

from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

import tiny_models

# Rows, states and windows in one model.
BAICHUAN_M1 = {
    **tiny_models.BASE,
    "model_type": "baichuan_m1",
    "num_hidden_layers": 4,
    "sliding_window": tiny_models.SLIDING_WINDOW,
    "sliding_window_layers": [1, 3],
    "conv_window": 2,
    "rope_theta": 1e4,
}


def folder_of(architecture: str, root: Path) -> Path:
    """Made once; not to be written to."""
    folder = root / architecture
    if architecture != "baichuan_m1" or folder.exists():
        return tiny_models.build(architecture, folder, stops=True)
    with patch.dict(tiny_models.FAMILIES, baichuan_m1=BAICHUAN_M1):
        tiny_models.build(architecture, folder, stops=True)
    fill_convolutions(folder / "model.safetensors")
    return folder


def fill_convolutions(path: Path) -> None:
    """They are 0 where they were not trained, and would hide a wrong state."""
    weights = dict(mx.load(str(path)))
    mx.random.seed(1)
    for name, array in weights.items():
        if name.endswith((".conv_k", ".conv_v")):
            weights[name] = mx.random.normal(array.shape)
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, {"format": "mlx"})
