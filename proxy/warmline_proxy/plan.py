"""Where a request should start: a resident, a restorable chain, or cold.  Pure; the caller acts.

Contract: `decide` never reuses the whole prompt (at least one token is left to compute), never a position where the
model's caches can't go on, and always says why the start is not warmer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from warmline_proxy.rows import Match
from warmline_wire.keys import BLOCK_TOKENS
from warmline_wire.messages import CheckpointRef, Layout, Rate, SegmentRef

CHECKPOINT_STRIDE_TOKENS = 2_048
CHECKPOINT_STRIDES_MAX = 8  # in a prompt; a longer one gets a longer stride, since a state may weigh 100 MB
_STRIDED_TOKENS_MAX = CHECKPOINT_STRIDE_TOKENS * CHECKPOINT_STRIDES_MAX
CHECKPOINT_GAP_TOKENS_MIN = 512  # a stride's checkpoint this close to a boundary's is not worth a split chunk
# Assumed until the backend has measured; restoring wins clearly, as it does on every machine we know.
PREFILL_TOKENS_PER_S_ASSUMED = 500.0
RESTORE_BYTES_PER_S_ASSUMED = 500e6
RESTORE_OVERHEAD_S = 0.01  # opening files and one more call

RESIDENT, RESTORED, SHARED, COLD = "resident", "restored", "shared", "cold"
SHARED_TOKENS_MIN = BLOCK_TOKENS  # less is not worth waiting for another request
LEADER_TOKENS_MAX = 1.25  # times one's own prompt: nobody waits for a much longer one that has not begun


@dataclass(frozen=True)
class Candidate:
    """A resident that shares its first `common` tokens with the prompt.

    A prompt that repeats it up to `turn_end`, where the last message of its own prompt ends, goes on with the same
    conversation, however its answer was rendered, and may take it over; any other branches off a living one.
    """

    resident: str
    tokens: int
    common: int
    positions: Sequence[int] = ()  # where it can be continued, ascending; empty means anywhere
    turn_end: int = 0
    durable: bool = False  # all of it is on disk


@dataclass(frozen=True)
class Running:
    """A request at the backend that shares its first `common` tokens with the prompt, and has computed `prefilled`."""

    request_id: str
    common: int
    tokens: int  # of its own prompt
    prefilled: int
    started: bool


@dataclass(frozen=True)
class Costs:
    """What the backend measured (Status); empty and zero where it has not yet."""

    prefill: Sequence[Rate] = ()
    restore_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """What of a PromptReply a plan depends on."""

    tokens: int
    boundaries: Sequence[int] = ()
    turn_end: int = 0


@dataclass(frozen=True)
class Plan:
    """`reuse` tokens of `resident`, or of what restoring `chain` (and `checkpoint`) gives, or of what the request
    `follow` is computing, or nothing.
    """

    source: str
    reuse: int
    why_not_warmer: str
    resident: str = ""
    follow: str = ""
    keep: bool = False  # the resident is another conversation's too: copy it
    chain: tuple[SegmentRef, ...] = ()
    checkpoint: CheckpointRef | None = None
    checkpoints: tuple[int, ...] = ()  # where to keep recurrent state while prefilling


def decide(
    prompt: Prompt,
    residents: Sequence[Candidate],
    match: Match,
    layout: Layout | None,
    costs: Costs,
    *,
    running: Sequence[Running] = (),
    checkpoint_gap_max: int = 0,
) -> Plan:
    """The start with the shortest estimated time to the first token; on a tie the one that computes and touches less.

    Where that leaves something to compute that a running request is computing anyway, it is followed.
    """
    limit = prompt.tokens - 1
    starts = [_cold(), _best_resident(residents, limit), _restorable(match, limit, layout)]
    timed = [(_seconds(start, prompt.tokens, layout, costs), start) for start in starts if start]
    _, start = min(timed, key=lambda pair: (pair[0], -pair[1].reuse))
    if leader := _leader(running, start.reuse, prompt.tokens, costs):
        start = _Start(SHARED, min(leader.common, limit), follow=leader.request_id)
    return Plan(
        source=start.source,
        reuse=start.reuse,
        why_not_warmer=_why(start, starts, match, limit, layout),
        resident=start.resident,
        follow=start.follow,
        keep=start.keep,
        chain=start.chain,
        checkpoint=start.checkpoint,
        checkpoints=checkpoint_positions(prompt, start.reuse, checkpoint_gap_max) if _has_states(layout) else (),
    )


def cold_plan(prompt: Prompt, layout: Layout | None, why: str, checkpoint_gap_max: int = 0) -> Plan:
    """Compute everything, whatever is stored."""
    checkpoints = checkpoint_positions(prompt, 0, checkpoint_gap_max) if _has_states(layout) else ()
    return Plan(source=COLD, reuse=0, why_not_warmer=why, checkpoints=checkpoints)


def _has_states(layout: Layout | None) -> bool:
    return layout is not None and layout.has_states


def _leader(running: Sequence[Running], reuse: int, tokens: int, costs: Costs) -> Running | None:
    """Whom to follow: who has, or will have, computed more than a start at `reuse` has, and sooner than we could."""

    def reach(each: Running) -> int:
        return min(each.common, tokens - 1)

    def is_worth_it(each: Running) -> bool:
        begins = each.started or each.tokens <= LEADER_TOKENS_MAX * tokens
        waits_s = prefill_seconds(min(each.prefilled, reach(each)), reach(each), costs.prefill)
        return begins and waits_s <= prefill_seconds(reuse, reach(each), costs.prefill)

    further = [each for each in running if reach(each) >= reuse + SHARED_TOKENS_MIN]
    return max(filter(is_worth_it, further), key=reach, default=None)


def checkpoint_positions(prompt: Prompt, start: int, gap_max: int = 0) -> tuple[int, ...]:
    """End of system and tools, the last boundary before the generation prompt, and a stride in between.

    With a `gap_max`, strides are no longer than that: a prefill that is saved on its way needs them.
    """
    named = {position for position in (*prompt.boundaries[:1], prompt.turn_end) if start < position < prompt.tokens}
    stride = CHECKPOINT_STRIDE_TOKENS * max(1, -(-(prompt.tokens - start) // _STRIDED_TOKENS_MAX))
    stride = min(stride, max(gap_max, CHECKPOINT_GAP_TOKENS_MIN)) if gap_max else stride
    stops = sorted({start, *named, prompt.turn_end or prompt.tokens - 1})
    positions = set(named)
    for low, high in pairwise(stops):
        strides = range((low // stride + 1) * stride, high, stride)
        positions.update(at for at in strides if min(at - low, high - at) >= CHECKPOINT_GAP_TOKENS_MIN)
    return tuple(sorted(position for position in positions if position > start))


@dataclass(frozen=True)
class _Start:
    source: str
    reuse: int
    resident: str = ""
    follow: str = ""
    keep: bool = False
    chain: tuple[SegmentRef, ...] = ()
    checkpoint: CheckpointRef | None = None


def _cold() -> _Start:
    return _Start(COLD, 0)


def _best_resident(residents: Sequence[Candidate], limit: int) -> _Start | None:
    # The shortest one that reaches as far: continuing a longer one would copy or trim it.
    reach = [(usable_position(each, limit), -each.tokens, each) for each in residents]
    best = max(reach, key=lambda entry: entry[:2], default=None)
    if best is None or best[0] <= 0:
        return None
    return _Start(RESIDENT, best[0], resident=best[2].resident, keep=_must_stay(best[2], best[0]))


def _must_stay(candidate: Candidate, reuse: int) -> bool:
    """It is another conversation's, or what would be given up of it exists nowhere else yet."""
    return reuse < candidate.turn_end or (reuse < candidate.tokens and not candidate.durable)


def usable_position(candidate: Candidate, limit: int) -> int:
    """The deepest token count from which this resident can go on with the prompt; 0 where there is none."""
    reach = min(candidate.common, limit)
    if not candidate.positions:
        return reach
    return max((position for position in candidate.positions if position <= reach), default=0)


def _restorable(match: Match, limit: int, layout: Layout | None) -> _Start | None:
    if not layout or not layout.persistent:
        return None
    position, checkpoint = min(match.tokens, limit), None
    if layout.has_states:
        usable = [each for each in match.checkpoints if each.position <= position]
        checkpoint = max(usable, key=lambda each: each.position, default=None)
        position = checkpoint.position if checkpoint else 0
    if position <= 0:
        return None
    return _Start(RESTORED, position, chain=cut_chain(match.chain, position), checkpoint=checkpoint)


def cut_chain(chain: Sequence[SegmentRef], position: int) -> tuple[SegmentRef, ...]:
    """The part of a chain that gives exactly the rows [0, position)."""
    return tuple(
        SegmentRef(id=link.id, start=link.start, end=link.end, upto=min(link.upto, position))
        for link in chain
        if link.start < position
    )


def _seconds(start: _Start, tokens: int, layout: Layout | None, costs: Costs) -> float:
    computing = prefill_seconds(start.reuse, tokens, costs.prefill)
    if start.source != RESTORED or not layout:
        return computing
    size = start.reuse * layout.row_bytes + (layout.state_bytes if start.checkpoint else 0)
    return computing + RESTORE_OVERHEAD_S + size / (costs.restore_bytes_per_s or RESTORE_BYTES_PER_S_ASSUMED)


def prefill_seconds(start: int, end: int, rates: Sequence[Rate]) -> float:
    """Time to compute [start, end), each stretch at the rate measured nearest above its context length."""
    usable = sorted((rate for rate in rates if rate.tokens_per_s > 0), key=lambda rate: rate.tokens)
    seconds, at = 0.0, start
    for rate in usable[:-1]:
        stretch = min(end, rate.tokens) - at
        if stretch > 0:
            seconds, at = seconds + stretch / rate.tokens_per_s, at + stretch
    last = usable[-1].tokens_per_s if usable else PREFILL_TOKENS_PER_S_ASSUMED
    return seconds + max(0, end - at) / last


def _why(start: _Start, starts: Sequence[_Start | None], match: Match, limit: int, layout: Layout | None) -> str:
    if start.reuse >= limit:
        return ""
    if start.follow:
        return f"another request computes the first {start.reuse} tokens"
    slower = max((other.reuse for other in starts if other), default=0)
    if slower > start.reuse:
        return f"restoring {slower} tokens would take longer"
    if layout and not layout.persistent and start.source == COLD:
        return f"not persistent: {layout.why_not}" if layout.why_not else "not persistent"
    stored = min(match.tokens, limit)
    if layout and layout.has_states and stored > start.reuse:
        return f"{stored} tokens stored, no checkpoint after {start.reuse}"
    if start.source == RESIDENT and start.reuse >= stored:
        return f"in memory up to token {start.reuse}"
    return match.why
