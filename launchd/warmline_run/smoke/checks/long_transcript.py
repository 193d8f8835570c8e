"""The gate that short requests don't see: a long transcript, warm turn by turn, against the same prompts cold."""

from dataclasses import dataclass
from itertools import pairwise

from warmline_run.smoke.check import CheckFailedError, Target, format_excerpt
from warmline_run.smoke.checks.basic import WITH_LOGPROBS
from warmline_run.smoke.judge import find_disagreement, is_collapsed, logprob_difference
from warmline_run.smoke.responses import ChatCompletion, Message
from warmline_run.smoke.transcript import Transcript, compute_turn_bytes, measure_text

COLD_FIELDS = {"cache_prompt": False}
COMPARED_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the turns
DISTRUST_ADVICE = (
    "do not trust this server with long conversations: its cache gives another answer than the model does. "
    'With Warmline, `cachectl verify --replay` finds the file, and `reuse = "exact"` or "off" avoids it'
)


@dataclass(frozen=True)
class TranscriptTurn:
    """One turn as it was asked and answered, warm."""

    number: int  # from 1
    prompt: list[Message]
    warm: ChatCompletion


async def check_long_transcript(target: Target) -> str:
    """All warm turns first: a cold run leaves what it computed, and the next turn would go on from that."""
    turns = await run_turns(target)
    worst = 0.0
    for turn in select_compared_turns(turns):
        worst = max(worst, await compare_with_cold(target, turn))
    _check_reuse_growth(target, turns)
    last = turns[-1].warm
    return (
        f"{len(turns)} turns, {last.prompt_tokens} tokens, {last.cached_tokens} of them reused in the last; as cold in "
        f"turns {', '.join(str(turn.number) for turn in select_compared_turns(turns))} (log-probabilities "
        f"within {worst:.2g})"
    )


async def run_turns(target: Target) -> list[TranscriptTurn]:
    script = Transcript(target.seed, compute_turn_bytes(target, await measure_text(target)))
    messages: list[Message] = []
    turns = []
    for number in range(1, target.scale.turns_count + 1):
        messages.append({"role": "user", "content": script.render_turn(number)})
        warm = await target.client.complete(messages, max_tokens=target.scale.answer_tokens, **WITH_LOGPROBS)
        turns.append(TranscriptTurn(number, list(messages), warm))
        messages.append({"role": "assistant", "content": warm.text})
    return turns


def select_compared_turns(turns: list[TranscriptTurn]) -> list[TranscriptTurn]:
    """Those that are computed again, cold: a few, and the last."""
    numbers = {max(1, round(share * len(turns))) for share in COMPARED_SHARES}
    return [turn for turn in turns if turn.number in numbers]


async def compare_with_cold(target: Target, turn: TranscriptTurn) -> float:
    """Largest difference of log-probabilities.  Raises CheckFailedError where the cold answer differs."""
    cold = await target.client.complete(
        turn.prompt, max_tokens=target.scale.answer_tokens, **WITH_LOGPROBS, **COLD_FIELDS
    )
    if cold.cached_tokens:
        raise CheckFailedError(
            f"asked to compute turn {turn.number} cold (cache_prompt: false), it reused {cold.cached_tokens} tokens",
            "nor does mlx_lm.server take notice of it: whether its warm answers are right can't be seen here",
        )
    where = f"in turn {turn.number}, at {turn.warm.prompt_tokens} tokens"
    texts = f"warm {format_excerpt(turn.warm.full_text)}, cold {format_excerpt(cold.full_text)}"
    if flaw := find_disagreement(turn.warm, cold, target.tolerance):
        raise CheckFailedError(f"{where}, the warm answer is not the cold one: {flaw}: {texts}", DISTRUST_ADVICE)
    if is_collapsed(turn.warm.full_text, cold.full_text):
        raise CheckFailedError(
            f"{where}, the warm answer collapses into repetition, and the cold one does not: {texts}", DISTRUST_ADVICE
        )
    return logprob_difference(turn.warm, cold)


def _check_reuse_growth(target: Target, turns: list[TranscriptTurn]) -> None:
    """Each turn reuses more than the last one; where what is kept ends on a grid, no less, and more in the end."""
    counts = [turn.warm.cached_tokens for turn in turns]
    if any(count is None for count in counts):
        raise CheckFailedError("usage does not say how much was reused (prompt_tokens_details.cached_tokens)")
    for before, now in pairwise(turns):
        old, new = before.warm.cached_tokens or 0, now.warm.cached_tokens or 0
        if not (new >= old if target.grid_tokens else new > old):
            raise CheckFailedError(
                f"turn {now.number} reused {new} of {now.warm.prompt_tokens} tokens, the one before it {old}",
                "each turn should start where the last one ended; the log, or `cachectl stats`, says why it did not",
            )
    if target.expected_cached_tokens(turns[-2].warm.prompt_tokens if len(turns) > 1 else 0) and not counts[-1]:
        raise CheckFailedError("nothing was reused in any turn", "is reuse off?")
