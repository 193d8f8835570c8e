"""What a model's chat template takes, found out once by rendering a few small conversations.

Templates differ in what they refuse, and, worse, in what they leave out without a word.  `fitting` makes every
conversation one that the template shows whole.
"""

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from jinja2 import Environment, TemplateError, meta

Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]  # "" where the template refuses

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # what templates and clients call it
SHORT_ID_CHARS = 9  # what Mistral's templates want of a call's id

# Words that no template says by itself, in the order in which they must be shown.
ONE, TWO, THREE, FOUR = "warmlineone", "warmlinetwo", "warmlinethree", "warmlinefour"
CALLED, OFFERED, ARGUMENT, RESULT = "warmlinecalled", "warmlineoffered", "warmlineargument", "warmlineresult"
LONG_ID = "call_0123456789abcdef01234567"
SHORT_ID = LONG_ID[-SHORT_ID_CHARS:]
_OF_TRAINING = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags of transformers' own, which render nothing
TOOLS = [
    {
        "type": "function",
        "function": {"name": OFFERED, "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of a template that takes whatever comes."""

    arguments: frozenset[str] = frozenset()  # names that it reads besides the conversation
    reasoning_fields: tuple[str, ...] = ()  # under which it reads an assistant's reasoning
    one_thought: bool = False  # beside calls it takes either reasoning or content
    developer: bool = True
    systems: Literal["none", "one", "any"] = "any"  # system messages at the beginning
    late_system: bool = True  # and later ones, where they stand
    alternates: bool = False  # insists that user and assistant take turns
    tools: bool = True  # shows what tools there are
    calls: bool = True  # shows what an assistant called
    results: bool = True  # shows what a tool said
    user_after_results: bool = True  # takes a user's message right after what a tool said
    ids: Literal["any", "short", "named"] = "any"  # of calls: "named" is functions.NAME:NUMBER, shown for the name


def traits_of(source: str, render: Render) -> Traits:
    """`source` is the template's text, or its code."""
    probe = _Probe(render)
    ids = probe.ids()
    call_id = SHORT_ID if ids == "short" else LONG_ID
    return Traits(
        arguments=_arguments(source),
        reasoning_fields=tuple(name for name in REASONING_FIELDS if _reads(source, name)),
        one_thought=probe.wants_one_thought(call_id),
        developer="developer" in source,
        systems=probe.systems(),
        late_system=probe.shows([_user(ONE), _assistant(TWO), _system(THREE), _user(FOUR)], ONE, TWO, THREE, FOUR),
        alternates=probe.alternates(),
        tools=probe.shows([_user(ONE)], OFFERED, tools=TOOLS),
        calls=probe.shows(_exchange(call_id), ARGUMENT, tools=TOOLS),
        results=probe.shows(_exchange(call_id), RESULT, tools=TOOLS),
        user_after_results=not probe.takes(*_exchange(call_id)) or probe.takes(*_exchange(call_id), _user(TWO)),
        ids=ids,
    )


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render

    def shows(self, messages: list[Message], *words: str, tools: list[dict[str, Any]] | None = None) -> bool:
        """Whether the words are there, in this order."""
        text, at = self._render(messages, tools), 0
        for word in words:
            at = text.find(word, at) + len(word)
            if at < len(word):
                return False
        return True

    def takes(self, *messages: Message) -> bool:
        return bool(self._render(list(messages), TOOLS))

    def systems(self) -> Literal["none", "one", "any"]:
        if self.shows([_system(ONE), _system(TWO), _user(THREE)], ONE, TWO, THREE):
            return "any"
        return "one" if self.shows([_system(ONE), _user(TWO)], ONE, TWO) else "none"

    def alternates(self) -> bool:
        return not self.takes(_user(ONE), _user(TWO)) and self.takes(_user(ONE), _assistant(TWO), _user(THREE))

    def ids(self) -> Literal["any", "short", "named"]:
        text = self._render(_exchange(LONG_ID), TOOLS)
        if not text:
            return "short" if self._render(_exchange(SHORT_ID), TOOLS) else "any"
        return "named" if CALLED not in text and LONG_ID in text and ARGUMENT in text else "any"

    def wants_one_thought(self, call_id: str) -> bool:
        user, calling, result = _exchange(call_id)
        thinks = dict.fromkeys(REASONING_FIELDS, TWO)
        either = self.takes(user, {**calling, "content": ONE}, result) and self.takes(
            user, {**calling, **thinks}, result
        )
        return either and not self.takes(user, {**calling, **thinks, "content": ONE}, result)


def _exchange(call_id: str) -> list[Message]:
    function = {"name": CALLED, "arguments": {"path": ARGUMENT}}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return [
        _user(ONE),
        {**_assistant(""), "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "name": CALLED, "content": RESULT},
    ]


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _arguments(source: str) -> frozenset[str]:
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_OF_TRAINING.sub("", source))
    except (TemplateError, RecursionError):  # several templates, or a function's code
        return frozenset(re.findall(r"\b[a-z_]+\b", source))
    return frozenset(meta.find_undeclared_variables(tree))


def _reads(source: str, field: str) -> bool:
    """As an attribute or a key of something."""
    return re.search(rf"""\.{field}\b|['"]{field}['"]""", source) is not None
