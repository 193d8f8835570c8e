"""Loading and unloading of models by a keeper over stand-in backends."""

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

from support.keeper.keepers import MB, ModelFolder, RunningKeeper, find_status
from warmline_common.protocol.keeper import ModelStage
from warmline_common.settings.models import parse_models
from warmline_common.storage.file_lock import is_process_alive
from warmline_common.storage.home import Home
from warmline_run.keeper.backends.model_process import choose_poll_interval_s

LOADED, STARTING, STOPPING = ModelStage.LOADED, ModelStage.STARTING, ModelStage.STOPPING
UNLOADED, FAILED = ModelStage.UNLOADED, ModelStage.FAILED


def test_default_model_is_loaded_at_first_start(tmp_path: Path) -> None:
    first, second = ModelFolder(tmp_path, "first"), ModelFolder(tmp_path, "second")
    with RunningKeeper(tmp_path, {first: {}, second: {}}) as keeper:
        keeper.wait_until_listening()
        status = keeper.wait_for_stage("first", LOADED)
        assert status.port and status.pid == first.events("start")[0]["pid"]
        assert status.starts == 1 and status.load_s > 0 and status.down_s == 0
        assert status.need_bytes == 130 * MB
        keeper.wait_for_budgets(first=630)
        assert keeper.status("first").held_bytes == 740 * MB
        second_status = keeper.status("second")
        assert second_status.held_bytes == 0
        assert (second_status.stage, second_status.port, second_status.kv_bytes) == (UNLOADED, 0, 0)
        assert keeper.stop() == 0
        assert first.events("end")
        assert not list(keeper.home.run.glob("*.pid")) and not keeper.home.backend_state.exists()


def test_load_shrinks_others_and_unload_grows_them(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_budgets(a=630)
        assert keeper.load("b")[0] == 200
        keeper.wait_for_stage("b", LOADED)
        keeper.wait_for_budgets(a=280, b=280)
        assert all(each.events("memory")[-1]["usable"] == 500 * MB for each in (a, b)), "half of what nobody holds each"
        start = {"share": 20 * MB, "usable": 130 * MB, "limit": 1000 * MB}
        assert b.events("start")[0] == {**b.events("start")[0], **start}
        assert keeper.unload("b")[0] == 200
        keeper.wait_for_stage("b", UNLOADED)
        assert b.events("end")
        keeper.wait_for_budgets(a=630, b=0)


def test_wish_gets_its_memory_first(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        keeper.load("b")
        keeper.wait_for_budgets(a=280, b=280)
        assert keeper.load("b", kv_mb=500)[0] == 200
        keeper.wait_for_budgets(a=60, b=500)
        assert keeper.load("b", kv_mb=100)[0] == 200, "it has more"
        assert keeper.status("b").kv_bytes == 500 * MB
        status, answer = keeper.load("b", kv_mb=700)
        assert (status, answer["error"]["code"]) == (400, "model_too_large")


def test_budget_setting_caps_a_model(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {"memory_budget_gb": 0.05}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_budgets(a=50)
        keeper.load("b")
        keeper.wait_for_budgets(a=50, b=510)


def test_kv_in_use_is_not_taken_away(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b", weights=300)
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_budgets(a=630)
        a.set("in_use", str(600 * MB))
        status, answer = keeper.load("b")
        assert (status, answer["error"]["code"]) == (409, "no_room")
        assert "0.040 GB" in answer["error"]["message"]
        assert keeper.status("b").stage is UNLOADED
        a.set("in_use", str(400 * MB))
        assert keeper.load("b")[0] == 200
        keeper.wait_for_stage("b", LOADED)


def test_load_without_room_returns_409_until_another_is_unloaded(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a", weights=500), ModelFolder(tmp_path, "b", weights=500)
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        a.set("hold_stop")
        status, answer = keeper.load("b")
        assert (status, answer["error"]["code"]) == (409, "no_room")
        assert "0.060 GB" in answer["error"]["message"]
        keeper.unload("a")
        keeper.wait_for_stage("a", STOPPING)
        assert keeper.load("b")[0] == 409, "its memory isn't free before it has ended"
        a.clear("hold_stop")
        keeper.wait_for_stage("a", UNLOADED)
        assert keeper.load("b")[0] == 200
        keeper.wait_for_stage("b", LOADED)


def test_model_beyond_the_memory_returns_400(tmp_path: Path) -> None:
    small, large, huge = (ModelFolder(tmp_path, name, size) for name, size in (("s", 100), ("l", 800), ("h", 2000)))
    with RunningKeeper(tmp_path, {small: {"pinned": True}, large: {}, huge: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("s", LOADED)
        status, answer = keeper.load("h")
        assert (status, answer["error"]["code"]) == (400, "model_too_large")
        assert "1.160 GB more than there are beside the pinned s; unpin one" in answer["error"]["message"]
        assert keeper.load("l")[0] == 200, "830 MB beside 130"
        keeper.wait_for_stage("l", LOADED)
        keeper.unload("l")
        keeper.wait_for_stage("l", UNLOADED)


def test_default_model_that_never_fits_is_reported_once_and_others_can_be_loaded(tmp_path: Path) -> None:
    huge, small = ModelFolder(tmp_path, "h", 2000), ModelFolder(tmp_path, "s", 100)
    with RunningKeeper(tmp_path, {huge: {"pinned": True}, small: {}}) as keeper:
        keeper.wait_for("WARNING .*h needs 2.030 GB .*1.030 GB more than there are for all models; raise models_memory")
        keeper.wait_until(lambda reply: find_status(reply, "s").need_bytes)
        assert keeper.load("s")[0] == 200
        keeper.wait_for_stage("s", LOADED)
        assert keeper.stop() == 0
        assert "".join(keeper.seen).count("h needs 2.030 GB") == 1


def test_memory_beyond_the_machines_is_reported_and_not_used(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    for folder in (a, b):
        folder.set("machine_bytes", str(500 * MB))
    with RunningKeeper(tmp_path, {a: {}, b: {}}, 1000) as keeper:
        keeper.wait_for("WARNING .*models_memory_gb is 1, and this machine has 0.500 GB for models: 0.500 GB are used")
        keeper.wait_for_budgets(a=280)
        assert keeper.read().memory_bytes == 500 * MB
        assert a.events("start")[0]["limit"] == 500 * MB
        keeper.wait_until(lambda reply: all(model.need_bytes for model in reply.models))
        assert keeper.stop() == 0
        assert "".join(keeper.seen).count("models_memory_gb is") == 1


def test_pinned_models_that_do_not_fit_together_are_reported(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a", 600), ModelFolder(tmp_path, "b", 600)
    with RunningKeeper(tmp_path, {a: {"pinned": True}, b: {"pinned": True}}) as keeper:
        keeper.wait_for("WARNING .*b needs 0.630 GB .*0.260 GB more than there are beside the pinned a; unpin one")
        keeper.wait_for_stage("a", LOADED)


def test_keeper_of_models_that_never_fit_ends_with_exit_code_2(tmp_path: Path) -> None:
    huge, huger, broken = ModelFolder(tmp_path, "h", 2000), ModelFolder(tmp_path, "i", 3000), ModelFolder(tmp_path, "b")
    broken.clear("sizes.json")
    with RunningKeeper(tmp_path, {huge: {}, huger: {}, broken: {}}) as keeper:
        keeper.wait_for("WARNING .*h needs 2.030 GB")
        keeper.wait_for("WARNING .*b can't be served: config.json is missing")
        keeper.wait_for("WARNING .*i needs 3.030 GB")
        keeper.wait_for("warmline backend: none of the models can be loaded")
        assert keeper.process.wait() == 2


def test_unload_pinned_model_returns_409(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    with RunningKeeper(tmp_path, {a: {}, b: {"pinned": True}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("b", LOADED)
        assert keeper.status("a").stage is UNLOADED, "the pinned one is loaded, so the default isn't needed"
        status, answer = keeper.unload("b")
        assert (status, answer["error"]["code"]) == (409, "model_pinned")
        assert keeper.pin("b", False)[0] == 200
        assert keeper.unload("b")[0] == 200
        keeper.wait_for_stage("b", UNLOADED)


def test_load_of_stopping_model_waits_and_starts_it_again(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    a.set("hold_stop")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        first = keeper.wait_for_stage("a", LOADED)
        keeper.unload("a")
        keeper.wait_for_stage("a", STOPPING)
        a.clear("hold_stop")
        assert keeper.load("a")[0] == 200
        again = keeper.wait_for_stage("a", LOADED)
        assert again.pid != first.pid and again.starts == 2


def test_model_is_starting_until_it_is_ready(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    a.set("hold_load")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        starting = find_status(keeper.wait_until(lambda reply: reply.models[0].pid), "a")
        assert starting.stage is STARTING and starting.kv_bytes == 20 * MB
        keeper.unload("a")
        keeper.wait_for_stage("a", UNLOADED)
        keeper.load("a")
        a.clear("hold_load")
        keeper.wait_for_stage("a", LOADED)


def test_load_waits_for_the_size_which_is_read_again_once_the_files_have_changed(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    a.set("hold_size")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        waiting = find_status(keeper.wait_until(lambda reply: reply.models[0].reason), "a")
        assert (waiting.stage, waiting.reason) == (STARTING, "its size is being read")
        a.clear("hold_size")
        assert keeper.wait_for_stage("a", LOADED).need_bytes == 130 * MB
        keeper.unload("a")
        keeper.wait_for_stage("a", UNLOADED)
        a.set("sizes.json", json.dumps([400 * MB, 10 * MB, 20 * MB]))
        assert keeper.load("a")[0] == 200
        assert keeper.status("a").need_bytes == 130 * MB, "its config.json and weights are as before"
        keeper.unload("a")
        keeper.wait_for_stage("a", UNLOADED)
        a.set("config.json", '{"changed": true}')
        assert keeper.load("a")[0] == 200
        assert keeper.wait_for_stage("a", LOADED).need_bytes == 430 * MB
        keeper.wait_until(lambda reply: find_status(reply, "b").need_bytes)
        keeper.stop()
    b.set("config.json", '{"changed": true}')
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        keeper.wait_until(lambda reply: find_status(reply, "b").need_bytes)
        assert (len(a.events("examined")), len(b.events("examined"))) == (2, 2), "a's size is remembered"


def test_failed_report_fails_the_model_until_it_is_mended(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    b.clear("sizes.json")
    with RunningKeeper(tmp_path, {a: {}, b: {}}) as keeper:
        keeper.wait_until_listening()
        failed = keeper.wait_for_stage("b", FAILED)
        assert failed.reason == "config.json is missing (copy it)"
        assert keeper.load("b")[1]["models"][1]["stage"] == "failed"
        b.set("sizes.json", "[1000000, 1000000, 1000000]")
        assert keeper.load("b")[0] == 200
        keeper.wait_for_stage("b", LOADED)


def test_port_and_failure_need_no_disk(tmp_path: Path) -> None:
    """The file with the port can't be written, as on a full disk."""
    a = ModelFolder(tmp_path, "org/a")
    instance = parse_models(f'[{{"name": "org/a", "path": "{a.path}"}}]')[0].instance
    (Home(tmp_path / "home", instance).backend_state / "in the way").mkdir(parents=True)
    a.set("fails", "no such layer")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for("WARNING .*the backend org/a has failed: no such layer")
        failed = keeper.wait_for_stage("org/a", FAILED)
        assert (failed.reason, failed.kv_bytes, failed.pid) == ("no such layer", 0, 0)
        a.clear("fails")
        keeper.load("org/a")
        assert keeper.wait_for_stage("org/a", LOADED).reason == ""
        keeper.wait_for(r"loaded org/a in [\d.]+ s")


def test_killed_backend_starts_again(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_budgets(a=630)
        first = keeper.status("a")
        a.set("hold_load")
        os.kill(first.pid, signal.SIGKILL)
        crashed = find_status(keeper.wait_until(lambda reply: reply.models[0].stage is STARTING), "a")
        assert "was killed by SIGKILL" in crashed.reason
        assert crashed.kv_bytes == 20 * MB, "its next process begins with its least budget"
        a.clear("hold_load")
        again = keeper.wait_for_stage("a", LOADED)
        assert again.pid != first.pid and again.starts == 2 and again.reason == ""
        keeper.wait_for_budgets(a=630)


def test_memory_is_never_overcommitted(tmp_path: Path) -> None:
    """In any order of loads, unloads, wishes, deaths and KV in use; each reading checks the sum."""
    chance = random.Random(5)
    folders = [ModelFolder(tmp_path, name, weights) for name, weights in zip("abcd", (100, 200, 300, 400), strict=True)]
    with RunningKeeper(tmp_path, {folder: {} for folder in folders}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", LOADED)
        for _ in range(60):
            folder, kind = chance.choice(folders), chance.choice(["load", "load", "wish", "unload", "use", "kill"])
            status = keeper.status(folder.name)
            if kind in ("load", "wish"):
                code = keeper.load(folder.name, chance.randrange(400) if kind == "wish" else 0)[0]
                assert code in (200, 400 if kind == "wish" else 200, 409)
            elif kind == "unload":
                keeper.unload(folder.name)
            elif kind == "use":
                folder.set("in_use", str(chance.randrange(max(1, status.kv_bytes))))
            elif status.stage is LOADED:
                with suppress(ProcessLookupError):  # killed already, which the keeper is about to see
                    os.kill(status.pid, signal.SIGKILL)
        for folder in folders:
            keeper.unload(folder.name)
        for folder in folders:
            keeper.wait_for_stage(folder.name, UNLOADED)
        assert all(model.kv_bytes == 0 for model in keeper.read().models)
        assert keeper.load("d")[0] == 200
        keeper.wait_for_stage("d", LOADED)


def test_crash_at_start_backs_off(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    a.set("crashes")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        delays = [float(keeper.wait_for(r"ended with exit code 1; starting it again in (\S+) s")[1]) for _ in range(3)]
        assert delays == [0.05, 0.1, 0.2]
        assert keeper.status("a").down_s > 0
        keeper.unload("a")
        keeper.wait_for_stage("a", UNLOADED)


def test_process_that_hangs_at_its_start_is_started_again(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    a.set("hangs")
    a.set("hold_load")
    with RunningKeeper(tmp_path, {a: {}}, TEST_FIRST_ANSWER_TIMEOUT_S="1.5") as keeper:
        keeper.wait_until_listening()
        hung = keeper.wait_for_pid("a")
        keeper.wait_for("the backend a has not announced its port for 1.5 s and was killed; starting it again")
        keeper.wait_until(lambda reply: find_status(reply, "a").pid not in (0, hung))
        again = keeper.status("a")
        assert again.stage is STARTING and again.starts > 1 and not is_process_alive(hung)
        assert again.reason == "its process has not announced its port for 1.5 s and was killed; it is started again"
        a.clear("hold_load")
        assert keeper.wait_for_stage("a", LOADED).reason == ""
        keeper.wait_for(r"loaded a in [\d.]+ s")


def test_starting_process_is_polled_more_often_at_first() -> None:
    intervals = [choose_poll_interval_s(elapsed_s) for elapsed_s in (0.0, 0.5, 2.0, 10.0, 300.0)]
    assert intervals == [0.01, 0.01, 0.02, 0.1, 0.1]
