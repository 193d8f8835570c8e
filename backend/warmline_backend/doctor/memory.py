"""Memory and disk of conversations of some lengths, and the lengths that a machine can hold.  Pure."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from warmline_backend.doctor.findings import Findings, format_bytes
from warmline_backend.kv_cache.batch_caches import round_up_to_buffer
from warmline_backend.model.model import get_device_name, get_machine_bytes
from warmline_backend.model.wired_memory import describe_excess
from warmline_backend.scheduler.capacity import ANSWER_TOKENS_RESERVED
from warmline_common.measurement.model_memory import ModelSize, compute_memory_budget
from warmline_common.process.arguments import GB
from warmline_common.protocol.keeper import CONTEXT_TOKENS_MIN
from warmline_common.protocol.tokens import TOKEN_BYTES

GIB, MIB = 1 << 30, 1 << 20
LENGTHS = (8_192, 32_768, 131_072, 200_000)
UNBOUNDED_TOKENS = 10_000_000  # where a model doesn't say how long its context is
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
    info, usable, name = mx.device_info(), get_machine_bytes(), get_device_name()
    size = format_bytes(usable)
    if info.get("max_recommended_working_set_size"):
        raised_bytes = int(info["memory_size"]) - SYSTEM_BYTES
        return MachineMemory(usable, f"{name}: macOS lets the GPU use {size}", raised_bytes)
    where = f": {size} of GPU memory" if info.get("total_memory") else f", without a GPU: {size} of memory"
    return MachineMemory(usable, name + where)


def estimate_mac(size_gb: float) -> MachineMemory:
    """Memory of a Mac as it is sold: its gigabytes are of 2**30 bytes."""
    share = SMALL_MAC_SHARE if size_gb <= SMALL_MAC_GIB else MAC_SHARE
    usable = int(size_gb * GIB * share)
    part = "two thirds" if share == SMALL_MAC_SHARE else "three quarters"
    how = f"a Mac of {size_gb:g} GB: macOS lets its GPU use {part} by default, {format_bytes(usable)}"
    return MachineMemory(usable, how, int(size_gb * GIB) - SYSTEM_BYTES)


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
    load: ModelSize  # as the keeper of several models reckons with it


def plan_memory(
    needs: MemoryNeeds,
    machine: MachineMemory,
    configured_budget_bytes: int = 0,
    prefill_tokens_s: float = 0.0,
    disk_bytes_s: float = 0.0,
) -> MemoryPlan:
    """Plan the LENGTHS; a speed of 0 is not known."""
    budget = configured_budget_bytes or compute_memory_budget(needs.weight_bytes, machine.usable_bytes)
    estimates = []
    for tokens in LENGTHS:
        kv, total, disk = needs.kv_bytes(tokens), needs.total_bytes(tokens), needs.disk_bytes(tokens)
        prefill_s = tokens / prefill_tokens_s if prefill_tokens_s else None
        restore_s = disk / disk_bytes_s if disk_bytes_s else None
        if needs.context_tokens_max and tokens > needs.context_tokens_max:
            verdict = "beyond the context"
        elif total > machine.usable_bytes:
            verdict = "does not fit"
        else:
            verdict = "fits" if kv <= budget else "needs a budget"
        step_bytes = total - kv - needs.weight_bytes
        estimates.append(LengthEstimate(tokens, kv, step_bytes, total, disk, prefill_s, restore_s, verdict))
    lengths = range(1, (needs.context_tokens_max or UNBOUNDED_TOKENS) + 1)
    longest = bisect_right(lengths, machine.usable_bytes, key=needs.total_bytes)
    needed = needs.kv_bytes(min(longest, LENGTHS[-1])) if longest else 0
    needed_gb = -(-needed * 10 // GB) / 10 if needed > budget else 0.0  # rounded up
    load = ModelSize(
        weight_bytes=needs.weight_bytes,
        step_bytes=needs.step_bytes(CONTEXT_TOKENS_MIN),
        kv_min_bytes=needs.kv_bytes(CONTEXT_TOKENS_MIN),
        kv_set_bytes=configured_budget_bytes,
    )
    return MemoryPlan(machine, budget, tuple(estimates), longest, needed_gb, load)


def check_memory(findings: Findings, needs: MemoryNeeds, plan: MemoryPlan) -> None:
    """Add findings about the lengths that fit, and about the budget."""
    if not plan.tokens_max:
        findings.fail(
            f"{format_bytes(needs.weight_bytes)} of weights and what a prefill step works with take "
            f"{format_bytes(needs.total_bytes(1))}; {plan.machine.description}",
            _suggest_memory(needs, plan.machine, 1),
        )
        return
    if short := [length.tokens for length in plan.lengths if length.verdict == "does not fit"]:
        findings.warn(
            f"conversations of up to {plan.tokens_max:,} tokens fit; {short[0]:,} do not",
            _suggest_memory(needs, plan.machine, short[-1]),
        )
    elif plan.tokens_max == needs.context_tokens_max:
        findings.ok(f"conversations of the whole context fit ({plan.tokens_max:,} tokens)")
    else:
        findings.ok(f"conversations of up to {plan.tokens_max:,} tokens fit")
    if plan.budget_needed_gb:
        findings.warn(
            f"conversations may have {format_bytes(plan.budget_bytes)} by default, less than one of "
            f"{min(plan.tokens_max, LENGTHS[-1]):,} tokens takes",
            f"--memory-budget-gb {plan.budget_needed_gb:g}",
        )


def check_wired_memory(findings: Findings, needs: MemoryNeeds, machine: MachineMemory, wired_bytes: int) -> None:
    """Add a finding about the memory that mlx keeps wired on a Mac."""
    if not machine.raised_bytes:
        return
    weights = format_bytes(needs.weight_bytes)
    if wired_bytes > machine.usable_bytes:
        findings.fail(describe_excess(wired_bytes, machine.usable_bytes), "--wired-limit-gb 0")
    elif wired_bytes:
        findings.warn(
            f"up to {format_bytes(wired_bytes)} stay wired, and the weights are {weights}: by reports, macOS panicked "
            "where buffers were wired and requests ran at once (docs/install-macos.md)",
            "--wired-limit-gb 0, if this Mac restarts by itself",
        )
    else:
        findings.ok(
            f"nothing is kept wired, which is the safest; where the first step after a pause is slow, --wired-limit-gb "
            f"{-(-needs.weight_bytes // GB)} keeps the weights ({weights}) in memory"
        )


def _suggest_memory(needs: MemoryNeeds, machine: MachineMemory, tokens: int) -> str:
    longest = max(tokens, min(LENGTHS[-1], needs.context_tokens_max or LENGTHS[-1]))
    for length in (longest, tokens):
        if (total := needs.total_bytes(length)) <= machine.raised_bytes:
            command = f"sudo sysctl iogpu.wired_limit_mb={-(-total // MIB)} (until the next start of the Mac)"
            return f"let the GPU have what {length:,} tokens take: {command}"
    smaller = "a conversion with fewer bits, a smaller --prefill-step-size, or a larger machine"
    return f"{format_bytes(total)} are needed for {tokens:,} tokens: use {smaller}"
