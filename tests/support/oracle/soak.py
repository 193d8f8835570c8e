"""Soak: the oracle for many steps: `make soak STEPS=2000 FAMILIES=llama,gemma3 MODES=fast,exact SEED=7`.

    python tests/support/oracle/soak.py --steps 2000 --families llama --modes fast
    python tests/support/oracle/soak.py --replay SCRIPT --families llama --modes fast

Steps are for each family and mode.  Where an answer differs, the script is written to a file, to be replayed, shortened
and kept in tests/support/oracle/scripts.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.oracle import machine
from support.oracle.duel import MODES, Duel
from support.oracle.reference import FAMILIES, Reference
from support.oracle.steps import Any, encode_script, read_script
from support.oracle.verdict import Difference

STEPS_AN_EXAMPLE, STEPS_A_HOME = 30, 240
RESTART_INTERVAL = 15
# Columns of the table, with their names in `Tally.counts`.
COLUMNS = {
    "answers": ["answers compared"],
    "numbers": ["numbers"],
    "near ties": ["near ties"],
    "explained by noise": ["explained by noise"],
    "differences": ["differences"],
    "in memory": ["resident", "shared"],
    "restored": ["restored"],
    "left": ["left"],
    "failed": ["failed"],
    "at once": ["Together"],
    "restarts": ["Restart"],
    "killed at the disk": ["killed at the disk"],
}


def soak(duel: Duel, steps: int, seed: int) -> str:
    """Make random steps; describe the first problem, "" for none."""
    number = 0
    while duel.tally.steps < steps:
        duel.renew()
        number += 1
        try:
            machine.run_machine(
                duel, seed + number, STEPS_A_HOME // STEPS_AN_EXAMPLE, STEPS_AN_EXAMPLE, RESTART_INTERVAL
            )
            duel.check()
        except Exception as error:  # noqa: BLE001  any failure is reported with its script
            return format_problem(duel.failure or error)
    return ""


def format_problem(error: Exception) -> str:
    if isinstance(error, Difference):
        return str(error)
    return "".join(traceback.format_exception(error))


def replay(duel: Duel, script: Sequence[Any]) -> str:
    """Play a script on a new home; describe the problem, "" for none."""
    try:
        duel.renew()
        for step in script:
            duel.do(step)
        duel.close()
    except Exception as error:  # noqa: BLE001
        return format_problem(error)
    return ""


def shorten(duel: Duel, script: Sequence[Any]) -> list[Any]:
    """Remove steps while the script still finds a problem."""
    script, size = list(script), max(1, len(script) // 2)
    while size:
        at = 0
        while at < len(script):
            shorter = [*script[:at], *script[at + size :]]
            if replay(duel, shorter):
                script = shorter
                print(f"{len(script)} steps are enough", flush=True)
            else:
                at += size
        size //= 2
    return script


@contextmanager
def make_duel(name: str, mode: str, models: Path) -> Iterator[Duel]:
    family = FAMILIES[name]
    with Reference(family, family.folder(models)) as reference, Duel(reference, mode) as duel:
        yield duel


def format_heading() -> str:
    columns = ["family", "mode", "steps", *COLUMNS, "cached", "largest", "seconds"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def format_row(name: str, mode: str, duel: Duel, seconds: float) -> str:
    counts = duel.tally.counts
    format_problem = [f"{sum(counts[each] for each in names):,}" for names in COLUMNS.values()]
    share = counts["cached tokens"] / max(1, counts["prompt tokens"])
    cells = [
        name,
        mode,
        f"{duel.tally.steps:,}",
        *format_problem,
        f"{share:.0%}",
        f"{duel.tally.largest:.1e}",
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--shorten", action="store_true", help="with --replay: find the shortest part that does it")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="where scripts go")
    given = parser.parse_args()
    print(f"seed {given.seed}\n{format_heading()}", flush=True)
    found = False
    with tempfile.TemporaryDirectory(prefix="soak-models-") as models:
        for name in given.families.split(","):
            for mode in given.modes.split(","):
                with make_duel(name, mode, Path(models)) as duel:
                    found |= run_duel(duel, given)
    return 1 if found else 0


def run_duel(duel: Duel, given: argparse.Namespace) -> bool:
    began, name, mode = time.monotonic(), duel.family.name, duel.mode
    script = read_script(given.replay) if given.replay else []
    if given.replay and given.shorten:
        print(encode_script(shorten(duel, script)))
        return False
    problem = replay(duel, script) if given.replay else soak(duel, given.steps, given.seed)
    if problem:
        path = given.out / f"oracle-{name}-{mode}-{given.seed}.jsonl"
        path.write_text(encode_script(duel.script))
        path.with_suffix(".log").write_text("\n".join(duel.abandon()))
        print(f"FAILED {name} {mode} after {len(duel.script)} steps, see {path} and .log\n{problem}", flush=True)
    print(format_row(name, mode, duel, time.monotonic() - began), flush=True)
    return bool(problem)


if __name__ == "__main__":
    sys.exit(main())
