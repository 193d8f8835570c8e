"""`warmline doctor` as a process, and the command that it prints."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from warmline_backend import demo
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_run.cli import app


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMLINE_")}
    return subprocess.run(
        [sys.executable, "-m", "warmline_run.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        timeout=120,
    )


def test_printed_serve_command_runs(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "a model's folder"
    folder.symlink_to(tiny_folder("llama", tools=True))
    args = ("--home", str(tmp_path), "--kv-bits", "8", "--json")
    answer = run_doctor(
        str(folder), *args, WARMLINE_KV_GROUP_SIZE="32", WARMLINE_CHAT_TEMPLATE_ARGS='{"manner": "open"}'
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    words = shlex.split(report["serve"])
    assert words[:2] == ["warmline", "serve"]
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    params = serve.make_context("serve", words[2:]).params
    assert params["model"] == [str(folder)] and params["home"] == str(tmp_path)
    assert (params["kv_bits"], params["kv_group_size"]) == ("8", "32")
    assert json.loads(params["chat_template_args"]) == {"manner": "open"}


def test_demo_write_error_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = run_doctor("--home", str(tmp_path / "file" / "home"), "--json")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("warmline: ") and answer.stderr.count("\n") == 1


def test_usage_errors_exit_with_2(tmp_path: Path) -> None:
    for arguments in (("--memory-gb", "much"), (" ",), ("--kv-bits", "7")):
        answer = run_doctor("--home", str(tmp_path), *arguments)
        assert answer.returncode == 2 and "Traceback" not in answer.stderr


def test_examination_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)  # as the death of its owner does
    arguments = ["-m", "warmline_backend.doctor", "--home", str(tmp_path), "org/model"]
    environment = {**os.environ, PARENT_PIPE: str(read_end)}
    ended = subprocess.run([sys.executable, *arguments], env=environment, pass_fds=[read_end], timeout=120)
    os.close(read_end)
    assert ended.returncode == -signal.SIGTERM


def test_preparation_of_the_demo_watches_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[float] = []
    monkeypatch.setattr(demo, "watch_parent", watched.append)
    (tmp_path / "file").touch()
    assert demo.main(["--home", str(tmp_path / "file" / "home")]) == 2 and watched
