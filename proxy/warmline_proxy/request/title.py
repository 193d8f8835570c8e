"""Titles of conversations: the first words of the first user message.  Pure."""

import re
from collections.abc import Iterator
from typing import Any

from warmline_proxy.api.base import Fields
from warmline_proxy.api.chat_messages import decode_as, decode_elements, extract_texts

TITLE_CHARS_MAX = 60
TEXT_CHARS_MAX = 1 << 16  # of a message, looked into
MESSAGES_MAX = 8  # of users, looked into

# Texts that clients put into users' messages, or before them (see tests/fixtures/requests).
_INSERTED_TAGS = (
    *("system-reminder", "environment_context", "environment_details", "user_instructions", "INSTRUCTIONS"),
    *("permissions instructions", "skills_instructions", "local-command-caveat"),
)
_INSERTED_HEADING = "# AGENTS.md instructions"
_TAG = re.compile(r"</?[A-Za-z][\w-]{0,40}>")


def make_title(fields: Fields) -> str:
    """Title of the conversation that a body in the internal form belongs to; "" where no user has said anything."""
    return next(filter(None, (_shorten(_remove_inserted(text)) for text in _iter_user_texts(fields))), "")


def _iter_user_texts(fields: Fields) -> Iterator[str]:
    """Yield what users say, message by message; of a completion its prompt."""
    if "prompt" in fields:
        prompt = decode_as(fields["prompt"], Any)
        yield from extract_texts(prompt[:1] if isinstance(prompt, list) else prompt)
        return
    left = MESSAGES_MAX
    for message in decode_elements(fields.get("messages")):
        read = decode_as(message, dict)
        if read is None or read.get("role") != "user":
            continue
        for text in extract_texts(read.get("content")):
            yield text[:TEXT_CHARS_MAX]
        if not (left := left - 1):
            return


def _remove_inserted(text: str) -> str:
    for tag in _INSERTED_TAGS:
        while (start := text.find(f"<{tag}>")) >= 0:
            end = text.find(f"</{tag}>", start)
            text = text[:start] + (text[end + len(tag) + 3 :] if end >= 0 else "")
    return "" if text.lstrip().startswith(_INSERTED_HEADING) else _TAG.sub(" ", text)


def _shorten(text: str) -> str:
    """One line of words, without characters that steer a terminal or turn the direction of text."""
    words = "".join(each if each.isprintable() else " " for each in text[: TITLE_CHARS_MAX * 20]).split()
    line = " ".join(words)
    if len(line) <= TITLE_CHARS_MAX:
        return line
    cut = line[: TITLE_CHARS_MAX - 1]
    return (cut[: cut.rfind(" ")] if " " in cut[TITLE_CHARS_MAX // 2 :] else cut).rstrip() + "…"
