"""Conversations of a script: the bodies of its requests, derived from steps and answers."""

import random
from dataclasses import dataclass, field

from support.oracle.steps import AGAIN, BEGIN, BRANCH, EDIT, TOOLS, WORD, Ask
from support.pair.pair import Message

LETTERS = "abcdefgh ijklmnop qrstuvw xyz "
SYSTEM_LENGTHS = (0, 30, 170, 333)
TALK_LENGTH_MAX = 900  # characters, about; after a longer one a new conversation begins
GRAPHIC = "".join(
    chr(code) for code in range(0x21, 0x7F) if chr(code) != "<"
)  # characters that the tiny models generate
STOP_WORDS = 4
TOOL_NAMES = ((), ("look",), ("look", "write"), ("write",))


@dataclass
class OracleConversation:
    """Messages and number of the tools of a conversation."""

    messages: list[Message]
    tools: int = 0

    @property
    def length(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class PendingRequest:
    """Body of a request, and the conversation that it continues."""

    ask: Ask
    talk: int
    messages: list[Message]
    tools: int
    options: dict[str, object]

    @property
    def body(self) -> dict[str, object]:
        return {"messages": self.messages, **self.options}


@dataclass
class Conversations:
    """Conversations as a pure function of steps and answers."""

    salt: int = 0
    all: list[OracleConversation] = field(default_factory=list)

    def question(self, ask: Ask) -> PendingRequest:
        at = ask.talk % len(self.all) if self.all else 0
        if not self.all or ask.how == BEGIN or (ask.how != AGAIN and self.all[at].length > TALK_LENGTH_MAX):
            at, talk = len(self.all), self._begin(ask)
        elif ask.how == BRANCH:
            at, talk = len(self.all), self._change(ask, self.all[at])
        else:
            talk = self._change(ask, self.all[at])
        return PendingRequest(ask, at, talk.messages, talk.tools, self._options(ask, talk))

    def record_answer(self, question: PendingRequest, text: str | None) -> None:
        """Add an answer; None: its client got none, or left before its end."""
        answer: list[Message] = [] if text is None else [{"role": "assistant", "content": text}]
        talk = OracleConversation([*question.messages, *answer], question.tools)
        if question.talk < len(self.all):
            self.all[question.talk] = talk
        else:
            self.all.append(talk)

    def _begin(self, ask: Ask) -> OracleConversation:
        length = SYSTEM_LENGTHS[ask.at % len(SYSTEM_LENGTHS)]
        system: list[Message] = [{"role": "system", "content": self._make_text(f"system {length}", length)}]
        return OracleConversation([*(system if length else []), self._make_message(ask)])

    def _change(self, ask: Ask, talk: OracleConversation) -> OracleConversation:
        messages, tools = list(talk.messages), talk.tools
        if ask.how == EDIT:
            at = ask.at % len(messages)
            messages[at] = {**messages[at], "content": self._make_message(ask)["content"]}
        elif ask.how == BRANCH:
            ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
            messages = messages[: ends[ask.at % len(ends)]] if ends else []
        elif ask.how == TOOLS:
            tools = (tools + 1 + ask.at) % len(TOOL_NAMES)
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1] if ask.how in (AGAIN, TOOLS, EDIT) else [*messages, self._make_message(ask)]
        return OracleConversation(
            messages if messages and messages[-1]["role"] == "user" else [*messages, self._make_message(ask)], tools
        )

    def _make_message(self, ask: Ask) -> Message:
        return {"role": "user", "content": self._make_text(f"words {ask.dice}", max(1, ask.words))}

    def _make_text(self, seed: str, length: int) -> str:
        return "".join(random.Random(f"{self.salt} {seed}").choices(LETTERS, k=length))

    def _options(self, ask: Ask, talk: OracleConversation) -> dict[str, object]:
        options: dict[str, object] = {"max_tokens": ask.tokens, "logprobs": True, "top_logprobs": 20}
        if talk.tools:
            options["tools"] = [make_tool(name) for name in TOOL_NAMES[talk.tools]]
        if ask.end == WORD:
            options["stop"] = random.Random(f"stop {ask.dice}").sample(GRAPHIC, STOP_WORDS)
        if ask.sampled:
            options.update(temperature=1.0, seed=ask.dice)
        return options


def make_tool(name: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"what": {"type": "string", "description": f"what to {name}"}}}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}
