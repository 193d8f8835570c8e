"""Memory that mlx's arrays hold."""

import gc

import mlx.core as mx


def read_active_memory() -> int:
    """Bytes of all arrays alive, after earlier tests' garbage went: else it goes while a test measures."""
    gc.collect()
    return mx.get_active_memory()
