"""What a storm asks, and what the answers must be: each computed once, cold, by the backend asked directly."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.pair.answers import WITH_LOGPROBS, explain_difference
from support.pair.pair import Message, Pair, Reply

LETTERS = "abcdefgh ijklmnop qrstuvw xyz "
SMALL, MEDIUM, LONG = 40, 400, (1200, 2000, 3500)  # prompt tokens, about
SMALL_COUNT, MEDIUM_COUNT = 4, 3
CONVERSATIONS, TURNS = 2, 3


@dataclass(frozen=True, eq=False)
class Question:
    """A prompt, the options that it is sent with, and the cold answer."""

    messages: list[Message]
    options: dict[str, Any]
    cold: Reply

    def fault_of(self, reply: Reply) -> str:
        """ "" where it is the cold answer, but for near ties."""
        return explain_difference(self.cold, reply)

    def nearly_tied(self, reply: Reply) -> bool:
        return reply.text != self.cold.text and not self.fault_of(reply)


@dataclass(frozen=True)
class Questions:
    small: list[Question]
    medium: list[Question]
    long: list[Question]
    talkative: list[Question]  # a short prompt and a long answer
    conversations: list[list[Question]]  # each a turn more than the one before

    def any_of(self, dice: random.Random) -> Question:
        kinds = [self.small, self.medium, self.medium, self.long, self.talkative, *self.conversations]
        return dice.choice(dice.choice(kinds))


def ask_cold(pair: Pair, dice: random.Random, long: Sequence[int]) -> Questions:
    """Make up questions, and long ones of so many tokens, and have them answered, one after the other."""

    def ask(messages: list[Message], tokens: int) -> Question:
        options = {"max_tokens": tokens, **WITH_LOGPROBS}
        return Question(messages, options, pair.direct(messages, **options))

    def single(length: int, tokens: int) -> Question:
        return ask([{"role": "user", "content": words(length, dice)}], tokens)

    return Questions(
        small=[single(SMALL, 6) for _ in range(SMALL_COUNT)],
        medium=[single(MEDIUM, 24) for _ in range(MEDIUM_COUNT)],
        long=[single(length, 12) for length in long],
        talkative=[single(SMALL, 200)],
        conversations=[list(converse(ask, dice)) for _ in range(CONVERSATIONS)],
    )


def converse(ask: Any, dice: random.Random) -> Iterator[Question]:
    messages: list[Message] = [{"role": "system", "content": words(MEDIUM, dice)}]
    for _ in range(TURNS):
        messages = [*messages, {"role": "user", "content": words(SMALL, dice)}]
        question = ask(messages, 20)
        yield question
        messages = [*messages, {"role": "assistant", "content": question.cold.text}]


def words(length: int, dice: random.Random) -> str:
    return "".join(dice.choices(LETTERS, k=length)).strip()
