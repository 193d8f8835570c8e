"""Status of a service: its state, its start, its logs, and its end."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from warmline_common.process import exit_codes
from warmline_common.settings.resolve import ResolvedConfig, resolve
from warmline_run.cli import main as warmline
from warmline_run.services import actions, launchd, logs, systemd
from warmline_run.services.launchd import LaunchdManager
from warmline_run.services.manager import ServiceManagerError, ServiceState


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("x = {\n\tstate = running\n\tpid = 7\n\tlast exit code = (never exited)\n}", ServiceState(True, 7)),
        (
            "x = {\n\tstate = not running\n\tlast exit code = 78: EX_CONFIG\n}",
            ServiceState(True, None, "exit code 78: EX_CONFIG"),
        ),
        ("x = {\n\tlast terminating signal = Killed: 9\n}", ServiceState(True, None, "killed by signal Killed: 9")),
        ("x = {\n\tstate = spawn scheduled\n\tlast exit code = 0\n}", ServiceState(True)),
        ("x = {\n\tstate = spawn scheduled\n\tlast terminating signal = Terminated: 15\n}", ServiceState(True)),
        ("x = {\n\tstate = spawn scheduled\n\tlast exit code = 1\n}", ServiceState(True, None, "exit code 1")),
        ("x = {\n\tendpoints = {\n\t\tpid = 8\n\t}\n\tlast exit code = (never exited)\n}", ServiceState(True)),
    ],
)
def test_launchctl_output_is_parsed(printed: str, state: ServiceState) -> None:
    assert launchd.parse_state(printed) == state


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("LoadState=loaded\nMainPID=7\nExecMainExitTimestampMonotonic=0", ServiceState(True, 7)),
        ("LoadState=not-found\nMainPID=0\nExecMainExitTimestampMonotonic=0", ServiceState(False)),
        (
            "LoadState=loaded\nMainPID=0\nExecMainCode=1\nExecMainStatus=2\nExecMainExitTimestampMonotonic=5",
            ServiceState(True, None, "exit code 2"),
        ),
        (
            "LoadState=loaded\nMainPID=0\nExecMainCode=2\nExecMainStatus=9\nExecMainExitTimestampMonotonic=5",
            ServiceState(True, None, "killed by signal 9"),
        ),
    ],
)
def test_systemctl_output_is_parsed(shown: str, state: ServiceState) -> None:
    assert systemd.parse_state(shown) == state


@contextmanager
def run_fake_proxy(*answers: tuple[int, Any]) -> Iterator[ResolvedConfig]:
    """Settings of a proxy that gives these one after the other to whoever asks, and the last one for ever."""
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
        yield resolve({"home": "/nowhere", "port": str(server.server_port)}, {})
        server.shutdown()


class RunningServices(LaunchdManager):
    """Services that all run."""

    def read_state(self, which: object) -> ServiceState:
        return ServiceState(True, 1)


def test_wait_until_ready_prints_each_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "POLL_S", 0)
    loading = (503, {"ready": False, "reason": "loading"})
    lines: list[str] = []
    pair = actions.ServicePair(RunningServices(), "", lines.append)
    with run_fake_proxy(loading, loading, (503, []), (200, {"model": "tiny"})) as config:
        assert actions.wait_until_ready(pair, config, 60) == ""
    assert lines == ["waiting: loading", "waiting: the proxy answers 503"]
    with run_fake_proxy(loading) as config:
        problem = actions.wait_until_ready(pair, config, 0)
        assert problem == "not ready after 0 s: loading; it is still starting"


def test_last_lines_span_rotated_log(tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    assert logs.read_last_lines(log, 3) == []
    log.with_name("proxy.log.1").write_text("one\ntwo\nthree\n")
    log.write_text("four\n")
    assert logs.read_last_lines(log, 3) == ["two", "three", "four"] and logs.read_last_lines(log, 1) == ["four"]
    shown: list[str] = []
    assert logs.show([tmp_path / "none", log], 1, shown.append) and shown == ["four\n"]


def test_follow_survives_rotation_and_truncation(tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    followed = logs.LogFollower(log)
    assert followed.read_added() == ""
    log.write_text("one\n")
    assert followed.read_added() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    log.rename(tmp_path / "proxy.log.1")
    log.write_text("three\n")
    assert followed.read_added() == "two\nthree\n"
    log.write_text("4\n")
    assert followed.read_added() == "4\n"
    written: list[str] = []
    turns = iter([False, True])

    def is_over() -> bool:
        with log.open("a") as file:
            file.write("five\n")
        return next(turns)

    logs.follow(lambda: [log, tmp_path / "other"], written.append, is_over)
    assert written == [f"==> {log} <==\nfive\n"]
    followed.close()


def test_logs_of_backend_include_those_of_all_models(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("backend.stderr", "backend.log", "keeper.log", "backend-a.log", "backend-a.log.1", "proxy.log"):
        (folder / name).write_text(f"{name}\n")
    names = [path.name for path in logs.list_log_files(tmp_path, ["backend"])]
    assert names == ["backend.stderr", "backend.log", "keeper.log", "backend-a.log"]
    assert [path.name for path in logs.list_log_files(tmp_path, ["proxy"])] == ["proxy.stderr", "proxy.log"]
    written: list[str] = []
    turns = iter([False, True])

    def is_over() -> bool:
        (folder / "backend-b.log").write_text("loaded\n")  # by a model that is loaded meanwhile
        return next(turns)

    logs.follow(lambda: logs.list_log_files(tmp_path, ["backend"]), written.append, is_over)
    assert written == [f"==> {folder / 'backend-b.log'} <==\nloaded\n"]


# ---- in the processes


@pytest.mark.parametrize(("keeper", "code"), [("launchd", 0), ("systemd", 2), ("", 2)])
def test_configuration_error_exits_with_0_under_launchd(
    keeper: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from warmline_backend.__main__ import main as backend
    from warmline_proxy.__main__ import main as proxy

    monkeypatch.setenv("WARMLINE_AGENT", keeper)
    starts = [
        lambda: exit_codes.run_main(lambda: proxy(["--no-such-flag"])),
        lambda: exit_codes.run_main(lambda: proxy(["--host", "0.0.0.0", "--home", str(tmp_path)])),
        lambda: exit_codes.run_main(lambda: backend(["--home", "x", "--model", "y", "--temp", "z"])),
        warmline,
    ]
    monkeypatch.setattr("sys.argv", ["warmline", "backend", "--home", str(tmp_path), "--port", "http"])
    for start in starts:
        with pytest.raises(SystemExit) as ended:
            start()
        assert ended.value.code == code
        output = capfd.readouterr().err
        assert output.count("\n") == 1 and output.startswith("warmline")


def test_other_exit_codes_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMLINE_AGENT", "launchd")
    assert [exit_codes.map_exit_code(code) for code in (0, 1, 2, 3)] == [0, 1, 0, 3]
    assert exit_codes.locked_home_exit_code() == 1, "who holds the home may let go"
    monkeypatch.delenv("WARMLINE_AGENT")
    assert exit_codes.locked_home_exit_code() == 2


def test_output_file_of_service_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_codes, "OUTPUT_BYTES_MAX", 10)
    with (tmp_path / "proxy.stderr").open("ab", 0) as file:
        file.write(b"x" * 11)
        exit_codes.truncate_output({}, file.fileno())
        assert file.seek(0, 2) == 11
        exit_codes.truncate_output({"WARMLINE_AGENT": "launchd"}, file.fileno())
        file.write(b"new")
    assert (tmp_path / "proxy.stderr").read_bytes() == b"new"


def test_silent_tool_is_reported_by_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launchctl").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "launchctl").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceManagerError, match="launchctl print x: exit code 9"):
        LaunchdManager().run_checked("print", "x")
