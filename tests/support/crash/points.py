"""Kills a life of a home at each step of its disk, and looks at what a start makes of what is left.

`python points.py FOLDER LIFE` counts the steps, then forks one process a point and kills it there; prints a line of
JSON.  A process of its own, not pytest's: what forks must have one thread.
"""

import argparse
import json
import os
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "planted" / "site")]

from support.crash.scenario import (  # noqa: E402
    AT_ONCE,
    LIVES,
    ROOT,
    ROWS,
    SPARED,
    STATE,
    TEXTS,
    VALUE_BYTES,
    contents,
    live,
    save,
    small_world,
    start,
    stored,
)
from support.planted.site.planted_disk import CHANGES, die_at, targets, wrap  # noqa: E402
from warmline_common.protocol.tokens import pack_tokens  # noqa: E402
from warmline_common.storage import disk  # noqa: E402
from warmline_common.storage.home import Home  # noqa: E402
from warmline_common.storage.segment_file import read_header  # noqa: E402
from warmline_proxy.index.index import Index  # noqa: E402
from warmline_proxy.index.recovery.startup import ReconcileReport, reconcile  # noqa: E402
from warmline_proxy.index.recovery.verify import verify_index  # noqa: E402
from warmline_proxy.store.rows import SavePlan, SaveResult  # noqa: E402

PROBE = list(range(9000, 9200))


@dataclass(frozen=True)
class Step:
    errand: str
    name: str
    target: str


class Ledger:
    """Wrapped around the disk's steps: writes them down, and dies at the one that is wanted."""

    def __init__(self, root: Path, nth: int = 0, when: str = "") -> None:
        self._root, self._nth, self._when = root, nth, when
        self.errand = ""
        self.steps: list[Step] = []

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        if name not in CHANGES:
            return real(*arguments)
        self.steps.append(Step(self.errand, name, self._named(arguments)))
        if len(self.steps) == self._nth:
            die_at(self._when, real, arguments)
        return real(*arguments)

    def _named(self, arguments: tuple[Any, ...]) -> str:
        """Location of a step, without parts that differ from run to run."""
        short = [target.replace(str(self._root), "HOME") for target in targets(arguments)]
        return " -> ".join(
            re.sub(r"[0-9a-f]{16,64}", "ID", re.sub(r"/[0-9a-f]{2}(?=/|$)", "/XX", each)) for each in short
        )


def in_child(work: Callable[[], object]) -> tuple[bool, str]:
    """Do it in a fork: whether that was killed, and what it said (JSON of what `work` returns) or what went wrong."""
    assert threading.active_count() == 1, "what forks must have one thread"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            said = json.dumps(work())
        except BaseException:  # noqa: BLE001  told, whatever it is
            said, code = traceback.format_exc()[-4000:], 1
        with os.fdopen(writing, "w") as pipe:
            pipe.write(said)
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True, ""
    assert os.waitstatus_to_exitcode(status) == 0, said
    return False, said


# ---- the life that is counted


def counted(home: Home, life: str) -> dict[str, Any]:
    """All steps; and of each errand what is stored before it and after it."""
    ledger, levels = Ledger(home.root), [dict.fromkeys(TEXTS, 0)]
    errands: list[str] = []

    def begins(errand: str, index: Index | None) -> None:
        if errands:
            levels.append(levels[-1] if index is None else stored(index))
        errands.append(errand)
        ledger.errand = errand

    wrap(disk, ledger)
    live(home, life, begins)
    between = {errand: levels[at : at + 2] for at, errand in enumerate(errands[:-1])}
    return {"steps": [(step.errand, step.name, step.target) for step in ledger.steps], "stored": between}


# ---- one that ends at a point


def killed(home: Home, life: str, nth: int, when: str) -> None:
    ledger = Ledger(home.root, nth, when)
    wrap(disk, ledger)
    live(home, life, lambda errand, index: None)


def look_after(home: Home, at_once: bool, before: dict[str, int], after: dict[str, int]) -> None:
    """Check a start afterwards: all that was stored, nothing else, no leftovers, and further saves work.

    In this process, which has one thread again afterwards.
    """
    with start(home) as index:
        found = stored(index)
        for name, tokens in found.items():
            low, high = sorted((before[name], after[name]))
            assert low <= tokens <= high, f"{name}: {tokens} tokens are stored, expected {low} to {high}"
            assert not at_once or tokens in (low, high), f"{name}: {tokens} tokens are stored, expected {low} or {high}"
        check_home(index)
        with small_world("after"):
            save(index, PROBE, [100])
        assert index.match_prefix(ROOT, pack_tokens(PROBE), len(PROBE)).tokens == len(PROBE)
        check_home(index)
    with Index(home, index.budget_bytes) as index:
        again = reconcile(index)
        assert again == ReconcileReport(), f"a second start had something to do: {again}"
        assert stored(index) == found


def check_home(index: Index) -> None:
    findings = verify_index(index, deep=True)
    assert not findings, findings
    snapshot = index.snapshot()
    known = {*snapshot.segments, *snapshot.checkpoints, *snapshot.quarantined}
    there = {path.stem for path in index.home.segments.rglob("*") if path.is_file()}
    assert there == known, f"files without a row: {there - known}; rows without a file: {known - there}"
    drafts = list(index.home.root.rglob(".*"))
    assert not drafts, drafts
    generations = list(index.home.index.iterdir())
    assert len(generations) == 1, generations
    for ids in (*TEXTS.values(), PROBE):
        check_content(index, ids)
    wanted = {link.id for row in snapshot.sessions.values() if row.pinned for link in snapshot.segment_path(row.leaf)}
    pinned = {row.id for row in snapshot.segments.values() if row.pinned}
    assert pinned == wanted, f"pinned without a conversation: {pinned - wanted}; and not: {wanted - pinned}"


def check_content(index: Index, ids: list[int]) -> None:
    """Rows and states are those of just these tokens."""
    tokens = pack_tokens(ids)
    values = contents(tokens)
    match = index.match_prefix(ROOT, tokens, len(ids))
    for link in match.chain:
        assert read_tensor(index.home.segment_file(link.id), ROWS, (link.upto - link.start)) == b"".join(
            values[link.start : link.upto]
        ), link
    for ref in match.checkpoints:
        assert read_tensor(index.home.segment_file(ref.id), STATE, 1) == values[ref.position - 1], ref


def read_tensor(path: Path, name: str, values: int) -> bytes:
    place = read_header(path).tensors[name]
    return path.read_bytes()[place.offset :][: values * VALUE_BYTES]


# ---- all of them


def points(steps: list[Step]) -> Iterator[tuple[int, str]]:
    """Before each step, which is after the one before; in the middle of what is written; after the last."""
    for nth, step in enumerate(steps, 1):
        yield nth, "before"
        if step.name == "write":
            yield nth, "middle"
    yield len(steps), "after"


def delete_too_soon() -> None:
    """The fault of a merge that deletes what it swallows before what it wrote is committed."""
    commit_save = Index.commit_save

    def faulty(self: Index, plan: SavePlan, *arguments: Any, **options: Any) -> SaveResult:
        if plan.replaces:
            disk.delete(self.home.segment_file(plan.replaces))
        return commit_save(self, plan, *arguments, **options)

    Index.commit_save = faulty  # type: ignore[method-assign]


def main(folder: Path, life: str, only: str, fault: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if fault:
        delete_too_soon()
    _, said = in_child(lambda: counted(Home(folder / "counted"), life))
    told = json.loads(said)
    steps = [Step(*step) for step in told["steps"]]
    wrong, tried = [], 0
    for nth, when in points(steps):
        step, home = steps[nth - 1], Home(folder / "home")
        if only not in ("", step.errand) or step.errand in SPARED[life]:
            continue
        try:
            was_killed, _ = in_child(lambda: killed(home, life, nth, when))  # noqa: B023
            assert was_killed, "it lived on"
            look_after(home, step.errand in AT_ONCE, *told["stored"][step.errand])
        except AssertionError as error:
            wrong.append(f"{when} step {nth} ({step.errand}: {step.name} {step.target}): {error}")
        tried += 1
        shutil.rmtree(home.root, ignore_errors=True)
    print(json.dumps({**told, "points": tried, "wrong": wrong}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a life of a home at each step of its disk.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("life", choices=LIVES)
    parser.add_argument("--only", default="", help="this errand")
    parser.add_argument("--fault", action="store_true", help="with a fault that must be found")
    given = parser.parse_args()
    main(given.folder, given.life, given.only, given.fault)
