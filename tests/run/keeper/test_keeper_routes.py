"""HTTP routes of a keeper."""

import threading
from pathlib import Path

from support.keeper.keepers import ModelFolder, RunningKeeper
from warmline_common.protocol.keeper import ModelStage


def test_routes_answer_errors_in_openais_form(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    with RunningKeeper(tmp_path, {a: {"aliases": ["other"]}}) as keeper:
        keeper.wait_until_listening()
        assert keeper.call("/health", secret="wrong") == (200, {"keeper": True, "pid": keeper.process.pid})
        for path, body in (("/keeper/models", None), ("/keeper/models/a/unload", {})):
            status, answer = keeper.call(path, body, secret="wrong")
            assert status == 401 and answer["error"]["type"] == "authentication"
        status, answer = keeper.load("nobody")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert answer["error"]["message"] == "no model 'nobody' is configured; expected one of a"
        for path, body, wanted in (
            ("/keeper/models/a/load", {"kv_bytes": "many"}, 400),
            ("/keeper/models/a/pin", [], 400),
            ("/keeper/models?wait_s=soon", None, 400),
            ("/elsewhere", None, 404),
            ("/keeper/models/a/load", None, 405),
        ):
            status, answer = keeper.call(path, body)
            assert status == wanted and answer["error"]["message"], path
        assert keeper.call("/keeper/models/other/pin", {})[1]["models"][0]["pinned"], "by an alias"


def test_listing_waits_for_a_change(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_budgets(a=630)
        before = keeper.read()
        while (after := keeper.read(before.version, 0.05)).version != before.version:  # it still starts
            before = after
        found = []
        waiting = threading.Thread(target=lambda: found.append(keeper.read(before.version, 30)))
        waiting.start()
        keeper.pin("a")
        waiting.join()
        assert found[0].version > before.version and found[0].boot == before.boot


def test_name_with_a_slash_can_be_loaded(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    with RunningKeeper(tmp_path, {a: {"name": "org/Model A"}}) as keeper:
        keeper.wait_until_listening()
        status = keeper.wait_for_stage("org/Model A", ModelStage.LOADED)
        assert keeper.load("org%2FModel%20A")[0] == 200
        assert keeper.load("org/Model%20A")[0] == 200
        assert (keeper.home.run / f"backend-{status.instance}.json").exists()


def test_files_of_the_keeper_are_private(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    with RunningKeeper(tmp_path, {a: {}}) as keeper:
        keeper.wait_until_listening()
        keeper.wait_for_stage("a", ModelStage.LOADED)
        assert keeper.home.backend_state.read_text() == f'{{"pid": {keeper.process.pid}, "port": {keeper.port}}}'
        files = [*keeper.home.run.iterdir(), *keeper.home.models.iterdir()]
        assert {file.stat().st_mode & 0o077 for file in files} == {0}
