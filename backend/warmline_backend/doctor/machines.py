"""How much memory a machine gives a model and its KV."""

from dataclasses import dataclass

import mlx.core as mx

from warmline_backend.doctor.findings import gigabytes
from warmline_backend.model.model import device_name, machine_bytes

GIB, MIB = 1 << 30, 1 << 20
# What macOS lets the GPU wire while `iogpu.wired_limit_mb` is 0: two thirds of a small Mac, three quarters of a larger
# one.  The newest releases were seen to give more (107.5 of 128 GiB), none to give less.
SMALL_MAC_GIB = 36
SMALL_MAC_SHARE, MAC_SHARE = 2 / 3, 3 / 4
SYSTEM_BYTES = 16 * GIB  # left to macOS where the limit is raised


@dataclass(frozen=True)
class Machine:
    bytes_usable: int
    how: str  # for people: what machine, and why so much
    bytes_raised: int = 0  # what a Mac's GPU may have once its limit is raised; 0: no such thing here


def this_machine() -> Machine:
    info, usable = mx.device_info(), machine_bytes()
    name = device_name()
    if info.get("max_recommended_working_set_size"):
        return Machine(
            usable, f"{name}: macOS lets the GPU use {gigabytes(usable)}", int(info["memory_size"]) - SYSTEM_BYTES
        )
    if info.get("total_memory"):
        return Machine(usable, f"{name}: {gigabytes(usable)} of GPU memory")
    return Machine(usable, f"{name}, without a GPU: {gigabytes(usable)} of memory")


def mac_of(size_gb: float) -> Machine:
    """A Mac as it is sold: its gigabytes are of 2**30 bytes."""
    share = SMALL_MAC_SHARE if size_gb <= SMALL_MAC_GIB else MAC_SHARE
    usable = int(size_gb * GIB * share)
    part = "two thirds" if share == SMALL_MAC_SHARE else "three quarters"
    how = f"a Mac of {size_gb:g} GB: macOS lets its GPU use {part} unless told otherwise, {gigabytes(usable)}"
    return Machine(usable, how, int(size_gb * GIB) - SYSTEM_BYTES)


def raise_limit(bytes_needed: int) -> str:
    """What to do for a Mac's GPU to have so much."""
    return f"sudo sysctl iogpu.wired_limit_mb={-(-bytes_needed // MIB)} (until the next start of the Mac)"
