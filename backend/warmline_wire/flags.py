"""What the flags of both processes have in common."""

import math

GB = 10**9


def gigabytes(text: str) -> float:
    """argparse's type for a budget; raises ValueError for what is no amount."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
