"""Matcher of one answer: the tokens that may come next, and whether those that came may stay.  Engine thread.

reasoning -> (line break) -> grammar;   free text -> trigger -> grammar -> free text

A grammar may accept more than what was asked for.  A check finds that, once a value is complete; the answer then goes
back to an earlier token, which is banned at that place (see redraw.py).
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher

from warmline_backend.structured_output.constraint import Constraint
from warmline_backend.structured_output.prototypes import Prototype
from warmline_backend.structured_output.redraw import RedrawPolicy, TokenCheck

MatcherState = Literal["reasoning", "start", "free", "grammar"]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class GrammarDeadEndError(Exception):
    """No allowed token: the grammar has met a limit, or the tokenizer can't write the required text."""


@dataclass(frozen=True)
class Rejection:
    """Rejection of an answer as it stands."""

    reason: str  # for the client, where the answer ends
    sound_count: int  # tokens that stay, and may be sent
    position: int | None  # of the token to draw again; None: the answer ends


class Matcher:
    """A logits processor for one run of one sequence, called once a step with all tokens so far.

    The prototype is this matcher's own until `release`, and is copied, never changed.  At a dead end all tokens are
    allowed, so that the batch goes on; `reject_token` then says that the answer ends.
    """

    def __init__(
        self,
        constraint: Constraint,
        prototype: Prototype | None,
        width: int,
        eos: list[int],
        on_released: Callable[[Prototype], object] = lambda prototype: None,
        check: TokenCheck | None = None,
    ) -> None:
        self._constraint, self._prototype, self._width = constraint, prototype, width
        self._eos, self._on_released = frozenset(eos), on_released
        self._check, self._policy = check, RedrawPolicy()
        self._masks: dict[str, mx.array] = {}
        self._allowed_counts: list[int] = []  # with a check: how many tokens were allowed, by position
        self._tokens: list[int] = []
        self.dead_end = ""  # why no token may follow those so far
        self._begin()

    def _begin(self) -> None:
        """Begin at the answer's first token."""
        constraint = self._constraint
        self._ll_matcher = self._prototype.copy_matcher() if self._prototype else None
        self._recent_tokens: deque[int] = deque(maxlen=max(len(constraint.think_start), len(constraint.think_end), 1))
        self._opening_count = 0  # how many of the tokens that open reasoning are there
        self._is_matching = True  # the grammar accepts the answer so far
        self._sampled: tuple[mx.array, int] | None = None  # all sequences' last tokens, and which is this one's
        self._has_started = self._has_reasoned = False
        self._state_since = 0  # tokens before the present state
        self.is_complete = False  # the answer has its form, and has ended
        self.state: MatcherState = "free" if self._is_lazy else "start"
        if constraint.reasoning == "open":
            self.state = "reasoning"

    @property
    def _is_lazy(self) -> bool:
        return self._prototype is None or self._constraint.trigger is not None

    def release(self) -> None:
        """Hand the prototype back, once the answer has ended; nothing may be called afterwards."""
        if (prototype := self._prototype) is not None:
            self._prototype = self._ll_matcher = None
            self._on_released(prototype)

    # ---- a step

    def set_sampled(self, sampled: mx.array, row: int) -> None:
        """Set the last sampled token, `sampled[row]`, which may not be computed yet."""
        self._sampled = sampled, row

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._width = logits.shape[-1]  # which may be more than the tokenizer has tokens
        if self._prototype is None:
            return self._apply_fixed_mask("forbidden", logits)
        if self.dead_end:
            return logits
        # The device goes on with this step while this waits for the last token, and thinks about the next.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        try:
            if self._has_started:
                sampled, row = self._sampled or (tokens, -1)
                self.advance(int(sampled.tolist()[row]))  # type: ignore[index, arg-type]
            self._has_started = True
            return self._mask_next(logits)
        except GrammarDeadEndError as error:
            self.dead_end = str(error)
            return logits

    def _mask_next(self, logits: mx.array) -> mx.array:
        allowed = None if self.state in ("free", "reasoning") else self.compute_allowed()
        if self._check is not None:
            # Tokens outside of the grammar are no decisions: no check concerns them.
            self._allowed_counts.append(1 if allowed is None else int(np.count_nonzero(allowed)))
        if allowed is not None:
            return self._apply_mask(mx.array(allowed), logits)
        is_free = self.state == "free" or self._is_lazy
        return logits if is_free else self._apply_fixed_mask("unending", logits)

    def advance(self, token: int) -> None:
        """Take the token that was just sampled.  Raises GrammarDeadEndError."""
        state = self.state
        self._tokens.append(token)
        self._recent_tokens.append(token)
        self._advance_state(token)
        if self.state != state or state == "start" or self.is_complete:
            self._state_since = len(self._tokens)

    def _advance_state(self, token: int) -> None:
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
        assert self._prototype is not None and self._ll_matcher is not None
        opens = self._can_open_reasoning and token == self._constraint.think_start[self._opening_count]
        fits = self._is_matching and self._ll_matcher.validate_tokens([token]) == 1
        if self._ll_matcher.is_error():
            raise self._make_dead_end()
        if opens and self._opening_count + 1 == len(self._constraint.think_start):
            self._ll_matcher, self._is_matching, self.state = self._prototype.copy_matcher(), True, "reasoning"
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
        if self._prototype is not None and token == constraint.trigger:
            self._ll_matcher, self.state = self._prototype.copy_matcher(), "grammar"
            self._consume(token)
        elif constraint.think_start and self._has_suffix(constraint.think_start):
            self.state = "reasoning"

    def _consume(self, token: int) -> None:
        assert self._prototype is not None and self._ll_matcher is not None
        if self.is_complete:
            return
        self._prototype.token_count += 1
        if not self._ll_matcher.consume_token(token) or self._ll_matcher.is_error():
            raise self._make_dead_end()
        if token in self._eos and self._ll_matcher.is_stopped():
            self.is_complete = True
        elif self._is_lazy and not self._constraint.single_match and self._ll_matcher.is_stopped():
            self.state = "free"

    @property
    def _can_open_reasoning(self) -> bool:
        return self._constraint.reasoning == "possible" and not self._has_reasoned

    def _has_suffix(self, tokens: tuple[int, ...]) -> bool:
        return bool(tokens) and tuple(self._recent_tokens)[-len(tokens) :] == tokens

    # ---- drafts

    def compute_forced(self, following: list[int] | None = None) -> list[int]:
        """Tokens of the text that the grammar forces, as its tokenizer would write it.

        After the tokens so far, and those `following`, which are not taken yet.
        """
        if self.state != "grammar" or self._ll_matcher is None or self.is_complete or self.dead_end:
            return []
        if not following:
            return list(self._ll_matcher.compute_ff_tokens())
        if self.count_valid(following) < len(following) or not self._ll_matcher.consume_tokens(following):
            return []
        forced = list(self._ll_matcher.compute_ff_tokens())
        if not self._ll_matcher.rollback(len(following)):
            self._restore(self._tokens)
        return forced

    def count_valid(self, tokens: list[int]) -> int:
        """Count the leading tokens of a draft that may be taken, as far as no state ends before."""
        if self._prototype is None:
            return len(tokens)
        if self.dead_end or self.is_complete or self.state == "start":
            return 0
        if self.state == "grammar":
            assert self._ll_matcher is not None
            count = int(self._ll_matcher.validate_tokens(tokens))
            if self._ll_matcher.is_error():  # for a token that its tokenizer does not have
                self._restore(self._tokens)
                return 0
            return count
        constraint = self._constraint
        marks = {constraint.trigger, *constraint.think_start, *constraint.think_end, *self._eos}
        return next((n for n, token in enumerate(tokens) if token in marks), len(tokens))

    @property
    def token_count(self) -> int:
        """Tokens taken so far."""
        return len(self._tokens)

    def retract(self, length: int) -> None:
        """Go back to the first `length` tokens, from those of a draft; the token after them has been masked already."""
        count = len(self._tokens) - length
        if self._prototype is None or count <= 0:
            return
        tokens, allowed_counts = self._tokens[:length], self._allowed_counts[: length + 1]
        if self.dead_end or length < self._state_since or not self._roll_back(count):
            self._restore(tokens)
        else:
            self._tokens = tokens
            self._recent_tokens.clear()
            self._recent_tokens.extend(tokens[-(self._recent_tokens.maxlen or 1) :])
        self._allowed_counts = allowed_counts

    def _restore(self, tokens: list[int]) -> None:
        """Make the state after these tokens anew; the token after them has been masked already."""
        self._replay(tokens)
        self._has_started = True

    def _roll_back(self, count: int) -> bool:
        return self.state != "grammar" or (self._ll_matcher is not None and bool(self._ll_matcher.rollback(count)))

    # ---- checks and redraws

    @property
    def has_check(self) -> bool:
        """True where tokens may be drawn again."""
        return self._check is not None

    def count_sound(self, count: int) -> int:
        """Count those of the `count` tokens so far that no redraw can concern."""
        return count if self._check is None else min(count, self._check.sound_count)

    def is_drawn_freely(self, position: int) -> bool:
        """True where a token was drawn after a dead end, so that it does not belong to the answer."""
        return bool(self.dead_end) and position >= len(self._tokens)

    def reject_token(self, token: int, count: int, sent_count: int, *, ends: bool, is_last: bool) -> Rejection | None:
        """Check token number `count` of the answer; `is_last`: no other will follow, `ends`: as the model has ended.

        The first `sent_count` tokens have been sent, and stay.  Of a draft, tokens after this one may be taken already.
        """
        violation = self._check.add(token, ends) if self._check is not None else None
        sound_count = self.count_sound(count)
        if violation is not None:
            reason = f"the answer can't be held to its schema: {violation.reason}"
            sound_count = min(sound_count, violation.start)
        elif self.dead_end and not is_last and count >= len(self._tokens):
            reason = self.dead_end
        else:
            return None
        if self._check is None:
            return Rejection(reason, sound_count, None)
        tokens = self._tokens[:count]
        position = self._policy.choose_position(tokens, self._allowed_counts, sent_count, violation)
        return Rejection(reason, sound_count if position is None else min(sound_count, position), position)

    def rewind(self, count: int) -> None:
        """Go back to the first `count` tokens; the next call masks the token after them."""
        del self._allowed_counts[count:]
        self._replay(self._tokens[:count])
        if self._check is not None:
            self._check.rewind(count)

    def _replay(self, tokens: list[int]) -> None:
        """Begin anew, and take these tokens."""
        self._tokens, self.dead_end = [], ""
        self._begin()
        try:
            self._advance_all(tokens)
        except GrammarDeadEndError as error:  # a limit of the lexer, which copies share
            self._tokens, self.dead_end = tokens, str(error)

    def _advance_all(self, tokens: list[int]) -> None:
        for n, token in enumerate(tokens):
            if self.state == "grammar" and not self._is_lazy and n < len(tokens) - 1:
                self._consume_all(tokens[n:-1])  # some times faster: the engine waits for this
                self.advance(tokens[-1])
                return
            self.advance(token)

    def _consume_all(self, tokens: list[int]) -> None:
        """Take tokens of a grammar that do not end it."""
        assert self._prototype is not None and self._ll_matcher is not None
        self._tokens += tokens
        self._recent_tokens.extend(tokens)
        self._prototype.token_count += len(tokens)
        if not self._ll_matcher.consume_tokens(tokens) or self._ll_matcher.is_error():
            raise self._make_dead_end()

    # ---- masks

    def compute_allowed(self) -> Mask:
        """Mask [vocabulary] of the allowed next tokens.  Raises GrammarDeadEndError for none."""
        assert self._ll_matcher is not None
        allowed = np.zeros(self._width, np.bool_)
        if self._is_matching:
            bits = np.frombuffer(self._ll_matcher.compute_bitmask(), np.uint8)
            if self._ll_matcher.is_error():  # the mask allows an end then
                raise self._make_dead_end()
            allowed = np.unpackbits(bits, count=self._width, bitorder="little").astype(np.bool_)
        if self.state == "start":
            if self._can_open_reasoning:
                allowed[self._constraint.think_start[self._opening_count]] = True
            if self._has_reasoned:
                allowed[list(self._constraint.line_breaks)] = True
        allowed[list(self._policy.get_bans(len(self._tokens)))] = False
        if not allowed.any():
            raise self._make_dead_end()
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

    def _make_dead_end(self) -> GrammarDeadEndError:
        assert self._prototype is not None and self._ll_matcher is not None
        self._prototype.has_failed = self._prototype.has_failed or self._ll_matcher.is_error()
        detail = format_error(self._ll_matcher)[:200] or "no token may follow"
        return GrammarDeadEndError(f'the answer can\'t go on in the form asked for: "{detail}"')


def format_error(ll_matcher: LLMatcher) -> str:
    """Error in one line, without llguidance's inner state."""
    return " ".join(re.split("<state>|<non-verbose/>", ll_matcher.get_error())[0].split())
