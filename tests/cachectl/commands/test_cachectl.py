"""cachectl as a process, on a real home: with no proxy, and with one that answers the purge."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.cachectl.homes import A, CommandResult, read_json, run_cachectl
from support.index.indexes import (
    PAGE_BYTES,
    begin_save,
    break_page,
    commit_save,
    count_matched,
    make_home,
    namespace,
    save,
)
from warmline_cachectl import lookup
from warmline_cachectl.cli import app
from warmline_common.protocol.messages import decode, encode
from warmline_common.storage.home import Home
from warmline_proxy.home_lock import home_lock
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeRequest, ReplayReply, ReplayRequest, ReplayResult


def run_process(home: Home, *words: str, stdin: int = subprocess.DEVNULL) -> CommandResult:
    environment = {**os.environ, "WARMLINE_HOME": str(home.root)}
    command = [sys.executable, "-c", "from warmline_cachectl.cli import main; main()", *words]
    done = subprocess.run(command, env=environment, stdin=stdin, capture_output=True, text=True, check=False)
    return CommandResult(done.returncode, done.stdout, done.stderr)


def test_inspect_shows_conversations_paths_and_files(home: Home) -> None:
    view = read_json(home, "inspect")
    first, second = sorted(view["sessions"], key=lambda row: row["client"], reverse=True)
    assert (first["tokens"], first["client"], first["model"]) == (1502, "first", "model-a")
    assert first["bytes"] > first["bytes_alone"] == 0  # the other leaves it in the middle of its only segment
    assert second["bytes"] > second["bytes_alone"] > 0
    assert view["quarantined"][0]["reason"] == "checksum"
    path = read_json(home, "inspect", second["id"])["path"]
    assert [(row["start"], row["end"], row["shared"]) for row in path] == [(0, 1502, True), (1500, 1502, False)]
    row = read_json(home, "inspect", path[0]["id"][:8])["segment"]
    assert row["children"] == [path[1]["id"]] and len(row["sessions"]) == 2
    assert [state["position"] for state in row["checkpoints"]] == [1000]
    assert read_json(home, "inspect", row["checkpoints"][0]["id"])["checkpoint"]["position"] == 1000
    assert read_json(home, "inspect", view["quarantined"][0]["id"])["quarantined"]["end"] == 3
    for words in (["inspect"], ["inspect", second["id"]], ["inspect", row["id"]]):
        text = run_cachectl(home, *words)
        assert text.returncode == 0 and words[-1].removeprefix("inspect") in text.stdout


def test_stats_totals(home: Home) -> None:
    view = read_json(home, "stats")
    assert view["stored"]["segments"] == 2 and view["stored"]["tokens"] == 1504
    assert view["stored"]["bytes_used"] > view["stored"]["bytes_segments"]
    assert view["requests"]["sources"] == {"cold": 1, "restored": 1}
    assert view["requests"]["cached_share"] == 0.25
    assert view["requests"]["why_not_warmer"] == {"checksum in ID: N.N.keys of segment ID; nothing after token N": 2}
    assert "used on disk" in run_cachectl(home, "stats").stdout


def test_verify_finds_damage(home: Home) -> None:
    assert read_json(home, "verify", "--deep")["findings"] == []
    with Index(home, 1 << 30) as index:
        file = home.segment_file(max(index.segments(), key=lambda row: row.bytes_on_disk).id)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run_cachectl(home, "verify").returncode == 0  # its frame is whole; only reading it all can tell
    done = run_cachectl(home, "verify", "--deep", "--json")
    assert done.returncode == 1
    assert [finding["what"] for finding in json.loads(done.stdout)["findings"]] == ["checksum"]
    assert "checksum" in run_cachectl(home, "verify", "--deep").stdout
    file.unlink()
    assert run_cachectl(home, "verify").returncode == 1


def test_repair_reports_changes(home: Home) -> None:
    clean = read_json(home, "verify", "--repair")
    assert (clean["did"], clean["findings"], clean["deep"]) == ([], [], True)
    with Index(home, 1 << 30) as index:
        ((leaf,), (other,)) = ([row.leaf] for row in index.sessions())
    home.segment_file(leaf).write_bytes(b"x")
    home.segment_file(other).chmod(0o644)
    assert run_cachectl(home, "verify").returncode == 1
    done = read_json(home, "verify", "--repair")
    assert done["findings"] == [] and {each["what"] for each in done["did"]} >= {"quarantined", "mode", "session"}
    shown = run_cachectl(home, "verify", "--repair")
    assert shown.returncode == 0 and "0 repairs" in shown.stdout and "0 findings" in shown.stdout


def test_crashing_pages_are_reported_and_repaired(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        for number in range(40):  # so many that the segments' rows take some pages
            save(index, [number] * 5)
        rows = {row.id for row in index.segments()}
    break_page(home, max(rows))
    done = run_process(home, "verify")
    assert done.returncode == 3 and "is damaged: page" in done.stderr and "verify --repair" in done.stderr
    assert run_process(home, "verify", "--repair").returncode == 0
    with Index(home, 1 << 30) as index:
        assert {row.id for row in index.segments()} == rows


@pytest.mark.parametrize("command", ["ls", "stats", "verify"])
def test_truncated_index_is_reported(home: Home, command: str) -> None:
    """At each page: what is left may be all that LMDB reads as it opens the file."""
    (data,) = home.index.glob("*/data.mdb")
    whole, pages = data.read_bytes(), range(0, data.stat().st_size, PAGE_BYTES)
    codes = []
    for size in pages:
        data.write_bytes(whole[:size])
        done = run_cachectl(home, command)
        codes.append(done.returncode)
        assert done.returncode in (0, 3)  # 0: free pages alone are missing, which nobody reads
        assert done.returncode == 0 or ("is damaged: " in done.stderr and "verify --repair" in done.stderr)
    assert codes.count(3) > len(codes) / 2


def test_unreadable_index_is_repaired(home: Home) -> None:
    (data,) = home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 1000)
    refused = run_cachectl(home, "verify")
    assert refused.returncode == 3 and "damaged" in refused.stderr
    done = read_json(home, "verify", "--repair")
    assert done["findings"] == [] and (done["segments"], done["checkpoints"]) == (2, 1)
    assert [row["tokens"] for row in read_json(home, "inspect")["sessions"]] == [1502]  # one a leaf of the tree


def test_lost_index_beside_files_is_reported_and_repaired(home: Home) -> None:
    shutil.rmtree(home.index)
    for command in (["verify"], ["ls"]):
        refused = run_cachectl(home, *command)
        assert refused.returncode == 3 and "though files are stored" in refused.stderr
        assert "verify --repair" in refused.stderr
    done = read_json(home, "verify", "--repair")
    assert done["findings"] == [] and (done["segments"], done["checkpoints"]) == (2, 1)
    assert [each["what"] for each in done["did"]].count("adopted") == 3


@pytest.mark.parametrize("command", [["gc"], ["pin", "feedfeed"]])
def test_change_of_damaged_index_repairs_it_first(home: Home, command: list[str]) -> None:
    """Without its rows each file would look like an orphan."""
    files = {path for path in home.segments.rglob("*") if path.is_file()}
    (data,) = home.index.glob("*/data.mdb")
    damaged = bytearray(data.read_bytes())
    damaged[-3000:] = bytes(3000)
    damaged[2 * 4096 :] = damaged[2 * 4096 :][::-1]  # all but the metas
    data.write_bytes(damaged)
    run_cachectl(home, *command)
    assert {path for path in home.segments.rglob("*") if path.is_file()} == files
    assert read_json(home, "verify", "--repair")["findings"] == []


def test_shared_options_may_stand_before_command(home: Home) -> None:
    root = str(home.root)
    expected = run_cachectl(home, "ls", "--json").stdout
    for words in (
        ["--home", root, "ls", "--json"],
        [f"--home={root}", "--json", "ls"],
        ["--json", "ls", "--home", root],
    ):
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, without_ages(done.stdout)) == (0, without_ages(expected))
    assert CliRunner().invoke(app, ["--home", root, "key", "list"]).stdout.startswith("no keys")
    elsewhere = CliRunner().invoke(app, ["--home", "/nowhere", "ls"], env={"WARMLINE_HOME": root})
    assert elsewhere.exit_code == 2 and "/nowhere" in elsewhere.stderr
    assert CliRunner().invoke(app, ["--home", root]).exit_code == 2


def without_ages(text: str) -> str:
    return re.sub(r'"idle_s": [\d.e-]+', "", text)


def test_listing_adds_up_to_files_on_disk(home: Home) -> None:
    view, stored = read_json(home, "ls"), read_json(home, "stats")["stored"]
    total = stored["bytes_segments"] + stored["bytes_checkpoints"]
    assert view["bytes_alone"] + view["bytes_shared"] + view["bytes_unlisted"] == total
    assert sum(row["bytes_alone"] for row in view["sessions"]) == view["bytes_alone"]
    assert all(row["bytes_alone"] + row["bytes_shared"] == row["bytes"] for row in view["sessions"])
    assert view["bytes_shared"] > 0
    assert " shared by several = " in run_cachectl(home, "ls").stdout


def test_listing_of_one_model(home: Home) -> None:
    before = read_json(home, "ls")
    with Index(home, 1 << 30) as index:
        plan = begin_save(index, [5, 5, 5], root=namespace("model-b"), model="model-b")
        assert plan is not None
        commit_save(index, plan, client="other")
    listed = read_json(home, "ls", "--model", "model-b")
    assert [(row["model"], row["client"]) for row in listed["sessions"]] == [("model-b", "other")]
    assert listed["bytes_alone"] == listed["sessions"][0]["bytes"] and not listed["bytes_shared"]
    first = read_json(home, "ls", "--model", "model-a")
    assert {row["id"] for row in first["sessions"]} == {row["id"] for row in before["sessions"]}
    assert (first["bytes_alone"], first["bytes_unlisted"]) == (before["bytes_alone"], before["bytes_unlisted"])
    assert len(read_json(home, "ls")["sessions"]) == len(before["sessions"]) + 1
    whole = run_cachectl(home, "ls", columns=200).stdout
    assert "model-a" in whole and "model-b" in whole
    assert "model-b" not in run_cachectl(home, "ls", "--model", "model-b", columns=200).stdout, "a column of one name"


def test_listing_of_unknown_model_exits_with_1(home: Home) -> None:
    done = run_cachectl(home, "ls", "--model", "model-x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing is stored of a model named 'model-x'; there is data of 'model-a'" in done.stderr
    session = read_json(home, "ls")["sessions"][0]["id"]
    assert run_cachectl(home, "ls", session, "--model", "model-a").returncode == 2


def test_purge_takes_session_as_argument(home: Home) -> None:
    session = read_json(home, "ls")["sessions"][0]["id"]
    expected = read_json(home, "purge", "--session", session, "--dry-run")
    assert read_json(home, "purge", session[:8], "--dry-run") == expected
    assert run_cachectl(home, "purge", session, "--session", session, "--yes").returncode == 2
    assert read_json(home, "purge", session, "--yes")["sessions"] == expected["sessions"]


def test_purge_dry_run_then_purge(home: Home) -> None:
    sessions = {row["client"]: row["id"] for row in read_json(home, "inspect")["sessions"]}
    dry = read_json(home, "purge", "--session", sessions[""][:6], "--dry-run")
    assert dry["dry_run"] and len(dry["segments"]) == 1
    refused = run_cachectl(home, "purge", "--session", sessions[""])
    assert refused.returncode == 2 and "--yes" in refused.stderr
    done = read_json(home, "purge", "--session", sessions[""], "--yes")
    assert done == dry | {"dry_run": False}
    again = run_cachectl(home, "purge", "--session", sessions[""], "--yes")
    assert again.returncode == 1 and "nothing stored" in again.stderr
    with Index(home, 1 << 30) as index:
        assert count_matched(index, [*A[:1500], 1, 1]) == 1502
        assert verify_index(index, deep=True) == []
    assert run_cachectl(home, "purge", "--older-than", "7d", "--yes").returncode == 1
    assert run_cachectl(home, "purge", "--model", "other", "--yes").returncode == 1
    assert len(done["quarantined"]) == 1, "which conversation it was of is not known, so it goes with any of its model"
    assert read_json(home, "purge", "--all", "--yes")["segments"]
    assert [*map(read_json(home, "inspect").get, ("sessions", "quarantined", "bytes_alone"))] == [[], [], 0]


@pytest.mark.parametrize(("typed", "left"), [("n", 2), ("y", 0)])
def test_purge_asks_for_confirmation_on_terminal(home: Home, typed: str, left: int) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{typed}\n".encode())
    done = run_process(home, "purge", "--all", stdin=theirs)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0 and "purge 2 conversations" in done.stderr
    assert len(read_json(home, "inspect")["sessions"]) == left


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["purge", "--yes"], "exactly one"),
        (["purge", "--all", "--session", "ab", "--yes"], "exactly one"),
        (["purge", "--older-than", "7 days", "--yes"], "no age"),
        (["purge", "--older-than", "3x"], "no age"),  # before anything is asked
        (["inspect", "--home", "/nowhere"], "no home at /nowhere"),
        (["nonsense"], "No such command"),
        (["verify", "feedfeed"], "add --replay"),
        (["verify", "--repair", "--replay"], "one at a time"),
        (["verify", "--repair", "--home", "/nowhere"], "no home at /nowhere"),
    ],
)
def test_usage_errors_exit_with_2(home: Home, words: list[str], says: str) -> None:
    done = run_cachectl(home, *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_empty_home_is_reported(tmp_path: Path) -> None:
    done = run_cachectl(make_home(tmp_path / "new"), "inspect")
    assert done.returncode == 2 and "nothing was ever stored" in done.stderr


def test_unknown_id_exits_with_1(home: Home) -> None:
    done = run_cachectl(home, "inspect", "feedfeed")
    assert done.returncode == 1 and "feedfeed" in done.stderr


def test_ambiguous_id_prefix_is_refused(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        snapshot = index.snapshot()
    row = next(iter(snapshot.segments.values()))
    snapshot.segments = {"abcd1": row, "abcd2": row}
    with pytest.raises(lookup.AmbiguousIdError):
        lookup.find_id(snapshot, "abcd")
    assert lookup.find_id(snapshot, "abcd2") == ("segment", "abcd2")
    assert lookup.find_id(snapshot, "abc") == ("", "")


# --- beside a running proxy ---


class FakeProxy(HTTPServer):
    """Proxy that holds the index and handles a purge as the real proxy does."""

    def __init__(self, home: Home, index: Index) -> None:
        super().__init__(("127.0.0.1", 0), FakeProxyHandler)
        self.home, self.index = home, index
        self.replays: list[ReplayResult] = []
        self.replay_requests: list[ReplayRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class FakeProxyHandler(BaseHTTPRequestHandler):
    server: FakeProxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers["Authorization"] == f"Bearer {self.server.home.load_secret()}"
        if self.path == "/warmline/replay" and known:
            self.server.replay_requests.append(decode(body, ReplayRequest))
            return self._answer(200, encode(ReplayReply(replays=self.server.replays)))
        if self.path == "/warmline/repair" and known:
            return self._answer(200, encode(repair(self.server.index, deep=True, is_saving=True)))
        if self.path != "/warmline/purge" or not known:
            return self._answer(401, b'{"error": {"message": "not for you"}}')
        self._answer(200, encode(purge(self.server.index, decode(body, PurgeRequest))))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def proxy(home: Home) -> Iterator[FakeProxy]:
    with home_lock(home), Index(home, 1 << 30) as index, FakeProxy(home, index) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        (home.run / "proxy.json").write_text(json.dumps({"pid": os.getpid(), "url": server.url}))
        yield server
        server.shutdown()
        thread.join()


def test_commands_beside_running_proxy_delegate_purge(proxy: FakeProxy) -> None:
    home, index = proxy.home, proxy.index
    assert len(read_json(home, "inspect", runner=run_process)["sessions"]) == 2
    plan = begin_save(index, [7, *A[:100]])
    assert plan is not None
    assert read_json(home, "verify", "--deep", runner=run_process)["findings"] == []
    commit_save(index, plan)
    assert len(read_json(home, "purge", "--all", "--yes", runner=run_process)["sessions"]) == 3
    assert index.totals().segments == 0
    assert read_json(home, "inspect", runner=run_process)["sessions"] == []


def test_running_proxy_repairs_beside_saves(proxy: FakeProxy) -> None:
    home, index = proxy.home, proxy.index
    plan = begin_save(index, [7, *A[:100]])
    assert plan is not None
    home.segment_file(index.sessions()[0].leaf).unlink()
    done = read_json(home, "verify", "--repair", runner=run_process)
    assert done["findings"] == [] and "dropped" in {each["what"] for each in done["did"]}
    assert commit_save(index, plan).tokens_saved == 101


def test_proxy_refusal_is_quoted(proxy: FakeProxy) -> None:
    (proxy.home.root / "secret").write_text("another")
    proxy.home = Home(proxy.home.run)  # whose secret is its own
    done = run_process(Home(proxy.index.home.root), "purge", "--all", "--yes")
    assert (done.returncode, done.stderr) == (3, "cachectl: not for you\n")


def test_home_held_by_silent_process_is_refused(home: Home) -> None:
    (home.run / "proxy.json").write_text('{"pid": 1, "url": "http://127.0.0.1:9"}')  # nobody listens there
    with home_lock(home):
        done = run_cachectl(home, "purge", "--all", "--yes")
        assert done.returncode == 3 and f"process {os.getpid()}" in done.stderr
    assert run_cachectl(home, "purge", "--all", "--yes").returncode == 0


@pytest.mark.parametrize("url", ["", "nonsense", "http://[::1"])
def test_stale_proxy_address_is_not_contacted(proxy: FakeProxy, home: Home, url: str) -> None:
    """It may be anybody's, and would be shown the home's secret."""
    other = Home(home.root.with_name("other"))
    shutil.copytree(home.root, other.root)
    (other.run / "proxy.json").write_text(json.dumps({"pid": os.getpid(), "url": url or proxy.url}))
    assert run_cachectl(other, "gc").returncode == 0
    with home_lock(other):  # by a cachectl, say
        (other.run / "proxy.json").write_text(json.dumps({"pid": 1, "url": url or proxy.url}))
        assert f"process {os.getpid()}" in run_cachectl(other, "gc").stderr
    assert run_cachectl(other, "verify", "--replay").returncode == 3


def test_verify_replay_runs_in_the_pair(proxy: FakeProxy) -> None:
    home = proxy.home
    session = read_json(home, "inspect", runner=run_process)["sessions"][0]["id"]
    proxy.replays = [
        ReplayResult(session=session, tokens=1502, reused=1501, outcome="within", difference=1e-4, tolerance=1e-3)
    ]
    assert read_json(home, "verify", "--replay", session[:6], runner=run_process)["replays"][0]["outcome"] == "within"
    shown = run_process(home, "verify", "--replay")
    assert shown.returncode == 0 and "1,501" in shown.stdout and "1.00e-04" in shown.stdout
    assert [each.session for each in proxy.replay_requests] == [session, ""]


@pytest.mark.parametrize(("outcome", "code"), [("equal", 0), ("skipped", 0), ("differs", 1), ("damaged", 1)])
def test_verify_replay_exit_codes(proxy: FakeProxy, outcome: str, code: int) -> None:
    proxy.replays = [ReplayResult(session="a", tokens=9, reused=8, outcome="equal")]
    proxy.replays.append(ReplayResult(session="b", tokens=9, reused=8, outcome=outcome, quarantined=3 * code))
    done = run_process(proxy.home, "verify", "--replay")
    assert done.returncode == code and outcome in done.stdout


def test_verify_replay_needs_running_pair(home: Home) -> None:
    (home.run / "proxy.json").unlink(missing_ok=True)
    for _ in range(2):
        done = run_cachectl(home, "verify", "--replay")
        assert done.returncode == 3 and "warmline serve" in done.stderr
        (home.run / "proxy.json").write_text('{"pid": 1, "url": "http://127.0.0.1:9"}')  # nobody listens there
    unknown = run_cachectl(home, "verify", "--replay", "feedfeed")
    assert unknown.returncode == 1 and "feedfeed" in unknown.stderr
