"""Memory that mlx keeps wired on a Mac: as much as is set, and none by default.

By reports, macOS has panicked where mlx kept buffers wired while many were made and freed (docs/install-macos.md).
"""

import logging

import mlx.core as mx

from warmline_backend.model.loader import ModelError
from warmline_common.process.arguments import GB

log = logging.getLogger(__name__)


def get_wirable_bytes() -> int:
    """Bytes that macOS lets the GPU use; 0 where there is no Metal."""
    return int(mx.device_info().get("max_recommended_working_set_size", 0))


def limit_wired_memory(wired_bytes: int) -> None:
    """Have mlx keep so many bytes of its buffers wired, the first ones first; before a model is loaded.

    Raises ModelError where macOS does not let the GPU use so much.
    """
    if not wired_bytes:
        return  # mlx's own default
    wirable_bytes = get_wirable_bytes()
    if not wirable_bytes:
        log.warning("wired_limit_gb has no effect without Metal: leave it out")
        return
    if wired_bytes > wirable_bytes:
        raise ModelError(describe_excess(wired_bytes, wirable_bytes))
    mx.set_wired_limit(wired_bytes)
    log.info("up to %.1f GB stay wired", wired_bytes / GB)


def describe_excess(wired_bytes: int, wirable_bytes: int) -> str:
    return (
        f"wired_limit_gb {wired_bytes / GB:g} is more than the {wirable_bytes / GB:.1f} GB that macOS lets the GPU "
        "use: set less, or 0 for none; the GPU's share is raised by sudo sysctl iogpu.wired_limit_mb=N"
    )
