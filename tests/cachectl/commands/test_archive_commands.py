"""`cachectl export` and `import`: files, standard input and output, exit codes, the owner of imports."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.cachectl.homes import A, CommandResult, find_session, read_json, run_cachectl
from support.index import indexes as index_helpers
from support.index.indexes import count_matched, make_home, save
from support.index.segment_files import rewrite_meta
from warmline_cachectl.cli import app
from warmline_common.protocol.tokens import namespace
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.home_lock import home_lock
from warmline_proxy.index.index import Index, IndexReader

TOKENS = [*A[:1500], 1, 1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "talk.warmline"


@pytest.fixture
def archive_file(home: Home, file: Path) -> Path:
    run_cachectl(home, "export", find_session(home, "first"), str(file))
    return file


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Home]:
    home = make_home(tmp_path / "other")
    yield home
    assert list(home.run.iterdir()) == [], "nothing is left of what came in"


def count_stored(home: Home, tenant: str = "") -> int:
    with IndexReader(home) as reader:
        return count_matched(reader, TOKENS, namespace("model-a", tenant))  # type: ignore[arg-type]


def test_export_and_import_between_homes(home: Home, other: Home, file: Path) -> None:
    report = read_json(home, "export", find_session(home, "first"), str(file))
    names = "session model fingerprint tokens segments checkpoints turns bytes_count file"
    assert set(report) == set(names.split())
    assert report["bytes_count"] == file.stat().st_size and file.stat().st_mode & 0o777 == 0o600
    view = read_json(other, "import", str(file))
    names = "session model fingerprint tokens tokens_known segments checkpoints turns bytes_written"
    assert set(view) == set(names.split())
    assert (view["tokens"], view["segments"], view["checkpoints"]) == (1502, 1, 1)
    assert find_session(other, "first") == view["session"] and count_stored(other) == 1502
    again = run_cachectl(other, "import", str(file))
    assert again.stdout == f"all 1,502 tokens of model-a are stored already, as session {view['session']}\n"
    assert read_json(other, "verify", "--deep")["findings"] == []


def test_export_and_import_through_pipes(home: Home, other: Home) -> None:
    environment = {"WARMLINE_HOME": str(home.root)}
    out = CliRunner().invoke(app, ["export", find_session(home, "first"), "-"], env=environment)
    assert out.exit_code == 0 and "exported 1,502 tokens of model-a in 1 segment and 1 checkpoint" in out.stderr
    environment["WARMLINE_HOME"] = str(other.root)
    done = CliRunner().invoke(app, ["import", "-"], input=out.stdout_bytes, env=environment)
    assert done.exit_code == 0 and count_stored(other) == 1502
    cut = CliRunner().invoke(app, ["import", "-"], input=out.stdout_bytes[:5000], env=environment)
    assert cut.exit_code == 3 and "standard input: it ends within its manifest" in cut.stderr


def test_drafts_of_running_and_killed_imports(home: Home, other: Home) -> None:
    running, killed = (other.run / f"import.{pid}.tmp" for pid in (os.getppid(), 2**22 + 1))
    for path in (running, killed):
        path.write_bytes(b"half of it")
    cut = CliRunner().invoke(app, ["import", "-"], input=b"x", env={"WARMLINE_HOME": str(other.root)})
    assert cut.exit_code == 3 and running.exists() and not killed.exists()
    running.unlink()


def test_export_does_not_overwrite_without_force(home: Home, archive_file: Path) -> None:
    whole = archive_file.read_bytes()
    archive_file.write_bytes(b"mine")
    words = ("export", find_session(home, "first"), str(archive_file))
    refused = run_cachectl(home, *words)
    assert refused.returncode == 2 and "add --force" in refused.stderr and archive_file.read_bytes() == b"mine"
    assert run_cachectl(home, *words, "--force").returncode == 0
    assert len(archive_file.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("export feedfeed TMP/new", 1, "nothing stored is called feedfeed"),
        ("export SESSION TMP", 2, "is no plain file"),
        ("export SESSION TMP/none/x", 2, "there is no folder"),
        ("export SESSION - --json", 2, "without --json"),
        ("import TMP/none", 3, "can't be read: No such file"),
        ("import TMP", 3, "is no plain file"),
        ("import HOME/home.lock", 3, "it is no archive"),
        ("import FILE --key nobody", 3, "there is no client key 'nobody'"),
    ],
)
def test_impossible_export_and_import_are_refused(
    home: Home, archive_file: Path, tmp_path: Path, words: str, code: int, message: str
) -> None:
    places = {
        "SESSION": find_session(home, "first"),
        "FILE": str(archive_file),
        "TMP": str(tmp_path),
        "HOME": str(home.root),
    }
    for name, place in places.items():
        words = words.replace(name, place)
    done = run_cachectl(home, *words.split())
    assert done.returncode == code
    assert any(each in done.stderr for each in message.split("|")), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_import_creates_no_home(archive_file: Path, tmp_path: Path) -> None:
    done = run_cachectl(Home(tmp_path / "none"), "import", str(archive_file))
    assert done.returncode == 2 and "no home at" in done.stderr and not (tmp_path / "none").exists()


def test_import_into_locked_home_is_refused(archive_file: Path, other: Home) -> None:
    with home_lock(other):
        done = run_cachectl(other, "import", str(archive_file))
    assert done.returncode == 3 and f"process {os.getpid()}" in done.stderr


def test_foreign_model_needs_anyway(
    home: Home, archive_file: Path, other: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_helpers, "MODEL", "model-b")
    with Index(other, 1 << 30) as index:
        save(index, [5, 5, 5])
    path = next(other.segments.rglob("*.safetensors"))
    rewrite_meta(path, fingerprint="model-b-fingerprint")
    refused = run_cachectl(other, "import", str(archive_file))
    assert refused.returncode == 3
    assert "fingerprint model-a, and the stored data is of model-b model-b-fing" in refused.stderr
    assert run_cachectl(other, "import", str(archive_file), "--anyway").returncode == 0 and count_stored(other) == 1502


def add_keys(home: Home, *names: str) -> list[str]:
    tenants = [keys_file.add_key(home, name).tenant for name in names]
    home.keys_lock.unlink()
    return tenants


def test_import_belongs_to_only_key(archive_file: Path, other: Home) -> None:
    (tenant,) = add_keys(other, "laptop")
    assert run_cachectl(other, "import", str(archive_file)).returncode == 0
    assert (count_stored(other), count_stored(other, tenant)) == (0, 1502)


def test_import_with_several_keys_needs_key_option(archive_file: Path, other: Home) -> None:
    tenants = add_keys(other, "laptop", "desk")
    refused: CommandResult = run_cachectl(other, "import", str(archive_file))
    assert refused.returncode == 3 and "one of 'laptop', 'desk'" in refused.stderr
    assert run_cachectl(other, "import", str(archive_file), "--key", "desk").returncode == 0
    assert [count_stored(other, tenant) for tenant in ("", *tenants)] == [0, 0, 1502]


def test_import_into_shared_cache_has_shared_owner(archive_file: Path, other: Home) -> None:
    add_keys(other, "laptop", "desk")
    (other.root / "warmline.toml").write_text("share_cache = true\n")
    assert run_cachectl(other, "import", str(archive_file)).returncode == 0 and count_stored(other) == 1502


def test_export_and_import_json_output(home: Home, archive_file: Path) -> None:
    assert json.loads(run_cachectl(home, "import", str(archive_file), "--json").stdout)["tokens_known"] == 1502
