"""The tokenizer in llguidance's form, and grammars compiled within limits.  Any thread.

llguidance bounds the cost of a grammar in steps rather than seconds; a grammar beyond them is refused while the prompt
is rendered.  One that reaches a limit only later fails its own request.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import xxhash
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser
from warmline_backend.request.params import BadRequestError, FieldError, Tools
from warmline_backend.request.response_format import parse_response_format
from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output import constraint as constraints
from warmline_backend.structured_output.constraint import Constraint, TokenizerTraits
from warmline_backend.structured_output.json_schema.guidance import UNSATISFIABLE
from warmline_backend.structured_output.json_schema.patterns import clear_patterns
from warmline_backend.structured_output.json_schema.prepared import Trial
from warmline_backend.structured_output.matcher import Matcher, format_error
from warmline_backend.structured_output.prototypes import Prototype, PrototypePool
from warmline_backend.structured_output.schema_cache import SchemaCache

PROBLEM_COUNT_MAX = 4096
PROBLEM_CHARS_MAX = 200
TOKENS_TRIED = 8
STRING_TOKENS_TRIED = 64  # some limits are met only in its middle
_TRIAL_STRIDE = 7919  # a prime: a trial takes another of the allowed tokens each time
SLOW_TOKENIZER_MESSAGE = (
    "this model's tokenizer has no fast form, which answers of a given form, required calls and strict tools need"
)


PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=5_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Constraints for one model's prompts, and matchers for their answers.  Any thread."""

    def __init__(
        self, tokenizer: TokenizerWrapper, vocabulary_size: int, on_compiled: Callable[[float], object] = float
    ) -> None:
        """Call `on_compiled` with the seconds of each compilation, on the compiling thread."""
        self._tokenizer, self._vocabulary_size, self._on_compiled = tokenizer, vocabulary_size, on_compiled
        self._lock = threading.Lock()
        self._converted_tokenizer: tuple[LLTokenizer, TokenizerTraits] | None = None
        self._prototypes = PrototypePool()
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._schemas = SchemaCache(self._find_schema_problem)

    def build_constraint(
        self,
        endpoint: str,
        body: Mapping[str, Any],
        tools: Tools,
        tail: str,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> Constraint | None:
        """Build the constraint of a body; None for an unconstrained answer.

        Raises BadRequestError, and what `check_cancelled` raises, which is called now and then.  The first constraint
        takes up to a second or two, for the tokenizer.
        """
        response_format = parse_response_format(endpoint, body, tools)
        if response_format.is_unconstrained:
            return None
        is_whole = response_format.text_format is not None or response_format.tool_choice == "required"
        if is_whole and body.get("continue_final_message"):
            raise FieldError("continue_final_message", "can't be combined with a form that the whole answer must have")
        try:
            traits = self._load_tokenizer()[1]
            prepare = partial(self._schemas.prepare, check_cancelled=check_cancelled)
            constraint = constraints.build_constraint(response_format, tail, traits, self.find_problem, prepare)
        except UnicodeEncodeError as error:
            raise BadRequestError("a schema, a grammar or a tool has a lone surrogate; it is no valid text") from error
        if constraint is not None and body.get("allowed_token_ids") is not None:  # both may leave no token at all
            fault = "can't be combined with a form, 'tool_choice' or strict tools; send one of them"
            raise FieldError("allowed_token_ids", fault)
        return constraint if constraint is None or endpoint == "chat" else replace(constraint, reasoning="closed")

    def clear(self) -> None:
        """Delete compiled grammars and problems: schemas and grammars are their clients' texts."""
        self._schemas.clear()
        clear_patterns()
        self._prototypes.clear()
        with self._lock:
            self._problems.clear()

    def create_matcher(self, constraint: Constraint, expected: ExpectedOutput | None = None) -> Matcher:
        """Create the matcher of one run of one answer; it may have to compile the grammar."""
        check = None
        if constraint.checks is not None:
            check = constraint.checks.create(lambda: OutputParser(self._tokenizer, expected=expected))
        prototype, grammar = None, constraint.grammar
        if grammar:
            prototype = self._prototypes.take(grammar) or self._compile(grammar)[0]
        eos = sorted(self._tokenizer.eos_token_ids)
        return Matcher(constraint, prototype, self._vocabulary_size, eos, self._prototypes.put, check)

    def find_problem(self, grammar: str, tokens_tried: int = TOKENS_TRIED, *, is_part: bool = False) -> str:
        """Problem of a grammar, in a line; "" for a valid one, which an answer will use unless it `is_part` of one."""
        key = xxhash.xxh3_128_digest(grammar.encode())
        with self._lock:
            if (problem := self._problems.get(key)) is not None:
                return problem
        prototype, problem = self._compile(grammar, tokens_tried)
        if not (problem or is_part):
            self._prototypes.put(prototype)
        with self._lock:
            self._problems[key] = problem
            while len(self._problems) > PROBLEM_COUNT_MAX:
                self._problems.popitem(last=False)
        return problem

    def _find_schema_problem(self, forced: Schema, trial: Trial) -> str:
        tokens_tried = STRING_TOKENS_TRIED if trial is Trial.STRING else TOKENS_TRIED
        return self.find_problem(
            constraints.encode_schema(forced), tokens_tried, is_part=trial is not Trial.WHOLE_ANSWER
        )

    def prepare_tokenizer(self) -> None:
        """Convert the tokenizer now, so that no request waits for it; one without a fast form is refused later."""
        if isinstance(self._tokenizer._tokenizer, PreTrainedTokenizerFast):
            self._load_tokenizer()

    def _load_tokenizer(self) -> tuple[LLTokenizer, TokenizerTraits]:
        with self._lock:
            if self._converted_tokenizer is None:
                self._converted_tokenizer = _convert_tokenizer(self._tokenizer)
            return self._converted_tokenizer

    def _compile(self, grammar: str, tokens_tried: int = TOKENS_TRIED) -> tuple[Prototype, str]:
        """Compile a grammar and try some tokens of it; returns it with its problem, "" for none."""
        tokenizer, epoch, start_s = self._load_tokenizer()[0], self._prototypes.epoch, time.monotonic()
        prototype = Prototype(grammar, LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS), epoch)
        trial = prototype.copy_matcher()
        _try_tokens(trial, tokens_tried)
        self._on_compiled(time.monotonic() - start_s)
        return prototype, _format_problem(format_error(trial)) if trial.is_error() else ""


def _convert_tokenizer(tokenizer: TokenizerWrapper) -> tuple[LLTokenizer, TokenizerTraits]:
    inner = tokenizer._tokenizer
    if not isinstance(inner, PreTrainedTokenizerFast):
        raise BadRequestError(SLOW_TOKENIZER_MESSAGE)
    backend = copy(inner.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    description = json.loads(backend.to_str())
    markers = _hide_markers(description)
    converted = LLTokenizer(json.dumps(description), n_vocab=len(inner), eos_token=sorted(tokenizer.eos_token_ids))
    return converted, constraints.read_tokenizer_traits(tokenizer, markers)


def _hide_markers(description: dict[str, Any]) -> dict[str, int]:
    """Rename markers in a tokenizer's description; returns their ids by their true names.

    llguidance tokenizes forced text, so a word of a schema that reads like a marker would become that marker.  Renamed,
    a marker is a token that only its id names.
    """
    markers: dict[str, int] = {}
    unknown, hidden = description["model"].get("unk_token"), dict[str, str]()
    for token in description["added_tokens"]:
        word = token["content"]
        if (token["special"] or (word.startswith("<") and word.endswith(">"))) and word != unknown:
            markers[word] = token["id"]
            token["content"] = hidden[word] = f"<\ue000{token['id']}\ue000>"
    description["post_processor"] = None  # names markers, and has no part in this
    vocabulary = description["model"].get("vocab")  # has markers too where it was made of SentencePiece's
    if isinstance(vocabulary, dict):
        for word in hidden.keys() & vocabulary.keys():
            vocabulary[hidden[word]] = vocabulary.pop(word)
    elif isinstance(vocabulary, list):
        for entry in vocabulary:
            entry[0] = hidden.get(entry[0], entry[0])
    return markers


def _try_tokens(matcher: LLMatcher, count: int) -> None:
    """Follow a grammar for some tokens, since some limits are met only then; it is in error where none may follow."""
    for n in range(count):
        if matcher.is_error() or matcher.is_stopped():
            return
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        matcher.consume_token(int(allowed[n * _TRIAL_STRIDE % len(allowed)]) if len(allowed) else 0)


def _format_problem(line: str) -> str:
    if line.startswith("panic"):
        return "it is too large or too complex"
    if line.startswith("Unsatisfiable") and (definition := re.search(r"(#/\$defs/[^\s,]+)$", line)):
        return f"{UNSATISFIABLE}, at {definition[1]}"
    if not line or line.startswith(("NoExtension", "Unsatisfiable")) or "doesn't satisfy the grammar" in line:
        return UNSATISFIABLE
    return line[:PROBLEM_CHARS_MAX]
