"""How much memory a machine gives a model and its KV."""

from dataclasses import dataclass

import mlx.core as mx

from warmline_backend.doctor.findings import format_bytes
from warmline_backend.model.model import get_device_name, get_machine_bytes

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
    """A Mac as it is sold: its gigabytes are of 2**30 bytes."""
    share = SMALL_MAC_SHARE if size_gb <= SMALL_MAC_GIB else MAC_SHARE
    usable = int(size_gb * GIB * share)
    part = "two thirds" if share == SMALL_MAC_SHARE else "three quarters"
    how = f"a Mac of {size_gb:g} GB: macOS lets its GPU use {part} unless told otherwise, {format_bytes(usable)}"
    return MachineMemory(usable, how, int(size_gb * GIB) - SYSTEM_BYTES)


def format_raise_limit(bytes_needed: int) -> str:
    """What to do for a Mac's GPU to have so much."""
    return f"sudo sysctl iogpu.wired_limit_mb={-(-bytes_needed // MIB)} (until the next start of the Mac)"
