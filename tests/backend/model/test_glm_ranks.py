"""GLM over two processes, split by heads and experts or by layers, gives the reference's logits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from support.glm.golden_glm import assert_equals_reference, make_arguments
from support.glm.recipe import CASES
from support.processes import free_port
from warmline_backend.model.architectures.glm_moe_dsa import Layers
from warmline_backend.model.architectures.glm_moe_dsa_config import split_at_full

RANKS = Path(__file__).parents[2] / "support" / "glm" / "ranks.py"
CASE = "by_frequency_as_in_glm_5_2"


@pytest.mark.parametrize("how", ["tensor", "pipeline"])
def test_two_ranks_match_reference_logits(how: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), how, CASE, str(tmp_path / "logits.npy")],
            env=os.environ
            | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert_equals_reference(CASE, mx.array(np.load(tmp_path / "logits.npy")))


@pytest.mark.parametrize(
    ("types", "ranks", "expected"),
    [
        ("FFFF", 2, [2, 2]),
        ("FSSFS", 2, [2, 3]),  # rank 1 comes first
        ("FSSSSSF", 2, [1, 6]),
        ("FFFSSSFSSSFSSSFSSS", 3, [8, 4, 6]),
        ("FFF", 3, [1, 1, 1]),
    ],
)
def test_ranks_start_with_full_layers(types: str, ranks: int, expected: list[int]) -> None:
    split = split_at_full(["full" if letter == "F" else "shared" for letter in types], ranks)
    assert split == expected and sum(split) == len(types)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 full layers can't start 3 ranks; use 2 or fewer"):
        split_at_full(["full", "shared", "full"], 3)


def test_split_at_shared_layer_is_refused() -> None:
    class Group:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    layers = Layers(make_arguments(CASES["shared_as_listed"]))  # full shared shared full shared
    with pytest.raises(ValueError, match="starts a rank with layer 2, which shares the selection of a layer before it"):
        layers.pipeline(Group(), [3, 2])
