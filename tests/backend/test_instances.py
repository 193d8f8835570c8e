"""Backends of several models in one home: their names, files, ports, drafts and failures."""

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import pytest

from support.processes import RunningProcess
from warmline_backend.__main__ import _make_scheduler, main
from warmline_backend.config import BackendConfigError, parse_config
from warmline_backend.generation.chunk_memory import compute_usable_bytes
from warmline_common.measurement.model_memory import compute_memory_budget
from warmline_common.process.keeper_pipes.announcement import ANNOUNCE_PIPE, Announcement, parse_announcement
from warmline_common.storage.drafts import make_draft_path
from warmline_common.storage.home import Home

FolderOf = Callable[..., Path]
WAIT_S = 60.0


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", "large")


def run_instance(home: Home, model: Path | str, *flags: str, announce_to: int | None = None) -> RunningProcess:
    program = ["-m", "warmline_backend", "--home", str(home.root), "--instance", home.instance, "--port", "0"]
    environment = os.environ | ({} if announce_to is None else {ANNOUNCE_PIPE: str(announce_to)})
    descriptors = [] if announce_to is None else [announce_to]
    return RunningProcess([sys.executable, *program, "--model", str(model), *flags], environment, descriptors)


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """Keeper's end of an announcement pipe, and the backend's."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader:
        yield reader, write_end
        with suppress(OSError):  # the test has
            os.close(write_end)


def read_state(home: Home) -> Any:
    return json.loads(home.backend_state.read_text())


def test_instance_writes_files_of_its_name(tiny_folder: FolderOf, home: Home) -> None:
    """Also where an earlier start has left its failure."""
    home.prepare()
    home.backend_state.write_text('{"pid": 1, "port": 1, "failure": "an earlier one"}')
    segment = home.segment_file("ab" * 16)
    segment.parent.mkdir()
    own, other = make_draft_path(segment, "large"), make_draft_path(segment, "small")
    for draft in (own, other):
        draft.touch()
    with run_instance(home, tiny_folder("llama"), "--log-format", "json") as running:
        line = running.wait_for("serving llama.* at http://", WAIT_S).string
        pid, state = running.process.pid, read_state(home)
        assert state == {"pid": pid, "port": state["port"]} and f"127.0.0.1:{state['port']}" in line
        assert json.loads(line)["process"] == "backend-large"
        with urllib.request.urlopen(f"http://127.0.0.1:{state['port']}/health", timeout=WAIT_S) as response:
            assert json.load(response)["pid"] == pid
        assert not own.exists() and other.exists(), "another backend may be writing its drafts"
        names = {"backend-large.json", "backend-large.lock", "backend-large.pid"}
        assert {path.name for path in home.run.iterdir()} == names
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(WAIT_S) == 0
    assert {path.name for path in home.run.iterdir()} == {"backend-large.lock"}


def test_failure_is_announced_and_logged_to_file_of_its_name(home: Home, pipe: tuple[BinaryIO, int]) -> None:
    reader, write_end = pipe
    with run_instance(home, "/nowhere", "--log-files", announce_to=write_end) as running:
        os.close(write_end)
        reason = running.wait_for("warmline backend: (can't serve.*)", WAIT_S)[1]
        assert running.process.wait(WAIT_S) == 2
    first, last = (parse_announcement(line) for line in reader)
    assert first is not None and first.port and not first.failure
    assert last == Announcement(failure=reason)
    assert {path.name for path in home.run.iterdir()} == {"backend-large.lock"}
    assert "can't serve" in (home.logs / "backend-large.log").read_text()
    assert not (home.logs / "backend.log").exists()


def test_refused_setting_is_announced(home: Home, pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, write_end = pipe
    monkeypatch.setenv(ANNOUNCE_PIPE, str(write_end))
    assert main(["--home", str(home.root), "--model", "m", "--instance", "large", "--host", "0.0.0.0"]) == 2
    announced = parse_announcement(reader.readline())
    assert announced is not None and announced.failure.startswith("--host 0.0.0.0: the backend serves loopback only")
    assert ANNOUNCE_PIPE not in os.environ and not os.get_inheritable(write_end)


@pytest.mark.parametrize("name", ["../x", "a/b", "Large", "a b", "a" * 65])
def test_instance_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(BackendConfigError, match=r"expected 1 to 64 of a-z 0-9 \. _ -"):
        parse_config(["--home", "h", "--model", "m", "--instance", name])


def test_memory_of_start_is_taken_from_flags(
    tiny_folder: FolderOf, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.prepare()
    common = ["--home", str(home.root), "--model", str(tiny_folder("llama")), "--prefill-step-size", "64"]
    flags = ["--memory-limit-bytes", "2000000000", "--memory-share-bytes", "5000000"]
    caches: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", caches.append)
    for usable_flags, usable in (([], 2_000_000_000), (["--memory-usable-bytes", "7000000"], 7_000_000)):
        scheduler = _make_scheduler(parse_config([*common, *flags, *usable_flags]), home, "boot")
        weights = scheduler.served.weight_bytes
        assert scheduler.settings.memory_budget_bytes == compute_memory_budget(weights, 2_000_000_000)
        assert scheduler.chunk_memory.usable_bytes == compute_usable_bytes(weights, usable)
        assert caches[-1] == pytest.approx((usable - weights) / 10, abs=1)
        assert scheduler.residents.budget_bytes == 5_000_000


def test_budget_is_at_least_the_share_of_the_start(tiny_folder: FolderOf, home: Home) -> None:
    """As the keeper promises it, where the KV of the shortest context takes more than the usual part of the memory."""
    home.prepare()
    flags = ["--memory-limit-bytes", "2000000", "--memory-share-bytes", "1500000", "--prefill-step-size", "64"]
    config = parse_config(["--home", str(home.root), "--model", str(tiny_folder("llama")), *flags])
    scheduler = _make_scheduler(config, home, "boot")
    assert compute_memory_budget(scheduler.served.weight_bytes, 2_000_000) < 1_500_000
    assert scheduler.settings.memory_budget_bytes == scheduler.admission.set_budget(1_500_000) == 1_500_000


@pytest.mark.parametrize("value", ["-1", "word", "1.5"])
def test_bytes_that_are_no_number_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--home", "h", "--model", "m", "--memory-limit-bytes", value])
    assert "--memory-limit-bytes" in capsys.readouterr().err
