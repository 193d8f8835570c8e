"""What conversations of some lengths take, in memory and on disk, and which of them a machine can hold.  Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmline_backend.doctor.findings import Findings, format_bytes
from warmline_backend.doctor.machines import MachineMemory, format_raise_limit
from warmline_backend.kv_cache.codecs import round_up_to_buffer
from warmline_backend.model.model import MEMORY_SHARE
from warmline_backend.scheduler.capacity import ANSWER_TOKENS_RESERVED
from warmline_common.process.arguments import GB
from warmline_common.protocol.tokens import TOKEN_BYTES

LENGTHS = (8_192, 32_768, 131_072, 200_000)
UNBOUNDED_TOKENS = 10_000_000  # where a model doesn't say how long its context is


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model takes; `step_bytes` says what a prefill step works with on top of so many tokens."""

    weight_bytes: int
    row_bytes: int
    state_bytes: int
    context_tokens_max: int  # 0: the model doesn't say
    step_bytes: Callable[[int], int]

    def kv_bytes(self, tokens: int) -> int:
        """As admission counts a prompt and the beginning of its answer.  A restore takes no more."""
        return round_up_to_buffer(tokens + ANSWER_TOKENS_RESERVED) * self.row_bytes + self.state_bytes

    def disk_bytes(self, tokens: int) -> int:
        """A conversation's segments and one checkpoint."""
        return tokens * (self.row_bytes + TOKEN_BYTES) + self.state_bytes

    def total_bytes(self, tokens: int) -> int:
        return self.weight_bytes + self.kv_bytes(tokens) + self.step_bytes(tokens)


@dataclass(frozen=True)
class LengthEstimate:
    """What one conversation of so many tokens takes."""

    tokens: int
    kv_bytes: int
    step_bytes: int
    total_bytes: int
    disk_bytes: int
    prefill_s: float | None  # cold, at the speed that was given; None where none was
    restore_s: float | None  # from disk
    verdict: str  # "fits", "needs a budget", "does not fit", "beyond the context"


@dataclass(frozen=True)
class MemoryPlan:
    machine: MachineMemory
    budget_bytes: int  # for conversations: as set, or as the backend chooses by itself
    lengths: tuple[LengthEstimate, ...]
    tokens_max: int  # the longest conversation that fits, within the context
    budget_needed_gb: float  # what --memory-budget-gb should be; 0: nothing needs to be said


@dataclass(frozen=True)
class MachineSpeeds:
    """Of a machine, as it is known to be; 0: not known."""

    prefill_tokens_s: float = 0.0
    disk_bytes_s: float = 0.0


def plan_memory(
    needs: MemoryNeeds,
    machine: MachineMemory,
    configured_budget_bytes: int = 0,
    speeds: MachineSpeeds = MachineSpeeds(),
    lengths: Sequence[int] = LENGTHS,
) -> MemoryPlan:
    own_choice = max(int((machine.usable_bytes - needs.weight_bytes) * MEMORY_SHARE), 0)
    budget = configured_budget_bytes or own_choice
    rows = tuple(_estimate_length(needs, machine, budget, speeds, tokens) for tokens in lengths)
    longest = _find_tokens_max(needs, machine)
    wanted = needs.kv_bytes(min(longest, lengths[-1])) if longest else 0
    return MemoryPlan(machine, budget, rows, longest, _round_up_gb(wanted) if wanted > budget else 0.0)


def _round_up_gb(count: int) -> float:
    """Gigabytes, rounded up."""
    return -(-count * 10 // GB) / 10


def _estimate_length(
    needs: MemoryNeeds, machine: MachineMemory, budget: int, speeds: MachineSpeeds, tokens: int
) -> LengthEstimate:
    kv, total, disk = needs.kv_bytes(tokens), needs.total_bytes(tokens), needs.disk_bytes(tokens)
    prefill_s = tokens / speeds.prefill_tokens_s if speeds.prefill_tokens_s else None
    restore_s = disk / speeds.disk_bytes_s if speeds.disk_bytes_s else None
    if needs.context_tokens_max and tokens > needs.context_tokens_max:
        verdict = "beyond the context"
    elif total > machine.usable_bytes:
        verdict = "does not fit"
    else:
        verdict = "fits" if kv <= budget else "needs a budget"
    return LengthEstimate(tokens, kv, total - kv - needs.weight_bytes, total, disk, prefill_s, restore_s, verdict)


def _find_tokens_max(needs: MemoryNeeds, machine: MachineMemory) -> int:
    low, high = 0, needs.context_tokens_max or UNBOUNDED_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if needs.total_bytes(middle) <= machine.usable_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def check_memory(needs: MemoryNeeds, memory_plan: MemoryPlan) -> Findings:
    findings = Findings("memory")
    if not memory_plan.tokens_max:
        least = needs.total_bytes(1)
        findings.fail(
            f"{format_bytes(needs.weight_bytes)} of weights and what a prefill step works with take {format_bytes(least)}; "
            f"{memory_plan.machine.description}",
            _suggest_memory(needs, memory_plan.machine, 1),
        )
        return findings
    within = [length for length in memory_plan.lengths if length.verdict != "beyond the context"]
    if short := [length for length in within if length.verdict == "does not fit"]:
        findings.warn(
            f"conversations of up to {memory_plan.tokens_max:,} tokens fit; {short[0].tokens:,} do not",
            _suggest_memory(needs, memory_plan.machine, short[-1].tokens),
        )
    else:
        context = needs.context_tokens_max
        longest = (
            "of the whole context"
            if memory_plan.tokens_max == context
            else f"of up to {memory_plan.tokens_max:,} tokens"
        )
        findings.ok(f"conversations {longest} fit" + (f" ({context:,} tokens)" if longest.endswith("context") else ""))
    if memory_plan.budget_needed_gb:
        findings.warn(
            f"conversations may have {format_bytes(memory_plan.budget_bytes)} unless told otherwise, less than one of "
            f"{min(memory_plan.tokens_max, memory_plan.lengths[-1].tokens):,} tokens takes",
            f"--memory-budget-gb {memory_plan.budget_needed_gb:g}",
        )
    return findings


def _suggest_memory(needs: MemoryNeeds, machine: MachineMemory, tokens: int) -> str:
    wished = max(tokens, min(LENGTHS[-1], needs.context_tokens_max or LENGTHS[-1]))
    for length in (wished, tokens):
        if (total := needs.total_bytes(length)) <= machine.raised_bytes:
            return f"let the GPU have what {length:,} tokens take: {format_raise_limit(total)}"
    smaller = "a conversion with fewer bits, a smaller --prefill-step-size, or a larger machine"
    return f"{format_bytes(total)} are needed for {tokens:,} tokens: use {smaller}"
