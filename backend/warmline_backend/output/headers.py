"""Answers that are messages, each with a header that says whether it is reasoning, content or a call."""

import re
from dataclasses import dataclass

START, MESSAGE = "<|start|>", "<|message|>"
_ROLE = "assistant"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_HEADER_CHARS_MAX = 256


@dataclass(frozen=True)
class Headers:
    ends: tuple[str, ...]  # of a message
    fields: tuple[str, ...]  # of a header: what may follow the role
    people: tuple[str, ...]  # recipients of content
    myself: str  # the recipient of reasoning, "" where a channel tells
    calls_are_json: bool  # a call's message is its arguments; else it holds calls between markers

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.ends, *self.fields, START, MESSAGE)

    def may_be_header(self, text: str) -> bool:
        """Whether text with no message's start in it may yet be a header: a model may also answer without one."""
        if len(text) > _HEADER_CHARS_MAX:
            return False
        for word in (START, _ROLE):
            text = text.lstrip()
            if word.startswith(text):
                return True
            text = text.removeprefix(word)
        text = text.lstrip()
        return any(text.startswith(field) or field.startswith(text) for field in self.fields)

    def recipient(self, header: str) -> str:
        """The function that a message calls; "" where it calls none."""
        match = _RECIPIENT.search(header)
        name = match.group(1) if match else ""
        return "" if name == self.myself or name in self.people else name

    def is_reasoning(self, header: str) -> bool:
        if self.myself:
            return f"to={self.myself}" in header
        channel = _CHANNEL.search(header)
        return channel is not None and channel.group(1) == "analysis"


HARMONY = Headers(
    ends=("<|end|>", "<|return|>", "<|call|>"),
    fields=("to=", "<|channel|>", "<|constrain|>"),
    people=("user", "assistant", "all"),
    myself="",
    calls_are_json=True,
)
MUSE = Headers(
    ends=("<|eom|>", "<|eot|>"),
    fields=("to=",),
    people=("user", "commentary"),
    myself="self",
    calls_are_json=False,
)
