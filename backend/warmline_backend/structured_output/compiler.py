"""The tokenizer as llguidance wants it, and grammars compiled within limits.  Any thread.

llguidance bounds what a grammar may cost, in steps rather than seconds; what goes beyond is refused while the prompt
is rendered.  A grammar that reaches a limit only while it is followed fails its own request.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import xxhash
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from warmline_backend.request.params import BadRequest
from warmline_backend.request.response_format import Asked, read_asked
from warmline_backend.structured_output.constraint import Constraint, Family, constraint_of, family_of
from warmline_backend.structured_output.matcher import Guide

K = TypeVar("K")
V = TypeVar("V")

COMPILED_KEPT_MAX = 64
PROBLEMS_KEPT_MAX = 4096
PROBLEM_CHARS_MAX = 200
STEPS_TRIED = 8
NEEDS_FAST = (
    "this model's tokenizer has no fast form, which answers of a given form, required calls and strict tools need"
)


def limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Grammars:
    """Constraints for one model's prompts, and guides for their answers.  Any thread."""

    def __init__(
        self, tokenizer: TokenizerWrapper, vocabulary_size: int, compiled: Callable[[float], object] = float
    ) -> None:
        """`compiled` hears how many seconds each compilation took, on the thread that did it."""
        self._tokenizer, self._vocabulary_size, self._note_compiled = tokenizer, vocabulary_size, compiled
        self._lock = threading.Lock()
        self._made: tuple[LLTokenizer, Family] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._problems: OrderedDict[bytes, str] = OrderedDict()

    def constraint(
        self, endpoint: str, body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, tail: str
    ) -> Constraint | None:
        """What the body asks of its answer; None where any will do.  Raises BadRequest.

        The first one that asks for anything takes up to a second or two, for the tokenizer.
        """
        asked = read_asked(endpoint, body, tools)
        if asked.anything:
            return None
        _check_continues_nothing(asked, body)
        try:
            made = constraint_of(asked, tail, self._ready()[1], self.problem)
        except UnicodeEncodeError as error:
            raise BadRequest("a schema, a grammar or a tool has a lone surrogate; it is no valid text") from error
        _check_leaves_tokens_free(made, body)
        return made if made is None or endpoint == "chat" else replace(made, reasoning="closed")

    def forget(self) -> None:
        """What was compiled, and why something could not be: schemas and grammars are their clients' texts."""
        with self._lock:
            self._compiled.clear()
            self._problems.clear()

    def guide(self, constraint: Constraint) -> Guide:
        """For one run of one answer."""
        matcher = self._matcher(constraint.grammar) if constraint.grammar else None
        return Guide(constraint, matcher, self._vocabulary_size, sorted(self._tokenizer.eos_token_ids))

    def problem(self, grammar: str) -> str:
        """What is wrong with a grammar, in a line; "" where it can be followed."""
        key = xxhash.xxh3_128_digest(grammar.encode())
        with self._lock:
            if (known := self._problems.get(key)) is not None:
                return known
        matcher = self._compile(grammar)
        _try_out(matcher)
        problem = _told(matcher.get_error()) if matcher.is_error() else ""
        with self._lock:
            _keep(self._problems, key, problem, PROBLEMS_KEPT_MAX)
        return problem

    def prepare(self) -> None:
        """Convert the tokenizer now, so that no request waits for it; what can't be converted is refused later."""
        if isinstance(self._tokenizer._tokenizer, PreTrainedTokenizerFast):
            self._ready()

    def _ready(self) -> tuple[LLTokenizer, Family]:
        with self._lock:
            if self._made is None:
                self._made = _converted(self._tokenizer)
            return self._made

    def _matcher(self, grammar: str) -> LLMatcher:
        """At its start; to be copied, never advanced."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = self._compile(grammar)
        with self._lock:
            _keep(self._compiled, grammar, matcher, COMPILED_KEPT_MAX)
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        """With its first mask computed; in error where no token can be the first."""
        tokenizer, began = self._ready()[0], time.monotonic()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if not matcher.is_error() and not np.frombuffer(matcher.compute_bitmask(), np.uint8).any():
            matcher.consume_token(0)  # it takes none, and now says so
        self._note_compiled(time.monotonic() - began)
        return matcher


def _keep(kept: OrderedDict[K, V], key: K, value: V, count_max: int) -> None:
    kept[key] = value
    while len(kept) > count_max:
        kept.popitem(last=False)


def _check_continues_nothing(asked: Asked, body: Mapping[str, Any]) -> None:
    if body.get("continue_final_message") and (asked.form is not None or asked.choice == "required"):
        raise BadRequest(
            "'continue_final_message' can't be combined with a form that the whole answer must have",
            "continue_final_message",
        )


def _check_leaves_tokens_free(made: Constraint | None, body: Mapping[str, Any]) -> None:
    """Both together may leave no token at all."""
    if made is not None and body.get("allowed_token_ids") is not None:
        raise BadRequest(
            "'allowed_token_ids' can't be combined with a form, 'tool_choice' or strict tools; send one of them",
            "allowed_token_ids",
        )


def _converted(tokenizer: TokenizerWrapper) -> tuple[LLTokenizer, Family]:
    inner = tokenizer._tokenizer
    if not isinstance(inner, PreTrainedTokenizerFast):
        raise BadRequest(NEEDS_FAST)
    backend = copy(inner.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    described = json.loads(backend.to_str())
    markers = _hide_markers(described)
    family = family_of(tokenizer, markers)
    made = LLTokenizer(json.dumps(described), n_vocab=len(inner), eos_token=sorted(tokenizer.eos_token_ids))
    return made, family


def _hide_markers(described: dict[str, Any]) -> dict[str, int]:
    """Rename, in a tokenizer's description, the tokens that are no text; returns their ids by their true names.

    llguidance takes text that is forced for the tokens that it is tokenized to, so a word of a schema that reads like a
    marker would become that marker.  Renamed, a marker is a token that only its id names.
    """
    markers: dict[str, int] = {}
    unknown, hidden = described["model"].get("unk_token"), dict[str, str]()
    for token in described["added_tokens"]:
        word = token["content"]
        if (token["special"] or (word.startswith("<") and word.endswith(">"))) and word != unknown:
            markers[word] = token["id"]
            token["content"] = hidden[word] = f"<\ue000{token['id']}\ue000>"
    _rename(described["model"].get("vocab"), hidden)
    described["post_processor"] = None  # names markers, and has no part in this
    return markers


def _rename(vocabulary: Any, hidden: Mapping[str, str]) -> None:
    """Where a vocabulary has markers too, as those made of SentencePiece's do."""
    if isinstance(vocabulary, dict):
        for word in hidden.keys() & vocabulary.keys():
            vocabulary[hidden[word]] = vocabulary.pop(word)
    elif isinstance(vocabulary, list):
        for entry in vocabulary:
            entry[0] = hidden.get(entry[0], entry[0])


def _try_out(matcher: LLMatcher) -> None:
    """Follow a grammar for a few tokens: some limits are met only then."""
    for _ in range(STEPS_TRIED):
        if matcher.is_error() or matcher.is_stopped():
            return
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        matcher.consume_token(int(bits.argmax()))


def _told(problem: str) -> str:
    """In one line, without llguidance's inner state."""
    line = " ".join(re.split("<state>|<non-verbose/>", problem)[0].split())
    if line.startswith("panic"):
        return "it is too large or too complex"
    if not line or line.startswith("NoExtension") or "doesn't satisfy the grammar" in line:
        return "no text can match it"
    return line[:PROBLEM_CHARS_MAX]
