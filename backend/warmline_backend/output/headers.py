"""Header formats of answers that are messages: reasoning, content or a call each."""

import re
from dataclasses import dataclass

START, MESSAGE = "<|start|>", "<|message|>"
_ROLE = "assistant"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_HEADER_CHARS_MAX = 256


@dataclass(frozen=True)
class HeaderFormat:
    end_markers: tuple[str, ...]  # of a message
    field_prefixes: tuple[str, ...]  # of a header, behind the role
    content_recipients: tuple[str, ...]  # recipients of content
    reasoning_recipient: str  # the recipient of reasoning, "" where a channel tells
    has_json_calls: bool  # a call's message is its arguments; else it holds calls between markers

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.end_markers, *self.field_prefixes, START, MESSAGE)

    def can_be_header(self, text: str) -> bool:
        """True for text that may yet become a header: a model may also answer without headers."""
        if len(text) > _HEADER_CHARS_MAX:
            return False
        for word in (START, _ROLE):
            text = text.lstrip()
            if word.startswith(text):
                return True
            text = text.removeprefix(word)
        text = text.lstrip()
        return any(text.startswith(field) or field.startswith(text) for field in self.field_prefixes)

    def parse_recipient(self, header: str) -> str:
        """Function that a message calls; "" for none."""
        match = _RECIPIENT.search(header)
        name = match.group(1) if match else ""
        return "" if name == self.reasoning_recipient or name in self.content_recipients else name

    def is_reasoning(self, header: str) -> bool:
        if self.reasoning_recipient:
            return f"to={self.reasoning_recipient}" in header
        channel = _CHANNEL.search(header)
        return channel is not None and channel.group(1) == "analysis"


HARMONY = HeaderFormat(
    end_markers=("<|end|>", "<|return|>", "<|call|>"),
    field_prefixes=("to=", "<|channel|>", "<|constrain|>"),
    content_recipients=("user", "assistant", "all"),
    reasoning_recipient="",
    has_json_calls=True,
)
MUSE = HeaderFormat(
    end_markers=("<|eom|>", "<|eot|>"),
    field_prefixes=("to=",),
    content_recipients=("user", "commentary"),
    reasoning_recipient="self",
    has_json_calls=False,
)
