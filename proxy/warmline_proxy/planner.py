"""Where a request should start: a resident, a restorable chain, or cold.  Pure; the caller acts.

Contract: `decide` never reuses the whole prompt (at least one token is left to compute), never a position where the
model's caches can't go on or, in exact mode, one off the grid, and always says why the start is not warmer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from warmline_common.protocol.messages import CheckpointRef, KvLayout, MessageEnd, PrefillRate, SegmentRef
from warmline_common.protocol.tokens import BLOCK_TOKENS
from warmline_proxy.store.rows import PrefixMatch

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
TOOLS_ROLE = "tools"  # the role of what stands before all messages
NOTE_TOKENS = 32  # a message's header and what opens its reasoning are shorter
LEADER_LENGTH_RATIO_MAX = 1.25  # times one's own prompt: nobody waits for a much longer one that has not begun


@dataclass(frozen=True)
class ResidentCandidate:
    """A resident whose conversation shares its first `common` tokens with the prompt.

    A prompt that repeats it up to `turn_end`, where the last message of its own prompt ends, goes on with the same
    conversation, however its answer was rendered, and may take it over; any other branches off a living one.  Both may
    lie past the `tokens` that have rows.
    """

    resident: str
    tokens: int
    common_tokens: int
    positions: Sequence[int] = ()  # where it can be continued, ascending; empty means anywhere
    turn_end: int = 0
    durable: bool = False  # all of it is on disk


@dataclass(frozen=True)
class RunningRequest:
    """A request at the backend that shares its first `common` tokens with the prompt, and has computed `prefilled`."""

    request_id: str
    common_tokens: int
    tokens: int  # of its own prompt
    prefilled: int
    started: bool


@dataclass(frozen=True)
class Costs:
    """What the backend measured (Status); empty and zero where it has not yet."""

    prefill: Sequence[PrefillRate] = ()
    restore_bytes_per_s: float = 0.0


UNMEASURED = Costs()


@dataclass(frozen=True)
class PromptShape:
    """What of a PromptReply a plan depends on."""

    tokens: int
    boundaries: Sequence[int] = ()
    turn_end: int = 0
    messages: Sequence[MessageEnd] = ()


@dataclass(frozen=True)
class RequestPlan:
    """`reuse` tokens of `resident`, or of what restoring `chain` (and `checkpoint`) gives, or of what the request
    `follow` is computing, or nothing.
    """

    source: str
    reuse: int
    why_not_warmer: str
    resident: str = ""
    leader_id: str = ""
    copy_resident: bool = False  # the resident is another conversation's too: copy it
    chain: tuple[SegmentRef, ...] = ()
    checkpoint: CheckpointRef | None = None
    checkpoint_positions: tuple[int, ...] = ()  # where to keep recurrent state while prefilling
    expected_ttft_s: float = 0.0  # to the first token, as estimated, without waiting for a turn; 0.0: nobody has
    diverges_at: int | None = None  # the token from which on the prompt differs from all that is known
    diverges_from: str = ""  # the resident that it differs from there; "" where it is what is stored

    @property
    def file_ids(self) -> list[str]:
        """The ids of what is on disk of it."""
        return [link.id for link in self.chain] + ([self.checkpoint.id] if self.checkpoint else [])


def plan_request(
    prompt: PromptShape,
    residents: Sequence[ResidentCandidate],
    match: PrefixMatch,
    layout: KvLayout | None,
    costs: Costs,
    *,
    running: Sequence[RunningRequest] = (),
    checkpoint_gap_max: int = 0,
) -> RequestPlan:
    """The start with the shortest estimated time to the first token; on a tie the one that computes and touches less.

    Where that leaves something to compute that a running request is computing anyway, it is followed.
    """
    limit, grid = prompt.tokens - 1, _grid_step(layout)
    starts = [_start_cold(), _start_from_resident(residents, limit, grid), _start_from_disk(match, limit, layout)]
    estimates = [(_estimate_ttft_s(start, prompt.tokens, layout, costs), start) for start in starts if start]
    seconds, start = min(estimates, key=lambda pair: (pair[0], -pair[1].reuse))
    if leader := _choose_leader(running, start.reuse, limit, grid, costs):
        start = _StartOption(SHARED, _shareable_tokens(leader, limit, grid), leader_id=leader.request_id)
        seconds = estimate_prefill_s(min(leader.prefilled, start.reuse), prompt.tokens, costs.prefill)
    known_prefix = _find_known_prefix(start, prompt, residents, match)
    return RequestPlan(
        source=start.source,
        reuse=start.reuse,
        why_not_warmer=_explain_start(start, starts, prompt, known_prefix, layout),
        resident=start.resident,
        leader_id=start.leader_id,
        copy_resident=start.copy_resident,
        chain=start.chain,
        checkpoint=start.checkpoint,
        checkpoint_positions=_plan_checkpoints(prompt, start.reuse, layout, checkpoint_gap_max),
        expected_ttft_s=seconds,
        diverges_at=known_prefix.end if known_prefix.diverges else None,
        diverges_from=known_prefix.resident if known_prefix.diverges else "",
    )


def plan_cold(
    prompt: PromptShape, layout: KvLayout | None, reason: str, checkpoint_gap_max: int = 0, *, costs: Costs = UNMEASURED
) -> RequestPlan:
    """Compute everything, whatever is stored."""
    return RequestPlan(
        source=COLD,
        reuse=0,
        why_not_warmer=reason,
        checkpoint_positions=_plan_checkpoints(prompt, 0, layout, checkpoint_gap_max),
        expected_ttft_s=estimate_prefill_s(0, prompt.tokens, costs.prefill),
    )


def plan_restore(tokens: int, match: PrefixMatch, layout: KvLayout | None) -> RequestPlan | None:
    """Start from what is on disk, however long that takes; None where nothing there is of use."""
    start = _start_from_disk(match, tokens - 1, layout)
    if start is None:
        return None
    return RequestPlan(RESTORED, start.reuse, "", chain=start.chain, checkpoint=start.checkpoint)


def plan_restores(match: PrefixMatch, layout: KvLayout | None) -> list[RequestPlan]:
    """Starts from what is on disk, ascending: at each place where a file ends, or the last one before that."""
    ends = {link.upto for link in match.chain} | {each.position for each in match.checkpoints}
    plans = (plan_restore(end + 1, match, layout) for end in sorted(ends))
    return list({plan.reuse: plan for plan in plans if plan}.values())


def align_to_grid(position: int, grid: int) -> int:
    """The last position up to this one at which KV may end and be reused."""
    return position - position % grid if grid else position


def _grid_step(layout: KvLayout | None) -> int:
    return layout.grid if layout else 0


def _shareable_tokens(leader: RunningRequest, limit: int, grid: int) -> int:
    """How much of what it computes can be shared; on a grid, its last token comes after the last place of a copy."""
    return (
        align_to_grid(min(leader.common_tokens, limit, leader.tokens - 1), grid)
        if grid
        else min(leader.common_tokens, limit)
    )


def _choose_leader(
    running: Sequence[RunningRequest], reuse: int, limit: int, grid: int, costs: Costs
) -> RunningRequest | None:
    """Whom to follow: who has, or will have, computed more than a start at `reuse` has, and sooner than we could."""

    def reach(each: RunningRequest) -> int:
        return _shareable_tokens(each, limit, grid)

    def is_worth_it(each: RunningRequest) -> bool:
        is_startable = each.started or each.tokens <= LEADER_LENGTH_RATIO_MAX * (limit + 1)
        waits_s = estimate_prefill_s(min(each.prefilled, reach(each)), reach(each), costs.prefill)
        return is_startable and waits_s <= estimate_prefill_s(reuse, reach(each), costs.prefill)

    candidates = [each for each in running if reach(each) >= reuse + SHARED_TOKENS_MIN]
    return max(filter(is_worth_it, candidates), key=reach, default=None)


def _plan_checkpoints(prompt: PromptShape, reuse: int, layout: KvLayout | None, gap_max: int) -> tuple[int, ...]:
    if layout is None or not layout.has_states:
        return ()
    return choose_checkpoint_positions(prompt, reuse, gap_max, layout.grid)


def choose_checkpoint_positions(prompt: PromptShape, start: int, gap_max: int = 0, grid: int = 0) -> tuple[int, ...]:
    """End of system and tools, the last boundary before the generation prompt, and a stride in between.

    With a `gap_max`, strides are no longer than that: a prefill that is saved on its way needs them.  With a `grid`,
    all lie on it, and its last position in the prompt is one of them.
    """
    boundaries = {
        position for position in (*prompt.boundaries[:1], prompt.turn_end) if start < position < prompt.tokens
    }
    stride = _checkpoint_stride(prompt.tokens - start, gap_max, grid)
    stops = sorted({start, *boundaries, prompt.turn_end or prompt.tokens - 1})
    positions = set(boundaries)
    for low, high in pairwise(stops):
        strides = range((low // stride + 1) * stride, high, stride)
        positions.update(at for at in strides if min(at - low, high - at) >= CHECKPOINT_GAP_TOKENS_MIN)
    if grid:
        positions = {align_to_grid(position, grid) for position in (*positions, prompt.tokens - 1)}
    return tuple(sorted(position for position in positions if position > start))


def _checkpoint_stride(tokens: int, gap_max: int, grid: int) -> int:
    stride = CHECKPOINT_STRIDE_TOKENS * max(1, -(-tokens // _STRIDED_TOKENS_MAX))
    stride = min(stride, max(gap_max, CHECKPOINT_GAP_TOKENS_MIN)) if gap_max else stride
    return max(grid, align_to_grid(stride, grid))


@dataclass(frozen=True)
class _StartOption:
    source: str
    reuse: int
    resident: str = ""
    leader_id: str = ""
    copy_resident: bool = False
    chain: tuple[SegmentRef, ...] = ()
    checkpoint: CheckpointRef | None = None


def _start_cold() -> _StartOption:
    return _StartOption(COLD, 0)


def _start_from_resident(residents: Sequence[ResidentCandidate], limit: int, grid: int) -> _StartOption | None:
    """Of those that reach as far, one that need not be copied: what is left behind piles up.  Of these the shortest,
    since least of it is given up.
    """
    starts = []
    for each in residents:
        reuse = find_usable_position(each, limit, grid)
        copy_resident = _needs_copy(each, reuse)
        starts.append(
            (
                reuse,
                not copy_resident,
                -each.tokens,
                _StartOption(RESIDENT, reuse, resident=each.resident, copy_resident=copy_resident),
            )
        )
    best = max(starts, key=lambda entry: entry[:3], default=None)
    return best[3] if best and best[0] > 0 else None


def _needs_copy(candidate: ResidentCandidate, reuse: int) -> bool:
    """It is another conversation's, or what would be given up of it exists nowhere else yet."""
    return candidate.common_tokens < candidate.turn_end or (reuse < candidate.tokens and not candidate.durable)


def find_usable_position(candidate: ResidentCandidate, limit: int, grid: int = 0) -> int:
    """The deepest token count from which this resident can go on with the prompt; 0 where there is none."""
    reach = align_to_grid(min(candidate.common_tokens, candidate.tokens, limit), grid)
    if not candidate.positions:
        return reach
    usable = (
        position for position in candidate.positions if position <= reach and position == align_to_grid(position, grid)
    )
    return max(usable, default=0)


def _start_from_disk(match: PrefixMatch, limit: int, layout: KvLayout | None) -> _StartOption | None:
    if not layout or not layout.persistent:
        return None
    position, checkpoint = align_to_grid(min(match.tokens, limit), layout.grid), None
    if layout.has_states:
        usable = [
            each
            for each in match.checkpoints
            if each.position <= position and each.position == align_to_grid(each.position, layout.grid)
        ]
        checkpoint = max(usable, key=lambda each: each.position, default=None)
        position = checkpoint.position if checkpoint else 0
    if position <= 0:
        return None
    return _StartOption(RESTORED, position, chain=truncate_chain(match.chain, position), checkpoint=checkpoint)


def truncate_chain(chain: Sequence[SegmentRef], position: int) -> tuple[SegmentRef, ...]:
    """The part of a chain that gives exactly the rows [0, position)."""
    return tuple(
        SegmentRef(id=link.id, start=link.start, end=link.end, upto=min(link.upto, position))
        for link in chain
        if link.start < position
    )


def _estimate_ttft_s(start: _StartOption, tokens: int, layout: KvLayout | None, costs: Costs) -> float:
    computing = estimate_prefill_s(start.reuse, tokens, costs.prefill)
    if start.source != RESTORED or not layout:
        return computing
    size = start.reuse * layout.row_bytes + (layout.state_bytes if start.checkpoint else 0)
    return computing + RESTORE_OVERHEAD_S + size / (costs.restore_bytes_per_s or RESTORE_BYTES_PER_S_ASSUMED)


def estimate_prefill_s(start: int, end: int, rates: Sequence[PrefillRate]) -> float:
    """Time to compute [start, end), each stretch at the rate measured nearest above its context length."""
    usable = sorted((rate for rate in rates if rate.tokens_per_s > 0), key=lambda rate: rate.tokens)
    seconds, at = 0.0, start
    for rate in usable[:-1]:
        stretch = min(end, rate.tokens) - at
        if stretch > 0:
            seconds, at = seconds + stretch / rate.tokens_per_s, at + stretch
    last = usable[-1].tokens_per_s if usable else PREFILL_TOKENS_PER_S_ASSUMED
    return seconds + max(0, end - at) / last


def _explain_start(
    start: _StartOption,
    options: Sequence[_StartOption | None],
    prompt: PromptShape,
    known_prefix: "_KnownPrefix",
    layout: KvLayout | None,
) -> str:
    limit, grid = prompt.tokens - 1, _grid_step(layout)
    if start.reuse >= limit:
        return ""
    if start.leader_id:
        return f"another request computes the first {start.reuse} tokens"
    slower_reuse = max((other.reuse for other in options if other), default=0)
    if slower_reuse > start.reuse:
        return f"restoring {slower_reuse} tokens would take longer"
    if layout and not layout.persistent and start.source == COLD:
        return f"not persistent: {layout.why_not}" if layout.why_not else "not persistent"
    if grid and align_to_grid(limit, grid) <= start.reuse:
        return _explain_grid(grid)
    if _has_fixed_positions(layout) and start.reuse < align_to_grid(known_prefix.end, grid):
        return f"{known_prefix.reason}; no checkpoint after token {start.reuse}"
    return f"{known_prefix.reason}; {_explain_grid(grid)}" if grid else known_prefix.reason


def _has_fixed_positions(layout: KvLayout | None) -> bool:
    """And not just anywhere."""
    return layout is not None and (layout.has_states or layout.has_windows)


def _explain_grid(grid: int) -> str:
    return f"exact mode keeps and reuses multiples of {grid} tokens"


@dataclass(frozen=True)
class _KnownPrefix:
    """How many of the prompt's tokens were computed before, as far as is known, and why no more."""

    end: int
    reason: str
    diverges: bool = False
    resident: str = ""  # in which they are


def _find_known_prefix(
    start: _StartOption, prompt: PromptShape, residents: Sequence[ResidentCandidate], match: PrefixMatch
) -> _KnownPrefix:
    """What reaches furthest; of the same, what differs there, then what is in memory where the start is, the youngest
    first.
    """
    stored_prefix, resident_prefixes = (
        _find_stored_prefix(match, prompt),
        [_find_resident_prefix(each, prompt) for each in reversed(residents)],
    )
    prefixes = [*resident_prefixes, stored_prefix] if start.source == RESIDENT else [stored_prefix, *resident_prefixes]
    return max(prefixes, key=lambda each: (each.end, each.diverges))


def _find_stored_prefix(match: PrefixMatch, prompt: PromptShape) -> _KnownPrefix:
    if match.tokens >= prompt.tokens - 1:
        return _KnownPrefix(prompt.tokens - 1, "all of it is stored")
    where = locate_token(prompt.messages, match.tokens).description if match.is_divergent else ""
    return _KnownPrefix(match.tokens, match.end_reason + where, match.is_divergent)


def _find_resident_prefix(candidate: ResidentCandidate, prompt: PromptShape) -> _KnownPrefix:
    end = min(candidate.common_tokens, candidate.tokens, prompt.tokens - 1)
    if end < min(candidate.tokens, prompt.tokens - 1):
        where = locate_token(prompt.messages, end).description
        return _KnownPrefix(end, f"differs from what is in memory at token {end}{where}", True, candidate.resident)
    return _KnownPrefix(end, f"in memory up to token {end}")


@dataclass(frozen=True)
class TokenLocation:
    """Where a token lies: in one of messages `first` to `last`, or in the tools, or after all; or nobody knows."""

    first_message: int = 0
    last_message: int = 0
    role: str = ""  # "tools" in the tools; "" where it may be one of several messages
    note: str = ""
    is_after_last_message: bool = False

    @property
    def description(self) -> str:
        """For people: ", in message 4 (assistant): ..."; "" where nobody knows."""
        if self.is_after_last_message:
            return ", after the last message"
        if self.role == TOOLS_ROLE:
            return ", in the tools"
        if self.first_message < self.last_message:
            return f", in messages {self.first_message} to {self.last_message}"
        return (
            f", in message {self.last_message} ({self.role})" + (f": {self.note}" if self.note else "")
            if self.last_message
            else ""
        )


def locate_token(messages: Sequence[MessageEnd], position: int) -> TokenLocation:
    """Where token `at` lies."""
    after = next((index for index, message in enumerate(messages) if message.end > position), None)
    if after is None:
        return TokenLocation(is_after_last_message=bool(messages))
    start, first = (messages[after - 1].end, messages[after - 1].number + 1) if after else (0, 1)
    last = messages[after]
    if not last.number:
        return TokenLocation(role=TOOLS_ROLE)
    if first < last.number:
        return TokenLocation(first, last.number)
    note = (
        last.note if position - start < NOTE_TOKENS else ""
    )  # reasoning comes first: what differs later is something else
    return TokenLocation(last.number, last.number, last.role, note)
