"""What the agents' files say, and what the verbs have launchctl or systemctl do."""

import http.server
import json
import os
import plistlib
import re
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_managers import User

from warmline_run.address import Address
from warmline_run.agents import kept, launchctl, logs, plists, systemctl, units, waiting
from warmline_run.agents.agent import pair, settings_of
from warmline_run.agents.launchctl import Launchd
from warmline_run.agents.manager import Installed, ManagerFailed, State
from warmline_run.agents.systemctl import Systemd
from warmline_run.cli import main as warmline
from warmline_run.resolve import ConfigurationError, resolve
from warmline_run.settings import SETTINGS
from warmline_wire import kept as wire_kept
from warmline_wire.lock import process_lock

ODD_HOME = 'a home\\ of "odd" $HOME %h names'
ODD_ARGUMENTS = '{"system": "50% of $HOME\\n"}'


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch, "launchctl")


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    return User(tmp_path, monkeypatch, "systemctl")


# ---- what the files say


def test_a_plist_says_what_launchd_needs(mac: User) -> None:
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


def test_both_get_what_flags_and_variables_say_and_read_the_file_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warmline.toml").write_text('port = 9000\nclient_key = "hush"')
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = {"home": str(tmp_path), "model": "model", "lan": False, "kv_bits": "8"}
    variables = {"WARMLINE_REUSE": "exact", "HF_HOME": "/models", "HF_TOKEN": "hush", "MLX_METAL_JIT": "1", "X": "y"}
    for agent in pair(resolve(flags, variables), variables):
        given = settings_of(agent.arguments)
        assert given == {
            **{"home": str(tmp_path), "model": str(tmp_path / "model"), "lan": False, "kv_bits": "8"},
            **{"reuse": "exact", "log_files": True},
        }
        assert agent.environment.keys() == {"HOME", "PATH", "HF_HOME", "MLX_METAL_JIT"}
        assert "hush" not in " ".join((*agent.arguments, *agent.environment.values()))
        assert resolve(given, agent.environment)["port"] == 9000


def test_every_setting_comes_back_from_the_command_line() -> None:
    """As `resolve` has it, whatever its kind."""
    others = {"served_name": "-x", "host": "::1", "stabilize": "ids,times", "cors_origins": "*", "allowed_hosts": "a"}
    flags: dict[str, object] = {
        name: others.get(name, not setting.default if isinstance(setting.default, bool) else setting.default)
        for name, setting in SETTINGS.items()
        if setting.as_flag
    }
    config = resolve({**flags, "home": "/nowhere"}, {})
    (proxy, backend) = pair(config, {})
    assert dict(resolve(settings_of(proxy.arguments), {})) == dict(config)
    assert settings_of(backend.arguments) == settings_of(proxy.arguments)


def test_what_an_agent_could_not_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="cachectl key add"):
        pair(resolve({}, {"WARMLINE_CLIENT_KEY": "hush"}), {})
    with pytest.raises(ConfigurationError, match="--name"):
        pair(resolve({}, {}), {}, "Two words")
    (tmp_path / "model").mkdir()
    (tmp_path / "warmline.toml").write_text('model = "model"')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="depends on the current folder"):
        pair(resolve({"home": str(tmp_path)}, {}), {})


@pytest.mark.parametrize("manager", [Launchd, Systemd])
def test_a_file_is_read_back_as_it_was_meant(manager: type[Launchd] | type[Systemd], tmp_path: Path) -> None:
    flags = {"home": str(tmp_path / ODD_HOME), "chat_template_args": ODD_ARGUMENTS, "served_name": ""}
    agent = pair(resolve(flags, {}), {"MLX_X": 'a "b"\\ %c $d', "PATH": "/a b"}, "second")[0]
    read = manager().parse(manager().content(agent))
    assert read == Installed(agent.arguments, agent.environment, agent.exit_timeout_s)


@pytest.mark.parametrize("data", [b"", b"\xff", b"<plist/>", b"[Service]", plistlib.dumps({"Label": "x"}), b"a=b"])
def test_what_is_no_file_of_ours_is_told(data: bytes) -> None:
    for read in (plists.read, units.read):
        with pytest.raises(ValueError):
            read(data)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_units(linux: User) -> None:
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


# ---- what the verbs do


def test_install_boots_both_in_the_users_domain_and_again_boots_them_out_first(mac: User) -> None:
    domain = f"gui/{os.getuid()}"
    labels = {role: f"com.warmline.{role}" for role in ("proxy", "backend")}
    files = {role: str(mac.root / "Library" / "LaunchAgents" / f"{label}.plist") for role, label in labels.items()}
    boot = [
        call
        for role in ("backend", "proxy")
        for call in (["enable", f"{domain}/{labels[role]}"], ["bootstrap", domain, files[role]])
    ]
    mac.install("--wait-s", "0")
    assert mac.calls == boot
    assert {Path(file).stat().st_mode & 0o777 for file in files.values()} == {0o600}
    assert (mac.home / "logs" / "proxy.stderr").stat().st_mode & 0o777 == 0o600
    mac.install("--wait-s", "0", "--disk-budget-gb", "3")
    out = [["bootout", f"{domain}/{labels[role]}"] for role in ("proxy", "backend")]
    assert mac.calls == [*boot, *out, *boot]
    assert settings_of(plistlib.loads(Path(files["proxy"]).read_bytes())["ProgramArguments"])["disk_budget_gb"] == "3.0"
    mac.run("uninstall")
    assert mac.calls == [*boot, *out, *boot, *out]
    assert not any(Path(file).exists() for file in files.values()) and (mac.home / "logs").is_dir()
    assert "no launch agents are installed" in mac.run("uninstall").output


def test_user_services_are_enabled_and_started(linux: User) -> None:
    linux.install("--wait-s", "0", "--name", "second")
    proxy, backend = "warmline-second-proxy.service", "warmline-second-backend.service"
    start = [call for unit in (backend, proxy) for call in (["daemon-reload"], ["enable", unit], ["restart", unit])]
    start.insert(0, ["daemon-reload"])  # whether there is a manager at all
    assert linux.calls == start
    linux.run("restart", "proxy", "--name", "second", "--wait-s", "0")
    assert linux.calls[len(start) :] == [["restart", proxy]]
    linux.run("uninstall", "--name", "second")
    assert linux.calls[len(start) + 1 :] == [
        ["disable", "--now", proxy],
        ["disable", "--now", backend],
        ["daemon-reload"],
    ]


def test_status_tells_what_runs_and_what_does_not(mac: User) -> None:
    found = mac.status(code=1)
    assert not found["installed"] and found["reason"] == "not installed"
    mac.install("--wait-s", "0")
    found = mac.status(code=1)
    assert found["installed"] and not found["ready"] and found["url"] == f"http://127.0.0.1:{mac.port}/v1"
    assert found["reason"] == "the proxy does not listen yet" and found["home"] == str(mac.home)
    assert found["agents"]["proxy"]["pid"] == 4242
    (mac.home / "warmline.toml").write_text("no_such_key = 1")
    assert "no_such_key" in mac.status(code=1)["reason"]
    Path(found["agents"]["backend"]["file"]).unlink()
    shown = mac.run("status", code=1).output
    assert "proxy    running, process 4242 (com.warmline.proxy)" in shown
    assert "backend  not installed, but process 4242 runs as it" in shown


def test_where_no_manager_answers_nothing_is_written(linux: User) -> None:
    (linux.root / "bin" / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    assert "loginctl enable-linger" in linux.install(code=3).output
    assert not (linux.root / ".config").exists() and not linux.home.exists()


def test_what_runs_on_without_its_file_is_stopped(mac: User) -> None:
    mac.install("--wait-s", "0")
    proxy, backend = (mac.root / "Library/LaunchAgents" / f"com.warmline.{role}.plist" for role in ("proxy", "backend"))
    backend.unlink()
    mac.install("--wait-s", "0")
    labels = [f"gui/{os.getuid()}/com.warmline.{role}" for role in ("proxy", "backend")]
    assert mac.calls[-6:-4] == [["bootout", label] for label in labels]
    proxy.unlink()
    backend.unlink()
    said = mac.run("uninstall").output
    assert "stopped com.warmline.proxy" in said and "stopped com.warmline.backend" in said
    assert "no launch agents are installed" in mac.run("uninstall").output


def test_so_it_is_with_systemd(linux: User) -> None:
    linux.install("--wait-s", "0")
    for unit in (linux.root / ".config/systemd/user").glob("*.service"):
        unit.unlink()
    assert "stopped warmline-backend.service" in linux.run("uninstall").output
    assert ["stop", "warmline-proxy.service"] in [call[-2:] for call in linux.calls]
    assert "no user services are installed" in linux.run("uninstall").output


@pytest.mark.parametrize("verb", ["status", "restart", "logs"])
def test_what_is_not_installed_is_1(linux: User, verb: str) -> None:
    shown = linux.run(verb, code=1).output
    assert "backend  not installed" in shown or "no user services are installed; `warmline service install`" in shown


def test_an_agent_that_can_not_start_is_told_with_its_last_words(mac: User) -> None:
    mac.install("--wait-s", "0")
    (mac.home / "logs" / "backend.stderr").write_text("warmline backend: can't serve nowhere\n")
    mac.run("uninstall")
    mac.then("exit 0")
    mac.install("--wait-s", "0")
    (mac.home / "logs" / "proxy.stderr").write_text("warmline: no\n")
    said = mac.run("restart", "proxy", code=1).output
    assert "the proxy does not run, exit code 0:\n  warmline: no\n" in said and "`warmline launchd logs`" in said
    assert (
        "proxy    not running, exit code 0 (com.warmline.proxy)\n         warmline: no\n"
        in mac.run("status", code=1).output
    )


@pytest.mark.parametrize("words", [("--out", "x"), ("--port", "http"), ("--name", "A B"), ("--no-such-flag",)])
def test_bad_usage_is_2(mac: User, words: tuple[str, ...]) -> None:
    mac.install(*words, code=2)
    assert not mac.calls


def test_what_holds_the_home_or_a_port_is_told_before_anything_is_changed(mac: User) -> None:
    (mac.home / "run").mkdir(parents=True)
    with process_lock(mac.home / "run" / "backend.lock"):
        said = mac.install(code=2).output
        assert f"{mac.home} is in use by process {os.getpid()} (run/backend.lock)" in said
    with socket.create_server(("127.0.0.1", mac.port)):
        about = {"pid": os.getpid(), "url": f"http://127.0.0.1:{mac.port}"}
        (mac.home / "run" / "proxy.json").write_text(json.dumps(about))
        said = mac.install(code=2).output
        assert f"port {mac.port} (--port): Address already in use\n" in said, "not by who told so and was killed"
    assert not mac.calls


def test_a_manager_that_is_not_there_or_refuses_is_3(mac: User, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = mac.root / "bin" / "launchctl"
    tool.write_text("#!/bin/sh\necho 'Bootstrap failed: 125: Domain does not support specified action' >&2\nexit 125\n")
    assert "launchctl print" in (said := mac.run("status", code=3).output) and "log in there" in said
    tool.unlink()
    assert mac.run("status", code=3).output.count("\n") == 1
    assert "on Linux use `warmline service`" in mac.install(code=3).output
    mac.install("--dry-run")


# ---- states, waiting, logs


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("x = {\n\tstate = running\n\tpid = 7\n\tlast exit code = (never exited)\n}", State(True, 7)),
        (
            "x = {\n\tstate = not running\n\tlast exit code = 78: EX_CONFIG\n}",
            State(True, None, "exit code 78: EX_CONFIG"),
        ),
        ("x = {\n\tlast terminating signal = Killed: 9\n}", State(True, None, "killed by signal Killed: 9")),
        ("x = {\n\tstate = spawn scheduled\n\tlast exit code = 0\n}", State(True)),
        ("x = {\n\tstate = spawn scheduled\n\tlast terminating signal = Terminated: 15\n}", State(True)),
        ("x = {\n\tstate = spawn scheduled\n\tlast exit code = 1\n}", State(True, None, "exit code 1")),
        ("x = {\n\tendpoints = {\n\t\tpid = 8\n\t}\n\tlast exit code = (never exited)\n}", State(True)),
    ],
)
def test_what_launchctl_prints_is_read(printed: str, state: State) -> None:
    assert launchctl.state_in(printed) == state


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("LoadState=loaded\nMainPID=7\nExecMainExitTimestampMonotonic=0", State(True, 7)),
        ("LoadState=not-found\nMainPID=0\nExecMainExitTimestampMonotonic=0", State(False)),
        (
            "LoadState=loaded\nMainPID=0\nExecMainCode=1\nExecMainStatus=2\nExecMainExitTimestampMonotonic=5",
            State(True, None, "exit code 2"),
        ),
        (
            "LoadState=loaded\nMainPID=0\nExecMainCode=2\nExecMainStatus=9\nExecMainExitTimestampMonotonic=5",
            State(True, None, "killed by signal 9"),
        ),
    ],
)
def test_what_systemctl_shows_is_read(shown: str, state: State) -> None:
    assert systemctl.state_in(shown) == state


@contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[Address]:
    """A proxy that says these one after the other to whoever asks, and the last one for ever."""
    left = list(answers)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Address("127.0.0.1", server.server_port)
        server.shutdown()


class Running(Launchd):
    """Agents of which all run."""

    def state(self, which: object) -> State:
        return State(True, 1)


def test_waiting_tells_each_reason_once_and_ends_when_requests_are_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0)
    loading = (503, {"ready": False, "reason": "loading"})
    told: list[str] = []
    with answering(loading, loading, (503, []), (200, {"model": "tiny"})) as address:
        assert waiting.until_ready(Running(), "", address, {}, 60, told.append) == ""
    assert told == ["waiting: loading", "waiting: the proxy answers 503"]
    with answering(loading) as address:
        problem = waiting.until_ready(Running(), "", address, {}, 0, told.append)
        assert problem == "not ready after 0 s: loading; it goes on starting"


def test_the_last_lines_reach_back_over_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    assert logs.last_lines(log, 3) == []
    log.with_name("proxy.log.1").write_text("one\ntwo\nthree\n")
    log.write_text("four\n")
    assert logs.last_lines(log, 3) == ["two", "three", "four"] and logs.last_lines(log, 1) == ["four"]
    shown: list[str] = []
    assert logs.show([tmp_path / "none", log], 1, shown.append) and shown == ["four\n"]


def test_what_is_followed_goes_on_through_rotation_and_truncation(tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    followed = logs.Followed(log)
    assert followed.more() == ""
    log.write_text("one\n")
    assert followed.more() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    log.rename(tmp_path / "proxy.log.1")
    log.write_text("three\n")
    assert followed.more() == "two\nthree\n"
    log.write_text("4\n")
    assert followed.more() == "4\n"
    written: list[str] = []
    turns = iter([False, True])

    def is_over() -> bool:
        with log.open("a") as file:
            file.write("five\n")
        return next(turns)

    logs.follow([log, tmp_path / "other"], written.append, is_over)
    assert written == [f"==> {log} <==\nfive\n"]
    followed.close()


# ---- in the processes


@pytest.mark.parametrize(("keeper", "code"), [("launchd", 0), ("systemd", 2), ("", 2)])
def test_a_configuration_error_is_one_line_and_0_under_launchd(
    keeper: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from warmline_backend.config import parse_config
    from warmline_proxy.__main__ import main as proxy

    monkeypatch.setenv("WARMLINE_AGENT", keeper)
    starts = [
        lambda: wire_kept.end(lambda: proxy(["--no-such-flag"])),
        lambda: wire_kept.end(lambda: proxy(["--host", "0.0.0.0", "--home", str(tmp_path)])),
        lambda: wire_kept.end(lambda: len(str(parse_config(["--home", "x", "--model", "y", "--temp", "z"])))),
        warmline,
    ]
    monkeypatch.setattr("sys.argv", ["warmline", "backend", "--home", str(tmp_path), "--port", "http"])
    for start in starts:
        with pytest.raises(SystemExit) as ended:
            start()
        assert ended.value.code == code
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and said.startswith("warmline")


def test_other_ends_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMLINE_AGENT", "launchd")
    assert [wire_kept.exit_code(code) for code in (0, 1, 2, 3)] == [0, 1, 0, 3]
    assert [kept.exit_code(code) for code in (0, 1, 2, 3)] == [0, 1, 0, 3]
    assert wire_kept.code_of_held() == 1, "who holds the home may let go"
    monkeypatch.delenv("WARMLINE_AGENT")
    assert wire_kept.code_of_held() == 2
    assert kept.VARIABLE == wire_kept.KEEPER


def test_the_file_with_what_a_kept_process_prints_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "OUTPUT_BYTES_MAX", 10)
    with (tmp_path / "proxy.stderr").open("ab", 0) as file:
        file.write(b"x" * 11)
        kept.bound_output({}, file.fileno())
        assert file.seek(0, 2) == 11
        kept.bound_output({"WARMLINE_AGENT": "launchd"}, file.fileno())
        file.write(b"new")
    assert (tmp_path / "proxy.stderr").read_bytes() == b"new"


def test_a_tool_that_says_nothing_is_told_by_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launchctl").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "launchctl").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ManagerFailed, match="launchctl print x: exit code 9"):
        Launchd().tell("print", "x")


# ---- the documentation


def test_what_is_told_to_type_can_be_typed_in_that_order(mac: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the one machine here; `warmline service` has the same verbs."""
    text = (Path(__file__).parents[2] / "docs" / "launchd.md").read_text()
    typed = re.findall(r"^ *\.venv/bin/warmline launchd (.+)$", text, flags=re.MULTILINE)
    assert {words.split()[0] for words in typed} == {"install", "status", "restart", "logs", "uninstall"}
    monkeypatch.setattr("warmline_run.agents.verbs.wait", lambda pair, config, wait_s: 0)
    for verb, *words in map(shlex.split, typed[: typed.index("uninstall") + 1]):
        codes = {"status": 1}  # nothing listens
        if verb == "install":
            mac.install(*words)
            (mac.home / "logs" / "backend.log").write_text("started\n")
        else:
            mac.run(verb, *words, code=codes.get(verb, 0))


def test_every_key_of_the_plist_is_explained(mac: User) -> None:
    text = (Path(__file__).parents[2] / "docs" / "launchd.md").read_text()
    mac.install("--dry-run", "--out", str(mac.root))
    plist = plistlib.loads((mac.root / "com.warmline.proxy.plist").read_bytes())
    obvious = {"Label", "WorkingDirectory", "StandardOutPath", "Umask"}
    assert all(f"`{key}`" in text for key in plist.keys() - obvious)
    assert f"`ThrottleInterval` {plist['ThrottleInterval']}" in text and f"after {units.RESTART_S} seconds" in text
