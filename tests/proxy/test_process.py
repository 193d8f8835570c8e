"""The proxy as a process: it tells where it listens, owns its home alone, and ends cleanly."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from warmline_proxy.lock import HomeLocked, home_lock
from warmline_wire.home import Home

START_TIMEOUT_S = 15.0


def start(home: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "warmline_proxy", "--home", str(home), "--port", "0", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def announced(home: Path, process: subprocess.Popen[str]) -> dict[str, str | int]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (home / "run" / "proxy.pid").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.02)
    told: dict[str, str | int] = json.loads((home / "run" / "proxy.json").read_text())
    return told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_where_it_listens_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "--backend-url", "http://127.0.0.1:9")
    told = announced(tmp_path, process)
    assert told["pid"] == process.pid == int((tmp_path / "run" / "proxy.pid").read_text())
    with urllib.request.urlopen(f"{told['url']}/health") as response:
        assert response.status == 200
    with pytest.raises(HomeLocked), home_lock(Home(tmp_path)):
        pass
    process.send_signal(number)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, errors
    assert not list((tmp_path / "run").iterdir())
    assert "Traceback" not in errors


def test_a_killed_proxy_leaves_its_home_to_the_next(tmp_path: Path) -> None:
    first = start(tmp_path)
    announced(tmp_path, first)
    first.kill()
    first.communicate()
    (tmp_path / "run" / "proxy.pid").unlink()
    second = start(tmp_path)
    assert announced(tmp_path, second)["pid"] == second.pid
    second.terminate()
    second.communicate()
    assert second.returncode == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "WARMLINE_CLIENT_KEY"),
        (["--reuse", "perhaps"], "--reuse"),
        (["--port", "70000"], "70000"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(tmp_path: Path, flags: list[str], words: str) -> None:
    process = start(tmp_path, *flags)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert words in errors and errors.count("\n") == 1
