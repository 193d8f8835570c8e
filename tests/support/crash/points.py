"""Crash points: kill a scenario at each of its disk steps, and check what the next start makes of the home.

`python points.py FOLDER SCENARIO` counts the steps, then forks one process a point and kills it there; prints a line of
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
    ATOMIC,
    ROOT,
    ROWS,
    SCENARIOS,
    SKIPPED,
    STATE,
    TEXTS,
    VALUE_BYTES,
    count_stored,
    deterministic_limits,
    make_contents,
    open_index,
    run_scenario,
    save,
)
from support.planted.site.planted_disk import CHANGES, kill_self_at, list_paths, wrap_operations  # noqa: E402
from warmline_common.protocol.tokens import pack_tokens  # noqa: E402
from warmline_common.storage import disk  # noqa: E402
from warmline_common.storage.home import Home  # noqa: E402
from warmline_common.storage.segment_file import read_header  # noqa: E402
from warmline_proxy.index.index import Index  # noqa: E402
from warmline_proxy.index.recovery.startup import ReconcileReport, reconcile  # noqa: E402
from warmline_proxy.index.recovery.verify import verify_index  # noqa: E402
from warmline_proxy.store.rows import SavePlan, SaveResult  # noqa: E402

SYNCS = ("sync", "sync_folder")
PROBE = list(range(9000, 9200))


@dataclass(frozen=True)
class DiskStep:
    operation: str
    name: str
    target: str


class StepRecorder:
    """Wrapper of disk operations that records them, and kills the process at the `nth` one."""

    def __init__(self, root: Path, nth: int = 0, when: str = "") -> None:
        self._root, self._nth, self._when = root, nth, when
        self.operation = ""
        self.steps: list[DiskStep] = []

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        if name not in CHANGES:
            return real(*arguments)
        self.steps.append(DiskStep(self.operation, name, self._locate(arguments)))
        if len(self.steps) == self._nth:
            kill_self_at(self._when, real, arguments)
        return real(*arguments)

    def _locate(self, arguments: tuple[Any, ...]) -> str:
        """Location of a step, without parts that differ from run to run."""
        short = [target.replace(str(self._root), "HOME") for target in list_paths(arguments)]
        return " -> ".join(
            re.sub(r"[0-9a-f]{16,64}", "ID", re.sub(r"/[0-9a-f]{2}(?=/|$)", "/XX", each)) for each in short
        )


def run_in_fork(work: Callable[[], object]) -> tuple[bool, str]:
    """Run `work` in a fork; (whether the fork was killed, JSON of the result or the traceback)."""
    assert threading.active_count() == 1, "what forks must have one thread"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            output = json.dumps(work())
        except BaseException:  # noqa: BLE001  told, whatever it is
            output, code = traceback.format_exc()[-4000:], 1
        with os.fdopen(writing, "w") as pipe:
            pipe.write(output)
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True, ""
    assert os.waitstatus_to_exitcode(status) == 0, output
    return False, output


# ---- recording the steps


def record_steps(home: Home, scenario: str) -> dict[str, Any]:
    """Record all steps, and the stored tokens before and after each operation."""
    recorder, levels = StepRecorder(home.root), [dict.fromkeys([*TEXTS, "responses"], 0)]
    operations: list[str] = []

    def on_operation(operation: str, index: Index | None) -> None:
        if operations:
            levels.append(levels[-1] if index is None else count_stored(index))
        operations.append(operation)
        recorder.operation = operation

    wrap_operations(disk, recorder)
    run_scenario(home, scenario, on_operation)
    between = {operation: levels[at : at + 2] for at, operation in enumerate(operations[:-1])}
    return {"steps": [(step.operation, step.name, step.target) for step in recorder.steps], "stored": between}


# ---- one run that is killed


def run_until_killed(home: Home, scenario: str, nth: int, when: str) -> None:
    recorder = StepRecorder(home.root, nth, when)
    wrap_operations(disk, recorder)
    run_scenario(home, scenario, lambda operation, index: None)


def check_restart(home: Home, is_atomic: bool, before: dict[str, int], after: dict[str, int]) -> None:
    """Check the next start: all stored tokens, nothing else, no orphans or drafts, and working saves.

    Runs in this process, which has one thread again afterwards.
    """
    with open_index(home) as index:
        found = count_stored(index)
        for name, tokens in found.items():
            low, high = sorted((before[name], after[name]))
            assert low <= tokens <= high, f"{name}: {tokens} tokens are stored, expected {low} to {high}"
            assert not is_atomic or tokens in (low, high), (
                f"{name}: {tokens} tokens are stored, expected {low} or {high}"
            )
        check_home(index)
        assert bool(found["longer"]) >= bool(found["responses"]), "a response is left of a purged conversation"
        with deterministic_limits("after"):
            save(index, PROBE, [100])
        assert index.match_prefix(ROOT, pack_tokens(PROBE), len(PROBE)).tokens == len(PROBE)
        check_home(index)
    with Index(home, index.budget_bytes) as index:
        again = reconcile(index)
        assert again == ReconcileReport(), f"a second start had something to do: {again}"
        assert count_stored(index) == found


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
    """Check that rows and states were computed from just these tokens."""
    tokens = pack_tokens(ids)
    values = make_contents(tokens)
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


# ---- all kill points


def iter_kill_points(steps: list[DiskStep]) -> Iterator[tuple[int, str]]:
    """Yield (step number, when): before each step, in the middle of each write, and after the last step.

    A kill finds the same home before and after a sync, so after one there is a point only where an operation begins.
    """
    for nth, (step, last) in enumerate(zip(steps, [None, *steps], strict=False), 1):
        if last is None or last.name not in SYNCS or last.operation != step.operation:
            yield nth, "before"
        if step.name == "write":
            yield nth, "middle"
    yield len(steps), "after"


def plant_early_delete() -> None:
    """Plant the bug of a merge that deletes the merged segment before it commits the new one."""
    commit_save = Index.commit_save

    def faulty(self: Index, plan: SavePlan, *arguments: Any, **options: Any) -> SaveResult:
        if plan.replaces:
            disk.delete(self.home.segment_file(plan.replaces))
        return commit_save(self, plan, *arguments, **options)

    Index.commit_save = faulty  # type: ignore[method-assign]


def main(folder: Path, scenario: str, only: str, fault: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if fault:
        plant_early_delete()
    _, output = run_in_fork(lambda: record_steps(Home(folder / "counted"), scenario))
    record = json.loads(output)
    steps = [DiskStep(*step) for step in record["steps"]]
    wrong, tried = [], 0
    for nth, when in iter_kill_points(steps):
        step, home = steps[nth - 1], Home(folder / "home")
        if only not in ("", step.operation) or step.operation in SKIPPED[scenario]:
            continue
        try:
            was_killed, _ = run_in_fork(lambda: run_until_killed(home, scenario, nth, when))  # noqa: B023
            assert was_killed, "the process was not killed"
            check_restart(home, step.operation in ATOMIC, *record["stored"][step.operation])
        except AssertionError as error:
            wrong.append(f"{when} step {nth} ({step.operation}: {step.name} {step.target}): {error}")
        tried += 1
        shutil.rmtree(home.root, ignore_errors=True)
    print(json.dumps({**record, "points": tried, "wrong": wrong}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a scenario at each of its disk steps.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--only", default="", help="this operation")
    parser.add_argument("--fault", action="store_true", help="with a fault that must be found")
    given = parser.parse_args()
    main(given.folder, given.scenario, given.only, given.fault)
