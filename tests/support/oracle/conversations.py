"""The conversations of a script: what each step asks, word by word."""

import random
from dataclasses import dataclass, field

from support.oracle.steps import AGAIN, BEGIN, BRANCH, EDIT, TOOLS, WORD, Ask
from support.pair.pair import Message

LETTERS = "abcdefgh ijklmnop qrstuvw xyz "
SYSTEM_LENGTHS = (0, 30, 170, 333)
TALK_LENGTH_MAX = 900  # characters, about; a longer one is begun anew
GRAPHIC = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "<")  # what the tiny models say
STOP_WORDS = 4
TOOL_NAMES = ((), ("look",), ("look", "write"), ("write",))


@dataclass
class Talk:
    messages: list[Message]
    tools: int = 0

    @property
    def length(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Question:
    """A body as clients send it, and the conversation that it makes of an answer."""

    ask: Ask
    talk: int
    messages: list[Message]
    tools: int
    options: dict[str, object]

    @property
    def body(self) -> dict[str, object]:
        return {"messages": self.messages, **self.options}


@dataclass
class Talks:
    """A pure function of the steps and the answers."""

    salt: int = 0
    all: list[Talk] = field(default_factory=list)

    def question(self, ask: Ask) -> Question:
        at = ask.talk % len(self.all) if self.all else 0
        if not self.all or ask.how == BEGIN or (ask.how != AGAIN and self.all[at].length > TALK_LENGTH_MAX):
            at, talk = len(self.all), self._begun(ask)
        elif ask.how == BRANCH:
            at, talk = len(self.all), self._changed(ask, self.all[at])
        else:
            talk = self._changed(ask, self.all[at])
        return Question(ask, at, talk.messages, talk.tools, self._options(ask, talk))

    def answered(self, question: Question, text: str | None) -> None:
        """None: its client heard no answer, or left before its end."""
        answer: list[Message] = [] if text is None else [{"role": "assistant", "content": text}]
        talk = Talk([*question.messages, *answer], question.tools)
        if question.talk < len(self.all):
            self.all[question.talk] = talk
        else:
            self.all.append(talk)

    def _begun(self, ask: Ask) -> Talk:
        length = SYSTEM_LENGTHS[ask.at % len(SYSTEM_LENGTHS)]
        system: list[Message] = [{"role": "system", "content": self._words(f"system {length}", length)}]
        return Talk([*(system if length else []), self._said(ask)])

    def _changed(self, ask: Ask, talk: Talk) -> Talk:
        messages, tools = list(talk.messages), talk.tools
        if ask.how == EDIT:
            at = ask.at % len(messages)
            messages[at] = {**messages[at], "content": self._said(ask)["content"]}
        elif ask.how == BRANCH:
            ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
            messages = messages[: ends[ask.at % len(ends)]] if ends else []
        elif ask.how == TOOLS:
            tools = (tools + 1 + ask.at) % len(TOOL_NAMES)
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1] if ask.how in (AGAIN, TOOLS, EDIT) else [*messages, self._said(ask)]
        return Talk(messages if messages and messages[-1]["role"] == "user" else [*messages, self._said(ask)], tools)

    def _said(self, ask: Ask) -> Message:
        return {"role": "user", "content": self._words(f"words {ask.dice}", max(1, ask.words))}

    def _words(self, what: str, length: int) -> str:
        return "".join(random.Random(f"{self.salt} {what}").choices(LETTERS, k=length))

    def _options(self, ask: Ask, talk: Talk) -> dict[str, object]:
        options: dict[str, object] = {"max_tokens": ask.tokens, "logprobs": True, "top_logprobs": 20}
        if talk.tools:
            options["tools"] = [tool(name) for name in TOOL_NAMES[talk.tools]]
        if ask.end == WORD:
            options["stop"] = random.Random(f"stop {ask.dice}").sample(GRAPHIC, STOP_WORDS)
        if ask.sampled:
            options.update(temperature=1.0, seed=ask.dice)
        return options


def tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"what": {"type": "string", "description": f"what to {name}"}}}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}
