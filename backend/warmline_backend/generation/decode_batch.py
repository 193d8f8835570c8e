"""mlx-lm's decode batch, which leaves ends to the scheduler, and verifies drafts.  Engine thread.

    step    [.. t1 t2]  t3 is drawn and being computed     ->  returns t3, begins t4
    verify  [.. t1 t2]  t3, and the draft d4 d5 d6         ->  returns t3 d4 d5 where d4 and d5 were drawn, too

Of a verified pass, rows of rejected tokens are dropped once the scheduler has said how many tokens it took, of each
sequence another number.  States of recurrent layers can't be: they go back to the pass's start, and the tokens that
were right are computed once more, in the next pass; such a batch has one sequence.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import TokenBuffer

from warmline_backend.generation.sampling import SeededSampler
from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind, flatten, rebuild
from warmline_backend.structured_output.matcher import Matcher

DrawnToken = tuple[int, mx.array]  # an id and the log-probabilities [vocabulary] that it was drawn from


@dataclass(frozen=True)
class _Pass:
    """A verified pass that is not committed yet."""

    tokens: list[list[int]]  # that it returned, by row
    width: int  # tokens that it computed of each
    remembered: list[dict[str, Any]]  # by leaf, where all of it may have to be computed again


class DecodeBatch(GenerationBatch):  # type: ignore[misc]  # mlx-lm has no types
    """A generation batch that never finds an end by itself, so that mlx-lm extracts no cache.

    Matchers get the last tokens before the forward pass.  mlx-lm hands processors their context only behind it, when
    the masks have to be ready.
    """

    _token_context: list[TokenBuffer]  # by row
    _next_tokens: mx.array
    _next_logprobs: list[mx.array]

    def __init__(
        self, matchers: list[Matcher | None], layout: CacheLayout, model: object, uids: list[str], *rest: object
    ) -> None:
        pairs = zip(uids, matchers, strict=True)
        self._matcher_by_uid = {uid: matcher for uid, matcher in pairs if matcher is not None}
        self._layout = layout
        self.is_read = False  # the last tokens were returned by `read_sampled`, and the step after them has not begun
        self.next_tokens: list[int] | None = None  # drawn by a verified pass, and returned by the next step or pass
        self.uncomputed: list[int] = []  # returned tokens without rows, of a pass that was rolled back
        self._pass: _Pass | None = None
        self._may_be_padded = False  # it is what is left of a larger batch
        super().__init__(model, uids, *rest)
        # Only processors read the tokens before: without any, no copy is kept.
        processors = zip(self._token_context, self.logits_processors, strict=True)
        self._token_context = [context if each else TokenBuffer() for context, each in processors]

    @property
    def can_read_sampled(self) -> bool:
        """True without matchers, which take a token as the next step begins, and must have it before it is checked."""
        return not self._matcher_by_uid and not self.is_read

    def read_sampled(self) -> tuple[list[int], list[mx.array]]:
        """Return the last tokens and their log-probabilities [vocabulary], without beginning the step after them.

        A step returns tokens only once the next one is under way, which takes longer, but keeps the device busy.
        """
        mx.eval(self._next_tokens, self._next_logprobs)
        self.is_read = True
        return _list_tokens(self._next_tokens), self._next_logprobs

    def read_next(self) -> list[int]:
        """The next tokens; where they are drawn but not known yet, the device is waited for."""
        if self.next_tokens is None:
            self.next_tokens = _list_tokens(self._next_tokens)
        return self.next_tokens

    def extend(self, batch: "DecodeBatch") -> None:
        self.compute_rows()
        batch.compute_rows()
        if self.is_read != batch.is_read:  # for both the same step is under way then
            self.complete_read()
            batch.complete_read()
        self._matcher_by_uid |= batch._matcher_by_uid
        known = self.next_tokens is not None and batch.next_tokens is not None
        self.next_tokens = [*(self.next_tokens or ()), *(batch.next_tokens or ())] if known else None
        super().extend(batch)

    def split(self, row: int) -> "DecodeBatch":
        """Take one sequence out, into a batch of its own, with the token that is drawn for it."""
        assert not self.uncomputed and self._pass is None
        self.complete_read()
        alone = copy.copy(self)
        alone.prompt_cache = copy.deepcopy(self.prompt_cache)  # free: neither is written to before it is filtered
        alone.filter([row])
        self.filter([each for each in range(len(self.uids)) if each != row])
        return alone

    def _step(self) -> tuple[list[int], list[mx.array]]:
        assert not self.uncomputed
        for row, uid in enumerate(self.uids) if self._matcher_by_uid else ():
            if (matcher := self._matcher_by_uid.get(uid)) is not None:
                matcher.set_sampled(self._next_tokens, row)
        self.complete_read()
        self.next_tokens = None
        return super()._step()  # type: ignore[no-any-return]

    def complete_read(self) -> None:
        """Begin the step after tokens that were read, if any were: the KV has their rows then."""
        if self.is_read:
            assert not self.uncomputed  # they come first
            self.is_read = False
            super()._step()  # its tokens were returned before

    # ---- drafts

    def verify(self, drafts: Sequence[Sequence[int]]) -> list[list[DrawnToken]]:
        """Compute the next token of each row and the draft after it in one pass; returns it and the draft's right ones.

        The answer is the one of single steps, up to rounding: each token is drawn from its own distribution, and the
        draft is right while it is what was drawn.  Several rows only where the layout has rows alone.  Call `commit`
        afterwards.
        """
        assert self._pass is None and (len(self.uids) == 1 or self._layout.has_rows_alone)
        self.complete_read()
        if self._may_be_padded:
            self._remove_padding()
        leaves = self._leaves() if self._layout.has_states else []
        remembered = [leaf.codec.remember(held) for leaf, held in leaves]
        inputs = self._make_inputs(drafts)
        logits = self.model(inputs, cache=self.prompt_cache)[:, len(self.uncomputed) :]
        taken = [matcher.token_count if (matcher := self._find_matcher(row)) else 0 for row in range(len(drafts))]
        rows = self._draw(logits, drafts)
        mx.eval(self._next_tokens, [drawn for _, drawn in rows])
        returned, ends = [], []
        for row, (draft, token) in enumerate(zip(drafts, _list_tokens(self._next_tokens), strict=True)):
            logprobs, drawn = rows[row]
            accepted = min(_count_equal(_list_tokens(drawn), draft), drawn.shape[0] - 1)  # rows may have been left out
            returned.append([(token, self._next_logprobs[row])])
            returned[row] += [(right, logprobs[n]) for n, right in enumerate(draft[:accepted])]
            self._retract(row, drawn.shape[0] - 1 - accepted, taken[row] + 1 + accepted)
            ends.append((drawn[accepted : accepted + 1], logprobs[accepted]))
        self._pass = _Pass([[token for token, _ in row] for row in returned], inputs.shape[1], remembered)
        self._next_tokens = mx.concatenate([drawn for drawn, _ in ends])
        self._next_logprobs = [logprobs for _, logprobs in ends]
        self.next_tokens = _list_tokens(self._next_tokens)
        return returned

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[row]` of the tokens that the last pass returned; does nothing after a single step."""
        if self._pass is None:
            return
        verified, self._pass = self._pass, None
        kept = [tokens[:count] for tokens, count in zip(verified.tokens, counts, strict=True)]
        rejected = [verified.width - len(self.uncomputed) - count for count in counts]
        if any(rejected) and self._layout.has_states:
            for (leaf, held), remembered in zip(self._leaves(), verified.remembered, strict=True):
                leaf.codec.restore(held, remembered)
            self.uncomputed = [*self.uncomputed, *kept[0]]
            return
        for leaf, held in self._leaves() if any(rejected) else ():
            leaf.codec.drop_last(held, rejected)
        for tokens, added in zip(self.tokens, kept, strict=True):
            tokens.extend([*self.uncomputed, *added])
        self.uncomputed = []

    def compute_rows(self) -> None:
        """Compute the rows of all tokens that were returned."""
        if self.uncomputed:
            self.model(mx.array([self.uncomputed]), cache=self.prompt_cache)
            self.tokens[0].extend(self.uncomputed)
            self.uncomputed = []

    def _make_inputs(self, drafts: Sequence[Sequence[int]]) -> mx.array:
        """[rows, width] tokens of a pass; behind a shorter draft, tokens that no expert is woken up for alone."""
        longest = max((list(draft) for draft in drafts), key=len)
        padded = [[*draft, *longest[-1:] * (len(longest) - len(draft))] for draft in drafts]
        parts = [self._next_tokens[:, None], mx.array(padded, self._next_tokens.dtype).reshape(len(drafts), -1)]
        if self.uncomputed:
            parts.insert(0, mx.array([self.uncomputed], self._next_tokens.dtype))
        return mx.concatenate(parts, axis=1)

    def _draw(self, logits: mx.array, drafts: Sequence[Sequence[int]]) -> list[tuple[mx.array, mx.array]]:
        """Log-probabilities [tokens, vocabulary] of each row, and what is drawn from them [tokens]; lazy.

        `logits`: [rows, width, vocabulary].  As in a single step, all rows are computed in one call where they can be.
        """
        if any(self.logits_processors):
            processed = [self._process(row, logits[row, : 1 + len(draft)], draft) for row, draft in enumerate(drafts)]
            logprobs = [each - mx.logsumexp(each, axis=-1, keepdims=True) for each in processed]
        else:
            together = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            logprobs = [together[row, : 1 + len(draft)] for row, draft in enumerate(drafts)]
            if all(sampler is None or sampler is self.fallback_sampler for sampler in self.samplers):
                drawn = self.fallback_sampler(together)
                return [(each, drawn[row, : each.shape[0]]) for row, each in enumerate(logprobs)]
        pairs = zip(self.samplers, logprobs, strict=True)
        return [(each, (sampler or self.fallback_sampler)(each)) for sampler, each in pairs]

    def _process(self, row: int, logits: mx.array, draft: Sequence[int]) -> mx.array:
        """Apply a row's processors at each place, with the draft's tokens before it, as far as the grammar allows them.

        `logits`: [tokens, vocabulary].
        """
        processors, matcher = self.logits_processors[row], self._find_matcher(row)
        if not processors:
            return logits
        processed = []
        for n, token in enumerate([self._next_tokens[row : row + 1], *(mx.array([token]) for token in draft)]):
            if n and matcher is not None and not matcher.count_valid([draft[n - 1]]):
                break
            if matcher is not None:
                matcher.set_sampled(token, 0)
            context, place = self._token_context[row].update_and_fetch(token), logits[n : n + 1]
            for processor in processors:
                place = processor(context, place)
            processed.append(place)
        return mx.concatenate(processed)

    def _retract(self, row: int, count: int, taken: int) -> None:
        """Take what was drawn after a row's rejected token back from sampler, processors and matcher."""
        sampler, matcher = self.samplers[row], self._find_matcher(row)
        if isinstance(sampler, SeededSampler):
            sampler.position -= count
        if self.logits_processors[row]:
            self._token_context[row]._size -= count
        if matcher is not None:
            matcher.retract(taken)

    def _find_matcher(self, row: int) -> Matcher | None:
        return self._matcher_by_uid.get(self.uids[row])

    def _remove_padding(self) -> None:
        """Copy windows without padding, of which mlx-lm masks a row too many in a pass of several tokens."""
        self._may_be_padded = False
        leaves = (
            leaf.codec.extract_sequence(held, 0) if leaf.codec.kind is CodecKind.WINDOW else held
            for leaf, held in self._leaves()
        )
        self.prompt_cache[:] = rebuild(self._layout.template, leaves)

    def _leaves(self) -> list[tuple[Any, Any]]:
        return list(zip(self._layout.leaves, (held for _, held in flatten(self.prompt_cache)), strict=True))

    def filter(self, keep: list[int]) -> None:
        self._may_be_padded = bool(self._layout.window) and len(self.uids) > 1
        super().filter(keep)
        if self.next_tokens is not None:
            self.next_tokens = [self.next_tokens[row] for row in keep]
        self._matcher_by_uid = {uid: matcher for uid, matcher in self._matcher_by_uid.items() if uid in self.uids}

    def extract_cache(self, idx: int) -> list[object]:
        return []


def _list_tokens(tokens: mx.array) -> list[int]:
    ids: list[int] = tokens.tolist()  # type: ignore[assignment]
    return ids


def _count_equal(drawn: Sequence[int], draft: Sequence[int]) -> int:
    """Number of leading tokens of a draft that were drawn."""
    pairs = zip(drawn, draft, strict=False)
    return next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(drawn), len(draft)))
