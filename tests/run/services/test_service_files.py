"""Content of plists and units, parsed as launchd and systemd do."""

import os
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from support.run.fake_managers import FakeUser
from warmline_common.settings.resolve import ConfigurationError, resolve
from warmline_common.settings.table import SETTINGS
from warmline_run.services.launchd import LaunchdManager
from warmline_run.services.manager import InstalledService
from warmline_run.services.service import make_processes, parse_arguments
from warmline_run.services.systemd import SystemdManager

ODD_HOME = 'a home\\ of "odd" $HOME %h names'
ODD_ARGUMENTS = '{"system": "50% of $HOME\\n"}'


def test_plist_content(mac: FakeUser) -> None:
    mac.install("--dry-run", "--out", str(mac.root / "out"), "--drain-timeout-s", "90.5", "--model", "org/model")
    plist = plistlib.loads((mac.root / "out" / "com.warmline.backend.plist").read_bytes())
    program, *words = plist["ProgramArguments"]
    assert Path(program).is_absolute() and words[:4] == ["-P", "-m", "warmline_run.cli", "backend"]
    assert plist["Label"] == "com.warmline.backend"
    assert plist["KeepAlive"] == {"SuccessfulExit": False} and plist["RunAtLoad"] is True
    assert plist["ThrottleInterval"] == 30 and plist["ProcessType"] == "Interactive"
    assert plist["ExitTimeOut"] == 121, "the drain, and time to save"
    assert plist["SoftResourceLimits"] == {"NumberOfFiles": 8192}
    assert plist["StandardErrorPath"] == plist["StandardOutPath"] == str(mac.home / "logs" / "backend.stderr")
    assert plist["WorkingDirectory"] == str(mac.home) and plist["Umask"] == 0o077
    assert plist["EnvironmentVariables"]["WARMLINE_AGENT"] == "launchd"
    assert {"/usr/bin", "/bin"} <= set(plist["EnvironmentVariables"]["PATH"].split(":"))
    assert not mac.calls and not mac.home.exists() and not (mac.root / "Library").exists(), "only written"


def test_services_get_flags_and_variables_but_not_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warmline.toml").write_text('port = 9000\nclient_key = "hush"')
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = {"home": str(tmp_path), "model": "model", "lan": False, "kv_bits": "8"}
    variables = {"WARMLINE_REUSE": "exact", "HF_HOME": "/models", "HF_TOKEN": "hush", "MLX_METAL_JIT": "1", "X": "y"}
    for agent in make_processes(resolve(flags, variables), variables):
        given = parse_arguments(agent.arguments)
        assert given == {
            **{"home": str(tmp_path), "model": str(tmp_path / "model"), "lan": False, "kv_bits": "8"},
            **{"reuse": "exact", "log_files": True},
        }
        assert agent.environment.keys() == {"HOME", "PATH", "HF_HOME", "MLX_METAL_JIT"}
        assert "hush" not in " ".join((*agent.arguments, *agent.environment.values()))
        assert resolve(given, agent.environment)["port"] == 9000


def test_every_setting_round_trips_through_command_line() -> None:
    """As `resolve` has it, whatever its kind."""
    others = {"served_name": "-x", "host": "::1", "stabilize": "ids,times", "cors_origins": "*", "allowed_hosts": "a"}
    flags: dict[str, object] = {
        name: others.get(name, not setting.default if isinstance(setting.default, bool) else setting.default)
        for name, setting in SETTINGS.items()
        if setting.has_flag
    }
    config = resolve({**flags, "home": "/nowhere"}, {})
    (proxy, backend) = make_processes(config, {})
    assert dict(resolve(parse_arguments(proxy.arguments), {})) == dict(config)
    assert parse_arguments(backend.arguments) == parse_arguments(proxy.arguments)


def test_unusable_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="cachectl key add"):
        make_processes(resolve({}, {"WARMLINE_CLIENT_KEY": "hush"}), {})
    with pytest.raises(ConfigurationError, match="--name"):
        make_processes(resolve({}, {}), {}, "Two words")
    (tmp_path / "model").mkdir()
    (tmp_path / "warmline.toml").write_text('model = "model"')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="depends on the current folder"):
        make_processes(resolve({"home": str(tmp_path)}, {}), {})


@pytest.mark.parametrize("manager", [LaunchdManager, SystemdManager])
def test_service_file_round_trips(manager: type[LaunchdManager] | type[SystemdManager], tmp_path: Path) -> None:
    flags = {"home": str(tmp_path / ODD_HOME), "chat_template_args": ODD_ARGUMENTS, "served_name": ""}
    agent = make_processes(resolve(flags, {}), {"MLX_X": 'a "b"\\ %c $d', "PATH": "/a b"}, "second")[0]
    read = manager().parse_file(manager().render_file(agent).encode())
    environment = {**agent.environment, "WARMLINE_AGENT": manager.name}
    assert read == InstalledService(agent.arguments, environment, agent.exit_timeout_s)


@pytest.mark.parametrize("data", [b"", b"\xff", b"<plist/>", b"[Service]", plistlib.dumps({"Label": "x"}), b"a=b"])
def test_foreign_service_file_is_reported(data: bytes) -> None:
    for manager in (LaunchdManager(), SystemdManager()):
        with pytest.raises(ValueError):
            manager.parse_file(data)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_analyze_accepts_units(linux: FakeUser) -> None:
    out = linux.root / ODD_HOME.replace("\\", "").replace('"', "")
    linux.home = linux.root / ODD_HOME
    linux.install("--dry-run", "--out", str(out), "--chat-template-args", ODD_ARGUMENTS)
    found = subprocess.run(
        ["systemd-analyze", "verify", "--user", *map(str, out.iterdir())],
        env={**os.environ, "XDG_RUNTIME_DIR": str(linux.root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    text = (out / "warmline-backend.service").read_text().splitlines()
    assert {"Restart=on-failure", "RestartPreventExitStatus=2", "TimeoutStopSec=60", "LimitNOFILE=8192"} <= set(text)
