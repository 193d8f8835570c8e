"""Constraint of one answer, by the body's format and the prompt's end.  Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llguidance.gbnf_to_lark import any_to_lark
from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.dialect import Dialect, detect_dialect
from warmline_backend.output.headers import HARMONY
from warmline_backend.request.params import BadRequestError, FieldError
from warmline_backend.request.response_format import CallableTool, ResponseFormat, TextFormat
from warmline_backend.request.schemas import Schema, list_required_names
from warmline_backend.structured_output.checks.answer_check import AnswerChecks, ToolCheck
from warmline_backend.structured_output.checks.content_check import ContentCheck
from warmline_backend.structured_output.grammars.lark import GrammarTooLongError, LarkBuilder, quote_literal
from warmline_backend.structured_output.grammars.literal_values import ToolSchema
from warmline_backend.structured_output.grammars.tool_calls import UnsupportedToolError, write_calls
from warmline_backend.structured_output.json_schema.guidance import add_guidance_options
from warmline_backend.structured_output.json_schema.patterns import PatternError, force_text
from warmline_backend.structured_output.schema_cache import PrepareSchema
from warmline_backend.tool_parsers.registry import CallSyntax

# Start of the answer: within reasoning; where the model may open it; after it, or where there is none.
ReasoningState = Literal["open", "possible", "closed"]
GrammarCheck = Callable[[str], str]  # (grammar) -> its problem, or ""

NAMES_MAX = 200
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class TokenizerTraits:
    """Traits of a tokenizer that decide a grammar."""

    markers: Mapping[str, int]  # tokens that are never text
    dialect: Dialect
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    wrapper_markers: tuple[str, ...] = ()  # markers around whatever is said
    line_breaks: frozenset[int] = frozenset()  # line breaks that may stand between reasoning and answer

    @property
    def call_syntax(self) -> CallSyntax | None:
        """Syntax of its calls; None without tools, or where no grammar can be written."""
        return self.dialect.tool_format.syntax if self.dialect.tool_format else None

    @property
    def has_sections(self) -> bool:
        """True where one marker begins all calls of an answer."""
        return bool(self.call_syntax and self.call_syntax.start)

    @property
    def call_start(self) -> str:
        return self.dialect.tool_format.start if self.dialect.tool_format else ""

    @property
    def has_channels(self) -> bool:
        """True for gpt-oss: reasoning and answer are messages of their own."""
        return self.dialect.header_format is HARMONY


@dataclass(frozen=True)
class Constraint:
    """Constraint of one prompt's answer."""

    grammar: str = ""  # llguidance's; "" where tokens are forbidden, and nothing else
    reasoning: ReasoningState = "closed"
    trigger: int | None = None  # the grammar begins with this token, and holds only from there on
    single_match: bool = True  # with a trigger: nothing follows the grammar
    forbidden_tokens: tuple[int, ...] = ()
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    line_breaks: frozenset[int] = frozenset()
    checks: AnswerChecks | None = None  # of what the grammar does not force


def read_tokenizer_traits(tokenizer: TokenizerWrapper, markers: Mapping[str, int]) -> TokenizerTraits:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()

    dialect = detect_dialect(tokenizer)
    return TokenizerTraits(
        markers=markers,
        dialect=dialect,
        think_start=ids(dialect.think_start),
        think_end=ids(dialect.think_end),
        wrapper_markers=tuple(tokenizer.structural_markers),
        line_breaks=frozenset(tokens[0] for tokens in (ids("\n"), ids("\n\n")) if len(tokens) == 1),
    )


def detect_reasoning(tail: str, dialect: Dialect) -> ReasoningState:
    """Detect the state by the prompt's text from its last message's end on."""
    if not dialect.think_start:
        return "closed"
    if dialect.is_reasoning_open(tail):
        return "open"
    return "closed" if dialect.think_end in tail else "possible"


def build_constraint(
    response_format: ResponseFormat,
    tail: str,
    traits: TokenizerTraits,
    check_grammar: GrammarCheck,
    prepare_schema: PrepareSchema,
) -> Constraint | None:
    """Build the constraint of a format that has one; None where there is nothing to forbid.  Raises BadRequestError."""
    choice, form = response_format.tool_choice, response_format.text_format
    if traits.dialect.header_format and not traits.has_channels and choice != "none":
        field = form.field if form else "tool_choice" if choice == "required" else "tools"
        raise BadRequestError("this model's answers are messages with headers; they can't be held to a form", field)
    base = Constraint(
        reasoning=detect_reasoning(tail, traits.dialect),
        think_start=traits.think_start,
        think_end=traits.think_end,
        line_breaks=traits.line_breaks,
    )
    writer = _GrammarWriter(traits, response_format, check_grammar, prepare_schema)
    if choice == "required":
        made = replace(base, grammar=writer.write_call_block(response_format.parallel))
    elif form is not None:
        made = replace(base, grammar=writer.write_answer(form))
    elif choice == "none":
        return _forbid_tool_calls(traits)
    else:
        made = writer.constrain_free_text(base)
    return replace(made, checks=writer.collect_checks())


def _forbid_tool_calls(traits: TokenizerTraits) -> Constraint | None:
    markers = traits.markers
    starts = (opening.start for opening in traits.dialect.call_markers)
    forbidden = tuple(markers[start] for start in starts if start in markers)
    return Constraint(forbidden_tokens=forbidden) if forbidden else None


class _GrammarWriter:
    """Grammar of one request."""

    def __init__(
        self,
        traits: TokenizerTraits,
        response_format: ResponseFormat,
        check_grammar: GrammarCheck,
        prepare_schema: PrepareSchema,
    ) -> None:
        self._traits, self._response_format, self._check_grammar = traits, response_format, check_grammar
        self._prepare_schema = prepare_schema
        self._lark = LarkBuilder(traits.markers)
        self._content_check: ContentCheck | None = None
        self._tool_checks: dict[str, ToolCheck] = {}

    def collect_checks(self) -> AnswerChecks | None:
        """Collect the checks of what was written; None for none."""
        requires_call = self._response_format.tool_choice == "required"
        if self._content_check is None and not self._tool_checks and not requires_call:
            return None
        may_comment = requires_call and self._traits.has_channels
        return AnswerChecks(self._content_check, self._tool_checks, requires_call, may_comment)

    # ---- whole grammars

    def constrain_free_text(self, base: Constraint) -> Constraint:
        """Constrain calls of strict tools within free text."""
        traits, response_format = self._traits, self._response_format
        trigger, parallel = traits.markers.get(traits.call_start), response_format.parallel
        if trigger is None or traits.has_channels:
            return replace(base, grammar=self._encode_calls(self._write_free_text()))
        grammar = self.write_call_block(parallel and traits.has_sections)
        return replace(base, grammar=grammar, trigger=trigger, single_match=not parallel)

    def write_call_block(self, several: bool) -> str:
        """Write one call, or several, and nothing else."""
        return self._encode_calls(self._write_calls(several))

    def _write_free_text(self) -> str:
        """Write text with calls in it, for families whose calls begin with text, or are channels."""
        if self._traits.has_channels:
            calls = self._write_calls(several=False)
            return self._write_channels(calls, self._lark.text())
        start, several = self._traits.call_start, self._response_format.parallel
        if self._traits.wrapper_markers:
            begin, end, *ends = (self._lark.literal(marker) for marker in self._traits.wrapper_markers)
            return f"({begin} {self._lark.text()} {end})? ({self._write_calls(several)})? ({' '.join(ends)})?"
        if not start:  # only an answer that begins so is a call
            other = self._lark.text("([^{](?s:.*))?")
            return f"{self._write_calls(several)} | {other}"
        self._lark = LarkBuilder(self._traits.markers, consumed_prefix=start)
        head = f"{self._lark.text_until(start)} {self._write_calls(several and self._traits.has_sections)}"
        rest = self._lark.text(excluded=(start,))
        return f"({head})* {rest}" if several else f"{rest} | {head}"

    def write_answer(self, form: TextFormat) -> str:
        """Write the text format; or calls, where tools may be called."""
        response_format, traits = self._response_format, self._traits
        answer = self._encode_form(form)
        grammar = _encode_grammars([answer])
        if problem := self._check_grammar(grammar):
            raise FieldError(form.field, f'can\'t be used: "{problem}"')
        may_call = response_format.tool_choice == "auto" and response_format.tools and traits.call_syntax
        if not (may_call or traits.wrapper_markers or traits.has_channels):
            return grammar
        calls = self._write_calls(response_format.parallel) if may_call else ""
        if traits.has_channels:
            start = self._write_channels(calls, "@answer")
        else:
            start = " | ".join(filter(None, (self._wrap_in_markers("@answer"), calls)))
        main = {"name": "main", "lark_grammar": self._lark.render(start)}
        grammar = _encode_grammars([main, {**answer, "name": "answer"}])
        if problem := self._check_grammar(grammar):
            raise FieldError(form.field, f'and these tools can\'t be used together: "{problem}"')
        return grammar

    def _encode_form(self, form: TextFormat) -> dict[str, Any]:
        if form.kind != "json":
            return _encode_text_form(form)
        prepared = self._prepare_schema(form.value, form.field, form.strict, False)
        self._content_check = prepared.content_check
        return {"json_schema": add_guidance_options(prepared.forced)}

    # ---- surroundings

    def _wrap_in_markers(self, text: str) -> str:
        if not self._traits.wrapper_markers:
            return text
        begin, *ends = (self._lark.literal(marker) for marker in self._traits.wrapper_markers)
        return f"({begin})? {text} ({' '.join(ends)})?"

    def _write_channels(self, calls: str, text: str) -> str:
        """Write reasoning, then calls or text; without a text format, comments to the user may precede them."""
        lark = self._lark
        kinds = '"analysis"' if self._response_format.text_format else '("analysis" | "commentary")'
        reasoning = f"{lark.literal('<|channel|>')} {kinds} {lark.literal('<|message|>')}"
        thinks = f"({reasoning} {lark.text()} {lark.literal('<|end|><|start|>assistant')})*"
        channel = f'{lark.literal("<|channel|>final")} (" "? {lark.literal("<|constrain|>json")})?'
        final = f"{channel} {lark.literal('<|message|>')} {text}" if text else ""
        return f"{thinks} ({' | '.join(filter(None, (final, calls)))})"

    # ---- calls

    def _write_calls(self, several: bool) -> str:
        if (syntax := self._traits.call_syntax) is None:
            is_required = self._response_format.tool_choice == "required"
            strict = next((tool.field for tool in self._response_format.tools if tool.strict and not is_required), "")
            reason = "this model's way of calling tools has no grammar here, so its calls can't be held to one; "
            advice = "leave 'strict' out" if strict else "send 'tool_choice' \"auto\""
            raise BadRequestError(reason + advice, strict or "tool_choice")
        tools = [self._prepare_tool(tool) for tool in self._response_format.tools]
        try:
            calls = write_calls(self._lark, syntax, tools, several)
        except UnsupportedToolError as error:
            raise BadRequestError(f"this model can't be held to calling these tools: {error}", "tools") from error
        except GrammarTooLongError as error:
            fault = "these tools are too large to be held to their schemas; send fewer"
            raise BadRequestError(fault, "tools") from error
        if self._traits.has_channels and self._response_format.tool_choice == "required":
            return self._write_channels(calls, "")
        return calls

    def _prepare_tool(self, tool: CallableTool) -> ToolSchema:
        """Prepare a tool's schema; an unusable one of a tool that is not strict is reduced to its arguments' names."""
        try:
            prepared = self._prepare_schema(_close_parameters(tool), tool.field, tool.strict, True)
        except BadRequestError:
            if tool.strict:
                raise
            return ToolSchema(tool.name, _reduce_to_names(tool.parameters))
        syntax = self._traits.call_syntax
        if prepared.needs_check or syntax is None or syntax.arguments.style != "json":  # others force less than JSON
            self._tool_checks[tool.name] = prepared.tool_check
        return ToolSchema(tool.name, prepared.forced)

    def _encode_calls(self, start: str) -> str:
        """Encode a grammar of calls.  Raises BadRequestError where it has a problem."""
        grammar = _encode_grammars([{"lark_grammar": self._lark.render(start)}])
        if problem := self._check_grammar(grammar):
            raise BadRequestError(f'these tools can\'t be held to a grammar: "{problem}"', "tools")
        return grammar


def _close_parameters(tool: CallableTool) -> Schema:
    """Disallow further arguments in a schema that does not mention them."""
    parameters = {} if tool.parameters is None else tool.parameters
    if not isinstance(parameters, Mapping):
        raise FieldError(tool.field, "must be a JSON schema (an object)")
    if not parameters:
        return NO_PARAMETERS
    properties = parameters.get("properties")
    composed = any(key in parameters for key in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties"))
    listed = isinstance(properties, Mapping) and set(list_required_names(parameters)) <= set(properties)
    if listed and not composed and "additionalProperties" not in parameters:
        return {"type": "object", **parameters, "additionalProperties": False}
    return {"type": "object", **parameters}


def _reduce_to_names(parameters: Any) -> Schema:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or len(properties) > NAMES_MAX:
        return {"type": "object"}
    required = [name for name in list_required_names(parameters) if name in properties]
    closed = {"additionalProperties": False} if parameters.get("additionalProperties") is False else {}
    return {"type": "object", "properties": {name: {} for name in properties}, "required": required, **closed}


def _encode_text_form(form: TextFormat) -> dict[str, Any]:
    """Encode choices, a regular expression or a grammar as one of llguidance's grammars."""
    if form.kind == "choice":
        return {"lark_grammar": f"start: {' | '.join(quote_literal(word) for word in form.value)}"}
    if form.kind == "regex":
        try:
            patterns = force_text(form.value)
        except PatternError as error:
            raise FieldError(form.field, f"can't be used: {error}") from error
        return {"lark_grammar": f"start: T\nT: {' & '.join(f'/{pattern}/' for pattern in patterns)}"}
    try:
        return {"lark_grammar": any_to_lark(form.value)}
    except Exception as error:
        raise FieldError(form.field, f'can\'t be read as a grammar: "{str(error)[:200]}"') from error


def encode_schema(forced: Schema) -> str:
    """Encode the grammar of JSON under a forced schema."""
    return _encode_grammars([{"json_schema": add_guidance_options(forced)}])


def _encode_grammars(grammars: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
