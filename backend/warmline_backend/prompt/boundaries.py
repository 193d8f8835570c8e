"""Ends of messages in a rendered conversation, as offsets of characters.

A message's end is found by rendering the conversation up to there, and counts only where the whole prompt begins with
that: templates that rewrite earlier turns give fewer ends, never wrong ones.
"""

from collections.abc import Callable

from warmline_backend.prompt.messages import ChatConversation
from warmline_backend.prompt.template_traits import Message
from warmline_common.protocol.tokens import count_common_chars

MESSAGES_ALL_MAX = 16  # up to so many, every message's end is looked for; beyond, only the last ones'
MESSAGES_LAST = 8
TURNS_LAST = 2  # and the answers to as many users' messages: from there on templates leave out reasoning


class BoundaryFinder:
    """Boundaries of one conversation with the rendered `text`; `render_prefix` gives "" where the template refuses."""

    def __init__(
        self, conversation: ChatConversation, text: str, render_prefix: Callable[[list[Message]], str]
    ) -> None:
        self._conversation, self._text, self._render_prefix = conversation, text, render_prefix

    def find_turn_end(self) -> int:
        """Offset up to which the prompt is the same without a generation prompt (or the message to continue)."""
        closed = [item.message for item in self._conversation.complete_items]
        return count_common_chars(self._render_prefix(closed), self._text) if closed else 0

    def find_message_ends(self) -> dict[int, int]:
        """Offsets of the other boundaries, by the number of messages that end there."""
        messages, system, ends = self._conversation.messages, self._conversation.system_count, {}
        if system or self._conversation.tools:
            ends[system] = self._find_system_end()
        for count in _select_message_counts(self._conversation):
            prefix = self._render_prefix(messages[:count])
            if self._text.startswith(prefix):
                ends[count] = len(prefix)
        return ends

    def find_rewritten_ends(self, known_ends: dict[int, int]) -> dict[int, int]:
        """Ends of messages that the template has rewritten since a user spoke after them.

        They are found as rendered before a user's message, whose length is known from the one behind the first message.
        """
        messages, first = self._conversation.messages, self._conversation.system_count + 1
        last_turn = max(self._conversation.user_indices, default=0)
        wanted = _select_message_counts(self._conversation, last_count=0)
        rewritten = [count for count in wanted if count <= last_turn and count not in known_ends]
        if not rewritten:
            return {}
        start, followed = self._render_prefix(messages[:first]), self._render_before_user(first)
        if not start or not followed.startswith(start):
            return {}
        ends = {}
        for count in rewritten:
            followed_here = self._render_before_user(count)
            end = len(followed_here) - (len(followed) - len(start))
            if end > 0 and self._text.startswith(followed_here[:end]):
                ends[count] = end
        return ends

    def _render_before_user(self, count: int) -> str:
        return self._render_prefix([*self._conversation.messages[:count], {"role": "user", "content": "a"}])

    def _find_system_end(self) -> int:
        """End of system messages and tools.

        Some templates refuse a conversation without a user, or move the system text into the user's message; then it is
        the common beginning of two conversations that differ in the user's first word.
        """
        system = self._conversation.messages[: self._conversation.system_count]
        plain = self._render_prefix(system) if system else ""
        if plain and _has_system_and_tools(self._conversation, plain) and self._text.startswith(plain):
            return len(plain)
        one, other = (self._render_prefix([*system, {"role": "user", "content": word}]) for word in ("a", "b"))
        shared = one[: count_common_chars(one, other)]
        return len(shared) if self._text.startswith(shared) else 0


def _has_system_and_tools(conversation: ChatConversation, text: str) -> bool:
    """True where the text shows the system messages and the tools at all."""
    needles = [str(m["content"]).strip() for m in conversation.messages[: conversation.system_count]]
    needles += [tool["function"]["name"] for tool in conversation.offered_tools or ()]
    return all(needle in text for needle in needles)


def _select_message_counts(conversation: ChatConversation, last_count: int = MESSAGES_LAST) -> list[int]:
    """Numbers of messages to find the end of, ascending; of a long conversation the last ones, and around turns."""
    ends = range(conversation.system_count + 1, len(conversation.messages))
    if len(conversation.messages) <= MESSAGES_ALL_MAX:
        return list(ends)
    turns = {index + after for index in conversation.user_indices[-TURNS_LAST:] for after in (1, 2)}
    return sorted(turns.intersection(ends).union(ends[len(ends) - last_count :]))
