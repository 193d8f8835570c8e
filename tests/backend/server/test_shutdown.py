"""Shutdown: drains, signals, and exits of a process whose engine has ended."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path

import pytest

from support.backend.live_backend import (
    BODY,
    ENDLESS,
    WAIT_S,
    EngineHold,
    LiveBackend,
    read_result,
    read_until,
    wait_until,
    with_backend,
)
from support.processes import RunningProcess, free_port
from warmline_backend.config import BackendConfigError, parse_config
from warmline_backend.server import shutdown
from warmline_backend.server.shutdown import drain
from warmline_common.protocol.messages import (
    HEADER_BACKGROUND,
    HEADER_PROMPT,
    HEADER_REQUEST,
    PromptRequest,
    RestoreRequest,
    SaveRequest,
    SegmentSpec,
)
from warmline_common.storage.home import Home

FolderOf = Callable[..., Path]
FEW = {**BODY, "max_tokens": 300}


def drain_backend(backend: LiveBackend, timeout_s: float, hurry: asyncio.Event) -> "asyncio.Task[None]":
    return asyncio.ensure_future(drain(backend.service, timeout_s, hurry))


def test_drain_lets_running_requests_end_and_refuses_new_ones(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        later = await backend.render_prompt()
        async with backend.start_generation("a", await backend.render_prompt(FEW)) as response:
            await read_until(response, b'"content":"')
            task = drain_backend(backend, WAIT_S, asyncio.Event())
            await asyncio.sleep(0)
            new = [
                await backend.request_json(
                    "POST", "/kv/prompts", PromptRequest(request_id="p", endpoint="chat", body=BODY)
                ),
                await backend.request_json("POST", "/v1/chat/completions", BODY),
                await backend.request_json("POST", "/kv/restore", RestoreRequest(request_id="r", tokens=b"", chain=[])),
            ]
            async with backend.start_generation("b", later) as refused:
                new.append((refused.status, await refused.json()))
            assert [(status, reply["error"]["message"]) for status, reply in new] == [(503, "shutting down")] * 4
            end = await read_result(response)
            assert (end.finish, len(end.generated) // 4) == ("length", 300)
        assert not task.done(), "what it has left is not saved yet"
        spec = SegmentSpec(id="a" * 32, start=0, end=end.prefilled_until)
        save = SaveRequest(request_id="s", resident=end.resident, segments=[spec])
        assert (await backend.request_json("POST", "/kv/save", save))[0] == 200
        await asyncio.wait_for(task, WAIT_S)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_drain_cancels_background_requests(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "SAVES_WAIT_S", 0.01)  # nobody saves what the other one leaves

    async def work(backend: LiveBackend) -> None:
        audited = await backend.render_prompt({**BODY, "max_tokens": 1})
        async with backend.start_generation("a", await backend.render_prompt(ENDLESS)) as response:
            await read_until(response, b'"content":"')
            headers = {HEADER_REQUEST: "b", HEADER_PROMPT: audited.prompt_id, HEADER_BACKGROUND: "1"}
            async with backend.send("POST", "/v1/chat/completions", **headers) as background:
                hurry = asyncio.Event()
                task = drain_backend(backend, WAIT_S, hurry)
                assert (await read_result(background)).finish == "cancelled"
                assert backend.service.inflight.request_ids == ["a"]
                hurry.set()
            assert (await read_result(response)).finish == "cancelled"
        await asyncio.wait_for(task, WAIT_S)

    with_backend(tiny_folder("llama"), tmp_path, work)


@pytest.mark.parametrize("ending", ["the time is over", "in a hurry"])
def test_drain_timeout_cancels_and_keeps_kv(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(shutdown, "SAVES_WAIT_S", 0.01)  # nobody saves it

    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt(ENDLESS)) as response:
            await read_until(response, b'"content":"')
            hurry = asyncio.Event()
            task = drain_backend(backend, 0.01 if ending == "the time is over" else WAIT_S, hurry)
            if ending == "in a hurry":
                await asyncio.sleep(0)
                assert not task.done()
                hurry.set()
            end = await read_result(response)
            assert end.finish == "cancelled" and end.resident
        await asyncio.wait_for(task, WAIT_S)
        assert backend.service.inflight.request_ids == []

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_drain_does_not_wait_for_hanging_engine(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "CANCEL_WAIT_S", 0.01)

    async def work(backend: LiveBackend) -> None:
        async with backend.start_generation("a", await backend.render_prompt(ENDLESS)) as response:
            await read_until(response, b'"content":"')
            async with EngineHold(backend.engine):
                await asyncio.wait_for(drain_backend(backend, 0.01, asyncio.Event()), WAIT_S)
                assert backend.service.inflight.request_ids == ["a"]
            assert (await read_result(response)).finish == "cancelled"

    with_backend(tiny_folder("llama"), tmp_path, work)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_drain_timeout_flag_is_validated(seconds: str) -> None:
    with pytest.raises(
        BackendConfigError, match=r"--drain-timeout-s .*: expected a number of seconds, from 0 to 1000000000"
    ):
        parse_config(["--home", "h", "--model", "m", "--drain-timeout-s", seconds])


def test_same_signal_twice_stops_at_once() -> None:
    async def run() -> None:
        signals = shutdown.StopSignals()
        os.kill(os.getpid(), signal.SIGINT)
        await wait_until(signals.stop.is_set)
        os.kill(os.getpid(), signal.SIGTERM)  # passed on by whoever got the other one too
        await wait_until(lambda: len(signals._received) == 2)
        assert not signals.stop_now.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await wait_until(signals.stop_now.is_set)

    asyncio.run(run())


# ---- whole processes

BREAKING = """
import sys
from pathlib import Path
from warmline_backend import __main__
from warmline_backend.scheduler import scheduler

real = scheduler.Scheduler.step

def step(self):
    for _ in real(self):
        yield
        if Path(sys.argv[-1]).exists():
            raise scheduler.DeviceBrokenError("the device is gone")

scheduler.Scheduler.step = step
sys.exit(__main__.main(sys.argv[1:-1]))
"""


HANGING = """
import logging
import sys
import threading
from warmline_backend import __main__
from warmline_backend.server import service

def hang(*arguments, **options):
    logging.warning("the disk does not answer")
    threading.Event().wait()

service.fingerprint_served_model = hang
__main__.THREADS_WAIT_S = 0.1
sys.exit(__main__.main(sys.argv[1:]))
"""


ABORTING = """
import atexit
import os
import sys
from warmline_backend import __main__

atexit.register(os.abort)  # as a library's own threads do, while Python takes itself apart
sys.exit(__main__.main(sys.argv[1:]))
"""


class BackendProcess:
    """Backend in a process of its own."""

    def __init__(
        self, model: Path, folder: Path, program: list[str], *rest: str, says: str = "serving .* at http://"
    ) -> None:
        self.home, self._port = Home(folder / "home"), free_port()
        flags = ["--home", str(self.home.root), "--model", str(model), "--port", str(self._port)]
        self.running = RunningProcess([sys.executable, *program, *flags, *rest])
        self.running.wait_for(says, 60)

    def stream(self, body: object) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {self.home.load_secret()}", HEADER_REQUEST: "a"}
        url, data = f"http://127.0.0.1:{self._port}/v1/chat/completions", json.dumps(body).encode()
        response = urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=WAIT_S)
        assert isinstance(response, HTTPResponse)
        return response

    def signal(self, number: signal.Signals) -> None:
        self.running.process.send_signal(number)

    def code(self) -> int:
        return self.running.process.wait(WAIT_S)


def read_lines_until(response: HTTPResponse, word: bytes) -> None:
    for line in response:
        if word in line:
            return
    raise AssertionError(f"the stream ended without {word!r}")


def test_second_sigterm_ends_process_at_once_with_0(tiny_folder: FolderOf, tmp_path: Path) -> None:
    backend = BackendProcess(tiny_folder("llama"), tmp_path, ["-m", "warmline_backend"], "--drain-timeout-s", "1000")
    with backend.running as running, backend.stream({**ENDLESS, "stream": True}) as response:
        read_lines_until(response, b'"content":"')
        backend.signal(signal.SIGTERM)
        running.wait_for("shutting down: 1 requests have 1000 s to end")
        read_lines_until(response, b'"content":"')  # it goes on
        backend.signal(signal.SIGTERM)
        rest = response.read()
        assert b'"code":"cancelled"' in rest and b"[DONE]" not in rest
        assert backend.code() == 0
        assert any("descriptors may be open" in line for line in running.seen)
        assert not backend.home.pid_file("backend").exists()


def test_broken_device_ends_process_with_1(tiny_folder: FolderOf, tmp_path: Path) -> None:
    order = tmp_path / "order"
    backend = BackendProcess(tiny_folder("llama"), tmp_path, ["-c", BREAKING], str(order))
    with backend.running as running, backend.stream({**ENDLESS, "stream": True}) as response:
        read_lines_until(response, b'"content":"')
        order.touch()
        rest = response.read()
        assert b"the engine has ended: the device is gone" in rest and b'"finish":"discarded"' in rest
        running.wait_for("the engine has ended: the device is gone; this process must be started again")
        assert backend.code() == 1


def test_hanging_disk_does_not_delay_exit(tiny_folder: FolderOf, tmp_path: Path) -> None:
    backend = BackendProcess(tiny_folder("llama"), tmp_path, ["-c", HANGING], says="the disk does not answer")
    with backend.running as running:
        backend.signal(signal.SIGTERM)
        running.wait_for(r"helper_\d: still at work; the process ends without waiting")
        assert backend.code() == 0
        assert not backend.home.pid_file("backend").exists()


def test_abort_at_exit_does_not_change_exit_code(tiny_folder: FolderOf, tmp_path: Path) -> None:
    backend = BackendProcess(tiny_folder("llama"), tmp_path, ["-c", ABORTING])
    with backend.running as running:
        backend.signal(signal.SIGTERM)
        assert backend.code() == 0
        assert not any("at work" in line for line in running.seen)


def test_second_backend_on_home_is_refused_before_writing(tiny_folder: FolderOf, tmp_path: Path) -> None:
    """Otherwise it would delete the first one's drafts, and overwrite its pid file."""
    model = tiny_folder("llama")
    first = BackendProcess(model, tmp_path, ["-m", "warmline_backend"])
    with first.running:
        draft = first.home.segments / "ab" / ".draft.tmp"
        draft.parent.mkdir()
        draft.touch()
        pid = first.home.pid_file("backend").read_text()
        program = ["-c", QUICK, "--home", str(first.home.root), "--model", str(model), "--port", str(free_port())]
        with RunningProcess([sys.executable, *program]) as second:
            second.wait_for(f"in use by process {first.running.process.pid}, another backend")
            assert second.process.wait(WAIT_S) == 2
        assert draft.exists() and first.home.pid_file("backend").read_text() == pid


QUICK = """
import sys
from warmline_backend import __main__

__main__.LOCK_WAIT_S = 0.1
sys.exit(__main__.main(sys.argv[1:]))
"""
