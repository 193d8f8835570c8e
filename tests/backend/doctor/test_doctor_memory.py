"""Memory of conversations by machine."""

from warmline_backend.doctor.findings import DoctorFinding, FindingLevel, Findings
from warmline_backend.doctor.memory import (
    GIB,
    MachineMemory,
    MemoryNeeds,
    check_memory,
    check_wired_memory,
    estimate_mac,
    plan_memory,
)
from warmline_common.process.arguments import GB

ROW = 100_000
STEP_GB = 5


def make_memory_needs(weights_gb: float, context: int = 300_000) -> MemoryNeeds:
    return MemoryNeeds(int(weights_gb * GB), ROW, 0, context, lambda tokens: STEP_GB * GB)


def check(needs: MemoryNeeds, machine: MachineMemory) -> list[DoctorFinding]:
    findings = Findings("memory")
    check_memory(findings, needs, plan_memory(needs, machine))
    return findings


def list_verdicts(weights_gb: float, machine_gb: float, budget_gb: float = 0, context: int = 300_000) -> list[str]:
    planned = plan_memory(
        make_memory_needs(weights_gb, context), MachineMemory(int(machine_gb * GB), "test"), int(budget_gb * GB)
    )
    return [length.verdict for length in planned.lengths]


def test_each_length_has_verdict() -> None:
    assert list_verdicts(10, 100) == ["fits"] * 4
    assert list_verdicts(10, 100, context=131_072) == ["fits"] * 3 + ["beyond the context"]
    assert list_verdicts(10, 28.5) == ["fits", "fits", "needs a budget", "does not fit"]  # a share of 18.5 GB is 12.95
    assert list_verdicts(10, 28.5, budget_gb=14) == ["fits", "fits", "fits", "does not fit"]
    assert list_verdicts(24, 28) == ["does not fit"] * 4


def test_longest_conversation_just_fits() -> None:
    ours = make_memory_needs(10)
    planned = plan_memory(ours, MachineMemory(29 * GB, "test"))
    assert ours.total_bytes(planned.tokens_max) <= 29 * GB < ours.total_bytes(planned.tokens_max + 256)
    assert planned.budget_needed_gb * GB >= ours.kv_bytes(planned.tokens_max) > planned.budget_bytes


def test_mac_needs_raised_limit() -> None:
    """Weights of 400 GB on 512: not within three quarters, but within all that macOS can spare."""
    machine = estimate_mac(512)
    assert machine.usable_bytes == 384 * GIB
    assert estimate_mac(24).usable_bytes == 16 * GIB
    ours = make_memory_needs(410)
    (finding,) = check(ours, machine)
    assert finding.level is FindingLevel.FAIL
    limit = int(finding.todo.split("iogpu.wired_limit_mb=")[1].split()[0])
    assert ours.total_bytes(200_000) <= limit << 20 < 512 * GIB
    ours = make_memory_needs(600)
    (finding,) = check(ours, machine)
    assert finding.level is FindingLevel.FAIL and "larger machine" in finding.todo


def test_wired_memory_is_explained_on_a_mac_alone() -> None:
    needs, mac = make_memory_needs(30), estimate_mac(64)

    def explain(machine: MachineMemory, wired_gb: float) -> list[DoctorFinding]:
        findings = Findings("memory")
        check_wired_memory(findings, needs, machine, int(wired_gb * GB))
        return list(findings)

    (nothing,), (some,), (excess,) = (explain(mac, wired_gb) for wired_gb in (0, 30, 60))
    assert nothing.level is FindingLevel.OK and "--wired-limit-gb 30 keeps the weights" in nothing.what
    assert some.level is FindingLevel.WARN and "panicked" in some.what
    assert excess.level is FindingLevel.FAIL and "more than the 51.5 GB" in excess.what
    assert explain(MachineMemory(64 * GB, "a GPU"), 0) == []


def test_fitting_lengths_are_reported() -> None:
    ours = make_memory_needs(10)
    short, budget = check(ours, MachineMemory(29 * GB, "test"))
    assert short.level is budget.level is FindingLevel.WARN
    assert "200,000 do not" in short.what and budget.todo.startswith("--memory-budget-gb ")
    (fine,) = check(ours, MachineMemory(100 * GB, "test"))
    assert fine.level is FindingLevel.OK and "whole context fit (300,000 tokens)" in fine.what
