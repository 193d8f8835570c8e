"""Rank of a golden case over several processes: `python ranks.py tensor|pipeline CASE OUT`; rank 0 writes OUT.npy.

MLX_RANK and MLX_HOSTFILE name the ranks, as `mlx.launch` sets them.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from support.glm.golden_glm import compute_in_chunks, load_weights, make_weights
from support.glm.recipe import CASES, make_tokens
from warmline_backend.model.architectures.glm_moe_dsa import Model, ModelArgs

CHUNK = 20
STEPS = 3  # at the end, token by token


def main(how: str, case: str, out: Path) -> None:
    group = mx.distributed.init(backend="ring", strict=True)
    config = CASES[case]
    held = make_weights(config)
    model = Model(ModelArgs.from_dict(config))
    if how == "pipeline":  # before the weights, as mlx-lm does: a rank holds its own layers only
        sane = model.sanitize(held)
        model.model.pipeline(group)
        own = dict(tree_flatten(model.parameters()))
        model.load_weights([(name, array) for name, array in sane.items() if name in own])
    else:
        load_weights(model, held)
        model.shard(group)
    logits = compute_in_chunks(model, make_tokens(case), CHUNK, STEPS)
    if group.rank() == 0:
        np.save(out, np.array(logits))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
