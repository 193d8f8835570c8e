"""Causes of misses, from the planner's reason and the texts of both sides."""

import re
from pathlib import Path

import pytest

from warmline_proxy.explain.causes import CAUSES, find_cause, find_secondary_causes
from warmline_proxy.store.rows import Divergence

FIXTURES = Path(__file__).parents[2] / "fixtures" / "requests"
ROOT = Path(__file__).parents[3]
DIFFERS = "differs from what is stored at token 40"
SYSTEM = {"message": 1, "message_last": 1, "role": "system"}
USER = {"message": 2, "message_last": 2, "role": "user"}
ANSWER = {"message": 3, "message_last": 3, "role": "assistant"}


def make_divergence(old: str = "", new: str = "", **fields: object) -> Divergence:
    values = {"at": 40, "begins": 8, "stored": b"", "prompt": b"", "messages": 4, **fields}
    return Divergence(**values, stored_text=old, prompt_text=new)  # type: ignore[arg-type]


PLANNER_REASONS = [
    ("", "warm"),
    ("reuse is off", "reuse-off"),
    ("nothing is to be computed", "nothing-asked"),
    ("the client asked for no reuse", "client-asked"),
    ("its start was gone, twice", "gone"),
    ("another request computes the first 128 tokens", "shared"),
    ("restoring 128 tokens would take longer", "slower"),
    ("not persistent: MambaCache has no codec", "memory"),
    ("nothing stored", "first-request"),
    ("stored up to token 812", "new-text"),
    ("in memory up to token 812", "new-text"),
    ("all of it is stored; no checkpoint after token 512", "no-checkpoint"),
    ("exact mode keeps and reuses multiples of 128 tokens", "exact-grid"),
    ("evicted after token 64", "evicted"),
    ("missing after token 64", "missing"),
    ("quarantined (checksum) after token 64", "damaged"),
    ("checksum in 7a7a7a7a: 21.0.keys of segment; differs from what is stored at token 40", "damaged"),
    ("missing in the chain: no such file; nothing stored", "damaged"),
    ("what is stored after token 64 is suspect", "suspect"),
    ("what was restored is suspect; stored up to token 64", "suspect"),
    ("restore failed: 500: boom; nothing stored", "restore-failed"),
    ("restoring took more than 30 s; nothing stored", "restore-failed"),
    (DIFFERS, "differs"),
    ("a sentence of another version", "unknown"),
]


def test_planner_reasons_have_causes() -> None:
    for why, cause in PLANNER_REASONS:
        assert find_cause(why, None) == cause, why


NAMED_PLACES = [
    (", in message 3 (assistant): the template leaves out its reasoning", "reasoning-left-out"),
    (", in message 1 (system): a time of day in line 2 of the system text is new", "timestamp"),
    (", in message 1 (system): a Unix time in line 2 of the system text is new", "timestamp"),
    (", in message 1 (system): a date in line 9 of the system text is new", "date"),
    (", in message 1 (system): a hash or random id in line 9 of the system text is new", "random-id"),
    (", in message 1 (system): a billing header in line 1 of the system text is new", "billing-header"),
    (", in the tools: the tools come in another order", "tool-order"),
    (", in the tools: tools: look changed; walk new", "tools-changed"),
]


def test_named_place_decides_before_texts() -> None:
    for addition, cause in NAMED_PLACES:
        assert find_cause(DIFFERS + addition, make_divergence("one thing", "another", **USER)) == cause, addition


TEXTS: list[tuple[str, str, dict[str, object], str]] = [
    ("Current time: 2026-11-28T14:22:33Z. You", "Current time: 2026-11-28T14:25:01Z. You", SYSTEM, "timestamp"),
    ("It is 9:15 PM here", "It is 9:20 PM here", USER, "timestamp"),
    ("now 1764340953 s", "now 1764341010 s", SYSTEM, "timestamp"),
    ("Today's date: 2026-11-28", "Today's date: 2026-11-29", USER, "date"),
    ("Date: Nov 28, 2026\nYou", "Date: Nov 29, 2026\nYou", SYSTEM, "date"),
    (
        "session 0b5e3c1e-9f3a-4c55-8a94-2b8f7b8b5a10",
        "session 1b5e3c1e-9f3a-4c55-8a94-2b8f7b8b5a11",
        SYSTEM,
        "random-id",
    ),
    ("x-anthropic-billing-header: a1\nYou", "x-anthropic-billing-header: b2\nYou", SYSTEM, "billing-header"),
    ("Tokens left: 180,000. Go", "Tokens left: 179,200. Go", USER, "number"),
    ("Solve exercise 12.", "Solve exercise 13.", {**USER, "message": 4, "message_last": 4}, "other-message"),
    ("list the files.  Then stop, please.", "list the files.\nThen stop, please.", USER, "whitespace"),
    ('{"name": "look", "description": "Looks."}', '{"name": "look", "description": "Sees."}', {"role": "tools"},
     "tools-changed"),
    ('Tools: {"parameters": {"a": 1}}', 'Tools: {"parameters": {"b": 1}}', SYSTEM, "tools-changed"),
    ("You are a careful engineer.", "You are a careful pilot.", SYSTEM, "system-edited"),
    ("fix the test in a.py", "fix the test in b.py", USER, "message-edited"),
    ("fix the test in a.py", "write a poem instead", {**USER, "message": 4, "message_last": 4}, "other-message"),
    ("<think>\nHm, files.\n</think>\n\nDone", "Done<|im_end|>", ANSWER, "reasoning-dropped"),
    ("I have listed the files.", "The files are listed.", ANSWER, "answer-changed"),
    ("first, read the code", "second, run the tests", {**USER, "comes_later": True}, "truncated"),
    (
        "user\nfix the test",
        "user\nThis session is being continued from a previous conversation",
        USER,
        "compacted",
    ),
    ("assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", {}, "template"),
    ("once upon a time", "once more", {"messages": 0}, "differs"),
]  # fmt: skip


def test_texts_of_both_sides_decide() -> None:
    for old, new, place, cause in TEXTS:
        assert find_cause(DIFFERS, make_divergence(old, new, **place)) == cause, new


@pytest.mark.parametrize("client", ["claude-code", "codex"])
def test_date_in_real_client_prompt_is_found(client: str) -> None:
    sent = (FIXTURES / f"{client}.json").read_text()
    at = sent.index("2026-01-02")
    old = sent[at - 120 : at + 200]
    assert find_cause(DIFFERS, make_divergence(old, old.replace("2026-01-02", "2026-01-03"), **USER)) == "date"


def test_role_decides_without_texts() -> None:
    assert find_cause(DIFFERS, make_divergence(**SYSTEM)) == "system-edited"
    assert find_cause(DIFFERS, make_divergence(role="tools")) == "tools-changed"
    addition = ", in message 3 (assistant): it came without reasoning"
    assert find_cause(DIFFERS + addition, make_divergence(**ANSWER)) == "reasoning-dropped"
    assert find_cause(DIFFERS + addition, make_divergence("It is Anna.", "It was Anna.", **ANSWER)) == "answer-changed"
    assert find_cause(DIFFERS, make_divergence(message=2, message_last=7, messages=9)) == "message-edited"


def test_secondary_causes() -> None:
    why = "stored up to token 812; no checkpoint after token 512; exact mode keeps and reuses multiples of 128 tokens"
    assert find_cause(why, None) == "no-checkpoint"
    assert find_secondary_causes(why, "no-checkpoint") == ["exact-grid"]


def test_docs_have_the_table_of_causes() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| (.*?) ?\|$", (ROOT / "docs" / "explain.md").read_text(), re.MULTILINE
    )
    assert rows == [(name, cause.meaning, cause.advice) for name, cause in CAUSES.items()]


def test_page_of_cold_turns_names_causes_as_explain_does() -> None:
    table = re.findall(r"^\| \d+ \| (.+?) \|", (ROOT / "docs" / "cold-turns.md").read_text(), re.MULTILINE)
    assert len(table) == 10 and {cause for row in table for cause in re.findall(r"`([\w-]+)`", row)} <= CAUSES.keys()
