"""What the flags of both processes have in common."""

import math

GB = 10**9


def finite(text: str) -> float:
    """argparse's type for an amount; raises ValueError for what is none."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


gigabytes = finite
