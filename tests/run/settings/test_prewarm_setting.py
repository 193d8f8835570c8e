"""The setting `prewarm`: tables of the file, checked."""

from pathlib import Path

import pytest

from warmline_common.settings.prewarm import PrewarmEntry, parse_prewarm
from warmline_common.settings.resolve import ConfigurationError, resolve

TABLES = """
[[prewarm]]
file = "prewarm/day.json"
api = "messages"
pin = true

[[prewarm]]
client = "claude-cli"
model = "small"
key = "laptop"

[[models]]
path = "org/large"

[[models]]
path = "org/small"
"""


def resolve_prewarm(home: Path, toml: str) -> list[PrewarmEntry]:
    (home / "warmline.toml").write_text(toml)
    return parse_prewarm(str(resolve({"home": str(home)}, {})["prewarm"]))


def test_tables_are_entries_in_their_order(tmp_path: Path) -> None:
    entries = resolve_prewarm(tmp_path, TABLES)
    assert entries == [
        PrewarmEntry(file="prewarm/day.json", api="messages", pin=True),
        PrewarmEntry(client="claude-cli", model="small", key="laptop"),
    ]
    assert [entry.name for entry in entries] == ["prewarm/day.json", "claude-cli small laptop"]


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ('[prewarm]\nfile = "a"', r"\[prewarm\] is one table; write \[\[prewarm\]\]"),
        ('[[prewarms]]\nfile = "a"', r"did you mean \[\[prewarm\]\]"),
        ("prewarm = 3", r"expected tables \[\[prewarm\]\]"),
        ("[[prewarm]]\npin = true", "entry 1: expected either a file or a client"),
        ('[[prewarm]]\nfile = "a"\nclient = "b"', "entry 1: expected either a file or a client"),
        ('[[prewarm]]\nfiel = "a"', "unknown key 'fiel'; did you mean 'file'"),
        ('[[prewarm]]\nclient = "b"\napi = "chat"', "expected `api` with a file only"),
        ('[[prewarm]]\nfile = "a"\napi = "chats"', "entry 1: api: expected chat, completions, .*not 'chats'"),
        ('[[prewarm]]\nfile = "a"\npin = 3', "entry 1: pin: expected true or false, not '3'"),
        ('[[prewarm]]\nfile = ""', "entry 1: file: expected text"),
        ('[[prewarm]]\nfile = "a"\n[[prewarm]]\nfile = "a"', "'a' is given twice"),
        (TABLES.replace('"small"', '"tiny"'), "claude-cli: unknown model 'tiny'; expected one of large, small"),
    ],
)
def test_wrong_tables_are_refused_with_what_was_expected(tmp_path: Path, toml: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        resolve_prewarm(tmp_path, toml)
