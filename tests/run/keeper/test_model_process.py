"""A model's process, as it tells of its changes; its backend is a client's scripted answers."""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from warmline_common.protocol.keeper import ModelStage
from warmline_common.protocol.messages import HealthReply
from warmline_run.keeper.backends import model_process
from warmline_run.keeper.backends.backend_client import BackendUnreachableError
from warmline_run.keeper.backends.model_process import ModelProcess

PID = 7
LOADING = HealthReply(boot="b", pid=PID, ready=False, busy=False, steps=0, step_age_s=0.0, slowest_recent_step_s=0.0)


class ScriptedClient:
    def __init__(self, *answers: HealthReply | None) -> None:
        self._answers = list(answers)

    async def read_health(self, port: int) -> HealthReply:
        if (answer := self._answers.pop(0)) is None:
            raise BackendUnreachableError("TimeoutError")
        return answer


def test_change_is_told_when_a_backend_begins_or_ceases_to_answer(tmp_path: Path) -> None:
    """The proxy reckons with what was told last: a load would count as an outage to its end."""
    client: Any = ScriptedClient(LOADING, LOADING, None, None, LOADING)
    starter: Any = None
    told: list[bool] = []
    process = ModelProcess("a", tmp_path / "a.log", starter, client, lambda: told.append(process.state.down_s > 0))
    process._set(ModelStage.STARTING, "", pid=PID, unanswered_since=1.0)

    async def check_health() -> None:
        for _ in range(5):
            assert not await process._check_health(1, PID)

    asyncio.run(check_health())
    assert told == [True, False, True, False]


def test_process_that_hangs_before_it_is_loaded_is_not_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_process, "STOP_UNLOADED_S", 0.2)
    unused: Any = None

    async def stop_hung() -> tuple[int | None, float]:
        process = ModelProcess("a", tmp_path / "a.log", unused, unused, lambda: None)
        ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
        hung = await asyncio.create_subprocess_exec(sys.executable, "-c", ignoring, stdout=asyncio.subprocess.PIPE)
        assert hung.stdout is not None and await hung.stdout.readline()
        process._process = hung
        process._set(ModelStage.STARTING, "", pid=hung.pid)
        began = time.monotonic()
        await process.stop(asyncio.Event(), drain_timeout_s=60.0)
        assert process.state.stage is ModelStage.UNLOADED
        return hung.returncode, time.monotonic() - began

    code, seconds = asyncio.run(stop_hung())
    assert code == -signal.SIGKILL and seconds < 30
