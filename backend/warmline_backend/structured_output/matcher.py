"""Matcher of one answer: the tokens that may come next.  Engine thread.

reasoning -> (line break) -> grammar;   free text -> trigger -> grammar -> free text
"""

import re
from collections import deque
from typing import Literal

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher

from warmline_backend.structured_output.constraint import Constraint

MatcherState = Literal["reasoning", "start", "free", "grammar"]


class GrammarDeadEndError(Exception):
    """No allowed token: the grammar has met a limit, or the tokenizer can't write the required text."""


class Matcher:
    """A logits processor for one run of one sequence, called once a step with all tokens so far.

    `ll_matcher` is copied, never changed.
    """

    def __init__(self, constraint: Constraint, ll_matcher: LLMatcher | None, width: int, eos: list[int]) -> None:
        self._constraint, self._prototype, self._width = constraint, ll_matcher, width
        self._eos = frozenset(eos)
        self._ll_matcher = ll_matcher.deep_copy() if ll_matcher is not None else None
        self._recent_tokens: deque[int] = deque(maxlen=max(len(constraint.think_start), len(constraint.think_end), 1))
        self._opening_count = 0  # how many of the tokens that open reasoning are there
        self._is_matching = True  # the grammar accepts the answer so far
        self._sampled: tuple[mx.array, int] | None = None  # all sequences' last tokens, and which is this one's
        self._has_started = self._has_reasoned = False
        self._masks: dict[str, mx.array] = {}
        self.is_complete = False  # the answer has its form, and has ended
        self.state: MatcherState = "free" if self._is_lazy else "start"
        if constraint.reasoning == "open":
            self.state = "reasoning"

    @property
    def _is_lazy(self) -> bool:
        return self._ll_matcher is None or self._constraint.trigger is not None

    # ---- a step

    def set_sampled(self, sampled: mx.array, row: int) -> None:
        """Set the last sampled token, `sampled[row]`, which may not be computed yet."""
        self._sampled = sampled, row

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._width = logits.shape[-1]  # which may be more than the tokenizer has tokens
        if self._ll_matcher is None:
            return self._apply_fixed_mask("forbidden", logits)
        # The device goes on with this step while this waits for the last token, and thinks about the next.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        if self._has_started:
            sampled, row = self._sampled or (tokens, -1)
            self.advance(int(sampled.tolist()[row]))  # type: ignore[index, arg-type]
        self._has_started = True
        if self.state == "free":
            return logits
        if self.state == "reasoning":
            return logits if self._is_lazy else self._apply_fixed_mask("unending", logits)
        return self._apply_mask(mx.array(self.compute_allowed()), logits)

    def advance(self, token: int) -> None:
        """Take the token that was just sampled.  Raises GrammarDeadEndError."""
        self._recent_tokens.append(token)
        match self.state:
            case "reasoning":
                if self._has_suffix(self._constraint.think_end):
                    self.state, self._has_reasoned = ("free" if self._is_lazy else "start"), True
            case "start":
                self._advance_start(token)
            case "free":
                self._advance_free(token)
            case "grammar":
                self._consume(token)

    def _advance_start(self, token: int) -> None:
        """Take a first token: it opens the reasoning, belongs to the grammar, or may do either still."""
        assert self._ll_matcher is not None
        opens = self._can_open_reasoning and token == self._constraint.think_start[self._opening_count]
        fits = self._is_matching and self._ll_matcher.validate_tokens([token]) == 1
        if opens and self._opening_count + 1 == len(self._constraint.think_start):
            assert self._prototype is not None
            self._ll_matcher, self._is_matching, self.state = self._prototype.deep_copy(), True, "reasoning"
        elif opens:
            self._opening_count += 1
            self._is_matching = fits
            if fits:
                self._consume(token)
        elif self._has_reasoned and not fits and token in self._constraint.line_breaks:
            self.state = "grammar"
        else:
            self.state = "grammar"
            self._consume(token)

    def _advance_free(self, token: int) -> None:
        """Take a token of free text: reasoning or a call may begin."""
        constraint = self._constraint
        if token == constraint.trigger:
            assert self._prototype is not None
            self._ll_matcher, self.state = self._prototype.deep_copy(), "grammar"
            self._consume(token)
        elif constraint.think_start and self._has_suffix(constraint.think_start):
            self.state = "reasoning"

    def _consume(self, token: int) -> None:
        assert self._ll_matcher is not None
        if self.is_complete:
            return
        if not self._ll_matcher.consume_token(token):
            raise GrammarDeadEndError(self._describe_dead_end())
        if token in self._eos and self._ll_matcher.is_stopped():
            self.is_complete = True
        elif self._is_lazy and not self._constraint.single_match and self._ll_matcher.is_stopped():
            self.state = "free"

    @property
    def _can_open_reasoning(self) -> bool:
        return self._constraint.reasoning == "possible" and not self._has_reasoned

    def _has_suffix(self, tokens: tuple[int, ...]) -> bool:
        return bool(tokens) and tuple(self._recent_tokens)[-len(tokens) :] == tokens

    # ---- masks

    def compute_allowed(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask [vocabulary] of the allowed next tokens.  Raises GrammarDeadEndError for none."""
        assert self._ll_matcher is not None
        allowed = np.zeros(self._width, np.bool_)
        if self._is_matching:
            bits = np.frombuffer(self._ll_matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=self._width, bitorder="little").astype(np.bool_)
            if not allowed.any():
                raise GrammarDeadEndError(self._describe_dead_end())
        if self.state == "start":
            if self._can_open_reasoning:
                allowed[self._constraint.think_start[self._opening_count]] = True
            if self._has_reasoned:
                allowed[list(self._constraint.line_breaks)] = True
        return allowed

    def _apply_fixed_mask(self, name: Literal["forbidden", "unending"], logits: mx.array) -> mx.array:
        """Mask forbidden tokens, or those that end an answer."""
        if name not in self._masks:
            allowed = np.ones(self._width, np.bool_)
            allowed[list(self._constraint.forbidden_tokens if name == "forbidden" else self._eos)] = False
            self._masks[name] = mx.array(allowed)
        return self._apply_mask(self._masks[name], logits)

    def _apply_mask(self, allowed: mx.array, logits: mx.array) -> mx.array:
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

    def _describe_dead_end(self) -> str:
        assert self._ll_matcher is not None
        detail = format_error(self._ll_matcher)[:200] or "no token may follow"
        return f'the answer can\'t go on in the form asked for: "{detail}"'


def format_error(ll_matcher: LLMatcher) -> str:
    """Error in one line, without llguidance's inner state."""
    return " ".join(re.split("<state>|<non-verbose/>", ll_matcher.get_error())[0].split())
