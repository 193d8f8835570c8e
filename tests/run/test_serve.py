"""`warmline serve` over the real pair."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import tiny_models
from support.processes import RunningProcess, capture_writes, free_port
from warmline_common.storage.home import Home


@contextmanager
def run_serve(home: Path, *arguments: str, **environment: str) -> Iterator[tuple[RunningProcess, str]]:
    """(serve, ready and running; the base URL)."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WARMLINE_")}
    ports = ("--port", str(free_port()), "--backend-port", str(free_port()))
    command = [sys.executable, "-m", "warmline_run.cli", "serve", "--home", str(home), *ports, *arguments]
    with RunningProcess(command, {**clean, **environment}) as serve:
        yield serve, serve.wait_for(r"^ready (http://\S+/v1)$", timeout_s=60)[1]
        if serve.process.poll() is None:
            serve.process.terminate()
            serve.wait_for_silence()


def ask_chat(url: str, content: str, **more: Any) -> dict[str, Any]:
    body = {"model": "any/name", "messages": [{"role": "user", "content": content}], "temperature": 0, **more}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("model") / "tiny")


def read_pid(home: Path, process: str) -> int:
    return int(Home(home).pid_file(process).read_text())


def test_serve_answers_restarts_and_stops(tmp_path: Path, model: Path) -> None:
    with run_serve(tmp_path, "--model", str(model)) as (serve, url):
        serve.wait_for("^disk +.* of 50 GB used: no conversation is stored$")
        serve.wait_for(f"^dashboard +{url.removesuffix('/v1')}/admin$")
        before = ask_chat(url, "hello", max_tokens=8)["choices"][0]["message"]["content"]
        for process in ("backend", "proxy"):
            old = read_pid(tmp_path, process)
            os.kill(old, signal.SIGKILL)
            serve.wait_for(f"the {process} was killed by SIGKILL")
            serve.wait_for(f"^warmline: ready again, .* s after the {process} ended$")
            assert read_pid(tmp_path, process) != old
            assert ask_chat(url, "hello", max_tokens=8)["choices"][0]["message"]["content"] == before
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for_silence()
        assert serve.process.wait() == 0
        assert not list(Home(tmp_path).run.glob("*.pid"))


def test_client_key_is_required_and_killed_serve_ends_pair(tmp_path: Path, model: Path) -> None:
    with run_serve(tmp_path, "--model", str(model), WARMLINE_CLIENT_KEY="hush") as (serve, url):
        serve.wait_for(r'^curl .* -H "Authorization: Bearer ')
        assert not [line for line in serve.seen if "refused" in line], "its own look was refused"
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask_chat(url, "hello", max_tokens=1)
        assert refused.value.code == 401
        serve.process.kill()
        serve.wait_for_silence()
        assert not list(Home(tmp_path).run.glob("*.pid"))


def test_missing_model_exits_with_2(tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--backend-port", str(free_port()))
    nowhere = str(tmp_path / "nowhere")
    command = [sys.executable, "-m", "warmline_run.cli", "serve", "--home", str(tmp_path), "--model", nowhere, *ports]
    with capture_writes(command) as (serve, writes):
        lines = list(writes)
        assert serve.wait() == 2
        assert any(nowhere in line for line in lines)
        assert not any("Traceback" in line for line in lines)
        assert all(line.endswith("\n") for line in lines), "in whole lines, as several processes write there"


def test_demo_model_answers_through_serve(demo_home: Home) -> None:
    with run_serve(demo_home.root) as (_, url):
        answer = ask_chat(url, "What is the capital of France?", max_tokens=12)
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["model"] == "any/name"
