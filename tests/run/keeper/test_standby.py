"""Processes that the keeper starts ahead: the next load takes one, a load that waits for memory is prepared by one."""

import os
import signal
from pathlib import Path

import pytest

from support.keeper.keepers import ModelFolder, RunningKeeper
from support.pair.models_pair import list_parents
from support.pair.waiting import wait_until
from support.processes import is_running
from warmline_common.process.keeper_pipes.standby import STANDBY_FLAG
from warmline_common.process.pids import read_command_line
from warmline_common.protocol.keeper import ModelStage
from warmline_common.storage.file_lock import find_lock_holder, is_process_alive
from warmline_common.storage.home import Home

LOADED, STOPPING, UNLOADED = ModelStage.LOADED, ModelStage.STOPPING, ModelStage.UNLOADED
MEMORY_MB = 200  # for one model
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def start_standby_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STANDBY_DELAY_S", "0")


def list_children(pid: int) -> list[int]:
    return [child for child, parent in list_parents().items() if parent == pid]


def list_standby_processes(keeper: RunningKeeper) -> list[int]:
    return [pid for pid in list_children(keeper.process.pid) if STANDBY_FLAG in read_command_line(pid).split()]


def wait_for_standby(keeper: RunningKeeper, *taken: int) -> int:
    """Pid of a standby process that is none of those that were taken."""
    found: list[int] = []

    def has_one() -> bool:
        found[:] = [pid for pid in list_standby_processes(keeper) if pid not in taken]
        return bool(found)

    wait_until(has_one, "no process is started ahead", WAIT_S)
    return found[0]


def test_next_load_takes_the_process_that_was_started_ahead(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        standby = wait_for_standby(keeper)
        assert keeper.load("b")[0] == 200 and keeper.wait_for_stage("b", LOADED).pid == standby


def test_standby_process_that_takes_no_command_line_is_replaced(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}, TEST_FIRST_ANSWER_TIMEOUT_S="1.5") as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        standby = wait_for_standby(keeper)
        os.kill(standby, signal.SIGSTOP)
        assert keeper.load("b")[0] == 200
        assert keeper.wait_for_stage("b", LOADED).starts > 1
        assert keeper.stop() == 0 and not is_process_alive(standby)


def test_dead_standby_process_costs_a_start_and_no_load(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        standby = wait_for_standby(keeper)
        os.kill(standby, signal.SIGKILL)
        assert keeper.load("b")[0] == 200 and keeper.wait_for_stage("b", LOADED).pid != standby


def begin_swap(keeper: RunningKeeper, a: ModelFolder) -> int:
    """Stop `a`, which takes its time, and have `b` prepared; the pid of its process."""
    keeper.wait_for_stage("a", LOADED)
    standby = wait_for_standby(keeper)
    a.set("hold_stop")
    keeper.unload("a")
    keeper.wait_for_stage("a", STOPPING)
    status, _ = keeper.call("/keeper/models/b/prepare", {"kv_bytes": 0})
    assert status == 200 and keeper.load("b")[0] == 409, "there is no memory yet"
    return standby


def test_prepared_process_loads_once_there_is_memory(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}, MEMORY_MB) as keeper:
        keeper.wait_until_listening()
        prepared = begin_swap(keeper, a)
        assert not b.events("start")
        a.clear("hold_stop")
        keeper.wait_for_stage("a", UNLOADED)
        assert keeper.load("b")[0] == 200 and keeper.wait_for_stage("b", LOADED).pid == prepared


def test_prepared_process_ends_with_its_keeper(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}, MEMORY_MB) as keeper:
        keeper.wait_until_listening()
        prepared = begin_swap(keeper, a)
        keeper.process.kill()
        wait_until(lambda: not is_running(prepared), "the prepared process stays", WAIT_S)
        a.clear("hold_stop")
        keeper.wait_for_silence()
    assert not find_lock_holder(Home(keeper.home.root, "b").backend_lock)
