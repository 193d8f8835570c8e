"""Waits for a state of a pair."""

import time
from collections.abc import Callable

from support.pair.pair import POLL_S, Pair

LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], problem: str, limit_s: float = LIMIT_S) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, problem
        time.sleep(POLL_S)


def wait_until_idle(pair: Pair) -> None:
    wait_until(lambda: pair.status().running + pair.status().queued == 0, "the engine is still at work")
    pair.settle()


def wait_until_prefilling(pair: Pair) -> None:
    """Wait until the proxy has read the start of a generation, which comes later than the engine's first step."""
    wait_until(
        lambda: any(live["phase"] == "prefilling" for live in pair.proxy_status()["live"]),
        "the proxy knows of no request that is prefilled",
    )
