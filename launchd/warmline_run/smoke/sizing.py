"""How long prompts may be here: how many bytes make a token, how fast they are read, what the context holds."""

import asyncio
from dataclasses import dataclass

from warmline_run.smoke.check import Target
from warmline_run.smoke.transcript import Transcript

SAMPLE_BYTES = 2500  # some of all that transcripts are made of
CONTEXT_SHARE_USED = 0.85  # of the context that is used: texts differ
TURN_TOKENS = 48  # around a message, and around an answer


@dataclass(frozen=True)
class TextMeasurement:
    """What a sample has shown."""

    bytes_per_token: float
    prefill_tokens_s: float  # too low rather than too high: with all that a request takes

    def estimate_bytes(self, tokens: int) -> int:
        return int(tokens * self.bytes_per_token)


async def measure_text(target: Target) -> TextMeasurement:
    """Has the server read a text that nothing is kept of."""
    text = Transcript(f"{target.seed} sample", SAMPLE_BYTES).render_turn(1)
    began_s = asyncio.get_running_loop().time()
    answer = await target.client.complete([{"role": "user", "content": text}], max_tokens=1)
    tokens = max(1, answer.prompt_tokens)
    return TextMeasurement(len(text.encode()) / tokens, tokens / max(1e-6, asyncio.get_running_loop().time() - began_s))


def compute_turn_bytes(target: Target, measurement: TextMeasurement) -> int:
    """What a turn of the transcript may say, so that all of them fit the context."""
    wanted = target.scale.turn_bytes
    if not target.context_tokens:
        return wanted
    turns = target.scale.turns_count
    room = int(CONTEXT_SHARE_USED * target.context_tokens) - turns * (target.scale.answer_tokens + TURN_TOKENS)
    return min(wanted, measurement.estimate_bytes(max(0, room)) // turns)


def compute_long_bytes(target: Target, measurement: TextMeasurement) -> int:
    """What the long prompt may say."""
    wanted, context = target.scale.long_tokens, target.context_tokens
    return measurement.estimate_bytes(min(wanted, int(CONTEXT_SHARE_USED * context)) if context else wanted)
