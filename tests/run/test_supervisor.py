"""Supervisor over stand-in processes."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.processes import RunningProcess, capture_writes, free_port
from warmline_run import probe, supervisor
from warmline_run.address import Address

DRIVER = str(Path(__file__).parents[1] / "support" / "run" / "run_supervisor.py")


def make_command(*manner: str) -> list[str]:
    return [sys.executable, DRIVER, str(free_port()), str(free_port()), *manner]


def start_supervisor(*manner: str) -> RunningProcess:
    return RunningProcess(make_command(*manner))


def wait_until_up(serve: RunningProcess) -> None:
    """Wait for the start of both children, since "ready" tells it of the proxy alone."""
    serve.wait_for_all("^backend up ", "^proxy up ", "^ready ")


def test_supervisor_prints_ready_and_example() -> None:
    with start_supervisor() as serve:
        url = serve.wait_for(r"^ready (http://127\.0\.0\.1:\d+/v1)$")[1]
        serve.wait_for(rf"^curl {url}/chat/completions -H 'Content-Type: application/json' -d '\{{.*France")


def test_printed_lines_are_whole_after_kill() -> None:
    """Whole lines a write, or others, who print to the same place, come in between."""
    with capture_writes(make_command()) as (serve, writes):
        announced = next(write for write in writes if write.startswith("ready "))
        assert re.fullmatch(r"ready http://\S+/v1\ncurl .+\n", announced)
        serve.terminate()
        rest = list(writes)
        assert any(write.startswith("warmline: stopping") for write in rest)
        assert all(write.endswith("\n") for write in rest)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_proxy_before_backend(number: signal.Signals) -> None:
    with start_supervisor() as serve:
        wait_until_up(serve)
        serve.process.send_signal(number)
        serve.wait_for("^warmline: stopping; once more to end at once$")
        serve.wait_for("^proxy stopping$")
        serve.wait_for("^backend stopping$")
        serve.wait_for_silence()
        assert serve.process.wait() == 0


def test_killed_child_restarts_with_backoff() -> None:
    with start_supervisor() as serve:
        up, _ = serve.wait_for_all(r"^backend up (\d+)", "^ready ")
        first = int(up[1])
        os.kill(first, signal.SIGKILL)
        assert serve.wait_for(r"the backend was killed by SIGKILL; starting it again in (\S+) s")[1] == "1"
        up_again, again = serve.wait_for_all(
            r"^backend up (\d+)", r"^warmline: ready again, (\S+) s after the backend ended$"
        )
        assert float(again[1]) >= 1
        second = int(up_again[1])
        assert second != first
        assert up.string.endswith(" keeper=None") and up_again.string.endswith(" keeper=serve"), (
            "at a start a home that is held is an error; later it is waited for"
        )
        os.kill(second, signal.SIGKILL)
        assert serve.wait_for(r"starting it again in (\S+) s")[1] == "2"
        serve.process.terminate()  # while it waits to start the child again
        serve.wait_for("^proxy stopping$")
        serve.wait_for_silence()
        assert serve.process.wait() == 0


def test_ready_again_is_printed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ready = False
    monkeypatch.setattr(probe, "read_readiness", lambda _: probe.ProxyReadiness(ready))
    monkeypatch.setattr(supervisor, "PROBE_INTERVAL_S", 0.0)

    async def live() -> None:
        nonlocal ready
        outage = supervisor._OutageReporter(Address("127.0.0.1", 1))
        outage.record_exit("backend")
        outage.record_start("backend")
        assert outage.report_task is None, "that requests are served for the first time is announced otherwise"
        outage.is_enabled = True
        outage.record_exit("backend")
        outage.record_start("backend")
        first = outage.report_task
        assert first is not None
        outage.record_exit("backend")
        outage.record_exit("proxy")
        ready = True
        outage.record_start("proxy")
        assert outage.report_task is first, "the backend does not run yet"
        await asyncio.wait([first])
        assert first.cancelled(), "it died again meanwhile"
        outage.record_start("backend")
        await outage.report_task
        outage.record_exit("proxy")
        outage.record_start("proxy")
        await outage.report_task

    asyncio.run(live())
    lines = [re.sub(r"\d+\.\d", "N", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "warmline: ready again, N s after the backend and the proxy ended",
        "warmline: ready again, N s after the proxy ended",
    ]


def test_configuration_error_of_child_ends_serve_with_2() -> None:
    with start_supervisor("misconfigured") as serve:
        lines = serve.wait_for_silence()
        assert "backend: no such model" in lines
        assert serve.process.wait() == 2


def test_no_child_outlives_a_killed_serve() -> None:
    with start_supervisor() as serve:
        wait_until_up(serve)
        serve.process.kill()
        lines = serve.wait_for_silence()  # both stand-ins held the output open
        assert {"proxy stopping", "backend stopping"} <= set(lines)


def test_child_that_ignores_killed_serve_is_killed() -> None:
    with start_supervisor("stubborn") as serve:
        wait_until_up(serve)
        serve.process.kill()
        assert "backend stopping" in serve.wait_for_silence()


def test_child_is_killed_after_its_grace_period() -> None:
    with start_supervisor("stubborn", "3") as serve:
        wait_until_up(serve)
        serve.process.terminate()
        serve.wait_for("^backend stopping$")
        serve.wait_for("the backend doesn't end; killing it", timeout_s=10)
        serve.wait_for_silence()
        assert serve.process.wait() == 0


def test_second_signal_kills_children() -> None:
    with start_supervisor("stubborn") as serve:
        wait_until_up(serve)
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for("^backend stopping$")
        serve.process.send_signal(signal.SIGINT)
        serve.wait_for("the backend doesn't end; killing it", timeout_s=20)
        serve.wait_for_silence()
        assert serve.process.wait() == 0
