"""What a body asks of its answer, and where its prompt ends, as one constraint.  Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.dialect import Dialect, dialect_of, opens_reasoning
from warmline_backend.output.headers import HARMONY
from warmline_backend.request.json_refs import Schema
from warmline_backend.request.params import BadRequest
from warmline_backend.request.response_format import Asked, Form, Tool
from warmline_backend.structured_output.base import CannotWrite, Offered
from warmline_backend.structured_output.json_schema import fitted, guided, required_in
from warmline_backend.structured_output.lark import Lark, TooLong, quoted
from warmline_backend.structured_output.tool_calls import SECTIONS, STYLES

Reasoning = Literal["open", "possible", "closed"]
"""Where the answer starts: within reasoning; where the model may open it; after it, or where there is none."""

Checked = Callable[[str], str]
"""(grammar) -> what is wrong with it, or "" """

NAMES_MAX = 200
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Family:
    """What of a tokenizer matters here."""

    markers: Mapping[str, int]  # tokens that are never text
    dialect: Dialect
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    around: tuple[str, ...] = ()  # markers around whatever is said
    breaks: frozenset[int] = frozenset()  # line breaks that may stand between reasoning and answer

    @property
    def style(self) -> str:
        """The name of its tool format; "" where it has none."""
        return self.dialect.calls.name if self.dialect.calls else ""

    @property
    def call_start(self) -> str:
        return self.dialect.calls.start if self.dialect.calls else ""

    @property
    def channels(self) -> bool:
        """gpt-oss: reasoning and answer are messages of their own."""
        return self.dialect.headers is HARMONY


@dataclass(frozen=True)
class Constraint:
    """What one prompt's answer is held to."""

    grammar: str = ""  # llguidance's; "" where tokens are forbidden, and nothing else
    reasoning: Reasoning = "closed"
    trigger: int | None = None  # the grammar begins with this token, and holds only from there on
    once: bool = True  # with a trigger: nothing follows the grammar
    forbidden: tuple[int, ...] = ()
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    breaks: frozenset[int] = field(default_factory=frozenset)


def family_of(tokenizer: TokenizerWrapper, markers: Mapping[str, int]) -> Family:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

    dialect = dialect_of(tokenizer)
    return Family(
        markers=markers,
        dialect=dialect,
        think_start=ids(dialect.think_start),
        think_end=ids(dialect.think_end),
        around=tuple(tokenizer.structural_markers),
        breaks=frozenset(tokens[0] for tokens in (ids("\n"), ids("\n\n")) if len(tokens) == 1),
    )


def reasoning_at(tail: str, dialect: Dialect) -> Reasoning:
    """By the prompt's text from its last message's end on."""
    if not dialect.think_start:
        return "closed"
    if opens_reasoning(dialect, tail):
        return "open"
    return "closed" if dialect.think_end in tail else "possible"


def constraint_of(asked: Asked, tail: str, family: Family, checked: Checked) -> Constraint | None:
    """None where any answer will do.  Raises BadRequest."""
    if asked.anything:
        return None
    if family.dialect.headers and not family.channels and asked.choice != "none":
        raise BadRequest("this model's answers are messages with headers; they can't be held to a form", _field(asked))
    base = Constraint(
        reasoning=reasoning_at(tail, family.dialect),
        think_start=family.think_start,
        think_end=family.think_end,
        breaks=family.breaks,
    )
    if asked.choice == "required":
        return replace(base, grammar=_Writer(family, asked, checked).required())
    if asked.form is not None:
        return replace(base, grammar=_Writer(family, asked, checked).answer())
    if asked.choice == "none":
        return _without_calls(family)
    return _lazy(base, asked, family, checked)


def _field(asked: Asked) -> str:
    return asked.form.field if asked.form else "tool_choice" if asked.choice == "required" else "tools"


def _without_calls(family: Family) -> Constraint | None:
    calls = family.dialect.calls
    starts = [opening.start for opening in (calls, *calls.others)] if calls else []
    forbidden = tuple(family.markers[start] for start in starts if start in family.markers)
    return Constraint(forbidden=forbidden) if forbidden else None


def _lazy(base: Constraint, asked: Asked, family: Family, checked: Checked) -> Constraint | None:
    """Free text, and calls of strict tools as they must be."""
    writer = _Writer(family, asked, checked)
    if family.style not in STYLES:
        strict = next((tool.field for tool in asked.tools if tool.strict), "")
        what = "leave 'strict' out" if strict else "send 'tool_choice' \"auto\""
        raise BadRequest(f"{writer.no_calls()}; {what}", strict or "tool_choice")
    trigger = family.markers.get(family.call_start)
    if trigger is not None and not family.channels:
        return replace(base, grammar=writer.block(), trigger=trigger, once=not asked.several)
    return replace(base, grammar=writer.free())


class _Writer:
    """Writes one request's grammar."""

    def __init__(self, family: Family, asked: Asked, checked: Checked) -> None:
        self._family, self._asked, self._checked = family, asked, checked
        self._lark = Lark(family.markers)

    def no_calls(self) -> str:
        return "this model's way of calling tools has no grammar here, so its calls can't be held to one"

    # ---- whole grammars

    def required(self) -> str:
        """Calls, and nothing else."""
        return self._checked_calls(self._lark.written(self._calls(self._asked.several)))

    def block(self) -> str:
        """What one marker begins: one call, or all."""
        several = self._asked.several and self._family.style in SECTIONS
        return self._checked_calls(self._lark.written(self._calls(several)))

    def free(self) -> str:
        """Text, and calls in it, for families whose calls begin with text, or are channels."""
        if self._family.channels:
            calls = self._calls(several=False)
            return self._checked_calls(self._lark.written(self._channels(calls, self._lark.text())))
        start, several = self._family.call_start, self._asked.several
        if self._family.around:
            begin, end, *ends = (self._lark.literal(marker) for marker in self._family.around)
            said = f"({begin} {self._lark.text()} {end})? ({self._calls(several)})? ({' '.join(ends)})?"
            return self._checked_calls(self._lark.written(said))
        if not start:  # only an answer that begins so is a call
            other = self._lark.text("([^{](?s:.*))?")
            return self._checked_calls(self._lark.written(f"{self._calls(several)} | {other}"))
        self._lark = Lark(self._family.markers, begun=start)
        head = f"{self._lark.text_up_to(start)} {self._calls(several and self._family.style in SECTIONS)}"
        rest = self._lark.text(without=(start,))
        whole = f"({head})* {rest}" if several else f"{rest} | {head}"
        return self._checked_calls(self._lark.written(whole))

    def answer(self) -> str:
        """The form; or calls, where there are tools and none or any may be called."""
        asked, form = self._asked, self._asked.form
        assert form is not None
        answer = _grammar_of(form)
        if problem := self._checked(_listed([answer])):
            raise BadRequest(f"'{form.field}' can't be used: \"{problem}\"", form.field)
        may_call = asked.choice == "auto" and asked.tools and self._family.style in STYLES
        if not (may_call or self._family.around or self._family.channels):
            return _listed([answer])
        calls = self._calls(asked.several) if may_call else ""
        if self._family.channels:
            start = self._channels(calls, "@answer")
        else:
            start = " | ".join(part for part in (self._around("@answer"), calls) if part)
        main = {"name": "main", "lark_grammar": self._lark.written(start)}
        written = _listed([main, {**answer, "name": "answer"}])
        if problem := self._checked(written):
            raise BadRequest(f"'{form.field}' and these tools can't be used together: \"{problem}\"", form.field)
        return written

    # ---- what stands around

    def _around(self, inner: str) -> str:
        if not self._family.around:
            return inner
        begin, end, *rest = (self._lark.literal(marker) for marker in self._family.around)
        return f"({begin})? {inner} ({' '.join([end, *rest])})?"

    def _channels(self, calls: str, text: str) -> str:
        """Reasoning, then calls or text; where no form is asked for, words to the user may precede them."""
        lark = self._lark
        kinds = '"analysis"' if self._asked.form else '("analysis" | "commentary")'
        thought = f"{lark.literal('<|channel|>')} {kinds} {lark.literal('<|message|>')}"
        thinks = f"({thought} {lark.text()} {lark.literal('<|end|><|start|>assistant')})*"
        said = f'{lark.literal("<|channel|>final")} (" "? {lark.literal("<|constrain|>json")})?'
        final = f"{said} {lark.literal('<|message|>')} {text}" if text else ""
        return f"{thinks} ({' | '.join(part for part in (final, calls) if part)})"

    # ---- calls

    def _calls(self, several: bool) -> str:
        if (style := STYLES.get(self._family.style)) is None:
            raise BadRequest(f"{self.no_calls()}; send 'tool_choice' \"auto\"", "tool_choice")
        offered = [self._offered(tool) for tool in self._asked.tools]
        try:
            calls = style(self._lark, offered, several)
        except CannotWrite as problem:
            raise BadRequest(f"this model can't be held to calling these tools: {problem}", "tools") from problem
        except TooLong as problem:
            raise BadRequest("these tools are too large to be held to their schemas; send fewer", "tools") from problem
        if self._family.channels and self._asked.choice == "required":
            return self._channels(calls, "")
        return calls

    def _offered(self, tool: Tool) -> Offered:
        """Where the schema of a tool that is not strict can't be used, its arguments' names are."""
        try:
            parameters: Schema = fitted(_parameters(tool), tool.field)
            problem = self._checked(_listed([{"json_schema": guided(parameters, lenient=not tool.strict)}]))
            if problem:
                raise BadRequest(f"'{tool.field}' can't be used: \"{problem}\"", tool.field)
        except BadRequest:
            if tool.strict:
                raise
            parameters = _names_alone(tool.parameters)
        return Offered(tool, parameters)

    def _checked_calls(self, grammar: str) -> str:
        written = _listed([{"lark_grammar": grammar}])
        if problem := self._checked(written):
            raise BadRequest(f'these tools can\'t be held to a grammar: "{problem}"', "tools")
        return written


def _parameters(tool: Tool) -> Schema:
    """As a schema that allows no other arguments, where it doesn't speak of them."""
    parameters = tool.parameters
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise BadRequest(f"'{tool.field}' must be a JSON schema (an object)", tool.field)
    if not parameters:
        return NO_PARAMETERS
    properties = parameters.get("properties")
    composed = any(key in parameters for key in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties"))
    listed = isinstance(properties, Mapping) and set(required_in(parameters)) <= set(properties)
    if listed and not composed and "additionalProperties" not in parameters:
        return {"type": "object", **parameters, "additionalProperties": False}
    return {"type": "object", **parameters}


def _names_alone(parameters: Any) -> Schema:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or len(properties) > NAMES_MAX:
        return {"type": "object"}
    required = [name for name in required_in(parameters) if name in properties]
    return {"type": "object", "properties": {name: {} for name in properties}, "required": required}


def _grammar_of(form: Form) -> dict[str, Any]:
    """One of llguidance's grammars."""
    if form.kind == "json":
        return {"json_schema": guided(fitted(form.value, form.field))}
    if form.kind == "choice":
        return {"lark_grammar": f"start: {' | '.join(quoted(word) for word in form.value)}"}
    if form.kind == "regex":
        made: Sequence[dict[str, Any]] = json.loads(LLMatcher.grammar_from_regex(form.value))["grammars"]
        return {key: value for key, value in made[0].items() if value is not None and key != "name"}
    try:
        return {"lark_grammar": any_to_lark(form.value)}
    except Exception as problem:
        detail = str(problem)[:200]
        raise BadRequest(f"'{form.field}' can't be read as a grammar: \"{detail}\"", form.field) from problem


def _listed(grammars: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
