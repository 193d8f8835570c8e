"""mlx-lm's decode batch, which leaves ends to the scheduler and tells grammar matchers each token.  Engine thread."""

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import TokenBuffer

from warmline_backend.structured_output.matcher import Matcher


class DecodeBatch(GenerationBatch):  # type: ignore[misc]  # mlx-lm has no types
    """A generation batch that never finds an end by itself, so that mlx-lm extracts no cache.

    Matchers get the last tokens before the forward pass.  mlx-lm hands processors their context only behind it, when
    the masks have to be ready.
    """

    _token_context: list[TokenBuffer]  # by row

    def __init__(self, matchers: list[Matcher | None], model: object, uids: list[str], *rest: object) -> None:
        pairs = zip(uids, matchers, strict=True)
        self._matcher_by_uid = {uid: matcher for uid, matcher in pairs if matcher is not None}
        self.is_read = False  # the last tokens were returned by `read_sampled`, and the step after them has not begun
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
        return self._next_tokens.tolist(), self._next_logprobs

    def extend(self, batch: "DecodeBatch") -> None:
        if self.is_read != batch.is_read:  # for both the same step is under way then
            self.complete_read()
            batch.complete_read()
        self._matcher_by_uid |= batch._matcher_by_uid
        super().extend(batch)

    def _step(self) -> tuple[list[int], list[mx.array]]:
        for row, uid in enumerate(self.uids) if self._matcher_by_uid else ():
            if (matcher := self._matcher_by_uid.get(uid)) is not None:
                matcher.set_sampled(self._next_tokens, row)
        self.complete_read()
        return super()._step()  # type: ignore[no-any-return]

    def complete_read(self) -> None:
        """Begin the step after tokens that were read, if any were: the KV has their rows then."""
        if self.is_read:
            self.is_read = False
            super()._step()  # its tokens were returned before

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._matcher_by_uid = {uid: matcher for uid, matcher in self._matcher_by_uid.items() if uid in self.uids}

    def extract_cache(self, idx: int) -> list[object]:
        return []
