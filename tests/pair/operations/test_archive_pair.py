"""Export, purge and import: a conversation leaves one machine and continues warm on another."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.pair.pair import FolderOf, Message, Pair
from warmline_cachectl.cli import app as cachectl
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.home import Home

TALK: list[Message] = [
    {"role": "system", "content": "Moving house is a canary in this talk, of all talks."},
    {"role": "user", "content": "Where do the boxes go? " * 12},
]
GREEDY = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def other_pair(tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Pair of another machine with the same model."""
    with Pair(tmp_path_factory.mktemp("elsewhere"), tiny_folder("llama")) as pair:
        yield pair


def test_imported_conversation_continues_warm(warm_pair: Pair, other_pair: Pair, tmp_path: Path) -> None:
    first = warm_pair.chat(TALK, session_id="moving", **GREEDY)
    warm_pair.settle()
    (session,) = [row["id"] for row in warm_pair.cachectl("inspect")["sessions"] if row["client"] == "moving"]
    file = str(tmp_path / "talk.warmline")
    export = warm_pair.cachectl("export", session, file)
    assert export["tokens"] >= first.prompt_tokens and Path(file).stat().st_mode & 0o777 == 0o600
    more = [*TALK, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And the plants?"}]
    here = warm_pair.chat(more, **GREEDY)
    assert here.cached > first.prompt_tokens - 20
    warm_pair.settle()
    rendered = warm_pair.render_prompt(TALK).tokens
    warm_pair.cachectl("purge", "--session", session, "--yes")
    assert find_files_containing(warm_pair, rendered[-80:]) == find_files_containing(warm_pair, b"moving") == []

    stored = other_pair.cachectl("import", file)
    assert (stored["tokens"], stored["tokens_known"]) == (export["tokens"], 0)
    assert stored["fingerprint"] == other_pair.status().fingerprint
    there = other_pair.chat(more, **GREEDY)
    assert there.headers["X-Warmline-Cache"] == f"restored {there.cached}"
    assert (there.text, there.cached) == (here.text, here.cached)
    other_pair.settle()
    assert other_pair.cachectl("import", file)["tokens_known"] == export["tokens"]
    assert other_pair.cachectl("verify", "--deep")["findings"] == []
    sessions = [row for row in other_pair.cachectl("inspect")["sessions"] if row["client"] == "moving"]
    assert len(sessions) == 1 and sessions[0]["tokens"] > export["tokens"], "it is the same conversation, longer"


def test_import_refusals_are_equal_with_and_without_proxy(other_pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"x" * 4096)
    idle = Home(tmp_path / "idle")
    idle.prepare()
    before = other_pair.cachectl("stats")["stored"]["segments"]
    for words in (["junk"], ["nothing"], ["junk", "--key", "nobody"]):
        file = str(tmp_path / words[0])
        lines = [
            CliRunner().invoke(cachectl, ["import", file, *words[1:], "--home", str(home.root)]).stderr
            for home in (other_pair.home, idle)
        ]
        assert lines[0] == lines[1] and lines[0].startswith(f"cachectl: {file}: ") and lines[0].count("\n") == 1
        assert other_pair.cachectl("import", file, *words[1:], code=3) is None
    reply = other_pair.as_owner("POST", f"{other_pair.url}/warmline/import", b'{"path": "junk"}')
    assert (reply.status, reply.json["error"]["param"]) == (400, "path")
    assert other_pair.cachectl("stats")["stored"]["segments"] == before


def find_files_containing(pair: Pair, wanted: bytes) -> list[Path]:
    """Find the files under the home with these bytes, except the model's."""
    paths = (path for path in pair.home.root.rglob("*") if path.is_file())
    return [path for path in paths if wanted in path.read_bytes()]


def test_packed_tokens_search_finds_tokens(warm_pair: Pair) -> None:
    """Else the search above would find nothing for a reason of its own."""
    warm_pair.chat(TALK, session_id="searched", **GREEDY)
    warm_pair.settle()
    tokens = warm_pair.render_prompt(TALK).tokens
    assert pack_tokens([]) == b"" and len(find_files_containing(warm_pair, tokens[-80:])) >= 2
