"""Waits for a state of a pair."""

import time
from collections.abc import Callable

from support.pair.pair import POLL_S, Pair

LIMIT_S = 30.0


def until(true: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(POLL_S)


def wait_until_let_go(pair: Pair) -> None:
    until(lambda: pair.status().running + pair.status().queued == 0, "the engine goes on for nobody")
    pair.settle()
