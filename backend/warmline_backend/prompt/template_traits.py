"""What a model's chat template takes, found out once by rendering a few small conversations.

Templates differ in what they refuse, and, worse, in what they leave out without a word.  `fitting` makes every
conversation one that the template shows whole.
"""

import json
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
    json_arguments: bool = False  # wants the arguments of calls as JSON in a string
    ids: Literal["any", "short", "named"] = "any"  # of calls: "named" is functions.NAME:NUMBER, shown for the name


def traits_of(source: str, render: Render) -> Traits:
    """`source` is the template's text, or its code."""
    probe = _Probe(render)
    ids = probe.ids()
    exchange = probe.exchange
    return Traits(
        arguments=_arguments(source),
        reasoning_fields=tuple(name for name in REASONING_FIELDS if _reads(source, name)),
        one_thought=probe.wants_one_thought(),
        developer="developer" in source,
        systems=probe.systems(),
        late_system=probe.shows([_user(ONE), _assistant(TWO), _system(THREE), _user(FOUR)], ONE, TWO, THREE, FOUR),
        alternates=probe.alternates(),
        tools=probe.shows([_user(ONE)], OFFERED, tools=TOOLS),
        calls=probe.shows(exchange, ARGUMENT, tools=TOOLS),
        results=probe.shows(exchange, RESULT, tools=TOOLS),
        user_after_results=not probe.takes(*exchange) or probe.takes(*exchange, _user(TWO)),
        json_arguments=probe.json_arguments,
        ids=ids,
    )


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render
        forms = [(as_json, short) for as_json in (False, True) for short in (False, True)]
        taken = (form for form in forms if self.takes(*_exchange(SHORT_ID if form[1] else LONG_ID, form[0])))
        self.json_arguments, self.short_ids = next(taken, (False, False))
        # A call and its result, in the first form that the template takes.
        self.exchange = _exchange(SHORT_ID if self.short_ids else LONG_ID, self.json_arguments)

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
        text = self._render(self.exchange, TOOLS)
        if self.short_ids:
            return "short"
        return "named" if CALLED not in text and LONG_ID in text and ARGUMENT in text else "any"

    def wants_one_thought(self) -> bool:
        user, calling, result = self.exchange
        thinks = dict.fromkeys(REASONING_FIELDS, TWO)
        either = [{**calling, "content": ONE}, {**calling, **thinks}]
        both = {**calling, **thinks, "content": ONE}
        return all(self.takes(user, one, result) for one in either) and not self.takes(user, both, result)


def _exchange(call_id: str, as_json: bool) -> list[Message]:
    arguments: Any = {"path": ARGUMENT}
    function = {"name": CALLED, "arguments": json.dumps(arguments) if as_json else arguments}
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


def is_spelled_out(word: str, source: str) -> bool:
    """In quotes, as what a role is compared with."""
    return f"'{word}'" in source or f'"{word}"' in source


def _reads(source: str, field: str) -> bool:
    """As an attribute or a key of something."""
    return re.search(rf"""\.{field}\b|['"]{field}['"]""", source) is not None
