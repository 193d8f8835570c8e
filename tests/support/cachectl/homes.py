"""Homes for tests of cachectl, and cachectl run in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from support.index.indexes import ROOT, make_home, save
from warmline_cachectl.cli import app
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord

A = list(range(1000, 4000))
BAD = "7a" * 16


def make_filled_home(path: Path) -> Home:
    """Make a home with two conversations that share a prefix, a quarantined file, and two requests."""
    home = make_home(path)
    with Index(home, 1 << 30) as index:
        save(index, [*A[:1500], 1, 1], checkpoints=[1000], turn_end=1501, client="first")
        save(index, [*A[:1500], 2, 2], turn_end=1501)
        save(index, [3, 3, 3])
        index.quarantine(index.match_prefix(ROOT, pack_tokens([3]), 1).chain[0].id, "checksum")
        for number, source in enumerate(("cold", "restored")):
            index.record_request(
                RequestRecord(
                    id=str(number),
                    at=float(number),
                    endpoint="chat",
                    client_model="m",
                    outcome="ok",
                    source=source,
                    why_not_warmer=f"checksum in {BAD[:8]}: 21.0.keys of segment {BAD}; nothing after token 81{number}",
                    prompt_tokens=100,
                    cached_tokens=50 * number,
                )
            )
    return home


class CommandResult(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_cachectl(home: Home, *words: str, columns: int = 0) -> CommandResult:
    """Run cachectl in this process, which must not have the index open."""
    environment = {"WARMLINE_HOME": str(home.root), "COLUMNS": str(columns) if columns else None}
    result = CliRunner().invoke(app, words, env=environment, prog_name="cachectl")
    return CommandResult(result.exit_code, result.stdout, result.stderr)


def read_json(home: Home, *words: str, runner: Callable[..., CommandResult] = run_cachectl) -> dict[str, Any]:
    done = runner(home, *words, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def find_session(home: Home, client: str) -> str:
    """Find the id of the session with this client name."""
    (found,) = [row["id"] for row in read_json(home, "ls")["sessions"] if row["client"] == client]
    return str(found)
