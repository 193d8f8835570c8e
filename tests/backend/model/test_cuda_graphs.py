"""Settings of mlx's CUDA graphs: set in each process that serves a model, unless its environment has them."""

import os
import subprocess
import sys

import pytest

from warmline_backend.model.cuda_graphs import GRAPH_SETTINGS, set_graph_defaults

READ_IN_C = """
import ctypes
from warmline_backend.model.cuda_graphs import set_graph_defaults
set_graph_defaults()
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"MLX_CUDA_GRAPH_CACHE_SIZE").decode(), getenv(b"MLX_ENABLE_CACHE_THRASHING_CHECK").decode())
"""


def test_settings_reach_libraries_of_the_process() -> None:
    unset = {name: value for name, value in os.environ.items() if name not in GRAPH_SETTINGS}
    done = subprocess.run([sys.executable, "-c", READ_IN_C], capture_output=True, text=True, check=True, env=unset)
    assert done.stdout.split() == ["2000", "0"]


def test_settings_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MLX_CUDA_GRAPH_CACHE_SIZE": "50"}
    monkeypatch.setattr("os.environ", environment)
    set_graph_defaults()
    assert environment == {**GRAPH_SETTINGS, "MLX_CUDA_GRAPH_CACHE_SIZE": "50"}
