"""One answer on its way: which tokens may come next.  Engine thread.

reasoning -> (line break) -> grammar;   free text -> trigger -> grammar -> free text
"""

import re
from collections import deque
from typing import Literal

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher

from warmline_backend.structured_output.constraint import Constraint

State = Literal["reasoning", "start", "free", "grammar"]


class OffGrammar(Exception):
    """No token may follow: the grammar has met a limit, or the tokenizer can't write what it wants."""


class Guide:
    """A logits processor for one run of one sequence; it is called once a step, with all tokens so far.

    The matcher is copied, never changed.
    """

    def __init__(self, constraint: Constraint, matcher: LLMatcher | None, width: int, eos: list[int]) -> None:
        self._constraint, self._prototype, self._width = constraint, matcher, width
        self._eos = frozenset(eos)
        self._matcher = matcher.deep_copy() if matcher is not None else None
        self._lately: deque[int] = deque(maxlen=max(len(constraint.think_start), len(constraint.think_end), 1))
        self._opened = 0  # how many of the tokens that open reasoning are there
        self._fits = True  # the grammar takes what there is of the answer
        self._sampled: tuple[mx.array, int] | None = None  # all sequences' last tokens, and which is this one's
        self._begun = self._reasoned = False
        self._fixed: dict[str, mx.array] = {}
        self.complete = False  # the answer has its form, and has ended
        self.state: State = self._first_state()

    def _first_state(self) -> State:
        if self._constraint.reasoning == "open":
            return "reasoning"
        return "free" if self._is_lazy else "start"

    @property
    def _is_lazy(self) -> bool:
        return self._matcher is None or self._constraint.trigger is not None

    # ---- a step

    def follows(self, sampled: mx.array, row: int) -> None:
        """What the next step's logits come after: `sampled[row]`, which may not be computed yet."""
        self._sampled = sampled, row

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._width = logits.shape[-1]  # which may be more than the tokenizer has tokens
        if self._matcher is None:
            return self._masked("forbidden", logits)
        # The device goes on with this step while this waits for the last token, and thinks about the next.
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        if self._begun:
            sampled, row = self._sampled or (tokens, -1)
            self.advance(int(sampled.tolist()[row]))  # type: ignore[index, arg-type]
        self._begun = True
        if self.state == "free":
            return logits
        if self.state == "reasoning":
            return logits if self._is_lazy else self._masked("unending", logits)
        return self._where(mx.array(self.allowed()), logits)

    def advance(self, token: int) -> None:
        """Take the token that was just sampled.  Raises OffGrammar."""
        self._lately.append(token)
        match self.state:
            case "reasoning":
                if self._lately_were(self._constraint.think_end):
                    self.state, self._reasoned = ("free" if self._is_lazy else "start"), True
            case "start":
                self._start(token)
            case "free":
                self._listen(token)
            case "grammar":
                self._consume(token)

    def _start(self, token: int) -> None:
        """The answer's first tokens: they open the reasoning, or belong to the grammar, or might do either still."""
        assert self._matcher is not None
        opens = self._may_open and token == self._constraint.think_start[self._opened]
        fits = self._fits and self._matcher.validate_tokens([token]) == 1
        if opens and self._opened + 1 == len(self._constraint.think_start):
            assert self._prototype is not None
            self._matcher, self._fits, self.state = self._prototype.deep_copy(), True, "reasoning"
        elif opens:
            self._opened += 1
            self._fits = fits
            if fits:
                self._consume(token)
        elif self._reasoned and not fits and token in self._constraint.breaks:
            self.state = "grammar"
        else:
            self.state = "grammar"
            self._consume(token)

    def _listen(self, token: int) -> None:
        """Free text: reasoning or a call may begin."""
        constraint = self._constraint
        if token == constraint.trigger:
            assert self._prototype is not None
            self._matcher, self.state = self._prototype.deep_copy(), "grammar"
            self._consume(token)
        elif constraint.think_start and self._lately_were(constraint.think_start):
            self.state = "reasoning"

    def _consume(self, token: int) -> None:
        assert self._matcher is not None
        if self.complete:
            return
        if not self._matcher.consume_token(token):
            raise OffGrammar(self._problem())
        if token in self._eos and self._matcher.is_stopped():
            self.complete = True
        elif self._is_lazy and not self._constraint.once and self._matcher.is_stopped():
            self.state = "free"

    @property
    def _may_open(self) -> bool:
        return self._constraint.reasoning == "possible" and not self._reasoned

    def _lately_were(self, tokens: tuple[int, ...]) -> bool:
        return bool(tokens) and tuple(self._lately)[-len(tokens) :] == tokens

    # ---- what may come next

    def allowed(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[vocabulary]: which tokens may come next where not all may.  Raises OffGrammar where none may."""
        assert self._matcher is not None
        allowed = self._by_grammar() if self._fits else np.zeros(self._width, np.bool_)
        if self.state == "start":
            if self._may_open:
                allowed[self._constraint.think_start[self._opened]] = True
            if self._reasoned:
                allowed[list(self._constraint.breaks)] = True
        return allowed

    def _by_grammar(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        assert self._matcher is not None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._width, bitorder="little").astype(np.bool_)
        if not allowed.any():
            raise OffGrammar(self._problem())
        return allowed

    def _masked(self, name: Literal["forbidden", "unending"], logits: mx.array) -> mx.array:
        """Without the tokens that are forbidden, or those that end an answer."""
        if name not in self._fixed:
            allowed = np.ones(self._width, np.bool_)
            allowed[list(self._constraint.forbidden if name == "forbidden" else self._eos)] = False
            self._fixed[name] = mx.array(allowed)
        return self._where(self._fixed[name], logits)

    def _where(self, allowed: mx.array, logits: mx.array) -> mx.array:
        return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))

    def _problem(self) -> str:
        assert self._matcher is not None
        detail = " ".join(re.split("<state>|<non-verbose/>", self._matcher.get_error())[0].split())
        return f'the answer can\'t go on in the form asked for: "{detail[:200] or "no token may follow"}"'
