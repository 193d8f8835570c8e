"""Traits of a model's chat template, probed once by rendering a few small conversations.

Templates differ in what they refuse, and in what they omit silently.  `template_compat` makes every conversation one
that the template shows whole.
"""

import json
import re
from typing import Any, Literal, Protocol

import msgspec
from jinja2 import Environment, TemplateError, meta

from warmline_backend.request.params import Tools
from warmline_backend.request.reasoning_effort import (
    EFFORT_ARGUMENT,
    EFFORTS,
    EFFORTS_USUAL,
    THINKING_ARGUMENTS,
    ReasoningControls,
)

Message = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names in templates and clients
SHORT_ID_CHARS = 9  # of a call's id in Mistral's templates

# Words that no template contains, in the order in which they must be shown.
TALK_WORDS = ONE, TWO, _, _ = ("warmlineone", "warmlinetwo", "warmlinethree", "warmlinefour")
CALL_NAME, TOOL_NAME, ARGUMENT, RESULT = "warmlinecalled", "warmlineoffered", "warmlineargument", "warmlineresult"
UNKNOWN_EFFORT = "warmlineeffort"
LONG_ID, OTHER_LONG_ID = "call_0123456789abcdef01234567", "call_fedcba9876543210fedcba98"
_GENERATION_TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags of transformers' own, which render nothing
_NO_PARAMETERS = {"type": "object", "properties": {}}
_PROBE_FUNCTION = {"name": TOOL_NAME, "description": "Looks.", "parameters": _NO_PARAMETERS}
PROBE_TOOLS = [{"type": "function", "function": _PROBE_FUNCTION}]


class TemplateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Traits; the defaults are those of a template that accepts everything."""

    reasoning_controls: ReasoningControls = ReasoningControls()
    reasoning_fields: tuple[str, ...] = ()  # fields of an assistant's reasoning
    has_exclusive_reasoning: bool = False  # beside calls either reasoning or content is accepted
    supports_developer_role: bool = True
    system_messages: Literal["none", "one", "any"] = "any"  # system messages at the beginning
    supports_late_system: bool = True  # and later ones, where they stand
    requires_leading_user: bool = False  # requires a user's message, before any of the assistant's
    requires_alternation: bool = False  # requires that user and assistant alternate
    supports_tools: bool = True  # shows the tools
    supports_tool_calls: bool = True  # shows calls
    supports_parallel_calls: bool = True  # shows several calls of one message
    supports_tool_results: bool = True  # shows results
    supports_orphan_results: bool = True  # and those whose call is not there
    supports_missing_results: bool = True  # accepts a user's message right after a call
    supports_user_after_results: bool = True  # accepts a user's message right after a result
    requires_json_arguments: bool = False  # requires arguments of calls as JSON in a string
    argument_types: Literal["object", "text", "any"] = "any"  # that it shows: objects; texts, too; any JSON value
    call_id_format: Literal["any", "short", "named"] = "any"  # "named": functions.NAME:NUMBER, shown for the name


class RenderFunction(Protocol):
    def __call__(self, messages: list[Message], tools: Tools, **arguments: Any) -> str:
        """Render a conversation with these arguments of the template; "" where it refuses."""


def probe_template(source: str, render: RenderFunction) -> TemplateTraits:
    """Probe a template; `source` is its text, or its code."""
    probe = _TemplateProbe(render)
    exchange = probe.exchange
    return TemplateTraits(
        reasoning_controls=_probe_reasoning(source, render),
        reasoning_fields=tuple(name for name in REASONING_FIELDS if _is_field_read(source, name)),
        has_exclusive_reasoning=probe.probe_exclusive_reasoning(),
        supports_developer_role="developer" in source and probe.probe_developer_role(),
        system_messages=probe.system_messages,
        supports_late_system=probe.supports_late_system,
        requires_leading_user=probe.probe_leading_user(),
        requires_alternation=probe.probe_alternation(),
        supports_tools=probe.is_shown(_make_talk("user"), TOOL_NAME, tools=PROBE_TOOLS),
        supports_tool_calls=probe.is_shown(exchange, ARGUMENT, tools=PROBE_TOOLS),
        supports_parallel_calls=probe.probe_parallel_calls(),
        supports_tool_results=probe.is_shown(exchange, RESULT, tools=PROBE_TOOLS),
        supports_orphan_results=probe.probe_orphan_results(),
        supports_missing_results=probe.accepts_after_exchange(exchange[:2]),
        supports_user_after_results=probe.accepts_after_exchange(exchange),
        requires_json_arguments=probe.requires_json_arguments,
        argument_types=probe.probe_argument_types(),
        call_id_format=probe.probe_call_ids(),
    )


class _TemplateProbe:
    def __init__(self, render: RenderFunction) -> None:
        self._render = render
        forms = [(as_json, short) for as_json in (False, True) for short in (False, True)]
        accepted = (form for form in forms if self.is_accepted(*_make_exchange(*form)))
        self.requires_json_arguments, self.requires_short_ids = form = next(accepted, (False, False))
        self.exchange = _make_exchange(*form)  # a call and its result, in the first form that the template accepts
        self.system_messages = self._probe_system_messages()
        self.supports_late_system = self.shows_talk("user", "assistant", "system", "user")

    def is_shown(self, messages: list[Message], *words: str, tools: Tools = None) -> bool:
        """True where the words are rendered, in this order."""
        text, position = self._render(messages, tools), 0
        for word in words:
            position = text.find(word, position) + len(word)
            if position < len(word):
                return False
        return True

    def shows_talk(self, *roles: str, tools: Tools = None) -> bool:
        return self.is_shown(_make_talk(*roles), *TALK_WORDS[: len(roles)], tools=tools)

    def is_accepted(self, *messages: Message) -> bool:
        return bool(self._render(list(messages), PROBE_TOOLS))

    def _probe_system_messages(self) -> Literal["none", "one", "any"]:
        with_exchange = [{"role": "system", "content": TWO}, *self.exchange]
        if self.is_accepted(*with_exchange) and not self.is_shown(with_exchange, TWO, tools=PROBE_TOOLS):
            return "none"  # shown in the last message alone, where that is a user's
        if self.shows_talk("system", "system", "user"):
            return "any"
        return "one" if self.shows_talk("system", "user") else "none"

    def probe_developer_role(self) -> bool:
        """True where developers' messages are shown wherever those of the system are."""
        talks: list[tuple[str, ...]] = [("developer", "user")]
        talks += [("system", "developer", "user")] if self.system_messages == "any" else []
        talks += [("user", "assistant", "developer", "user")] if self.supports_late_system else []
        return all(self.shows_talk(*roles) for roles in talks)

    def probe_leading_user(self) -> bool:
        """True where conversations without a user's message at their beginning are refused, or not shown whole."""
        talks: list[tuple[str, ...]] = [("assistant",), ("assistant", "user")]
        talks += [("system",), ("system", "assistant")] if self.system_messages != "none" else []
        return any(
            self.shows_talk("user", tools=tools) and not all(self.shows_talk(*roles, tools=tools) for roles in talks)
            for tools in (None, PROBE_TOOLS)
        )

    def probe_alternation(self) -> bool:
        alternating = _make_talk("user", "assistant", "user")
        return not self.is_accepted(*_make_talk("user", "user")) and self.is_accepted(*alternating)

    def probe_call_ids(self) -> Literal["any", "short", "named"]:
        text = self._render(self.exchange[:2], PROBE_TOOLS)  # the result may show the name
        if self.requires_short_ids:
            return "short"
        return "named" if CALL_NAME not in text and LONG_ID in text and ARGUMENT in text else "any"

    def probe_parallel_calls(self) -> bool:
        """False where a call is shown alone, and a second one in its message is not."""
        if not self.is_shown(self.exchange, ARGUMENT, tools=PROBE_TOOLS):
            return True
        user, calling, result = self.exchange
        _, other_calling, other_result = _make_exchange(self.requires_json_arguments, self.requires_short_ids, TWO)
        both = {**calling, "tool_calls": calling["tool_calls"] + other_calling["tool_calls"]}
        return self.is_shown([user, both, result, other_result], ARGUMENT, TWO, tools=PROBE_TOOLS)

    def accepts_after_exchange(self, beginning: list[Message]) -> bool:
        """True unless the exchange is accepted, and a user's message after this beginning of it is not."""
        return not self.is_accepted(*self.exchange) or self.is_accepted(*beginning, *_make_talk("user"))

    def probe_orphan_results(self) -> bool:
        user, _, result = self.exchange
        orphan = {key: value for key, value in result.items() if key != "name"}
        return self.is_shown([user, orphan], RESULT, tools=PROBE_TOOLS)

    def probe_argument_types(self) -> Literal["object", "text", "any"]:
        if self.requires_json_arguments or not self.is_shown(self.exchange, ARGUMENT, tools=PROBE_TOOLS):
            return "any"
        if not self._shows_argument(ARGUMENT):
            return "object"
        return "any" if self._shows_argument([ARGUMENT]) else "text"

    def _shows_argument(self, value: object) -> bool:
        user, calling, result = self.exchange
        (call,) = calling["tool_calls"]
        calls = [{**call, "function": {**call["function"], "arguments": value}}]
        return self.is_shown([user, {**calling, "tool_calls": calls}, result], ARGUMENT, tools=PROBE_TOOLS)

    def probe_exclusive_reasoning(self) -> bool:
        user, calling, result = self.exchange
        thinks = dict.fromkeys(REASONING_FIELDS, TWO)
        either = [{**calling, "content": ONE}, {**calling, **thinks}]
        both = {**calling, **thinks, "content": ONE}
        return all(self.is_accepted(user, one, result) for one in either) and not self.is_accepted(user, both, result)


def _make_exchange(as_json: bool, short: bool, argument: str = ARGUMENT) -> list[Message]:
    arguments, long_id = {"path": argument}, LONG_ID if argument == ARGUMENT else OTHER_LONG_ID
    call_id = long_id[-SHORT_ID_CHARS:] if short else long_id
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


def _probe_reasoning(source: str, render: RenderFunction) -> ReasoningControls:
    names = _find_variables(source) & {*THINKING_ARGUMENTS, EFFORT_ARGUMENT}
    talk = _make_talk("user")
    if not names or not render(talk, None):
        return ReasoningControls(names=names)
    switches = [(name, value) for name in sorted(names - {EFFORT_ARGUMENT}) for value in (False, True)]
    refused: set[tuple[str, bool | str]] = {(name, on) for name, on in switches if not render(talk, None, **{name: on})}
    if EFFORT_ARGUMENT not in names:
        return ReasoningControls(names=names, refused_values=frozenset(refused))
    on_switches = {name: on for name, on in switches if on and (name, on) not in refused}
    texts = {
        effort: render(talk, None, **on_switches, **{EFFORT_ARGUMENT: effort}) for effort in (*EFFORTS, UNKNOWN_EFFORT)
    }
    refused |= {(EFFORT_ARGUMENT, effort) for effort in EFFORTS if not texts[effort]}
    return ReasoningControls(names=names, efforts=_find_known_efforts(source, texts), refused_values=frozenset(refused))


def _find_known_efforts(source: str, texts: dict[str, str]) -> tuple[str, ...]:
    """Efforts that a template spells out or tells from an unknown one; the usual ones where it shows any word."""
    accepted = tuple(effort for effort in EFFORTS if texts[effort])
    unknown = texts[UNKNOWN_EFFORT]
    if not unknown:
        return accepted or EFFORTS_USUAL
    usual = tuple(effort for effort in accepted if effort in EFFORTS_USUAL)
    different = usual if UNKNOWN_EFFORT in unknown else [effort for effort in accepted if texts[effort] != unknown]
    known = tuple(effort for effort in accepted if effort in different or is_quoted(effort, source))
    return known or usual or EFFORTS_USUAL


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
