"""The gate that short requests don't see: a long transcript, warm turn by turn, against the same prompts cold."""

from dataclasses import dataclass
from itertools import pairwise

from warmline_run.smoke.check import Failed, Visit, shown
from warmline_run.smoke.checks.basic import WITH_LOGPROBS
from warmline_run.smoke.judge import collapsed, difference, disagreement
from warmline_run.smoke.responses import Answer, Message
from warmline_run.smoke.sizing import measure, turn_bytes
from warmline_run.smoke.transcript import Transcript

COLD = {"cache_prompt": False}
COMPARED_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the turns
DISTRUST = (
    "do not trust this server with long conversations: its cache gives another answer than the model does. "
    'With Warmline, `cachectl verify --replay` finds the file, and `reuse = "exact"` or "off" avoids it'
)


@dataclass(frozen=True)
class Turn:
    """One turn as it was asked and answered, warm."""

    number: int  # from 1
    prompt: list[Message]
    warm: Answer


async def long_transcript(visit: Visit) -> str:
    """All warm turns first: a cold run leaves what it computed, and the next turn would go on from that."""
    turns = await converse(visit)
    worst = 0.0
    for turn in compared(turns):
        worst = max(worst, await against_cold(visit, turn))
    _judge_growth(visit, turns)
    last = turns[-1].warm
    return (
        f"{len(turns)} turns, {last.prompt_tokens} tokens, {last.cached_tokens} of them reused in the last; as cold in "
        f"turns {', '.join(str(turn.number) for turn in compared(turns))} (log-probabilities within {worst:.2g})"
    )


async def converse(visit: Visit) -> list[Turn]:
    script = Transcript(visit.seed, turn_bytes(visit, await measure(visit)))
    messages: list[Message] = []
    turns = []
    for number in range(1, visit.scale.turns_count + 1):
        messages.append({"role": "user", "content": script.said(number)})
        warm = await visit.server.ask(messages, max_tokens=visit.scale.answer_tokens, **WITH_LOGPROBS)
        turns.append(Turn(number, list(messages), warm))
        messages.append({"role": "assistant", "content": warm.text})
    return turns


def compared(turns: list[Turn]) -> list[Turn]:
    """Those that are computed again, cold: a few, and the last."""
    numbers = {max(1, round(share * len(turns))) for share in COMPARED_SHARES}
    return [turn for turn in turns if turn.number in numbers]


async def against_cold(visit: Visit, turn: Turn) -> float:
    """How far the log-probabilities are apart at most.  Raises Failed where the cold answer is another one."""
    cold = await visit.server.ask(turn.prompt, max_tokens=visit.scale.answer_tokens, **WITH_LOGPROBS, **COLD)
    if cold.cached_tokens:
        raise Failed(
            f"asked to compute turn {turn.number} cold (cache_prompt: false), it reused {cold.cached_tokens} tokens",
            "nor does mlx_lm.server take notice of it: whether its warm answers are right can't be seen here",
        )
    where = f"in turn {turn.number}, at {turn.warm.prompt_tokens} tokens"
    texts = f"warm {shown(turn.warm.said)}, cold {shown(cold.said)}"
    if flaw := disagreement(turn.warm, cold, visit.tolerance):
        raise Failed(f"{where}, the warm answer is not the cold one: {flaw}: {texts}", DISTRUST)
    if collapsed(turn.warm.said, cold.said):
        raise Failed(
            f"{where}, the warm answer collapses into repetition, and the cold one does not: {texts}", DISTRUST
        )
    return difference(turn.warm, cold)


def _judge_growth(visit: Visit, turns: list[Turn]) -> None:
    """Each turn reuses more than the last one; where what is kept ends on a grid, no less, and more in the end."""
    counts = [turn.warm.cached_tokens for turn in turns]
    if any(count is None for count in counts):
        raise Failed("usage does not say how much was reused (prompt_tokens_details.cached_tokens)")
    for before, now in pairwise(turns):
        old, new = before.warm.cached_tokens or 0, now.warm.cached_tokens or 0
        if not (new >= old if visit.grid_tokens else new > old):
            raise Failed(
                f"turn {now.number} reused {new} of {now.warm.prompt_tokens} tokens, the one before it {old}",
                "each turn should start where the last one ended; the log, or `cachectl stats`, says why it did not",
            )
    if visit.kept(turns[-2].warm.prompt_tokens if len(turns) > 1 else 0) and not counts[-1]:
        raise Failed("nothing was reused in any turn", "is reuse off?")
