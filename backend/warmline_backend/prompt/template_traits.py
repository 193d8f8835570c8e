"""Traits of a model's chat template, probed once by rendering a few small conversations.

Templates differ in what they refuse, and in what they omit silently.  `template_compat` makes every conversation one
that the template shows whole.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from jinja2 import Environment, TemplateError, meta

from warmline_backend.request.params import Tools

Message = dict[str, Any]
RenderFunction = Callable[[list[Message], Tools], str]  # "" where the template refuses

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in templates and clients
SHORT_ID_CHARS = 9  # of a call's id in Mistral's templates

# Words that no template contains, in the order in which they must be shown.
TALK_WORDS = ONE, TWO, _, _ = ("warmlineone", "warmlinetwo", "warmlinethree", "warmlinefour")
CALL_NAME, TOOL_NAME, ARGUMENT, RESULT = "warmlinecalled", "warmlineoffered", "warmlineargument", "warmlineresult"
LONG_ID = "call_0123456789abcdef01234567"
SHORT_ID = LONG_ID[-SHORT_ID_CHARS:]
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags of transformers' own, which render nothing
_NO_PARAMETERS = {"type": "object", "properties": {}}
_PROBE_FUNCTION = {"name": TOOL_NAME, "description": "Looks.", "parameters": _NO_PARAMETERS}
PROBE_TOOLS = [{"type": "function", "function": _PROBE_FUNCTION}]


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Traits; the defaults are those of a template that accepts everything."""

    variable_names: frozenset[str] = frozenset()  # read besides the conversation
    reasoning_fields: tuple[str, ...] = ()  # fields of an assistant's reasoning
    has_exclusive_reasoning: bool = False  # beside calls either reasoning or content is accepted
    supports_developer_role: bool = True
    system_messages: Literal["none", "one", "any"] = "any"  # system messages at the beginning
    supports_late_system: bool = True  # and later ones, where they stand
    requires_alternation: bool = False  # requires that user and assistant alternate
    supports_tools: bool = True  # shows the tools
    supports_tool_calls: bool = True  # shows calls
    supports_tool_results: bool = True  # shows results
    supports_user_after_results: bool = True  # accepts a user's message right after a result
    requires_json_arguments: bool = False  # requires arguments of calls as JSON in a string
    call_id_format: Literal["any", "short", "named"] = "any"  # "named": functions.NAME:NUMBER, shown for the name


def probe_template(source: str, render: RenderFunction) -> TemplateTraits:
    """Probe a template; `source` is its text, or its code."""
    probe = _TemplateProbe(render)
    exchange = probe.exchange
    return TemplateTraits(
        variable_names=_find_variables(source),
        reasoning_fields=tuple(name for name in REASONING_FIELDS if _is_field_read(source, name)),
        has_exclusive_reasoning=probe.probe_exclusive_reasoning(),
        supports_developer_role="developer" in source,
        system_messages=probe.probe_system_messages(),
        supports_late_system=probe.shows_talk("user", "assistant", "system", "user"),
        requires_alternation=probe.probe_alternation(),
        supports_tools=probe.is_shown(_make_talk("user"), TOOL_NAME, tools=PROBE_TOOLS),
        supports_tool_calls=probe.is_shown(exchange, ARGUMENT, tools=PROBE_TOOLS),
        supports_tool_results=probe.is_shown(exchange, RESULT, tools=PROBE_TOOLS),
        supports_user_after_results=not probe.is_accepted(*exchange)
        or probe.is_accepted(*exchange, *_make_talk("user")),
        requires_json_arguments=probe.requires_json_arguments,
        call_id_format=probe.probe_call_ids(),
    )


class _TemplateProbe:
    def __init__(self, render: RenderFunction) -> None:
        self._render = render
        forms = [(as_json, short) for as_json in (False, True) for short in (False, True)]
        accepted = (form for form in forms if self.is_accepted(*_make_exchange(*form)))
        self.requires_json_arguments, self.requires_short_ids = form = next(accepted, (False, False))
        self.exchange = _make_exchange(*form)  # a call and its result, in the first form that the template accepts

    def is_shown(self, messages: list[Message], *words: str, tools: Tools = None) -> bool:
        """True where the words are rendered, in this order."""
        text, position = self._render(messages, tools), 0
        for word in words:
            position = text.find(word, position) + len(word)
            if position < len(word):
                return False
        return True

    def shows_talk(self, *roles: str) -> bool:
        return self.is_shown(_make_talk(*roles), *TALK_WORDS[: len(roles)])

    def is_accepted(self, *messages: Message) -> bool:
        return bool(self._render(list(messages), PROBE_TOOLS))

    def probe_system_messages(self) -> Literal["none", "one", "any"]:
        if self.shows_talk("system", "system", "user"):
            return "any"
        return "one" if self.shows_talk("system", "user") else "none"

    def probe_alternation(self) -> bool:
        alternating = _make_talk("user", "assistant", "user")
        return not self.is_accepted(*_make_talk("user", "user")) and self.is_accepted(*alternating)

    def probe_call_ids(self) -> Literal["any", "short", "named"]:
        text = self._render(self.exchange, PROBE_TOOLS)
        if self.requires_short_ids:
            return "short"
        return "named" if CALL_NAME not in text and LONG_ID in text and ARGUMENT in text else "any"

    def probe_exclusive_reasoning(self) -> bool:
        user, calling, result = self.exchange
        thinks = dict.fromkeys(REASONING_FIELDS, TWO)
        either = [{**calling, "content": ONE}, {**calling, **thinks}]
        both = {**calling, **thinks, "content": ONE}
        return all(self.is_accepted(user, one, result) for one in either) and not self.is_accepted(user, both, result)


def _make_exchange(as_json: bool, short: bool) -> list[Message]:
    arguments, call_id = {"path": ARGUMENT}, SHORT_ID if short else LONG_ID
    function = {"name": CALL_NAME, "arguments": json.dumps(arguments) if as_json else arguments}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return [
        *_make_talk("user"),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "name": CALL_NAME, "content": RESULT},
    ]


def _make_talk(*roles: str) -> list[Message]:
    """Make a message of each role, with a word of TALK_WORDS each."""
    return [{"role": role, "content": word} for role, word in zip(roles, TALK_WORDS, strict=False)]


def _find_variables(source: str) -> frozenset[str]:
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAGS.sub("", source))
    except (TemplateError, RecursionError):  # several templates, or a function's code
        return frozenset(re.findall(r"\b[a-z_]+\b", source))
    return frozenset(meta.find_undeclared_variables(tree))


def is_quoted(word: str, source: str) -> bool:
    """True for a word in quotes, as a role is compared with."""
    return f"'{word}'" in source or f'"{word}"' in source


def _is_field_read(source: str, field: str) -> bool:
    """True for an attribute or a key of that name."""
    return re.search(rf"""\.{field}\b|['"]{field}['"]""", source) is not None
