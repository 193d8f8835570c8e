"""Types of command-line arguments that both processes use."""

import math

MB, GB = 10**6, 10**9
GIGABYTES_MAX = 1e9


def finite(text: str) -> float:
    """argparse type for a finite number.  Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def gigabytes(text: str) -> float:
    """argparse type for an amount of memory or disk in GB.  Raises ValueError."""
    value = finite(text)
    if abs(value) >= GIGABYTES_MAX:
        raise ValueError(text)
    return value
