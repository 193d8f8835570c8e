"""`warmline serve` with several models, over stand-ins; and the command lines of their processes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from support.keeper.keepers import ModelFolder, RunningKeeper, list_lock_holders
from support.processes import free_port
from warmline_common.protocol.keeper import ModelStage
from warmline_common.settings.models import parse_models
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig, resolve
from warmline_run.processes import StartMemory, keeper_command, model_command
from warmline_run.services.service import make_processes, parse_arguments
from warmline_run.settings.model_config import make_model_config

LOADED = ModelStage.LOADED


def start_serve(root: Path, models: dict[ModelFolder, dict[str, object]], **variables: str) -> RunningKeeper:
    return RunningKeeper(root, models, 1000, "--port", str(free_port()), command="serve", **variables)


def test_serve_starts_and_stops_keeper_and_backends_and_starts_a_killed_keeper_again(tmp_path: Path) -> None:
    a, b = ModelFolder(tmp_path, "a"), ModelFolder(tmp_path, "b")
    variables = {"WARMLINE_CLIENT_KEY": "hush", "WARMLINE_HOST": "0.0.0.0", "WARMLINE_PROT": "1"}
    with start_serve(tmp_path, {a: {}, b: {"pinned": True}}, **variables) as serve:
        serve.wait_for_all("^ready ", '^proxy up .*models=.*"b"', "keeping models at")
        serve.wait_for_stage("b", LOADED)
        serve.load("a")
        serve.wait_for_stage("a", LOADED)
        keeper = serve.call("/health")[1]["pid"]
        assert int(serve.home.pid_file("backend").read_text()) == keeper
        for pid in (keeper, serve.status("a").pid):
            assert not Path("/proc").exists() or b"hush" not in Path(f"/proc/{pid}/environ").read_bytes()
        os.kill(keeper, signal.SIGKILL)
        serve.wait_for("the keeper was killed by SIGKILL; starting it again")
        serve.wait_for("keeping models at")
        for name in ("a", "b"):
            serve.wait_for_stage(name, LOADED)
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for_silence()
        assert serve.process.wait() == 0
        assert [len(each.events(kind)) for each in (a, b) for kind in ("start", "end")] == [2] * 4
        assert not list_lock_holders(serve.home)
        warnings = [line for line in serve.seen if "WARMLINE_PROT is no setting" in line]
        assert len(warnings) == 1, "of serve, and not of its keeper too"


@pytest.mark.parametrize("is_killed", [True, False])
def test_no_backend_outlives_serve(tmp_path: Path, is_killed: bool) -> None:
    """SIGKILL lets backends end in their time; a second signal ends them at once."""
    a = ModelFolder(tmp_path, "a")
    with start_serve(tmp_path, {a: {}}) as serve:
        serve.wait_for_all("^ready ", "keeping models at")
        serve.wait_for_stage("a", LOADED)
        if is_killed:
            serve.process.kill()
        else:
            a.set("hold_stop")
            serve.process.send_signal(signal.SIGTERM)
            serve.wait_for_stage("a", ModelStage.STOPPING)
            serve.process.send_signal(signal.SIGTERM)
            serve.wait_for("the backend a doesn't end; killing it")
        serve.wait_for_silence()
        assert not list_lock_holders(serve.home)


def test_missing_folder_of_a_model_exits_with_2(tmp_path: Path) -> None:
    a = ModelFolder(tmp_path, "a")
    (a.path / "config.json").unlink()
    with start_serve(tmp_path, {a: {}}) as serve:
        assert serve.wait_for("not a model's folder, it has no config.json")
        serve.wait_for_silence()
        assert serve.process.wait() == 2


def resolve_several(tmp_path: Path, **flags: object) -> ResolvedConfig:
    models = '[{"name": "x", "path": "x", "kv_bits": 8}, {"path": "org/Model", "temp": 0.5}]'
    return resolve({"home": str(tmp_path / "home"), "models": models, **flags}, {})


def test_command_of_keeper_gives_the_same_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    config = resolve_several(tmp_path, lan=True, temp="0.25", log_files=True)
    command = keeper_command(config, {"WARMLINE_CLIENT_KEY": "hush", "PATH": "/bin"})
    assert command.arguments[:5] == [sys.executable, "-P", "-m", "warmline_run.cli", "backend"]
    assert command.environment == {"PATH": "/bin"} and command.drain_timeout_s == 50
    found = resolve(parse_arguments(command.arguments), {})
    models = parse_models(str(found["models"]))
    assert [model.path for model in models] == [str(tmp_path / "x"), "org/Model"]
    assert (found["host"], found["lan"], found["temp"], found["log_files"]) == ("127.0.0.1", False, 0.25, True)


def test_command_of_a_models_backend_has_its_own_settings(tmp_path: Path) -> None:
    config = resolve_several(tmp_path, temp="0.25", kv_bits="4")
    commands = [
        model_command(make_model_config(config, model), model.path, {}, model.instance, StartMemory(1000, 10, 130))
        for model in parse_models(str(config["models"]))
    ]
    pairs = [dict(zip(command.arguments, command.arguments[1:], strict=False)) for command in commands]
    flags = ("--model", "--served-name", "--instance", "--port", "--kv-bits", "--temp")
    assert [pairs[0][flag] for flag in flags] == ["x", "x", "x", "0", "8", "0.25"]
    assert [pairs[1][flag] for flag in flags] == ["org/Model", "Model", pairs[1]["--instance"], "0", "4", "0.5"]
    assert [pairs[0][f"--memory-{each}-bytes"] for each in ("limit", "share", "usable")] == ["1000", "10", "130"]


def test_services_get_models_of_flags_with_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    for service in make_processes(resolve_several(tmp_path), {}):
        found = resolve(parse_arguments(service.arguments), {})
        assert parse_models(str(found["models"]))[0].path == str(tmp_path / "x")


def test_services_refuse_relative_folders_of_models_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "warmline.toml").write_text('models = [{name = "x", path = "x"}]')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="x depends on the current folder; write it whole"):
        make_processes(resolve({"home": str(tmp_path)}, {}), {})
