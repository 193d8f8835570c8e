"""The decode batch: mlx-lm's, with ends left to the scheduler and grammar matchers told of each token.  Engine thread."""

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from warmline_backend.structured_output.matcher import Matcher


class DecodeBatch(GenerationBatch):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's batch, which here never finds an end by itself, so nothing is to be extracted when it would.

    It tells its guides what was sampled last.  They could ask the context that processors are given, but that is
    computed behind the forward pass, and they are to be done before it is.
    """

    def __init__(self, matcher: Matcher | None, model: object, uids: list[str], *rest: object) -> None:
        self._matcher_by_uid = {uid: matcher for uid in uids if matcher is not None}
        super().__init__(model, uids, *rest)

    def extend(self, batch: "DecodeBatch") -> None:
        self._matcher_by_uid |= batch._matcher_by_uid
        super().extend(batch)

    def _step(self) -> tuple[list[int], list[mx.array]]:
        for row, uid in enumerate(self.uids) if self._matcher_by_uid else ():
            if (guide := self._matcher_by_uid.get(uid)) is not None:
                guide.set_sampled(self._next_tokens, row)
        return super()._step()  # type: ignore[no-any-return]

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._matcher_by_uid = {uid: guide for uid, guide in self._matcher_by_uid.items() if uid in self.uids}

    def extract_cache(self, idx: int) -> list[object]:
        return []
