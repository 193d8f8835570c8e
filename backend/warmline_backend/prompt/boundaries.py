"""Ends of messages in a rendered conversation, as offsets of characters.

A message's end is found by rendering the conversation up to there, and counts only where the whole prompt begins with
that: templates that rewrite earlier turns give fewer ends, never wrong ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from warmline_backend.prompt.message_ends import MessageEndCache, TextHasher, describe_text, hash_messages
from warmline_backend.prompt.messages import ChatConversation
from warmline_backend.prompt.template_traits import Message
from warmline_common.protocol.tokens import count_common_chars

MESSAGES_ALL_MAX = 16  # up to so many, every message's end is looked for; beyond, only the last ones'
MESSAGES_LAST = 8
BEFORE_USER = b"user"  # of a key, for a beginning that a user's message follows
TURNS_LAST = 2  # and the answers to as many users' messages: from there on templates leave out reasoning


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation and its text; `render_prefix` gives "" where the template refuses.

    `known_ends`: of conversations of the same `root`.
    """

    conversation: ChatConversation
    text: str
    render_prefix: Callable[[list[Message]], str]
    known_ends: MessageEndCache = field(default_factory=MessageEndCache)
    root: bytes = b""

    @cached_property
    def _keys(self) -> list[bytes]:
        """Hashes of the conversation's beginnings, by the number of their messages."""
        conversation = self.conversation
        return hash_messages(self.root, [conversation.tools, conversation.kwargs], conversation.messages)

    @cached_property
    def _hasher(self) -> TextHasher:
        return TextHasher(self.text)

    @cached_property
    def turn_end(self) -> int:
        """Offset up to which the prompt is the same without a generation prompt (or the message to continue)."""
        closed = [item.message for item in self.conversation.complete_items]
        if not closed:
            return 0
        prefix = self.render_prefix(closed)
        self.known_ends.add(self._keys[len(closed)], describe_text(prefix))  # the next turn asks for it
        return count_common_chars(prefix, self.text)

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
            if (end := self.known_ends.find(self._keys[count])) is None:
                end = describe_text(self.render_prefix(messages[:count]))
                self.known_ends.add(self._keys[count], end)
            if self._hasher.begins_with(end):
                ends[count] = end.chars
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
            key = self._keys[count] + BEFORE_USER
            if (end := self.known_ends.find(key)) is None:
                text = self._render_before_user(count)
                end = describe_text(text[: max(0, len(text) - (len(followed) - len(start)))])
                self.known_ends.add(key, end)
            if end.chars and self._hasher.begins_with(end):
                ends[count] = end.chars
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
