"""Commands of cachectl beside a running pair: top, pin, gc, doctor."""

import json
import os
import pty
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from support.pair.pair import Message, Pair, send_request
from warmline_cachectl.cli import app

TIMEOUT_S = 30.0


def send_turn(pair: Pair, name: str) -> str:
    """Send one turn of a conversation; its session's id."""
    messages: list[Message] = [{"role": "user", "content": f"{name}: tell me what cachectl is for. " * 8}]
    pair.chat(messages, max_tokens=4, session_id=name)
    pair.settle()
    (found,) = [row["id"] for row in pair.cachectl("ls")["sessions"] if row["client"] == name]
    return str(found)


def test_top_once_shows_pair(warm_pair: Pair) -> None:
    send_turn(warm_pair, "watched")
    view = warm_pair.cachectl("top")
    assert (view["backend"], view["persistence"], view["requests"]) == ("up", "ok", [])
    assert view["engine"]["decode_tokens_per_s"] > 0 and view["memory"]["residents"] > 0
    assert view["disk"]["bytes_used"] > 0 and 0 <= view["reuse"]["share"] < 1


def test_top_on_terminal_runs_until_q(warm_pair: Pair) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from warmline_cachectl.cli import main; main()", "top", "--interval-s", "20"]
    environment = {**os.environ, "WARMLINE_HOME": str(warm_pair.home.root), "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs)
    os.close(theirs)
    shown = b""
    while b"no requests" not in shown:
        shown += os.read(ours, 4096)
    os.write(ours, b"q")
    assert process.wait(TIMEOUT_S) == 0
    os.close(ours)


def test_pin_goes_through_the_proxy(warm_pair: Pair) -> None:
    session = send_turn(warm_pair, "pinned")
    assert warm_pair.cachectl("pin", session)["pinned"]
    try:
        rows = {row["id"]: row["pinned"] for row in warm_pair.cachectl("ls", session)["segments"]}
        assert set(rows.values()) == {True}
        status = warm_pair.proxy_status()
        assert warm_pair.cachectl("pin", session)["bytes_pinned_max"] == int(0.8 * status["disk_budget_bytes"])
    finally:
        assert warm_pair.cachectl("pin", session, "--off")["segments"] != []


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        ("pin", {"session": "feedfeed"}, 404, 'no conversation is called "feedfeed"'),
        ("pin", {}, 400, "Not a pin"),
        ("gc", {"to_bytes": -1}, 400, "0 or more"),
    ],
)
def test_bad_owner_requests_are_refused(
    warm_pair: Pair, path: str, body: dict[str, object], code: int, says: str
) -> None:
    headers = {"Authorization": f"Bearer {warm_pair.home.load_secret()}", "Content-Type": "application/json"}
    reply = send_request(f"{warm_pair.url}/warmline/{path}", json.dumps(body).encode(), headers)
    assert reply.status == code and says in reply.json["error"]["message"]


def test_gc_keeps_stored_conversations(warm_pair: Pair) -> None:
    session = send_turn(warm_pair, "collected")
    done = warm_pair.cachectl("gc")
    assert done["evicted"] == [] and done["bytes_after"] > 0
    assert warm_pair.cachectl("verify", "--deep")["findings"] == []
    assert send_turn(warm_pair, "collected") == session


def test_doctor_sees_the_pair(warm_pair: Pair) -> None:
    checks = {check["name"]: check for check in run_doctor(warm_pair)}
    for name in ("proxy", "backend", "saving", "index", "lock"):
        assert checks[name]["status"] == "ok", checks[name]
    assert "ports" not in checks and "serves" in checks["backend"]["seen"]


def run_doctor(pair: Pair) -> list[dict[str, str]]:
    """Run doctor, whatever else it finds on this machine."""
    done = CliRunner().invoke(app, ["doctor", "--json", "--home", str(pair.home.root)])
    assert done.exit_code in (0, 1), done.output
    return list(json.loads(done.stdout)["checks"])
