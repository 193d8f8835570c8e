"""How long prompts may be here: how many bytes make a token, how fast they are read, what the context holds."""

import asyncio
from dataclasses import dataclass

from warmline_run.smoke.check import Visit
from warmline_run.smoke.transcript import Transcript

SAMPLE_BYTES = 2500  # some of all that transcripts are made of
MARGIN = 0.85  # of the context that is used: texts differ
TURN_TOKENS = 48  # around a message, and around an answer


@dataclass(frozen=True)
class Measure:
    """What a sample has shown."""

    bytes_per_token: float
    prefill_tokens_s: float  # too low rather than too high: with all that a request takes

    def bytes_of(self, tokens: int) -> int:
        return int(tokens * self.bytes_per_token)


async def measure(visit: Visit) -> Measure:
    """Has the server read a text that nothing is kept of."""
    text = Transcript(f"{visit.seed} sample", SAMPLE_BYTES).said(1)
    began_s = asyncio.get_running_loop().time()
    answer = await visit.server.ask([{"role": "user", "content": text}], max_tokens=1)
    tokens = max(1, answer.prompt_tokens)
    return Measure(len(text.encode()) / tokens, tokens / max(1e-6, asyncio.get_running_loop().time() - began_s))


def turn_bytes(visit: Visit, measured: Measure) -> int:
    """What a turn of the transcript may say, so that all of them fit the context."""
    wanted = visit.scale.turn_bytes
    if not visit.context_tokens:
        return wanted
    turns = visit.scale.turns_count
    room = int(MARGIN * visit.context_tokens) - turns * (visit.scale.answer_tokens + TURN_TOKENS)
    return min(wanted, measured.bytes_of(max(0, room)) // turns)


def long_bytes(visit: Visit, measured: Measure) -> int:
    """What the long prompt may say."""
    wanted, context = visit.scale.long_tokens, visit.context_tokens
    return measured.bytes_of(min(wanted, int(MARGIN * context)) if context else wanted)
