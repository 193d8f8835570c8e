"""Titles of conversations: which words of a body they are."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from warmline_proxy.api.registry import find_api
from warmline_proxy.request.title import TITLE_CHARS_MAX, make_title

REQUESTS = Path(__file__).parents[2] / "fixtures" / "requests"


def read_raw(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as the proxy has them: lists are raw JSON."""
    return msgspec.json.decode(json.dumps(fields), type=dict[str, msgspec.Raw])


def say(*contents: object) -> dict[str, Any]:
    system = {"role": "system", "content": "You help."}
    return {"messages": [system, *({"role": "user", "content": content} for content in contents)]}


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        (say("  Fix the\n\tbuild,  please "), "Fix the build, please"),
        (say([{"type": "text", "text": "Look"}, {"type": "image_url"}, {"type": "text", "text": "here"}]), "Look"),
        (say("<system-reminder>a\nb</system-reminder>\nFix it<system-reminder>c</system-reminder> now"), "Fix it now"),
        (say("<environment_context>cwd</environment_context>", "Fix it"), "Fix it"),
        (say("# AGENTS.md instructions for /a\n\n<INSTRUCTIONS>b</INSTRUCTIONS>", "Fix it"), "Fix it"),
        (say("<task>\nFix it\n</task>"), "Fix it"),
        (say("<system-reminder>never closed " * 3, "Fix it"), "Fix it"),
        (say("a < b and c > d"), "a < b and c > d"),
        (say("\x1b[31mred\u202eevil\x07"), "[31mred evil"),
        (say("", None, 5, {"a": 1}, "Fix it"), "Fix it"),
        (say(), ""),
        (say(*[""] * 20, "too late"), ""),
        ({"messages": [{"role": "assistant", "content": "Hello"}]}, ""),
        ({"messages": 7}, ""),
        ({"prompt": "Once upon a time"}, "Once upon a time"),
        ({"prompt": ["First", "Second"]}, "First"),
        ({"prompt": [1, 2, 3]}, ""),
        ({}, ""),
    ],
)
def test_title_is_what_the_user_says_first(fields: dict[str, Any], title: str) -> None:
    assert make_title(read_raw(fields)) == make_title(fields) == title


def test_long_text_is_cut_at_a_word() -> None:
    title = make_title(say("word " * 100_000))
    assert title.endswith("word…") and len(title) <= TITLE_CHARS_MAX
    assert make_title(say("x" * 1_000_000)) == "x" * (TITLE_CHARS_MAX - 1) + "…"
    assert make_title(say("y" * TITLE_CHARS_MAX)) == "y" * TITLE_CHARS_MAX


@pytest.mark.parametrize(
    ("client", "title"),
    [
        ("anthropic-python", "This is Anthropic Python SDK. Use bash: ls -la"),
        ("claude-code", "Use Bash: echo hello"),
        ("codex", "Use exec_command: echo hello"),
        ("hermes", "Use terminal: echo hello"),
        ("opencode", '"Use bash: echo hello"'),
        ("terminus-2", "You solve a task in a terminal. You are given the task and…"),
    ],
)
def test_first_words_of_real_clients(client: str, title: str) -> None:
    recorded = json.loads((REQUESTS / f"{client}.json").read_text())
    body = json.dumps(recorded["body"] | recorded["turns"][0]["body"]).encode()
    call = asyncio.run(find_api(recorded["path"].split("?")[0]).read_call(body, recorded["headers"]))
    assert make_title(call.fields) == title
