"""Where a request should start: a resident, a restorable chain, or cold.  Pure; the caller acts.

Contract: `decide` never reuses the whole prompt (at least one token is left to compute), never a position where the
model's caches can't go on or, in exact mode, one off the grid, and always says why the start is not warmer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from warmline_common.protocol.messages import CheckpointRef, Layout, MessageEnd, Rate, SegmentRef
from warmline_common.protocol.tokens import BLOCK_TOKENS
from warmline_proxy.store.rows import Match

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
TOOLS = "tools"  # the role of what stands before all messages
NOTE_TOKENS = 32  # a message's header and what opens its reasoning are shorter
LEADER_TOKENS_MAX = 1.25  # times one's own prompt: nobody waits for a much longer one that has not begun


@dataclass(frozen=True)
class Candidate:
    """A resident whose conversation shares its first `common` tokens with the prompt.

    A prompt that repeats it up to `turn_end`, where the last message of its own prompt ends, goes on with the same
    conversation, however its answer was rendered, and may take it over; any other branches off a living one.  Both may
    lie past the `tokens` that have rows.
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


UNMEASURED = Costs()


@dataclass(frozen=True)
class Prompt:
    """What of a PromptReply a plan depends on."""

    tokens: int
    boundaries: Sequence[int] = ()
    turn_end: int = 0
    messages: Sequence[MessageEnd] = ()


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
    seconds: float = 0.0  # to the first token, as estimated, without waiting for a turn; 0.0: nobody has
    parts_at: int | None = None  # the token from which on the prompt differs from all that is known
    parts_with: str = ""  # the resident that it differs from there; "" where it is what is stored

    @property
    def files(self) -> list[str]:
        """The ids of what is on disk of it."""
        return [link.id for link in self.chain] + ([self.checkpoint.id] if self.checkpoint else [])


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
    limit, grid = prompt.tokens - 1, _grid(layout)
    starts = [_cold(), _best_resident(residents, limit, grid), _restorable(match, limit, layout)]
    timed = [(_seconds(start, prompt.tokens, layout, costs), start) for start in starts if start]
    seconds, start = min(timed, key=lambda pair: (pair[0], -pair[1].reuse))
    if leader := _leader(running, start.reuse, limit, grid, costs):
        start = _Start(SHARED, _reach(leader, limit, grid), follow=leader.request_id)
        seconds = prefill_seconds(min(leader.prefilled, start.reuse), prompt.tokens, costs.prefill)
    known = _known(start, prompt, residents, match)
    return Plan(
        source=start.source,
        reuse=start.reuse,
        why_not_warmer=_why(start, starts, prompt, known, layout),
        resident=start.resident,
        follow=start.follow,
        keep=start.keep,
        chain=start.chain,
        checkpoint=start.checkpoint,
        checkpoints=_checkpoints(prompt, start.reuse, layout, checkpoint_gap_max),
        seconds=seconds,
        parts_at=known.until if known.differs else None,
        parts_with=known.resident if known.differs else "",
    )


def cold_plan(
    prompt: Prompt, layout: Layout | None, why: str, checkpoint_gap_max: int = 0, *, costs: Costs = UNMEASURED
) -> Plan:
    """Compute everything, whatever is stored."""
    return Plan(
        source=COLD,
        reuse=0,
        why_not_warmer=why,
        checkpoints=_checkpoints(prompt, 0, layout, checkpoint_gap_max),
        seconds=prefill_seconds(0, prompt.tokens, costs.prefill),
    )


def restored_plan(tokens: int, match: Match, layout: Layout | None) -> Plan | None:
    """Start from what is on disk, however long that takes; None where nothing there is of use."""
    start = _restorable(match, tokens - 1, layout)
    if start is None:
        return None
    return Plan(RESTORED, start.reuse, "", chain=start.chain, checkpoint=start.checkpoint)


def restored_plans(match: Match, layout: Layout | None) -> list[Plan]:
    """Starts from what is on disk, ascending: at each place where a file ends, or the last one before that."""
    ends = {link.upto for link in match.chain} | {each.position for each in match.checkpoints}
    plans = (restored_plan(end + 1, match, layout) for end in sorted(ends))
    return list({plan.reuse: plan for plan in plans if plan}.values())


def on_grid(position: int, grid: int) -> int:
    """The last position up to this one at which KV may end and be reused."""
    return position - position % grid if grid else position


def _grid(layout: Layout | None) -> int:
    return layout.grid if layout else 0


def _reach(leader: Running, limit: int, grid: int) -> int:
    """How much of what it computes can be shared; on a grid, its last token comes after the last place of a copy."""
    return on_grid(min(leader.common, limit, leader.tokens - 1), grid) if grid else min(leader.common, limit)


def _leader(running: Sequence[Running], reuse: int, limit: int, grid: int, costs: Costs) -> Running | None:
    """Whom to follow: who has, or will have, computed more than a start at `reuse` has, and sooner than we could."""

    def reach(each: Running) -> int:
        return _reach(each, limit, grid)

    def is_worth_it(each: Running) -> bool:
        begins = each.started or each.tokens <= LEADER_TOKENS_MAX * (limit + 1)
        waits_s = prefill_seconds(min(each.prefilled, reach(each)), reach(each), costs.prefill)
        return begins and waits_s <= prefill_seconds(reuse, reach(each), costs.prefill)

    further = [each for each in running if reach(each) >= reuse + SHARED_TOKENS_MIN]
    return max(filter(is_worth_it, further), key=reach, default=None)


def _checkpoints(prompt: Prompt, start: int, layout: Layout | None, gap_max: int) -> tuple[int, ...]:
    if layout is None or not layout.has_states:
        return ()
    return checkpoint_positions(prompt, start, gap_max, layout.grid)


def checkpoint_positions(prompt: Prompt, start: int, gap_max: int = 0, grid: int = 0) -> tuple[int, ...]:
    """End of system and tools, the last boundary before the generation prompt, and a stride in between.

    With a `gap_max`, strides are no longer than that: a prefill that is saved on its way needs them.  With a `grid`,
    all lie on it, and its last position in the prompt is one of them.
    """
    named = {position for position in (*prompt.boundaries[:1], prompt.turn_end) if start < position < prompt.tokens}
    stride = _stride(prompt.tokens - start, gap_max, grid)
    stops = sorted({start, *named, prompt.turn_end or prompt.tokens - 1})
    positions = set(named)
    for low, high in pairwise(stops):
        strides = range((low // stride + 1) * stride, high, stride)
        positions.update(at for at in strides if min(at - low, high - at) >= CHECKPOINT_GAP_TOKENS_MIN)
    if grid:
        positions = {on_grid(position, grid) for position in (*positions, prompt.tokens - 1)}
    return tuple(sorted(position for position in positions if position > start))


def _stride(tokens: int, gap_max: int, grid: int) -> int:
    stride = CHECKPOINT_STRIDE_TOKENS * max(1, -(-tokens // _STRIDED_TOKENS_MAX))
    stride = min(stride, max(gap_max, CHECKPOINT_GAP_TOKENS_MIN)) if gap_max else stride
    return max(grid, on_grid(stride, grid))


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


def _best_resident(residents: Sequence[Candidate], limit: int, grid: int) -> _Start | None:
    """Of those that reach as far, one that need not be copied: what is left behind piles up.  Of these the shortest,
    since least of it is given up.
    """
    starts = []
    for each in residents:
        reuse = usable_position(each, limit, grid)
        keep = _must_stay(each, reuse)
        starts.append((reuse, not keep, -each.tokens, _Start(RESIDENT, reuse, resident=each.resident, keep=keep)))
    best = max(starts, key=lambda entry: entry[:3], default=None)
    return best[3] if best and best[0] > 0 else None


def _must_stay(candidate: Candidate, reuse: int) -> bool:
    """It is another conversation's, or what would be given up of it exists nowhere else yet."""
    return candidate.common < candidate.turn_end or (reuse < candidate.tokens and not candidate.durable)


def usable_position(candidate: Candidate, limit: int, grid: int = 0) -> int:
    """The deepest token count from which this resident can go on with the prompt; 0 where there is none."""
    reach = on_grid(min(candidate.common, candidate.tokens, limit), grid)
    if not candidate.positions:
        return reach
    usable = (position for position in candidate.positions if position <= reach and position == on_grid(position, grid))
    return max(usable, default=0)


def _restorable(match: Match, limit: int, layout: Layout | None) -> _Start | None:
    if not layout or not layout.persistent:
        return None
    position, checkpoint = on_grid(min(match.tokens, limit), layout.grid), None
    if layout.has_states:
        usable = [
            each
            for each in match.checkpoints
            if each.position <= position and each.position == on_grid(each.position, layout.grid)
        ]
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


def _why(
    start: _Start,
    starts: Sequence[_Start | None],
    prompt: Prompt,
    known: "_Known",
    layout: Layout | None,
) -> str:
    limit, grid = prompt.tokens - 1, _grid(layout)
    if start.reuse >= limit:
        return ""
    if start.follow:
        return f"another request computes the first {start.reuse} tokens"
    slower = max((other.reuse for other in starts if other), default=0)
    if slower > start.reuse:
        return f"restoring {slower} tokens would take longer"
    if layout and not layout.persistent and start.source == COLD:
        return f"not persistent: {layout.why_not}" if layout.why_not else "not persistent"
    if grid and on_grid(limit, grid) <= start.reuse:
        return _grid_why(grid)
    if _continues_at_places(layout) and start.reuse < on_grid(known.until, grid):
        return f"{known.why}; no checkpoint after token {start.reuse}"
    return f"{known.why}; {_grid_why(grid)}" if grid else known.why


def _continues_at_places(layout: Layout | None) -> bool:
    """And not just anywhere."""
    return layout is not None and (layout.has_states or layout.has_windows)


def _grid_why(grid: int) -> str:
    return f"exact mode keeps and reuses multiples of {grid} tokens"


@dataclass(frozen=True)
class _Known:
    """How many of the prompt's tokens were computed before, as far as is known, and why no more."""

    until: int
    why: str
    differs: bool = False
    resident: str = ""  # in which they are


def _known(start: _Start, prompt: Prompt, residents: Sequence[Candidate], match: Match) -> _Known:
    """What reaches furthest; of the same, what differs there, then what is in memory where the start is, the youngest
    first.
    """
    stored, in_memory = _stored(match, prompt), [_in_memory(each, prompt) for each in reversed(residents)]
    known = [*in_memory, stored] if start.source == RESIDENT else [stored, *in_memory]
    return max(known, key=lambda each: (each.until, each.differs))


def _stored(match: Match, prompt: Prompt) -> _Known:
    if match.tokens >= prompt.tokens - 1:
        return _Known(prompt.tokens - 1, "all of it is stored")
    where = place(prompt.messages, match.tokens).told if match.differs else ""
    return _Known(match.tokens, match.why + where, match.differs)


def _in_memory(resident: Candidate, prompt: Prompt) -> _Known:
    until = min(resident.common, resident.tokens, prompt.tokens - 1)
    if until < min(resident.tokens, prompt.tokens - 1):
        where = place(prompt.messages, until).told
        return _Known(until, f"differs from what is in memory at token {until}{where}", True, resident.resident)
    return _Known(until, f"in memory up to token {until}")


@dataclass(frozen=True)
class Place:
    """Where a token lies: in one of messages `first` to `last`, or in the tools, or after all; or nobody knows."""

    first: int = 0
    last: int = 0
    role: str = ""  # "tools" in the tools; "" where it may be one of several messages
    note: str = ""
    after_all: bool = False

    @property
    def told(self) -> str:
        """For people: ", in message 4 (assistant): ..."; "" where nobody knows."""
        if self.after_all:
            return ", after the last message"
        if self.role == TOOLS:
            return ", in the tools"
        if self.first < self.last:
            return f", in messages {self.first} to {self.last}"
        return f", in message {self.last} ({self.role})" + (f": {self.note}" if self.note else "") if self.last else ""


def place(messages: Sequence[MessageEnd], at: int) -> Place:
    """Where token `at` lies."""
    after = next((index for index, message in enumerate(messages) if message.end > at), None)
    if after is None:
        return Place(after_all=bool(messages))
    start, first = (messages[after - 1].end, messages[after - 1].number + 1) if after else (0, 1)
    last = messages[after]
    if not last.number:
        return Place(role=TOOLS)
    if first < last.number:
        return Place(first, last.number)
    note = last.note if at - start < NOTE_TOKENS else ""  # reasoning comes first: what differs later is something else
    return Place(last.number, last.number, last.role, note)
