"""Contract of each command: names in its JSON, exit codes, help, shell completion."""

import errno
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.cachectl.documentation import OURS
from support.cachectl.homes import A, find_session, read_json, run_cachectl
from support.index.indexes import BUDGET, MODEL, count_matched, make_home, save
from warmline_cachectl import client
from warmline_cachectl.cli import app
from warmline_cachectl.completion import complete_session_ids
from warmline_common.storage.home import Home
from warmline_proxy.home_lock import home_lock
from warmline_proxy.index.index import Index
from warmline_proxy.retention import truncate as index_cut
from warmline_proxy.retention.pin import pin_limit_bytes

SEGMENT = (
    "bytes_on_disk checksum created end id last_used model parent pinned prefill_s root session shared start hits "
    "checkpoints"
)
SESSION = (
    "id key model title client tokens bytes bytes_alone bytes_shared segments checkpoints requests hits created "
    "last_used age_s idle_s leaf pinned"
)
SIZES = "bytes_alone bytes_shared bytes_unlisted"
LISTING = "id key model tokens bytes bytes_alone bytes_shared pinned last_used idle_s title client"
SHAPES = {  # by verb: the names at the top, and of the first row of each list
    "ls": {"": f"sessions {SIZES}", "sessions": LISTING},
    "ls SESSION": {"": "session segments", "segments": "id start end bytes checkpoints shared pinned"},
    "inspect": {
        "": f"sessions {SIZES} quarantined",
        "sessions": SESSION,
        "quarantined": "id kind model start end bytes_on_disk reason at",
    },
    "inspect SESSION": {"": "session path", "session": SESSION, "path": SEGMENT},
    "tree": {
        "": "trees nodes omitted",
        "trees": "root key model segments checkpoints bytes sessions",
        "nodes": (
            "id parent root key model depth start end segments checkpoints bytes bytes_below segments_below pinned "
            "sessions"
        ),
    },
    "stats": {
        "": "stored requests",
        "stored": (
            "segments checkpoints sessions quarantined tokens bytes_segments bytes_checkpoints bytes_quarantined "
            "bytes_writing bytes_doomed bytes_index turns bytes_turns responses bytes_responses bytes_used bytes_pinned"
        ),
        "requests": (
            "count outcomes sources prompt_tokens cached_tokens prefilled_tokens generated_tokens saved_tokens "
            "cached_share ttft_median_s audits collapsed_answers why_not_warmer"
        ),
    },
    "verify": {"": "findings segments checkpoints deep"},
    "verify --repair": {"": "findings segments checkpoints deep did"},
    "purge --all --dry-run": {"": "sessions segments checkpoints quarantined bytes_freed dry_run responses cuts"},
    "pin SESSION": {"": "session pinned segments bytes_pinned bytes_pinned_max"},
    "gc": {
        "": (
            "evicted orphans drafts bytes_strays doomed records turns responses notes cuts bytes_before bytes_after "
            "bytes_wanted bytes_index_before bytes_index_after"
        )
    },
    "doctor": {"": "checks findings", "checks": "name status seen mend"},
}


@pytest.mark.parametrize("words", SHAPES)
def test_json_names_of_each_command(home: Home, words: str) -> None:
    session = find_session(home, "first")
    done = run_cachectl(home, *words.replace("SESSION", session).split(), "--json")
    view = json.loads(done.stdout)
    expected = {place: set(names.split()) for place, names in SHAPES[words].items()}
    found: dict[str, set[str]] = {"": set(view)}
    for place in expected.keys() - {""}:
        row = view[place][0] if isinstance(view[place], list) else view[place]
        found[place] = set(row)
    assert found == expected


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("ls", 0),
        ("ls SESSION", 0),
        ("ls feedfeed", 1),
        ("ls abc", 2),
        ("inspect feedfeed", 1),
        ("inspect abc", 2),
        ("tree --depth 1", 0),
        ("tree --depth -1", 2),
        ("stats", 0),
        ("top", 3),
        ("top --interval-s 0", 2),
        ("verify --deep --quiet", 0),
        ("verify feedfeed", 2),
        ("verify --replay", 3),
        ("doctor", 1),
        ("purge --session feedfeed --yes", 1),
        ("purge", 2),
        ("pin SESSION", 0),
        ("pin SESSION --off", 0),
        ("pin feedfeed", 1),
        ("pin", 2),
        ("gc", 0),
        ("gc --to-gb x", 2),
        ("gc --to-gb nan", 2),
        ("gc --to-gb 1e300", 2),
        ("gc --to-gb 1e9", 0),
        ("top --interval-s inf", 2),
    ],
)
def test_exit_codes(home: Home, words: str, code: int) -> None:
    done = run_cachectl(home, *words.replace("SESSION", find_session(home, "first")).split())
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("gc --to-gb abc", "'--to-gb': expected a number of gigabytes, from 0 to 1000000000, not 'abc'"),
        ("gc --to-gb -1", "'--to-gb': expected a number of gigabytes, from 0 to 1000000000, not '-1'"),
        ("gc --to-gb 1e10", "'--to-gb': expected a number of gigabytes, from 0 to 1000000000, not '1e10'"),
        ("tree --depth 1.5", "'--depth': expected a whole number from 0 to 1000000, not '1.5'"),
        ("top --interval-s 0", "'--interval-s': expected a number of seconds, from 0.1 to 86400, not '0'"),
    ],
)
def test_bad_numbers_are_quoted(home: Home, words: str, problem: str) -> None:
    assert problem in run_cachectl(home, *words.split()).stderr


@pytest.mark.parametrize("verb", OURS)
def test_every_command_reports_missing_home(verb: str, tmp_path: Path) -> None:
    words = {"purge": ["--all", "--yes"], "pin": ["feedfeed"]}.get(verb, [])
    done = run_cachectl(Home(tmp_path / "none"), verb, *words)
    assert done.returncode == 2 and "no home at" in done.stderr + done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("verb", [verb for verb in OURS if verb not in ("doctor", "top", "verify")])
def test_empty_home_is_reported_and_stays_empty(verb: str, tmp_path: Path) -> None:
    home = make_home(tmp_path / "new")
    words = {"purge": ["--all", "--yes"], "pin": ["feedfeed"]}.get(verb, [])
    done = run_cachectl(home, verb, *words)
    assert done.returncode == 2 and "nothing was ever stored" in done.stderr
    assert not home.index.exists()


@pytest.mark.parametrize("words", ["pin SESSION", "gc", "purge --all --yes"])
def test_locked_home_is_refused(home: Home, words: str) -> None:
    typed = words.replace("SESSION", find_session(home, "first")).split()
    with home_lock(home):
        done = run_cachectl(home, *typed)
    assert done.returncode == 3 and f"process {os.getpid()}" in done.stderr


def test_doctor_reports_proxy_of_another_version(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "request_proxy", lambda *_: {"backend": "", "engine": None, "totals": {}})
    done = run_cachectl(home, "doctor")
    assert done.returncode == 3
    assert "(another version?): it does not tell disk_budget_bytes, persistence" in done.stderr


def test_unreadable_secret_is_reported(home: Home) -> None:
    (home.run / "proxy.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:9"}))
    (home.root / "secret").mkdir()
    with home_lock(home):
        for words in (("gc",), ("explain",), ("pin", find_session(home, "first"))):
            done = run_cachectl(home, *words)
            assert done.returncode in (0, 3), "explain reads the index then"
    assert done.returncode == 3 and "without the home's secret the proxy can't be asked" in done.stderr


# --- help ---


def list_help_examples(home: Home, verb: str) -> list[str]:
    text = run_cachectl(home, verb, "--help").stdout
    return [line.partition("  # ")[0].strip() for line in text.partition("Examples:")[2].splitlines() if line.strip()]


@pytest.mark.parametrize("verb", OURS)
def test_help_examples_run(home: Home, verb: str) -> None:
    found = list_help_examples(home, verb)
    assert 1 <= len(found) <= 3 and all(line.startswith(f"cachectl {verb}") for line in found)
    segment = read_json(home, "ls", find_session(home, "first"))["segments"][0]["id"]
    for line in found:
        values = {"SESSION": find_session(home, "first"), "SEGMENT": segment, "MODEL": MODEL}
        typed = [values.get(word, word) for word in line.split()[1:]]
        done = run_cachectl(home, *typed)
        usual = {"doctor": (1,), "top": (3,)}.get(verb, (0, 1) if "--key" in line else (0,))
        assert done.returncode in usual, (line, done.stderr)
        if "--all" in line:
            break  # nothing is left


def test_help_lists_commands_in_groups(home: Home) -> None:
    text = run_cachectl(home, "--help").stdout
    groups = {head: re.findall(r"^  (\w+) ", body, re.MULTILINE) for head, body in split_sections(text).items()}
    assert {"ls", "inspect", "tree", "stats", "top"} <= set(groups["Look"])
    assert {"verify", "doctor"} <= set(groups["Check"]) and {"purge", "pin", "gc"} <= set(groups["Change"])
    assert all(len(line) <= 80 for line in text.splitlines())


def split_sections(text: str) -> dict[str, str]:
    found = re.split(r"^(\w+):$", text, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


# --- messages ---


def test_short_and_unknown_ids_are_distinguished(home: Home) -> None:
    session = find_session(home, "first")
    assert "at least its first 4 characters" in run_cachectl(home, "inspect", session[:3]).stderr
    near = session[:-2] + ("00" if not session.endswith("00") else "11")
    assert f"near it: {session}" in run_cachectl(home, "ls", near).stderr
    assert f"near it: {session}" in run_cachectl(home, "ls", "first").stderr, "what its client calls it"
    assert "near it" not in run_cachectl(home, "ls", "zzzzzzzz").stderr


def test_counts_of_one_are_singular(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        home.segment_file(index.sessions()[0].leaf).chmod(0o644)
    assert "2 segments and 1 checkpoint checked: 1 finding\n" in run_cachectl(home, "verify").stdout


# --- tables ---


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_lines_fit_terminal_width(home: Home, columns: int) -> None:
    with Index(home, 1 << 30) as index:
        save(
            index, [8] * 2000, client="a name that is longer than anybody would like to see it, with a word at its end"
        )
    session = read_json(home, "ls")["sessions"][0]["id"]
    for words in (["ls"], ["inspect"], ["inspect", session], ["tree"], ["stats"], ["ls", session], ["verify"]):
        done = run_cachectl(home, *words, columns=columns)
        tables = [line for line in done.stdout.splitlines() if not line.startswith("(no room for")]
        assert max(map(len, tables)) <= columns, words
        if words in (["ls"], ["inspect"]):
            assert sum(session in line for line in done.stdout.splitlines()) == 1
            assert len(re.findall(r"^│ \w", done.stdout, re.MULTILINE)) == 3 + (words == ["inspect"])


def test_client_names_are_printed_as_text(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, [8] * 2000, client="[red]:smile:[/nope]\x1b[31m\nx")
    for verb in ("ls", "inspect", "tree"):
        shown = run_cachectl(home, verb).stdout
        assert "[red]:smile:[/nope]" in shown and "\x1b" not in shown


def test_tree_shows_shared_segments(home: Home) -> None:
    view = read_json(home, "tree")
    stem, branch = view["nodes"]
    assert (branch["parent"], stem["parent"]) == (stem["id"], "") and stem["bytes_below"] > stem["bytes"]
    assert [row["client"] for row in stem["sessions"]] == ["first"]
    (tree,) = view["trees"]
    assert (tree["segments"], tree["sessions"], tree["bytes"]) == (2, 2, stem["bytes_below"])
    assert read_json(home, "tree", "--depth", "1")["omitted"] == 1
    shown = run_cachectl(home, "tree").stdout
    assert "2 conversations, 2 segments" in shown and "0-1,502" in shown and "first" in shown


# --- what changes things ---


def test_pin_and_gc(home: Home) -> None:
    session = find_session(home, "first")
    pinned = read_json(home, "pin", session[:6])
    assert pinned["pinned"] and pinned["bytes_pinned_max"] == pin_limit_bytes(50_000_000_000)
    assert {row["id"] for row in read_json(home, "ls")["sessions"] if row["pinned"]} == {session}
    assert "pinned" in run_cachectl(home, "ls", session).stdout and "(pinned)" in run_cachectl(home, "ls").stdout
    assert read_json(home, "stats")["stored"]["bytes_pinned"] == pinned["bytes_pinned"]
    gone = read_json(home, "gc", "--to-gb", "0")
    assert len(gone["evicted"]) == 2, "the quarantined file, and the other's tail"
    assert "more than the 0 B wanted" in run_cachectl(home, "gc", "--to-gb", "0").stdout
    off = run_cachectl(home, "pin", session, "--off").stdout
    assert "no longer pinned: 1 segment fewer; 0 B of at most" in off
    run_cachectl(home, "gc", "--to-gb", "0")
    with Index(home, BUDGET) as index:
        assert count_matched(index, A[:10]) == 0


def test_purge_reports_truncated_shared_files(home: Home) -> None:
    """The one that came first holds what the other begins with, and more."""
    first = find_session(home, "first")
    preview = run_cachectl(home, "purge", "--session", first, "--dry-run").stdout
    assert preview.startswith("would purge 1 conversation: 0 segments, a part of 1 more, ")
    done = run_cachectl(home, "purge", "--session", first, "--yes")
    assert (done.returncode, done.stdout) == (0, preview.replace("would purge", "purged"))


def test_purge_reports_failed_truncation_and_gc_finishes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_session(home, "first")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(index_cut.disk, "write_durable", full)
    for words in (["purge", "--session", first, "--yes"], ["gc"]):
        done = run_cachectl(home, *words, "--json")
        assert done.returncode == 3 and "No space left on device" in json.loads(done.stdout)["cuts"][0]["why_not"]
        command = f"`cachectl gc --home {home.root}`"
        assert f"of unneeded data could not be cut away; {command} tries again: segment " in done.stderr
    monkeypatch.undo()
    done = run_cachectl(home, "gc")
    assert done.returncode == 0 and done.stdout.startswith("cut 1 segment\n")


def test_pin_limit_is_enforced(home: Home) -> None:
    session = find_session(home, "first")
    (home.root / "warmline.toml").write_text("disk_budget_gb = 0.00003")
    done = run_cachectl(home, "pin", session)
    assert done.returncode == 3 and "no more than 24,000 may be, 80% of the disk budget" in done.stderr
    assert read_json(home, "stats")["stored"]["bytes_pinned"] == 0


# --- completion ---


def complete_line(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> list[str]:
    words = line.split(" ")
    monkeypatch.setenv("WARMLINE_HOME", str(home.root))
    monkeypatch.setenv("_CACHECTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        app(prog_name="cachectl")
    out: Any = capsys.readouterr()
    assert out.err == ""
    return str(out.out).split()


def test_shell_completes_commands_and_ids(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = find_session(home, "first")
    segment = read_json(home, "ls", session)["segments"][0]["id"]
    assert complete_line(home, monkeypatch, capsys, "cachectl pi") == ["pin"]
    assert session in complete_line(home, monkeypatch, capsys, "cachectl pin ")
    assert complete_line(home, monkeypatch, capsys, f"cachectl ls {session[:5]}") == [session]
    assert segment in complete_line(home, monkeypatch, capsys, f"cachectl inspect {segment[:5]}")
    assert session in complete_line(home, monkeypatch, capsys, "cachectl purge --session ")
    for nothing in (make_home(home.root / "new"), Home(home.root / "none")):
        assert complete_line(nothing, monkeypatch, capsys, "cachectl pin ") == []


def test_completion_help_is_one_line(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save(index, [8] * 2000, client="two\nlines\x1b[31m")
    context = SimpleNamespace(params={"home": str(home.root)})
    assert "2,000 tokens two lines\N{REPLACEMENT CHARACTER}[31m" in dict(complete_session_ids(context, "")).values()


def test_completion_script_is_printed(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_CACHECTL_COMPLETE", "source_bash")
    with pytest.raises(SystemExit):
        app(prog_name="cachectl")
    assert "complete" in capsys.readouterr().out


def test_command_imports_no_heavy_libraries() -> None:
    """They would double what each call takes, and each completion."""
    program = "import sys, warmline_cachectl.cli; print(*{'aiohttp', 'httpx'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_version_is_installed_version(home: Home) -> None:
    done = run_cachectl(home, "--version")
    assert (done.returncode, done.stdout) == (0, f"cachectl {version('warmline')}\n")
