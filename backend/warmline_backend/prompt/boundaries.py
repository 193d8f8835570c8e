"""Where the messages of a rendered conversation end, as offsets of characters in its text.

A message's end is found by rendering the conversation up to there, and counts only where the whole prompt begins with
that: templates that rewrite earlier turns give fewer ends, never wrong ones.
"""

from collections.abc import Callable

from warmline_backend.prompt.messages import Conversation
from warmline_backend.prompt.template_traits import Message
from warmline_common.protocol.tokens import common_chars

MESSAGES_ALL_MAX = 16  # up to so many, every message's end is looked for; beyond, only the last ones'
MESSAGES_LAST = 8
TURNS_LAST = 2  # and the answers to as many users' messages: from there on templates leave out reasoning


class Boundaries:
    """Of one conversation, rendered to `text`; `prefix` renders messages alone, to "" where the template refuses."""

    def __init__(self, conversation: Conversation, text: str, prefix: Callable[[list[Message]], str]) -> None:
        self._conversation, self._text, self._prefix = conversation, text, prefix

    def turn_end(self) -> int:
        """Where the prompt leaves what is the same without a generation prompt (or without the message to continue)."""
        closed = [item.message for item in self._conversation.closed]
        return common_chars(self._prefix(closed), self._text) if closed else 0

    def message_ends(self) -> dict[int, int]:
        """Character offsets of the other boundaries, by how many messages end there."""
        messages, system, ends = self._conversation.messages, self._conversation.system_messages, {}
        if system or self._conversation.tools:
            ends[system] = self._system_end()
        for count in _wanted_ends(self._conversation):
            prefix = self._prefix(messages[:count])
            if self._text.startswith(prefix):
                ends[count] = len(prefix)
        return ends

    def rewritten_ends(self, known: dict[int, int]) -> dict[int, int]:
        """Where messages end that read differently now that a user has spoken after them: as rendered before a user's
        message, whose own length is known from one that stands behind the first message.
        """
        messages, first = self._conversation.messages, self._conversation.system_messages + 1
        last_turn = max(self._conversation.turns, default=0)
        wanted = _wanted_ends(self._conversation, last=0)
        rewritten = [count for count in wanted if count <= last_turn and count not in known]
        if not rewritten:
            return {}
        start, followed = self._prefix(messages[:first]), self._before_a_user(first)
        if not start or not followed.startswith(start):
            return {}
        ends = {}
        for count in rewritten:
            followed_here = self._before_a_user(count)
            end = len(followed_here) - (len(followed) - len(start))
            if end > 0 and self._text.startswith(followed_here[:end]):
                ends[count] = end
        return ends

    def _before_a_user(self, count: int) -> str:
        return self._prefix([*self._conversation.messages[:count], {"role": "user", "content": "a"}])

    def _system_end(self) -> int:
        """The end of system messages and tools.

        Some templates refuse a conversation without a user, or move the system text into the user's message; then it is
        where two conversations that differ in the user's first word part ways.
        """
        system = self._conversation.messages[: self._conversation.system_messages]
        plain = self._prefix(system) if system else ""
        if plain and _shows(self._conversation, plain) and self._text.startswith(plain):
            return len(plain)
        one, other = (self._prefix([*system, {"role": "user", "content": word}]) for word in ("a", "b"))
        shared = one[: common_chars(one, other)]
        return len(shared) if self._text.startswith(shared) else 0


def _shows(conversation: Conversation, text: str) -> bool:
    """Whether the system messages and the tools are in the text at all."""
    needles = [str(m["content"]).strip() for m in conversation.messages[: conversation.system_messages]]
    needles += [tool["function"]["name"] for tool in conversation.offered or ()]
    return all(needle in text for needle in needles)


def _wanted_ends(conversation: Conversation, last: int = MESSAGES_LAST) -> list[int]:
    """How many messages to look for the end of, ascending; of a long conversation the `last`, and around turns."""
    ends = range(conversation.system_messages + 1, len(conversation.messages))
    if len(conversation.messages) <= MESSAGES_ALL_MAX:
        return list(ends)
    turns = {index + after for index in conversation.turns[-TURNS_LAST:] for after in (1, 2)}
    return sorted(turns.intersection(ends).union(ends[len(ends) - last :]))
