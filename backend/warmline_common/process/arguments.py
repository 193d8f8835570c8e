"""What the flags of both processes have in common."""

import math

GB = 10**9
GIGABYTES_MAX = 1e9


def finite(text: str) -> float:
    """argparse's type for an amount; raises ValueError for what is none."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def gigabytes(text: str) -> float:
    """The same for an amount of memory or disk, which is counted in bytes."""
    value = finite(text)
    if abs(value) >= GIGABYTES_MAX:
        raise ValueError(text)
    return value
