"""Bounded oracle for the test suite: kept scripts, and a few random steps.

Each family and mode plays the scripts in scripts/ whose names begin with it: `all.tour.jsonl` has each kind of step
once; `FAMILY-MODE.WHAT.jsonl` is a shortened finding of a soak.  `make soak` is the long run.
"""

from pathlib import Path

from support.oracle import machine
from support.oracle.duel import Duel
from support.oracle.reference import FAMILIES, Reference
from support.oracle.steps import read_script

SCRIPTS = Path(__file__).with_name("scripts")
SEED = 20261128
EXAMPLES = 2  # hypothesis makes the first example of the simplest choices
STEPS, RESTART_INTERVAL = 6, 1_000  # no restarts, which take seconds each: the tour has them


def check(name: str, modes: tuple[str, ...], root: Path) -> None:
    """Check that no answer differs, and that enough answers were compared, warm and restored."""
    family = FAMILIES[name]
    with Reference(family, family.folder(root)) as reference:
        for mode in modes:
            with Duel(reference, mode) as duel:
                machine.run_machine(duel, SEED, EXAMPLES, STEPS, RESTART_INTERVAL)
                for path in find_scripts(name, mode):
                    for step in read_script(path):
                        duel.do(step)
                duel.close()
            counts = duel.tally.counts
            print(f"{name} {mode}: {dict(counts)}, largest {duel.tally.largest:.1e}")
            assert counts["differences"] == 0
            assert counts["answers compared"] > duel.tally.steps / 2
            assert counts["cached tokens"] > counts["prompt tokens"] / 5
            assert counts["restored"] and counts["resident"]


def find_scripts(name: str, mode: str) -> list[Path]:
    return [path for path in sorted(SCRIPTS.glob("*.jsonl")) if path.name.split(".")[0] in ("all", f"{name}-{mode}")]
