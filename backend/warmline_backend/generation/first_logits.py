"""What a request's first token was chosen from, for audits: the same prompt computed again must give the same.

Engine thread.
"""

import mlx.core as mx
import numpy as np
import xxhash

from warmline_common.protocol.messages import FirstLogits

LIKELIEST_MAX = 32


class LogprobsCapture:
    """The model's own log-probabilities, where processors are about to change them: one that goes before them.

    It computes them as mlx-lm does without processors, so that they have the same bits as in a run that has none.
    """

    def __init__(self) -> None:
        self.logprobs: mx.array | None = None  # [vocabulary], not evaluated yet

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.logprobs is None:
            self.logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
        return logits


def make_first_logits(row: mx.array) -> FirstLogits:
    """Of one row of log-probabilities [vocabulary], of whatever type."""
    values = np.array(row.astype(mx.float32), dtype="<f4")
    count = min(LIKELIEST_MAX, len(values))
    likeliest = np.argpartition(-values, count - 1)[:count]
    likeliest = likeliest[np.lexsort((likeliest, -values[likeliest]))]
    return FirstLogits(
        digest=xxhash.xxh3_128_hexdigest(values.tobytes()),
        ids=likeliest.astype("<u4").tobytes(),
        logprobs=values[likeliest].tobytes(),
    )
