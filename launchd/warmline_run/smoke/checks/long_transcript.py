"""Check of a long transcript, warm turn by turn, against the same prompts cold."""

from dataclasses import dataclass
from itertools import pairwise

from warmline_run.smoke.check import CheckFailedError, Target, format_excerpt, read_cached_tokens
from warmline_run.smoke.checks.basic import WITH_LOGPROBS
from warmline_run.smoke.judge import find_disagreement, is_collapsed, logprob_difference
from warmline_run.smoke.responses import ChatCompletion, Message
from warmline_run.smoke.transcript import compute_turn_bytes, measure_text, render_turn

COLD_FIELDS = {"cache_prompt": False}
COMPARED_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the turns
DISTRUST_ADVICE = (
    "do not trust this server with long conversations: its cache gives another answer than the model does. "
    'With Warmline, `cachectl verify --replay` finds the file, and `reuse = "exact"` or "off" avoids it'
)


@dataclass(frozen=True)
class TranscriptTurn:
    """One turn: its prompt, and the warm answer."""

    number: int  # from 1
    prompt: list[Message]
    warm: ChatCompletion


async def check_long_transcript(target: Target) -> str:
    """Run all warm turns first: a cold run leaves its KV, and the next turn would start from that."""
    turns = await _run_turns(target)
    compared = {max(1, round(share * len(turns))) for share in COMPARED_SHARES}
    differences = [await compare_with_cold(target, turn) for turn in turns if turn.number in compared]
    _check_reuse_growth(target, turns)
    last = turns[-1].warm
    return (
        f"{len(turns)} turns, {last.prompt_tokens} tokens, {last.cached_tokens} of them reused in the last; as cold in "
        f"turns {', '.join(map(str, sorted(compared)))} (log-probabilities within {max(differences):.2g})"
    )


async def _run_turns(target: Target) -> list[TranscriptTurn]:
    turn_bytes = compute_turn_bytes(target, await measure_text(target))
    messages: list[Message] = []
    turns = []
    for number in range(1, target.scale.turns_count + 1):
        messages.append({"role": "user", "content": render_turn(target.seed, number, turn_bytes)})
        warm = await target.complete(messages, **WITH_LOGPROBS)
        turns.append(TranscriptTurn(number, list(messages), warm))
        messages.append({"role": "assistant", "content": warm.text})
    return turns


async def compare_with_cold(target: Target, turn: TranscriptTurn) -> float:
    """Largest difference of log-probabilities.  Raises CheckFailedError where the cold answer differs."""
    cold = await target.complete(turn.prompt, **WITH_LOGPROBS, **COLD_FIELDS)
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
    """Each turn reuses more than the one before; on a grid of cached prefixes no less, and more in the end."""
    counts = [read_cached_tokens(turn.warm) for turn in turns]
    for turn, (old, new) in zip(turns[1:], pairwise(counts), strict=True):
        if not (new >= old if target.grid_tokens else new > old):
            raise CheckFailedError(
                f"turn {turn.number} reused {new} of {turn.warm.prompt_tokens} tokens, the one before it {old}",
                "each turn should start where the last one ended; the log, or `cachectl stats`, says why it did not",
            )
    target.require_step(turns[-2].warm.prompt_tokens)
    if not counts[-1]:
        raise CheckFailedError("nothing was reused in any turn", "is reuse off?")
