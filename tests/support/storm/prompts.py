"""Prompts of a storm and their expected answers, computed once, cold, by the backend without a proxy."""

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
class StormPrompt:
    """Prompt, options of its request, and its cold answer."""

    messages: list[Message]
    options: dict[str, Any]
    cold: Reply

    def find_difference(self, reply: Reply) -> str:
        """Describe the difference to the cold answer; "" for none but near ties."""
        return explain_difference(self.cold, reply)

    def is_near_tie(self, reply: Reply) -> bool:
        return reply.text != self.cold.text and not self.find_difference(reply)


@dataclass(frozen=True)
class StormPrompts:
    """All prompts of a storm, by kind."""

    small: list[StormPrompt]
    medium: list[StormPrompt]
    long: list[StormPrompt]
    talkative: list[StormPrompt]  # a short prompt and a long answer
    conversations: list[list[StormPrompt]]  # one more turn in each prompt

    def choose(self, rng: random.Random) -> StormPrompt:
        kinds = [self.small, self.medium, self.medium, self.long, self.talkative, *self.conversations]
        return rng.choice(rng.choice(kinds))


def ask_cold(pair: Pair, rng: random.Random, long: Sequence[int]) -> StormPrompts:
    """Make prompts, with `long` prompts of these lengths in tokens, and compute their answers in turn."""

    def ask(messages: list[Message], tokens: int) -> StormPrompt:
        options = {"max_tokens": tokens, **WITH_LOGPROBS}
        return StormPrompt(messages, options, pair.ask_backend(messages, **options))

    def ask_user_message(length: int, tokens: int) -> StormPrompt:
        return ask([{"role": "user", "content": make_text(length, rng)}], tokens)

    return StormPrompts(
        small=[ask_user_message(SMALL, 6) for _ in range(SMALL_COUNT)],
        medium=[ask_user_message(MEDIUM, 24) for _ in range(MEDIUM_COUNT)],
        long=[ask_user_message(length, 12) for length in long],
        talkative=[ask_user_message(SMALL, 200)],
        conversations=[list(make_conversation(ask, rng)) for _ in range(CONVERSATIONS)],
    )


def make_conversation(ask: Any, rng: random.Random) -> Iterator[StormPrompt]:
    messages: list[Message] = [{"role": "system", "content": make_text(MEDIUM, rng)}]
    for _ in range(TURNS):
        messages = [*messages, {"role": "user", "content": make_text(SMALL, rng)}]
        prompt = ask(messages, 20)
        yield prompt
        messages = [*messages, {"role": "assistant", "content": prompt.cold.text}]


def make_text(length: int, rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=length)).strip()
