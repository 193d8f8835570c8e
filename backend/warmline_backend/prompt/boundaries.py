"""Ends of messages in a rendered conversation, as offsets of characters.

A message's end is found by rendering the conversation up to there, and counts only where the whole prompt begins with
that: templates that rewrite earlier turns give fewer ends, never wrong ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from warmline_backend.prompt.messages import ChatConversation
from warmline_backend.prompt.template_traits import Message
from warmline_common.protocol.tokens import count_common_chars

MESSAGES_ALL_MAX = 16  # up to so many, every message's end is looked for; beyond, only the last ones'
MESSAGES_LAST = 8
TURNS_LAST = 2  # and the answers to as many users' messages: from there on templates leave out reasoning


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation and its text; `render_prefix` gives "" where the template refuses."""

    conversation: ChatConversation
    text: str
    render_prefix: Callable[[list[Message]], str]

    @cached_property
    def turn_end(self) -> int:
        """Offset up to which the prompt is the same without a generation prompt (or the message to continue)."""
        closed = [item.message for item in self.conversation.complete_items]
        return count_common_chars(self.render_prefix(closed), self.text) if closed else 0

    @property
    def tail(self) -> str:
        """Text from `turn_end` on; "" where that is unknown."""
        return self.text[self.turn_end :] if self.turn_end else ""

    def find_message_ends(self) -> dict[int, int]:
        """Offsets of the other boundaries, by the number of messages that end there."""
        messages, system, ends = self.conversation.messages, self.conversation.system_count, {}
        if system or self.conversation.tools:
            ends[system] = self._find_system_end()
        for count in _select_message_counts(self.conversation):
            prefix = self.render_prefix(messages[:count])
            if self.text.startswith(prefix):
                ends[count] = len(prefix)
        return ends

    def find_rewritten_ends(self, known_ends: dict[int, int]) -> dict[int, int]:
        """Ends of messages that the template has rewritten since a user spoke after them.

        They are found as rendered before a user's message, whose length is known from the one behind the first message.
        """
        first, last_turn = self.conversation.system_count + 1, max(self.conversation.user_indices, default=0)
        counts = _select_message_counts(self.conversation, last_count=0)
        rewritten = [count for count in counts if count <= last_turn and count not in known_ends]
        if not rewritten:
            return {}
        start, followed = self.render_prefix(self.conversation.messages[:first]), self._render_before_user(first)
        if not start or not followed.startswith(start):
            return {}
        ends = {}
        for count in rewritten:
            text = self._render_before_user(count)
            end = len(text) - (len(followed) - len(start))
            if end > 0 and self.text.startswith(text[:end]):
                ends[count] = end
        return ends

    def _render_before_user(self, count: int, word: str = "a") -> str:
        return self.render_prefix([*self.conversation.messages[:count], {"role": "user", "content": word}])

    def _find_system_end(self) -> int:
        """End of system messages and tools.

        Some templates refuse a conversation without a user, or move the system text into the user's message; then it is
        the common beginning of two conversations that differ in the user's first word.
        """
        count = self.conversation.system_count
        system = self.conversation.messages[:count]
        plain = self.render_prefix(system) if system else ""
        words = [str(message["content"]).strip() for message in system]
        words += [tool["function"]["name"] for tool in self.conversation.offered_tools or ()]
        if plain and all(word in plain for word in words) and self.text.startswith(plain):
            return len(plain)
        first, second = (self._render_before_user(count, word) for word in ("a", "b"))
        shared = first[: count_common_chars(first, second)]
        return len(shared) if self.text.startswith(shared) else 0


def _select_message_counts(conversation: ChatConversation, last_count: int = MESSAGES_LAST) -> list[int]:
    """Numbers of messages whose end to find, ascending; in a long conversation the last, and those around turns."""
    ends = range(conversation.system_count + 1, len(conversation.messages))
    if len(conversation.messages) <= MESSAGES_ALL_MAX:
        return list(ends)
    turns = {index + after for index in conversation.user_indices[-TURNS_LAST:] for after in (1, 2)}
    return sorted(turns.intersection(ends).union(ends[len(ends) - last_count :]))
