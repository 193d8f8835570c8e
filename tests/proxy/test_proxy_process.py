"""Proxy as a process: address files, home lock, signals and clean exit."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import warmline_proxy.__main__ as proxy
from support.proxy.fake_backend import FakeBackend
from support.proxy.harness import on_loop, serve
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.auth.key_store import derive_tenant, read_last_tenant
from warmline_proxy.config import parse_config
from warmline_proxy.home_lock import HomeLockedError, home_lock

START_TIMEOUT_S = 15.0
WITHOUT_PATIENCE = """
import sys
from warmline_proxy import __main__ as proxy
proxy.LOCK_WAIT_S = 0.0
sys.exit(proxy.main(["--home", sys.argv[1], "--port", "0"]))
"""


def start_proxy(home: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "warmline_proxy", "--home", str(home), "--port", "0", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_address(home: Path, process: subprocess.Popen[str]) -> dict[str, str | int]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (home / "run" / "proxy.pid").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.02)
    address: dict[str, str | int] = json.loads((home / "run" / "proxy.json").read_text())
    return address


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_address_file_and_clean_exit(tmp_path: Path, number: signal.Signals) -> None:
    process = start_proxy(tmp_path, "--backend-url", "http://127.0.0.1:9")
    address = wait_for_address(tmp_path, process)
    assert address["pid"] == process.pid == int((tmp_path / "run" / "proxy.pid").read_text())
    with urllib.request.urlopen(f"{address['url']}/health") as response:
        assert response.status == 200
    with pytest.raises(HomeLockedError), home_lock(Home(tmp_path)):
        pass
    process.send_signal(number)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 0, errors
    assert not list((tmp_path / "run").iterdir())
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if line.endswith(": stopping")] and "to finish" not in errors


def test_home_lock_released_after_kill(tmp_path: Path) -> None:
    first = start_proxy(tmp_path)
    wait_for_address(tmp_path, first)
    first.kill()
    first.communicate()
    (tmp_path / "run" / "proxy.pid").unlink()
    second = start_proxy(tmp_path)
    assert wait_for_address(tmp_path, second)["pid"] == second.pid
    second.terminate()
    second.communicate()
    assert second.returncode == 0


@on_loop
async def test_address_file_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full or read-only home recovers while serving; cachectl then finds the proxy."""
    monkeypatch.setenv("WARMLINE_CLIENT_KEY", "wl-settings")
    config, tries, written = parse_config(["--home", str(tmp_path)]), [0], asyncio.Event()
    config.home.prepare()
    loop, real = asyncio.get_running_loop(), disk.replace_file

    def full(path: Path, text: str) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, text)
        if path.name == "proxy.pid":
            loop.call_soon_threadsafe(written.set)

    monkeypatch.setattr(disk, "replace_file", full)
    async with proxy.publish_address(config, 8026, retry_interval_s=0.0):
        assert not list((tmp_path / "run").iterdir())
        await asyncio.wait_for(written.wait(), START_TIMEOUT_S)
        assert json.loads((tmp_path / "run" / "proxy.json").read_text())["url"] == "http://127.0.0.1:8026"
    assert list((tmp_path / "run").iterdir()) == [config.home.settings_tenant], "the settings key's tenant file stays"
    assert read_last_tenant(config.home) == derive_tenant("wl-settings")
    assert caplog.text.count("could not be written down") == 1


@asynccontextmanager
async def run_proxy(
    folder: Path, backend: FakeBackend, *flags: str
) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """(proxy process in front of `backend`, its URL)."""
    below, port = await serve(backend.make_app())
    process = start_proxy(folder, "--backend-url", f"http://127.0.0.1:{port}", *flags)
    try:
        yield process, str((await asyncio.to_thread(wait_for_address, folder, process))["url"])
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
        await below.cleanup()


def start_chat(client: aiohttp.ClientSession, url: str) -> "asyncio.Task[tuple[int, Any, Any]]":
    """Start a chat request; the task returns (status, headers, JSON)."""

    async def ask() -> tuple[int, Any, Any]:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        async with client.post(f"{url}/v1/chat/completions", json=body) as response:
            return response.status, response.headers, await response.json()

    return asyncio.create_task(ask())


@on_loop
async def test_drain_finishes_running_and_refuses_new(tmp_path: Path) -> None:
    backend = FakeBackend(Home(tmp_path))
    backend.hold_after = 1
    async with run_proxy(tmp_path, backend) as (process, url), aiohttp.ClientSession() as client:
        answer = start_chat(client, url)
        await backend.holding.wait()
        process.terminate()
        while (refusal := await start_chat(client, url))[0] == 200:  # the signal may take a moment
            pass
        assert refusal[0] == 503 and int(refusal[1]["Retry-After"]) > 0
        backend.may_continue.set()
        status, _, body = await answer
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Paris.")
        assert await asyncio.to_thread(process.wait, START_TIMEOUT_S) == 0


@on_loop
async def test_second_signal_aborts_drain(tmp_path: Path) -> None:
    backend = FakeBackend(Home(tmp_path))
    backend.hold_after = 1
    flags = ("--drain-timeout-s", "600")
    async with run_proxy(tmp_path, backend, *flags) as (process, url), aiohttp.ClientSession() as client:
        answer = start_chat(client, url)
        await backend.holding.wait()
        process.terminate()
        assert process.stderr
        while "stopping" not in (line := await asyncio.to_thread(process.stderr.readline)):
            pass
        assert "stopping: 1 request has 600 s to finish" in line
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, START_TIMEOUT_S) == 0
        assert not (tmp_path / "run" / "proxy.pid").exists()
        with pytest.raises(aiohttp.ClientError):
            await answer


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "WARMLINE_CLIENT_KEY"),
        (["--reuse", "perhaps"], "--reuse"),
        (["--port", "70000"], "70000"),
    ],
)
def test_bad_settings_exit_code_2(tmp_path: Path, flags: list[str], words: str) -> None:
    process = start_proxy(tmp_path, *flags)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert words in errors and errors.count("\n") == 1


def test_unusable_home_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    process = start_proxy(tmp_path / "file" / "home")
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2, "starting again would not help"
    assert "is not complete and can't be made so" in errors and "use another --home" in errors
    assert "Traceback" not in errors


def test_second_proxy_on_home_is_refused(tmp_path: Path) -> None:
    with home_lock(Home(tmp_path)):
        second = subprocess.run(
            [sys.executable, "-c", WITHOUT_PATIENCE, str(tmp_path)], capture_output=True, text=True, check=False
        )
    assert second.returncode == 2
    assert f"{tmp_path} is in use by process {os.getpid()}, a proxy or cachectl" in second.stderr
