"""View of `top` from the proxy's status, and its behaviour on a terminal."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from support.cachectl.top_status import RECORDS, make_live_row, make_status, render_text
from warmline_cachectl.views import top as top_view
from warmline_common.storage.home import Home

GB = 10**9
TIMEOUT_S = 30.0


def test_first_snapshot_averages_since_start() -> None:
    view = top_view.build_snapshot(
        make_status(100.0, make_live_row(), make_live_row("r2", phase="answering", ttft_s=8.0, spoken=60)), RECORDS
    )
    first, second = view["requests"]
    assert (first["progress"], first["tokens_per_s"], second["tokens_per_s"]) == (0.5, 100.0, 15.0)
    assert view["reuse"] == {"requests": 2, "prompt_tokens": 2000, "cached_tokens": 900, "share": 0.45}
    assert view["disk"] == {"sessions": 12, "segments": 40, "bytes_used": 31 * GB, "bytes_budget": 50 * GB}
    assert view["memory"] == {"residents": 2, "unsaved": 0, "bytes_used": 7 * GB, "bytes_budget": 20 * GB}
    assert view["engine"] == {
        "prefill_tokens_per_s": 80.0,
        "decode_tokens_per_s": 21.5,
        "slowest_recent_step_s": 0.9,
    }


def test_later_snapshots_average_since_last() -> None:
    before = top_view.build_snapshot(
        make_status(100.0, make_live_row(), make_live_row("r2", phase="answering", ttft_s=8.0, spoken=60)), []
    )
    rows = (
        make_live_row(prefilled_tokens=2300),
        make_live_row("r2", phase="answering", ttft_s=8.0, spoken=80),
        make_live_row("r3", prefilled_tokens=0),
    )
    speeds = [row["tokens_per_s"] for row in top_view.build_snapshot(make_status(102.0, *rows), [], before)["requests"]]
    assert speeds == [150.0, 10.0, 0.0]


def test_json_names_of_top() -> None:
    view = top_view.build_snapshot(make_status(100.0, make_live_row()), RECORDS)
    names = "at model backend models persistence running queued settling connections requests engine memory disk reuse"
    assert set(view) == set(names.split())
    names = (
        "id client_model client_session title phase source age_s queue_s ttft_s expected_ttft_s prompt_tokens "
        "reused_tokens prefilled_tokens spoken progress tokens_per_s"
    )
    assert set(view["requests"][0]) == set(names.split())


def test_screen_fits_width() -> None:
    text = render_text(top_view.build_snapshot(make_status(100.0, make_live_row()), RECORDS))
    for part in ("glm, up", "1 running, 2 waiting, 1 being saved", "31.0 GB of 50.0 GB", "45% of the prompts"):
        assert part in text
    assert "Fix the parser" in text and "restored" not in text
    assert max(map(len, text.splitlines())) <= 80
    wide = render_text(top_view.build_snapshot(make_status(100.0, make_live_row()), RECORDS), columns=100)
    assert "restored" in wide and "~12" in wide and "~12" not in text, "the first token is expected"
    many = render_text(
        top_view.build_snapshot(make_status(100.0, *(make_live_row(f"r{number}") for number in range(70))), [])
    )
    assert "and 40 more" in many and len(many.splitlines()) < 50


def test_screen_reports_down_backend_and_full_disk() -> None:
    down = make_status(100.0, engine=None, backend="the backend is loading", persistence="no space left")
    view = top_view.build_snapshot(down, [])
    text = render_text(view)
    assert view["engine"] is None and "the backend is loading" in text and "no space left" in text
    assert "no requests" in text


def test_screen_names_stages_of_several_models() -> None:
    other = {"running": 0, "waiting": 0, "pinned": False}
    models = [
        {"name": "large", "stage": "loaded", "resident_bytes": 3_000_000, "kv_bytes": 50_000_000, **other},
        {"name": "small", "stage": "loaded", "resident_bytes": 1_000_000, "kv_bytes": 10_000_000, **other},
        {"name": "none", "stage": "unloaded", "resident_bytes": 0, "kv_bytes": 0, **other},
    ]
    shown = render_text(top_view.build_snapshot(make_status(100.0, models=models), []))
    assert "large: loaded, small: loaded, none: unloaded" in shown and "4.0 MB of 60.0 MB" in shown


def test_top_ends_in_one_line_when_its_terminal_closes(home: Home) -> None:
    ours, theirs = pty.openpty()
    process = start_top(home, theirs)
    shown = b""
    while b"no proxy runs" not in shown:
        shown += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(TIMEOUT_S) in (0, 3) and process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


def start_top(home: Home, terminal: int) -> "subprocess.Popen[bytes]":
    """Start `cachectl top` on the process's end of a terminal, and close that here."""
    command = [sys.executable, "-c", "from warmline_cachectl.cli import main; main()", "top", "--interval-s", "20"]
    environment = {**os.environ, "WARMLINE_HOME": str(home.root), "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    return process


@pytest.mark.parametrize("end", [b"\x1b[Aq", signal.SIGTERM], ids=["an arrow, which is three keys, and q", "SIGTERM"])
def test_top_retries_until_interrupted(home: Home, end: bytes | signal.Signals) -> None:
    ours, theirs = pty.openpty()
    process = start_top(home, theirs)
    shown = b""
    while b"no proxy runs" not in shown:
        shown += os.read(ours, 4096)
    if isinstance(end, bytes):
        os.write(ours, end)
    else:
        process.send_signal(end)
    try:
        while read := os.read(ours, 4096):
            shown += read
    except OSError:
        pass  # it has closed its end
    assert shown.endswith(b"\x1b[?1049l"), "the shell's screen is back"
    assert process.wait(TIMEOUT_S) == 0 and process.stderr is not None and process.stderr.read() == b""
    process.stderr.close()
    os.close(ours)
