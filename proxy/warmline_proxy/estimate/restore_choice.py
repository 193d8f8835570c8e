"""Choice between restoring stored tokens and computing them, by the time to the first token.  Pure."""

from collections.abc import Sequence

from warmline_common.protocol.messages import KvLayout
from warmline_common.protocol.tokens import BLOCK_TOKENS
from warmline_proxy.estimate.costs import Costs, compute_restore_bytes

RESTORE_CUTS_MAX = 64  # places that are compared; a chain may have hundreds
# A prompt is computed twice at once only where that is clearly sooner: estimates of one moment are noisy.
SOONER_SHARE_MIN, SOONER_S_MIN = 0.1, 0.005
# What could be restored is computed only where that is sooner by so much and, up to half a second, takes less than a
# fifth as long: less is not worth the work of the device, and a busy machine's estimates are off by that much.
RECOMPUTED_SHARE_MIN, RECOMPUTED_S_MIN, RECOMPUTED_S_MAX = 0.1, 0.05, 0.5
RECOMPUTED_FACTOR = 4.0
# A few tokens that most prompts begin with are not worth a restore.
RECOMPUTED_TOKENS_MIN, RESTORED_SHARE_MIN = BLOCK_TOKENS, 0.1


def choose_restore_position(cuts: Sequence[int], tokens: int, layout: KvLayout, costs: Costs) -> int:
    """The last of ascending `cuts`, or an earlier one, or 0, from which a prompt of `tokens` starts clearly sooner.

    Of many cuts RESTORE_CUTS_MAX are compared, evenly spread.
    """
    if is_too_short(cuts[-1], tokens):
        return 0
    stride = -(-len(cuts) // RESTORE_CUTS_MAX)
    compared = (*cuts[::-1][::stride], 0)
    seconds = {at: estimate_start_s(at, at > 0, tokens, layout, costs) for at in compared}
    last_s, soonest = seconds[cuts[-1]], min(compared, key=lambda at: (seconds[at], -at))
    computed_s = costs.estimate_prefill_s(soonest, cuts[-1])
    return soonest if is_worth_computing(last_s - seconds[soonest], computed_s, last_s) else cuts[-1]


def is_too_short(position: int, tokens: int) -> bool:
    """True for a few tokens that most prompts begin with, as those of a template."""
    return position < min(RECOMPUTED_TOKENS_MIN, RESTORED_SHARE_MIN * tokens)


def is_worth_computing(gained_s: float, computed_s: float, restored_s: float) -> bool:
    """True where tokens that take `computed_s` are not restored, since the first token comes so much sooner."""
    shortest_s = min(RECOMPUTED_FACTOR * computed_s, RECOMPUTED_S_MAX)
    return gained_s > max(RECOMPUTED_S_MIN, shortest_s, RECOMPUTED_SHARE_MIN * restored_s)


def estimate_start_s(reuse: int, is_restored: bool, tokens: int, layout: KvLayout | None, costs: Costs) -> float:
    """Seconds of the parts that depend on the start: restore and prefill."""
    return estimate_restore_s(reuse if is_restored else 0, layout, costs) + costs.estimate_prefill_s(reuse, tokens - 1)


def estimate_restore_s(tokens: int, layout: KvLayout | None, costs: Costs) -> float:
    return costs.restore.estimate_s(compute_restore_bytes(layout, tokens)) if tokens and layout else 0.0
