"""Limit of open descriptors of this process: a connection is one, and a non-login macOS shell allows 256."""

import resource
from pathlib import Path

UNLIMITED = 1 << 62  # the number for "no limit"


def raise_descriptor_limit(requested: int) -> int:
    """Raise the soft limit to `requested`, or as far as the system allows; never lower it.

    Returns the soft limit in force: below `requested` where the hard limit, or the kernel's own, is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return UNLIMITED
    target = requested if hard == resource.RLIM_INFINITY else min(requested, hard)
    if soft >= target:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS names no hard limit, and refuses what is beyond the kernel's
        return soft
    return target


def count_open_descriptors() -> int:
    """Number of descriptors that this process has open now."""
    folder = Path("/proc/self/fd")
    held = list((folder if folder.exists() else Path("/dev/fd")).iterdir())
    return len(held) - 1  # the folder's own
