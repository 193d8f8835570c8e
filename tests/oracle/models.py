"""Tiny models for the oracle: those of `tiny_models`, whose answers may end by themselves, and Baichuan-M1."""

from pathlib import Path
from unittest.mock import patch

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
    with patch.dict(tiny_models.FAMILIES, baichuan_m1=BAICHUAN_M1):
        return tiny_models.build(architecture, root / architecture, stops=True)
