"""Ends of a keeper: by SIGTERM, by SIGKILL at any moment, with its starter; and what the next one takes over."""

import json
import os
import signal
from pathlib import Path

import pytest

from support.keeper.keepers import ModelFolder, RunningKeeper, list_lock_holders
from support.pair.waiting import wait_until
from support.processes import RunningProcess, is_running
from warmline_common.protocol.keeper import ModelStage
from warmline_common.storage.file_lock import is_process_alive, process_lock
from warmline_common.storage.home import Home
from warmline_run.keeper.backends.earlier_processes import delete_process_files
from warmline_run.keeper.saved_state import read_kept_models

LOADED, STARTING, STOPPING, UNLOADED = (
    ModelStage.LOADED,
    ModelStage.STARTING,
    ModelStage.STOPPING,
    ModelStage.UNLOADED,
)
WAIT_S = 30.0


def assert_none_overlap(folder: ModelFolder) -> None:
    """A process of an instance starts after the end of the one before."""
    kinds = [event["event"] for event in folder.events() if event["event"] in ("start", "end")]
    assert kinds == ["start", "end"] * (len(kinds) // 2) + ["start"] * (len(kinds) % 2)


def test_sigterm_waits_for_backends(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {"pinned": True}, b: {"pinned": True}}) as keeper:
        keeper.wait_until_listening()
        for name in ("a", "b"):
            keeper.wait_for_stage(name, LOADED)
        a.set("hold_stop")
        keeper.process.send_signal(signal.SIGTERM)
        keeper.wait_for_stage("b", UNLOADED)
        assert keeper.status("a").stage is STOPPING
        assert keeper.load("b")[0] == 503
        a.clear("hold_stop")
        keeper.wait_for_silence()
        assert keeper.process.wait() == 0 and not list_lock_holders(keeper.home)
        assert a.events("end") and b.events("end")


def test_second_sigterm_kills_backends(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    a.set("hold_stop")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        loaded = keeper.wait_for_stage("a", LOADED)
        pid = loaded.pid
        keeper.process.send_signal(signal.SIGTERM)
        stopping = keeper.wait_for_stage("a", STOPPING)
        assert (stopping.pid, stopping.port) == (pid, loaded.port), "it still runs, and answers"
        keeper.process.send_signal(signal.SIGTERM)
        keeper.wait_for("the backend a doesn't end; killing it")
        keeper.wait_for_silence()
        assert keeper.process.wait() == 0 and not is_process_alive(pid)


def test_backend_is_killed_after_its_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STOP_MARGIN_S", "0.1")
    a = ModelFolder(tmp_path, "a")
    a.set("hold_stop")
    with RunningKeeper(tmp_path, {a: {}}, 1000, "--drain-timeout-s", "0.1") as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        keeper.unload("a")
        keeper.wait_for("the backend a doesn't end; killing it")
        keeper.wait_for_stage("a", UNLOADED)


@pytest.mark.parametrize("moment", ["load", "stop"])
def test_killed_keeper_leaves_no_process_and_the_next_one_waits(tmp_path: Path, moment: str) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        pid = keeper.wait_for_stage("a", LOADED).pid
        a.set("hold_stop")
        if moment == "load":
            b.set("hold_load")
            keeper.load("b")
            keeper.wait_until(lambda reply: reply.models[1].pid)
        else:
            keeper.unload("a")
            keeper.wait_for_stage("a", STOPPING)
        keeper.process.kill()
        keeper.process.wait()
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as following:
        following.wait_for(f"waiting for backends of an earlier start to end: backend-a.lock of process {pid}")
        assert not following.read().ready
        assert following.status("a").pid == 0
        a.clear("hold_stop")
        following.wait_until(lambda reply: reply.ready)
        assert following.wait_for_stage("a", LOADED).pid != pid
        if moment == "load":
            b.clear("hold_load")
            following.wait_for_stage("b", LOADED)
        assert following.stop() == 0
    assert not list_lock_holders(keeper.home)
    assert_none_overlap(a)


def test_killed_keeper_leaves_no_process_that_reads_a_size(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    a.set("hold_size")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        wait_until(lambda: a.events("examined"), "no size is read", WAIT_S)
        pid = a.events("examined")[0]["pid"]
        assert is_running(pid)
        keeper.process.kill()
        wait_until(lambda: not is_running(pid), "the process that reads a size stays", WAIT_S)


def test_keeper_ends_with_its_starter(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    read_end, write_end = os.pipe()
    with RunningKeeper(tmp_path, {a: {}}, parent_pipe=read_end) as keeper:
        os.close(read_end)
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        os.close(write_end)
        keeper.wait_for_silence()
        assert keeper.process.wait() == 0 and a.events("end")


def test_second_keeper_of_a_home_or_port_is_refused(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        with RunningKeeper(tmp_path, {a: {}}) as second:
            second.wait_for(f"warmline backend: .*in use by process {keeper.process.pid}, another backend; use another")
            assert second.process.wait() == 2
        port = str(keeper.port)
        with RunningKeeper(tmp_path / "other", {a: {}}, 1000, "--backend-port", port) as second:
            second.wait_for(f"can't listen on 127.0.0.1 port {port}: .*use another port")
            assert second.process.wait() == 2
        assert keeper.read().ready


def test_next_start_loads_what_was_loaded_and_keeps_pins(tmp_path: Path) -> None:
    a, b, c = (ModelFolder(tmp_path, name) for name in "abc")
    models: dict[ModelFolder, dict[str, object]] = {a: {"pinned": True}, b: {}, c: {}}
    with RunningKeeper(tmp_path, models) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        keeper.load("c")
        keeper.wait_for_stage("c", LOADED)
        keeper.pin("a", False)
        keeper.pin("b")
        keeper.unload("a")
        keeper.wait_for_stage("a", UNLOADED)
        keeper.stop()
    with RunningKeeper(tmp_path, models) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("b", LOADED)
        keeper.wait_for_stage("c", LOADED)
        reply = keeper.read()
        assert [(model.stage, model.pinned) for model in reply.models] == [
            (UNLOADED, False),
            (LOADED, True),
            (LOADED, False),
        ]


@pytest.mark.parametrize("content", ["{", "[]", '{"pins": [], "loaded": 3}', '{"pins": {"x": true}, "loaded": ["x"]}'])
def test_unusable_file_of_loaded_models_is_ignored(tmp_path: Path, content: str) -> None:
    file = tmp_path / "models.json"
    file.write_text(content)
    kept = read_kept_models(file, ["a"])
    assert not kept.pins and not kept.loaded


def test_files_of_other_processes_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Their pids are another program's by now, which must not be signalled."""
    a = ModelFolder(tmp_path, "a")
    run = tmp_path / "home" / "run"
    run.mkdir(parents=True)
    with RunningProcess(["sleep", "1000"]) as bystander:
        for name in ("backend-a", "backend"):
            (run / f"{name}.json").write_text(f'{{"pid": {bystander.process.pid}, "port": 1, "failure": "old"}}')
            (run / f"{name}.pid").write_text(f"{bystander.process.pid}\n")
            (run / f"{name}.lock").write_text(f"{bystander.process.pid}\n")
        with RunningKeeper(tmp_path, {a: {}}) as keeper:
            keeper.wait_until_listening()
            assert keeper.wait_for_stage("a", LOADED).pid != bystander.process.pid
            keeper.unload("a")
            keeper.wait_for_stage("a", UNLOADED)
            keeper.stop()
        assert bystander.process.poll() is None


def list_process_files(run: Path) -> list[str]:
    return sorted(file.name for file in run.glob("backend-*") if file.suffix != ".lock")


def test_files_of_killed_backends_are_deleted_by_the_next_start(tmp_path: Path) -> None:
    """Those of a model that is no longer configured, too."""
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {"pinned": True}, b: {"pinned": True}}) as keeper:
        keeper.wait_until_listening()
        pids = [keeper.wait_for_stage(name, LOADED).pid for name in ("a", "b")]
        for pid in (keeper.process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        keeper.process.wait()
    run = keeper.home.run
    (run / "backend-a.pid").write_text(f"{pids[0]}\n")  # real backends write one
    assert list_process_files(run) == ["backend-a.json", "backend-a.pid", "backend-b.json"]
    c = ModelFolder(tmp_path, "c")
    with RunningKeeper(tmp_path, {b: {}, c: {}}) as following:
        following.wait_until_listening()
        pid = following.wait_for_stage("b", LOADED).pid
        assert list_process_files(run) == ["backend-b.json"]
        assert json.loads((run / "backend-b.json").read_text())["pid"] == pid
        following.stop()


def test_files_of_a_running_backend_are_not_deleted(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run.mkdir()
    for name in ("backend-qwen3.5", "backend-gone", "backend"):
        for suffix in (".json", ".pid"):
            (home.run / f"{name}{suffix}").write_text("1")
    with process_lock(Home(tmp_path, "qwen3.5").backend_lock):
        delete_process_files(home)
        assert list_process_files(home.run) == ["backend-qwen3.5.json", "backend-qwen3.5.pid"]
    assert (home.run / "backend.json").exists() and (home.run / "backend.pid").exists(), "the keeper's own"
    delete_process_files(home)
    assert list_process_files(home.run) == []
