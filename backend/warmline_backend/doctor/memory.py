"""Memory and disk of conversations of some lengths, and the lengths that a machine can hold.  Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from warmline_backend.doctor.findings import Findings, format_bytes
from warmline_backend.kv_cache.codecs import round_up_to_buffer
from warmline_backend.model.model import MEMORY_SHARE, get_device_name, get_machine_bytes
from warmline_backend.scheduler.capacity import ANSWER_TOKENS_RESERVED
from warmline_common.process.arguments import GB
from warmline_common.protocol.tokens import TOKEN_BYTES

GIB, MIB = 1 << 30, 1 << 20
# What macOS lets the GPU wire while `iogpu.wired_limit_mb` is 0: two thirds of a small Mac, three quarters of a larger
# one.  The newest releases were seen to give more (107.5 of 128 GiB), none to give less.
SMALL_MAC_GIB = 36
SMALL_MAC_SHARE, MAC_SHARE = 2 / 3, 3 / 4
SYSTEM_BYTES = 16 * GIB  # left to macOS where the limit is raised


@dataclass(frozen=True)
class MachineMemory:
    usable_bytes: int
    description: str  # for people: what machine, and why so much
    raised_bytes: int = 0  # what a Mac's GPU may have once its limit is raised; 0: no such thing here


def detect_machine() -> MachineMemory:
    info, usable = mx.device_info(), get_machine_bytes()
    name = get_device_name()
    if info.get("max_recommended_working_set_size"):
        return MachineMemory(
            usable, f"{name}: macOS lets the GPU use {format_bytes(usable)}", int(info["memory_size"]) - SYSTEM_BYTES
        )
    if info.get("total_memory"):
        return MachineMemory(usable, f"{name}: {format_bytes(usable)} of GPU memory")
    return MachineMemory(usable, f"{name}, without a GPU: {format_bytes(usable)} of memory")


def estimate_mac(size_gb: float) -> MachineMemory:
    """Memory of a Mac as it is sold: its gigabytes are of 2**30 bytes."""
    share = SMALL_MAC_SHARE if size_gb <= SMALL_MAC_GIB else MAC_SHARE
    usable = int(size_gb * GIB * share)
    part = "two thirds" if share == SMALL_MAC_SHARE else "three quarters"
    how = f"a Mac of {size_gb:g} GB: macOS lets its GPU use {part} unless told otherwise, {format_bytes(usable)}"
    return MachineMemory(usable, how, int(size_gb * GIB) - SYSTEM_BYTES)


def format_raise_limit(bytes_needed: int) -> str:
    """Command that raises a Mac's limit of GPU memory."""
    return f"sudo sysctl iogpu.wired_limit_mb={-(-bytes_needed // MIB)} (until the next start of the Mac)"


LENGTHS = (8_192, 32_768, 131_072, 200_000)
UNBOUNDED_TOKENS = 10_000_000  # where a model doesn't say how long its context is


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory that a model takes; `step_bytes` estimates a prefill step on top of a number of tokens."""

    weight_bytes: int
    row_bytes: int
    state_bytes: int
    context_tokens_max: int  # 0: the model doesn't say
    step_bytes: Callable[[int], int]

    def kv_bytes(self, tokens: int) -> int:
        """KV bytes as admission counts a prompt and the beginning of its answer.  A restore takes no more."""
        return round_up_to_buffer(tokens + ANSWER_TOKENS_RESERVED) * self.row_bytes + self.state_bytes

    def disk_bytes(self, tokens: int) -> int:
        """Bytes of a conversation's segments and one checkpoint."""
        return tokens * (self.row_bytes + TOKEN_BYTES) + self.state_bytes

    def total_bytes(self, tokens: int) -> int:
        return self.weight_bytes + self.kv_bytes(tokens) + self.step_bytes(tokens)


@dataclass(frozen=True)
class LengthEstimate:
    """Memory, disk and times of one conversation of `tokens` tokens."""

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
    """Known speeds of a machine; 0: not known."""

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
            f"{format_bytes(needs.weight_bytes)} of weights and what a prefill step works with take "
            f"{format_bytes(least)}; {memory_plan.machine.description}",
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
