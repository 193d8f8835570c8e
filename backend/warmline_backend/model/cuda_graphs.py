"""Settings of mlx's CUDA graphs, for a process that computes passes of many shapes.  Any thread, before mlx is used.

mlx makes a graph of every few operations, and by reports keeps 400.  Batches of other sizes and drafts of other lengths
need more: a graph that was dropped is made again, and after 800 that were not found mlx raises an error, however long
ago they were.
"""

import os

GRAPH_SETTINGS = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def set_graph_defaults() -> None:
    """Set what the environment does not set already; without CUDA it has no effect."""
    for name, value in GRAPH_SETTINGS.items():
        os.environ.setdefault(name, value)
