"""Checks of an answer for what its grammar can't force, as its tokens come: values, calls, and whether there is one.

The answer's tokens become parts through a parser of output, as they do for the client.  Each value of the content that
a check concerns is validated once it is complete, and the arguments of each call once the call is.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field

from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.output.parser import OutputParser
from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.checks.content_check import ContentCheck, ContentState
from warmline_backend.structured_output.checks.value_validation import ValueValidation, Violation, format_reason
from warmline_backend.structured_output.json_schema.validator import SchemaValidator

SNAPSHOT_TOKENS = 256  # between two snapshots that an answer can be rewound to
SNAPSHOTS_MAX = 16  # the older they are, the fewer are kept

_MISSING_CALL = "a call of a tool is required, and this is none that can be read"

MakeParser = Callable[[], OutputParser]  # of one answer, without stop words


class ToolCheck:
    """Check of one tool's arguments against the whole of a normalized schema.  Immutable; any thread."""

    def __init__(self, schema: Schema) -> None:
        """Raises PatternError, and LookupError for a reference without a target."""
        self.validator = SchemaValidator(schema)


@dataclass(frozen=True, eq=False)
class AnswerChecks:
    """Checks of one prompt's answers.  Any thread."""

    content: ContentCheck | None = None
    tools: Mapping[str, ToolCheck] = field(default_factory=dict)  # by function
    requires_call: bool = False  # the answer is calls, without text
    may_comment: bool = False  # with required calls: text may precede them

    def create(self, make_parser: MakeParser) -> "AnswerCheck":
        """Create the check of one run of one answer."""
        return AnswerCheck(self, make_parser)


class AnswerCheck:
    """Check of one run of one answer.  Engine thread.

    After a violation the answer is rewound before it goes on, or it ends there.
    """

    def __init__(self, checks: AnswerChecks, make_parser: MakeParser) -> None:
        self._tokens: list[int] = []
        self._validation = ValueValidation()
        self._state = _AnswerState(checks, make_parser(), self._validation)
        self._snapshots = [(0, self._state.copy())]  # by the tokens before them; the first one stays

    @property
    def sound_count(self) -> int:
        """Answer tokens before the outermost open value that a check concerns, and before text that is no part yet."""
        return self._state.sound_count

    def add(self, token: int, ends: bool) -> Violation | None:
        """Add a token; `ends`: it ends the answer and has no text.  Returns what it shows to be wrong."""
        self._tokens.append(token)
        self._validation.begin_token()
        if violation := self._state.add(token, ends):
            return violation
        if len(self._tokens) >= self._snapshots[-1][0] + SNAPSHOT_TOKENS:
            self._snapshots.append((len(self._tokens), self._state.copy()))
            if len(self._snapshots) > SNAPSHOTS_MAX:
                del self._snapshots[1::2]
        return None

    def rewind(self, count: int) -> None:
        """Forget all but the first `count` tokens, among which there is no violation."""
        while self._snapshots[-1][0] > count:
            self._snapshots.pop()
        del self._tokens[count:]
        start, snapshot = self._snapshots[-1]
        self._state = snapshot.copy()
        self._validation.is_off = True
        for token in self._tokens[start:]:
            self._state.add(token, False)
        self._validation.is_off = False


class _AnswerState:
    """State of an answer's check after some tokens."""

    def __init__(self, checks: AnswerChecks, parser: OutputParser, validation: "ValueValidation") -> None:
        self._checks, self._parser, self._validation = checks, parser, validation
        self._content = ContentState(checks.content, validation) if checks.content else None
        self._count = 0  # tokens
        self._settled_count = 0  # tokens whose text is in parts, or in none for certain
        self._call_start = self._call_end = 0  # tokens of the last calls, which end together
        self._has_calls = False
        self._text_start = -1  # token with which the last content begins
        self.sound_count = 0

    def copy(self) -> "_AnswerState":
        made = copy(self)
        made._parser, made._content = self._parser.copy(), self._content and self._content.copy()
        return made

    def add(self, token: int, ends: bool) -> Violation | None:
        self._count += 1
        for part in self._parser.finish() if ends else self._parser.add(token):
            if violation := self._add_part(part):
                return violation
        if ends:
            self._settled_count = self._count
            if violation := self._end():
                return violation
        held = self._content.held_token if self._content and not ends else -1
        self.sound_count = min(held, self._settled_count) if held >= 0 else self._settled_count
        return None

    def _add_part(self, part: Part) -> Violation | None:
        violation = None
        if isinstance(part, ToolCall):
            violation = self._add_call(part)
        elif isinstance(part, Text):
            violation = self._add_text(part)
        if isinstance(part, Text | Reasoning):
            is_placed = part.offset >= 0
            self._settle(self._parser.find_token(part.offset + len(part.text)) if is_placed else self._count)
        return violation

    def _settle(self, count: int) -> None:
        self._settled_count = max(self._settled_count, min(count, self._count))

    def _add_text(self, text: Text) -> Violation | None:
        start = text.start if text.start >= 0 else self._settled_count
        if text.text.strip():
            self._text_start = start
            if self._checks.requires_call and not self._checks.may_comment:
                return Violation(start, _MISSING_CALL)
        if self._content is None:
            return None

        def find_token(position: int) -> int:
            return self._parser.find_token(text.offset + position) if text.offset >= 0 else start

        return self._content.add(text.text, find_token)

    def _add_call(self, call: ToolCall) -> Violation | None:
        self._has_calls = True
        if call.end > self._call_end:
            self._call_start, self._call_end = self._settled_count, call.end
        self._settle(call.end)
        tool = self._checks.tools.get(call.name)
        if tool is None:
            return None
        problem = self._validation.find_problem(tool.validator, call.arguments, [""])
        # What is incomplete has been closed, and what closes a call is no part of the arguments.
        if problem is None:
            return None
        return Violation(self._call_start, format_reason(f"{call.name}: ", problem), is_final=problem.is_final)

    def _end(self) -> Violation | None:
        if self._checks.requires_call and not self._has_calls:
            return Violation(max(self._text_start, 0), _MISSING_CALL)
        return None if self._content is None or self._has_calls else self._content.end(self._count)
