"""Commands and Python of the documentation, run a document at a time beside a pair that serves."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docs.commands import DOCUMENTS, ROOT, find_commands_outside_blocks, has_commands, list_commands
from support.docs.reader import HOST, CommandFailedError, DocumentReader
from support.pair.models_pair import ModelsPair, PairModel
from support.pair.pair import FolderOf, Pair

# Their transcripts of our own commands are held to the truth elsewhere.
HELD_ELSEWHERE = {ROOT / "docs" / "cachectl.md": ROOT / "tests" / "cachectl" / "views" / "test_documented_output.py"}

TEXTS = {document: document.read_text(encoding="utf-8") for document in DOCUMENTS}
WITH_COMMANDS = [document for document, text in TEXTS.items() if has_commands(text)]
# Documents whose reader has another pair than one that serves one model.
READERS = {ROOT / "docs" / "models.md": "models_reader"}
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_PYTHON = [document for document, text in TEXTS.items() if PYTHON.search(text)]


def get_document_name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_folder: FolderOf) -> Iterator[Pair]:
    flags = ["--allowed-hosts", HOST, "--max-tokens", "32"]  # the model would talk for ever
    with Pair(tmp_path_factory.mktemp("served"), tiny_folder("llama"), *flags) as pair:
        yield pair


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, pair: Pair, tiny_folder: FolderOf) -> Iterator[DocumentReader]:
    with DocumentReader(tmp_path_factory.mktemp("reader"), pair, tiny_folder) as reader:
        yield reader


@pytest.fixture(scope="module")
def models_reader(tmp_path_factory: pytest.TempPathFactory, tiny_folder: FolderOf) -> Iterator[DocumentReader]:
    """Reader beside a pair of several models, as docs/models.md names them."""
    models = [
        PairModel("large", tiny_folder("llama")),
        PairModel("small", tiny_folder("gemma3"), aliases=["gpt-4o-mini", "claude-haiku-4-5"]),
    ]
    home = tmp_path_factory.mktemp("several")
    with (
        ModelsPair(home, models, memory_gb=4) as pair,
        DocumentReader(tmp_path_factory.mktemp("models-reader"), pair, tiny_folder) as reader,
    ):
        pair.chat([{"role": "user", "content": "Hello."}], model="small", max_tokens=4)
        pair.settle()
        yield reader


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=get_document_name)
def test_documented_commands_succeed(document: Path, request: pytest.FixtureRequest) -> None:
    reader: DocumentReader = request.getfixturevalue(READERS.get(document, "reader"))
    try:
        reader.type_commands(document)
    finally:
        reader.remove_keys()


def test_failing_command_is_named(tmp_path: Path, reader: DocumentReader) -> None:
    document = tmp_path / "wrong.md"
    document.write_text("Look:\n\n```sh\ncd .\ncurl http://127.0.0.1:8026/v1/none\n```\n")
    with pytest.raises(CommandFailedError, match=r"line 5: curl .*\nexit code 22"):
        reader.type_commands(document)


@pytest.mark.parametrize("document", WITH_PYTHON, ids=get_document_name)
def test_documented_python_runs(document: Path, pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    for example in PYTHON.finditer(TEXTS[document]):
        exec(compile(example[1].replace(":8026", f":{pair.port}"), str(document), "exec"), {})
        assert capsys.readouterr().out


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each not in HELD_ELSEWHERE], ids=get_document_name)
def test_commands_are_in_sh_blocks(document: Path) -> None:
    assert find_commands_outside_blocks(TEXTS[document]) == []


def test_transcript_tests_exist() -> None:
    for document, test in HELD_ELSEWHERE.items():
        assert document.is_file() and test.is_file()


def test_command_extraction() -> None:
    text = "```sh\n# why\ncd x  # there\n\ncurl a \\\n  -d '{\n  }'\npython - <<END\nprint()\nEND\n```\n"
    assert [(command.line, command.text.split()[0]) for command in list_commands(text)] == [
        (3, "cd"),
        (5, "curl"),
        (8, "python"),
    ]
    with pytest.raises(ValueError, match="line 2: a command has no end"):
        list_commands("```sh\ncurl 'a\n```\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("    warmline serve --lan\n", 1),
        ("    A=1 .venv/bin/cachectl ls\n", 1),
        ("    printed by it\n", 0),
        ("```text\n$ cachectl ls\n```\n", 1),
        ("```console\n$ cachectl ls\n```\n", 1),
        ("```console\n$ claude -p 'say hello'\nhello\n```\n", 0),
        ("```console\nclaude -p 'say hello'\n```\n", 1),
        ("```sh\nwarmline serve\n```\n", 0),
        ("- a list\n\n  ```sh\n  warmline serve\n  ```\n", 1),
    ],
)
def test_text_outside_blocks(text: str, found: int) -> None:
    assert len(find_commands_outside_blocks(text)) == found
