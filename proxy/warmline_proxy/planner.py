"""Plan of a request's start: from a resident, a restorable chain, a running request, or cold.  Pure; the caller acts.

Contract: `plan_request` never reuses the whole prompt (at least one token is left to compute), never ends at a
position that the model's caches can't continue from or, in exact mode, off the grid, and always says why the start is
not warmer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from warmline_common.protocol.messages import CheckpointRef, KvLayout, MessageEnd, SegmentRef
from warmline_common.protocol.tokens import BLOCK_TOKENS
from warmline_proxy.estimate.costs import Costs, EngineLoad
from warmline_proxy.estimate.restore_choice import (
    RECOMPUTED_TOKENS_MIN,
    SOONER_S_MIN,
    SOONER_SHARE_MIN,
    choose_restore_position,
    estimate_restore_s,
    estimate_start_s,
    is_too_short,
    is_worth_computing,
)
from warmline_proxy.store.rows import PrefixMatch, TtftParts

CHECKPOINT_STRIDE_TOKENS = 2_048
CHECKPOINT_STRIDES_MAX = 8  # in a prompt; longer ones get a longer stride, since a state may take 100 MB
_STRIDED_TOKENS_MAX = CHECKPOINT_STRIDE_TOKENS * CHECKPOINT_STRIDES_MAX
CHECKPOINT_GAP_TOKENS_MIN = 512  # closer to a boundary a stride's checkpoint is not worth a split chunk

RESIDENT, RESTORED, SHARED, COLD = "resident", "restored", "shared", "cold"
SHARED_TOKENS_MIN = BLOCK_TOKENS  # less is not worth waiting for another request
TOOLS_ROLE = "tools"  # role of the prompt before all messages
NOTE_TOKENS = 32  # a message's header and what opens its reasoning are shorter
LEADER_LENGTH_RATIO_MAX = 1.25  # of leader to follower, where the leader has not started


@dataclass(frozen=True)
class ResidentCandidate:
    """A resident whose conversation shares its first `common_tokens` tokens with the prompt.

    A prompt that repeats the resident up to `turn_end`, the end of its own prompt's last message, continues the
    conversation, however the answer was rendered, and may take the resident over; any other prompt branches off.
    Both `common_tokens` and `turn_end` may lie past the `tokens` that have rows.
    """

    resident: str
    tokens: int
    common_tokens: int
    positions: Sequence[int] = ()  # from which it can be continued, ascending; empty: any
    turn_end: int = 0
    durable: bool = False  # all of it is on disk


@dataclass(frozen=True)
class RunningRequest:
    """A request that shares its first `common_tokens` tokens with the prompt: at the backend, or about to be."""

    request_id: str
    common_tokens: int
    tokens: int  # of its own prompt
    prefilled: int
    started: bool  # the engine has begun with it
    dispatched: bool = True  # it is at the backend


@dataclass(frozen=True)
class PromptShape:
    """Part of a PromptReply that a plan depends on."""

    tokens: int
    boundaries: Sequence[int] = ()
    turn_end: int = 0
    messages: Sequence[MessageEnd] = ()


@dataclass(frozen=True)
class RequestPlan:
    """Start with `reuse` tokens of `resident`, of a restored `chain`, of the running request `leader_id`, or cold."""

    source: str
    reuse: int
    why_not_warmer: str = ""
    resident: str = ""
    leader_id: str = ""
    copy_resident: bool = False  # the resident is another conversation's, too
    chain: tuple[SegmentRef, ...] = ()
    checkpoint: CheckpointRef | None = None
    checkpoint_positions: tuple[int, ...] = ()  # at which prefill saves recurrent state
    expected: TtftParts = TtftParts()  # noqa: RUF009  frozen; estimated; all 0.0: not estimated
    diverges_at: int | None = None  # token from which on the prompt differs from all known prefixes
    diverges_from: str = ""  # the resident that differs there; "" for a stored prefix

    @property
    def file_ids(self) -> list[str]:
        """Ids of the files to restore."""
        return [link.id for link in self.chain] + ([self.checkpoint.id] if self.checkpoint else [])

    @property
    def expected_ttft_s(self) -> float:
        return self.expected.total_s


@dataclass(frozen=True)
class RestoreCut:
    """Place up to which a stored chain can be restored; with states the position of a checkpoint."""

    position: int
    checkpoint: CheckpointRef | None = None


def plan_request(
    prompt: PromptShape,
    residents: Sequence[ResidentCandidate],
    match: PrefixMatch,
    layout: KvLayout | None,
    costs: Costs,
    *,
    running: Sequence[RunningRequest] = (),
    load: EngineLoad = EngineLoad(),  # noqa: B008  frozen
    checkpoint_gap_max: int = 0,
) -> RequestPlan:
    """The start with the shortest estimated time to the first token; on a tie the one that reuses more.

    A running request that computes more of the prompt is followed, unless that would be clearly later.
    """
    limit, grid = prompt.tokens - 1, layout.grid if layout else 0
    in_memory = _start_from_resident(residents, limit, grid)
    cuts = list_restore_cuts(prompt.tokens, match, layout)
    start = _start_from_disk(cuts, match, prompt.tokens, layout, costs)
    restorable = cuts[-1].position if cuts and not is_too_short(cuts[-1].position, prompt.tokens) else 0
    reuse_max = max(in_memory.reuse if in_memory else 0, restorable)
    if in_memory and _is_preferred(in_memory, start, prompt.tokens, layout, costs):
        start = in_memory
    if leader := _choose_leader(running, start, limit, layout, costs):
        start = RequestPlan(SHARED, _shareable_tokens(leader, limit, grid), leader_id=leader.request_id)
        leader_s = costs.estimate_prefill_s(min(leader.prefilled, start.reuse), start.reuse)
        load = load.follow(leader.request_id, leader_s)
    known = _find_known_prefix(start, prompt, residents, match)
    diverges = known.diverges and known.end >= start.reuse  # a leader may have more of the prompt than is known
    positions = choose_checkpoint_positions(prompt, start.reuse, layout, checkpoint_gap_max)
    return replace(
        start,
        why_not_warmer=_explain_start(start, max(start.reuse, reuse_max), prompt, known, layout),
        checkpoint_positions=positions,
        expected=_estimate_parts(start, positions, prompt.tokens, layout, costs, load),
        diverges_at=known.end if diverges else None,
        diverges_from=known.resident if diverges else "",
    )


def plan_cold(
    prompt: PromptShape,
    layout: KvLayout | None,
    costs: Costs,
    reason: str,
    *,
    load: EngineLoad = EngineLoad(),  # noqa: B008  frozen
    checkpoint_gap_max: int = 0,
) -> RequestPlan:
    """Plan that computes the whole prompt."""
    positions = choose_checkpoint_positions(prompt, 0, layout, checkpoint_gap_max)
    plan = RequestPlan(COLD, 0, reason, checkpoint_positions=positions)
    return replace(plan, expected=_estimate_parts(plan, positions, prompt.tokens, layout, costs, load))


def plan_restores(match: PrefixMatch, layout: KvLayout | None) -> list[RequestPlan]:
    """Plans that restore, ascending: up to each file's end, or the last usable position before that."""
    return [_plan_cut(cut, match) for cut in list_restore_cuts(match.tokens + 1, match, layout)]


def align_to_grid(position: int, grid: int) -> int:
    """The last position up to this one at which KV may end and be reused."""
    return position - position % grid if grid else position


def _shareable_tokens(leader: RunningRequest, limit: int, grid: int) -> int:
    """Tokens that a follower can copy; on a grid, the copy ends before the leader's last token."""
    shared = min(leader.common_tokens, limit)
    return align_to_grid(min(shared, leader.tokens - 1), grid) if grid else shared


def _choose_leader(
    running: Sequence[RunningRequest], start: RequestPlan, limit: int, layout: KvLayout | None, costs: Costs
) -> RunningRequest | None:
    """Running request that will have computed more than `start` reuses, unless this request could clearly sooner.

    Instead of a restore also one that will have computed, or restored, as much: then the files are read once.  Not
    where there are windows: one that has nothing to compute would be past the place before it can be copied.
    """
    grid = layout.grid if layout else 0
    reads_once = start.source == RESTORED and layout is not None and not layout.has_windows
    reach_min = start.reuse + (0 if reads_once else SHARED_TOKENS_MIN)

    def reach(each: RunningRequest) -> int:
        return _shareable_tokens(each, limit, grid)

    def is_worth_it(each: RunningRequest) -> bool:
        is_startable = each.started or each.tokens <= LEADER_LENGTH_RATIO_MAX * (limit + 1)
        # One that is being planned can start from what this one could: they have the same beginning.
        prefilled = each.prefilled if each.dispatched else max(each.prefilled, start.reuse)
        waits_s = costs.estimate_prefill_s(min(prefilled, reach(each)), reach(each))
        alone_s = estimate_start_s(start.reuse, start.source == RESTORED, reach(each) + 1, layout, costs)
        return is_startable and waits_s - alone_s <= max(SOONER_S_MIN, SOONER_SHARE_MIN * waits_s)

    candidates = [each for each in running if reach(each) >= reach_min]
    return max(filter(is_worth_it, candidates), key=reach, default=None)


def choose_checkpoint_positions(
    prompt: PromptShape, start: int, layout: KvLayout | None, gap_max: int = 0
) -> tuple[int, ...]:
    """Positions at the end of system and tools, at the last boundary before the generation prompt, and strides between.

    None where the model has no states.  With a `gap_max` strides are no longer than that, for prefixes saved during
    prefill.  On a grid all positions lie on it, and its last position in the prompt is one of them.
    """
    if layout is None or not layout.has_states:
        return ()
    grid = layout.grid
    boundaries = {at for at in (*prompt.boundaries[:1], prompt.turn_end) if start < at < prompt.tokens}
    stride = CHECKPOINT_STRIDE_TOKENS * max(1, -(-(prompt.tokens - start) // _STRIDED_TOKENS_MAX))
    stride = min(stride, max(gap_max, CHECKPOINT_GAP_TOKENS_MIN)) if gap_max else stride
    stride = max(grid, align_to_grid(stride, grid))
    stops = sorted({start, *boundaries, prompt.turn_end or prompt.tokens - 1})
    positions = set(boundaries)
    for low, high in pairwise(stops):
        strides = range((low // stride + 1) * stride, high, stride)
        positions.update(at for at in strides if min(at - low, high - at) >= CHECKPOINT_GAP_TOKENS_MIN)
    if grid:
        positions = {align_to_grid(position, grid) for position in (*positions, prompt.tokens - 1)}
    return tuple(sorted(position for position in positions if position > start))


def _start_from_resident(residents: Sequence[ResidentCandidate], limit: int, grid: int) -> RequestPlan | None:
    """Start from the resident that reaches furthest; among equals one that need not be copied, since copies pile up,
    and the shortest of these, since least of its rows are dropped.
    """
    usable = [(find_usable_position(each, limit, grid), each) for each in residents]
    ranked = [(reuse, not _needs_copy(each, reuse), -each.tokens, each) for reuse, each in usable if reuse > 0]
    if not ranked:
        return None
    reuse, is_owned, _, best = max(ranked, key=lambda entry: entry[:3])
    return RequestPlan(RESIDENT, reuse, resident=best.resident, copy_resident=not is_owned)


def _needs_copy(candidate: ResidentCandidate, reuse: int) -> bool:
    """True if the resident is another conversation's, or rows past `reuse` are not on disk yet."""
    return candidate.common_tokens < candidate.turn_end or (reuse < candidate.tokens and not candidate.durable)


def find_usable_position(candidate: ResidentCandidate, limit: int, grid: int = 0) -> int:
    """Last position from which this resident can continue with the prompt; 0 where there is none."""
    reach = align_to_grid(min(candidate.common_tokens, candidate.tokens, limit), grid)
    if not candidate.positions:
        return reach
    return max((at for at in candidate.positions if at <= reach and at == align_to_grid(at, grid)), default=0)


def plan_restore(tokens: int, match: PrefixMatch, layout: KvLayout | None) -> RequestPlan | None:
    """Plan that restores stored rows of `tokens` tokens, however long that takes; None where none can be used."""
    cuts = list_restore_cuts(tokens, match, layout)
    return _plan_cut(cuts[-1], match) if cuts else None


def list_restore_cuts(tokens: int, match: PrefixMatch, layout: KvLayout | None) -> list[RestoreCut]:
    """Places to which a prompt of `tokens` tokens can be restored, ascending: files' ends, or checkpoints with states.

    In exact mode the last place before each end that lies on the grid.
    """
    if not layout or not layout.persistent:
        return []
    limit = min(match.tokens, tokens - 1)
    if layout.has_states:
        usable = (each for each in match.checkpoints if each.position == align_to_grid(each.position, layout.grid))
        by_position = {each.position: each for each in usable if 0 < each.position <= limit}
        return [RestoreCut(position, checkpoint) for position, checkpoint in sorted(by_position.items())]
    ends = {align_to_grid(min(link.upto, limit), layout.grid) for link in match.chain}
    return [RestoreCut(end) for end in sorted(ends) if end > 0]


def _plan_cut(cut: RestoreCut, match: PrefixMatch) -> RequestPlan:
    chain = truncate_chain(match.chain, cut.position)
    return RequestPlan(RESTORED, cut.position, chain=chain, checkpoint=cut.checkpoint)


def _start_from_disk(
    cuts: Sequence[RestoreCut], match: PrefixMatch, tokens: int, layout: KvLayout | None, costs: Costs
) -> RequestPlan:
    """Start that restores as much as is worth it, or nothing: the rest is computed."""
    if not cuts or not layout:
        return RequestPlan(COLD, 0)
    position = choose_restore_position([cut.position for cut in cuts], tokens, layout, costs)
    chosen = next((cut for cut in cuts if cut.position == position), None)
    return _plan_cut(chosen, match) if chosen else RequestPlan(COLD, 0)


def _is_preferred(
    in_memory: RequestPlan, stored: RequestPlan, tokens: int, layout: KvLayout | None, costs: Costs
) -> bool:
    """True where a start in memory is better than one that restores, or than a cold one."""
    if in_memory.reuse >= stored.reuse:
        return True
    seconds, stored_s = (
        estimate_start_s(each.reuse, each.source == RESTORED, tokens, layout, costs) for each in (in_memory, stored)
    )
    if stored.reuse - in_memory.reuse < RECOMPUTED_TOKENS_MIN:
        return seconds <= stored_s
    return is_worth_computing(stored_s - seconds, costs.estimate_prefill_s(in_memory.reuse, stored.reuse), stored_s)


def truncate_chain(chain: Sequence[SegmentRef], position: int) -> tuple[SegmentRef, ...]:
    """Part of a chain with exactly the rows [0, position)."""
    covered = (link for link in chain if link.start < position)
    return tuple(msgspec.structs.replace(link, upto=min(link.upto, position)) for link in covered)


def _estimate_parts(
    start: RequestPlan,
    chunk_ends: Sequence[int],
    tokens: int,
    layout: KvLayout | None,
    costs: Costs,
    load: EngineLoad,
) -> TtftParts:
    """Parts of the time to the first token; the prompt's last token is computed by the first step."""
    wait_s, prefill_s = load.estimate_prefill(start.reuse, tokens - 1, costs, chunk_ends)
    return TtftParts(
        render_s=costs.render.estimate_s(tokens),
        plan_s=costs.plan.estimate_s(tokens),
        restore_s=estimate_restore_s(start.reuse if start.source == RESTORED else 0, layout, costs),
        wait_s=wait_s,
        prefill_s=prefill_s,
        first_step_s=costs.first_step.estimate_s(tokens),
    )


@dataclass(frozen=True)
class _KnownPrefix:
    """Prefix of the prompt that was computed before, as far as is known, and why it ends."""

    end: int
    reason: str
    diverges: bool = False
    resident: str = ""  # with these tokens; "" for a stored prefix


def _explain_start(
    start: RequestPlan, reuse_max: int, prompt: PromptShape, known: _KnownPrefix, layout: KvLayout | None
) -> str:
    """`reuse_max`: tokens that the best of all possible starts reuses, however long it takes."""
    limit, grid = prompt.tokens - 1, layout.grid if layout else 0
    whole_steps = f"exact mode keeps and reuses multiples of {grid} tokens"
    if start.reuse >= limit:
        return ""
    if start.leader_id:
        return f"another request computes the first {start.reuse} tokens"
    if reuse_max > start.reuse:
        return f"restoring {reuse_max} tokens would take longer"
    if layout and not layout.persistent and start.source == COLD:
        return f"not persistent: {layout.why_not}" if layout.why_not else "not persistent"
    if grid and align_to_grid(limit, grid) <= start.reuse:
        return whole_steps
    if has_fixed_positions(layout) and start.reuse < align_to_grid(known.end, grid):
        return f"{known.reason}; no checkpoint after token {start.reuse}"
    return f"{known.reason}; {whole_steps}" if grid else known.reason


def has_fixed_positions(layout: KvLayout | None) -> bool:
    """True if rows can be continued only from checkpoints or window starts, not from any position."""
    return layout is not None and (layout.has_states or layout.has_windows)


def _find_known_prefix(
    start: RequestPlan, prompt: PromptShape, residents: Sequence[ResidentCandidate], match: PrefixMatch
) -> _KnownPrefix:
    """Longest known prefix; of equals a divergent one, then one of the start's kind: youngest resident or stored."""
    stored = _find_stored_prefix(match, prompt)
    resident = [_find_resident_prefix(each, prompt) for each in reversed(residents)]
    prefixes = [*resident, stored] if start.source == RESIDENT else [stored, *resident]
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
    """Place of a token: in one of messages `first` to `last`, in the tools, after all messages, or unknown."""

    first_message: int = 0
    last_message: int = 0
    role: str = ""  # "tools" in the tools; "" where it may be one of several messages
    note: str = ""
    is_after_last_message: bool = False

    @property
    def description(self) -> str:
        """Text such as ", in message 4 (assistant): ..."; "" where unknown."""
        if self.is_after_last_message:
            return ", after the last message"
        if self.role == TOOLS_ROLE:
            return ", in the tools"
        if self.first_message < self.last_message:
            return f", in messages {self.first_message} to {self.last_message}"
        note = f": {self.note}" if self.note else ""
        return f", in message {self.last_message} ({self.role}){note}" if self.last_message else ""


def locate_token(messages: Sequence[MessageEnd], position: int) -> TokenLocation:
    """Place of the token at `position`."""
    after = next((index for index, message in enumerate(messages) if message.end > position), None)
    if after is None:
        return TokenLocation(is_after_last_message=bool(messages))
    start, first = (messages[after - 1].end, messages[after - 1].number + 1) if after else (0, 1)
    last = messages[after]
    if not last.number:
        return TokenLocation(role=TOOLS_ROLE)
    if first < last.number:
        return TokenLocation(first, last.number)
    note = last.note if position - start < NOTE_TOKENS else ""  # of the reasoning, which comes first in a message
    return TokenLocation(last.number, last.number, last.role, note)
