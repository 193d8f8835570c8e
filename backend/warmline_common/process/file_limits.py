"""Limit of open descriptors of this process: a connection is one, and a non-login macOS shell allows 256."""

import resource
from pathlib import Path

UNLIMITED = 1 << 62  # the number for "no limit"

DESCRIPTORS_MIN = 128  # of a process of the pair: it has 30 open before its first request

_set_limit = resource.setrlimit


class DescriptorLimitError(Exception):
    """The system allows too few descriptors."""


def reserve_descriptors(requested: int) -> int:
    """As `raise_descriptor_limit`; raises DescriptorLimitError where too few are allowed to serve."""
    count = raise_descriptor_limit(requested)
    if count < DESCRIPTORS_MIN:
        raise DescriptorLimitError(
            f"only {count} files and connections may be open at once, and {DESCRIPTORS_MIN} are needed, better "
            f"{requested}; raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        )
    return count


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
        _set_limit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS names no hard limit, and refuses what is beyond the kernel's
        return soft
    return target


def protect_descriptor_limit() -> None:
    """Have libraries raise the limit at most, and as far as the system allows, in this process from now on.

    mlx-lm sets 2,048 and a hard limit of 4,096 as it is imported: that lowers a higher limit for good, and fails under
    a lower hard one.
    """

    def set_limit(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_NOFILE:
            raise_descriptor_limit(limits[0])
        else:
            _set_limit(kind, limits)

    vars(resource)["setrlimit"] = set_limit


def count_open_descriptors() -> int:
    """Number of descriptors that this process has open now."""
    folder = Path("/proc/self/fd")
    held = list((folder if folder.exists() else Path("/dev/fd")).iterdir())
    return len(held) - 1  # the folder's own
