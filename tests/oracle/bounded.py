"""As much of the oracle as fits into every run of the tests: each kind of step once, and some in any order.

`make soak` is the long one.
"""

from pathlib import Path

import machine
from duel import FAMILIES, Duel, reference_of
from models import folder_of
from steps import (
    AGAIN,
    APPEND,
    BEGIN,
    BRANCH,
    EDIT,
    LEAVE_IN_DECODE,
    LEAVE_IN_PREFILL,
    TOOLS,
    WORD,
    Any,
    Ask,
    Forget,
    Fresh,
    Kill,
    Purge,
    Restart,
    Together,
)

SEED = 20261128
EXAMPLES, STEPS, RESTART_INTERVAL = 2, 12, 6
TOUR: tuple[Any, ...] = (
    Fresh(SEED),
    Ask(BEGIN, at=3, words=40, dice=1, tokens=24),
    Ask(APPEND, talk=0, words=150, dice=2, tokens=12),
    Ask(BRANCH, talk=0, at=0, words=64, dice=3, stream=True),
    Ask(EDIT, talk=0, at=1, words=40, dice=4),
    Ask(AGAIN, talk=1, tokens=24),
    Ask(TOOLS, talk=1, at=0),
    Ask(APPEND, talk=1, words=40, dice=5, end=WORD, tokens=24),
    Together(tuple(Ask(BRANCH, talk=0, words=9 + 40 * dice, dice=dice, tokens=40) for dice in range(5))),
    Ask(BEGIN, at=2, words=400, dice=6, end=LEAVE_IN_PREFILL, after=2),
    Ask(APPEND, talk=-1, tokens=12),
    Ask(APPEND, talk=0, words=40, dice=7, end=LEAVE_IN_DECODE, after=5, tokens=24),
    Ask(APPEND, talk=0, words=40, dice=7, tokens=24, fault="first"),
    Restart("-9", settled=False),
    Ask(APPEND, talk=0, words=64, dice=8, tokens=12),
    Ask(APPEND, talk=1, words=64, dice=9, tokens=12),
    Forget(),
    Ask(APPEND, talk=0, words=64, dice=10, tokens=12),
    Purge(1),
    Kill("backend", 3, "middle", Ask(APPEND, talk=1, words=64, dice=11)),
    Ask(APPEND, talk=1, words=64, dice=12),
    Restart("softly", small_disk=True, small_memory=True),
    Ask(APPEND, talk=0, words=64, dice=13, tokens=12),
    Ask(APPEND, talk=0, words=64, dice=14, tokens=12),
)


def check(name: str, modes: tuple[str, ...], root: Path) -> None:
    """Nothing differs, much was compared, and much of it was warm, after a restart too."""
    family = FAMILIES[name]
    model = folder_of(family.architecture, root)
    with reference_of(family, model) as reference:
        for mode in modes:
            with Duel(family, mode, model, reference) as duel:
                for step in TOUR:
                    duel.do(step)
                machine.run(duel, SEED, EXAMPLES, STEPS, RESTART_INTERVAL)
                duel.close()
            counts = duel.tally.counts
            print(f"{name} {mode}: {dict(counts)}, largest {duel.tally.largest:.1e}")
            assert counts["differences"] == 0
            assert counts["answers compared"] > duel.tally.steps / 2
            assert counts["cached tokens"] > counts["prompt tokens"] / 5
            assert counts["restored"] and counts["resident"]
