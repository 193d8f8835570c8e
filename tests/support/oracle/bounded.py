"""As much of the oracle as fits into every run of the tests: kept scripts, and a few steps in any order.

A script in scripts/ is played by every family and mode that its name begins with: `all.tour.jsonl` has each kind of
step once; `FAMILY-MODE.WHAT.jsonl` is what a soak has found, made short.  `make soak` is the long run.
"""

from pathlib import Path

from support.oracle import machine
from support.oracle.duel import Duel
from support.oracle.reference import FAMILIES, Reference
from support.oracle.steps import read

SCRIPTS = Path(__file__).with_name("scripts")
SEED = 20261128
EXAMPLES = 2  # hypothesis makes the first one of the simplest choices alone
STEPS, RESTART_INTERVAL = 10, 1_000  # no restarts, each of which takes seconds: the tour has them


def check(name: str, modes: tuple[str, ...], root: Path) -> None:
    """Nothing differs, much was compared, and much of it was warm, after a restart too."""
    family = FAMILIES[name]
    with Reference(family, family.folder(root)) as reference:
        for mode in modes:
            with Duel(reference, mode) as duel:
                machine.run(duel, SEED, EXAMPLES, STEPS, RESTART_INTERVAL)
                for path in scripts_of(name, mode):
                    for step in read(path):
                        duel.do(step)
                duel.close()
            counts = duel.tally.counts
            print(f"{name} {mode}: {dict(counts)}, largest {duel.tally.largest:.1e}")
            assert counts["differences"] == 0
            assert counts["answers compared"] > duel.tally.steps / 2
            assert counts["cached tokens"] > counts["prompt tokens"] / 5
            assert counts["restored"] and counts["resident"]


def scripts_of(name: str, mode: str) -> list[Path]:
    return [path for path in sorted(SCRIPTS.glob("*.jsonl")) if path.name.split(".")[0] in ("all", f"{name}-{mode}")]
