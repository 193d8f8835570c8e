"""Real pair, run exactly as the plists say: their ProgramArguments, and no other environment."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support import tiny_models
from support.run.fake_managers import FakeUser
from warmline_common.storage.home import Home


def ask_pair(user: FakeUser) -> dict[str, Any]:
    body = {"model": "any", "messages": [{"role": "user", "content": "hello " * 30}], "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{user.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def get_cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_pair_runs_under_launchd_plists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = FakeUser(tmp_path, monkeypatch, "launchctl")
    user.then("run")
    model = tiny_models.build("llama", tmp_path / "tiny")
    try:
        output = user.install("--model", str(model), "--wait-s", "60").stdout
        assert f"ready http://127.0.0.1:{user.port}/v1\nmodel      tiny on " in output
        assert f"\ndashboard  http://127.0.0.1:{user.port}/admin\n" in output
        assert get_cached_tokens(ask_pair(user)) == 0
        before = {role: agent["pid"] for role, agent in user.status()["agents"].items()}
        assert before == {role: int(Home(user.home).pid_file(role).read_text()) for role in ("proxy", "backend")}

        user.run("restart", "proxy", "--wait-s", "60")
        found = user.status()
        after = {role: agent["pid"] for role, agent in found["agents"].items()}
        assert after["backend"] == before["backend"] and after["proxy"] != before["proxy"]
        assert found["ready"] and found["model"] == "tiny"
        assert get_cached_tokens(ask_pair(user)) > 0, "the backend has kept what it had"

        # A configuration error ends with 0, so that launchd leaves it, and its one line is what the user is told.
        output = user.install("--model", str(tmp_path / "nowhere"), "--wait-s", "60", code=1).output
        assert "the backend does not run, exit code 0:\n  warmline: " in output
        assert f"{tmp_path / 'nowhere'}: there is no such folder" in output
        assert (user.home / "logs" / "backend.stderr").read_text().count("\n") == 1
    finally:
        user.run("uninstall")
    for pid in (*before.values(), *after.values()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list(Home(user.home).run.glob("*.pid"))
