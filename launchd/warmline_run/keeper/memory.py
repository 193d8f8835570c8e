"""Division of one memory among loaded models.  Pure.

Always: weights, a prefill step and the KV budget of each model whose process runs, together, are within the total.  So
is all that their processes may take: what nobody holds is lent, for longer steps, in parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from warmline_common.measurement.model_memory import ModelSize, compute_memory_budget


@dataclass(frozen=True)
class MemoryHolder:
    """Model whose process runs, starts or ends.

    `kv_bytes`: present KV budget; `can_shrink`, `can_grow`: False while its process can't be asked to, and isn't going
    to be; `wish_bytes`: budget that it was asked to have; `is_pinned`: it is not unloaded for another one;
    `extra_bytes`: what else its process may take, where it can't be told otherwise any more.
    """

    size: ModelSize
    kv_bytes: int
    wish_bytes: int = 0
    can_shrink: bool = True
    can_grow: bool = True
    is_pinned: bool = False
    extra_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.size.fixed_bytes + self.extra_bytes

    @property
    def held_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes

    @property
    def floor_bytes(self) -> int:
        """The least that its KV budget can be now: the proxy wishes what its running requests need."""
        least = max(self.size.floor_bytes, self.wish_bytes)
        return min(self.kv_bytes, least) if self.can_shrink else self.kv_bytes

    def limit_bytes(self, total_bytes: int) -> int:
        """The most that its KV budget can be."""
        return max(self.floor_bytes, self.size.kv_max_bytes(total_bytes)) if self.can_grow else self.kv_bytes


Holders = Mapping[str, MemoryHolder]


class LoadDecision(StrEnum):
    FITS = "fits"  # once the others have the budgets that `divide_memory` gives them
    NO_ROOM = "no_room"
    TOO_LARGE = "model_too_large"


@dataclass(frozen=True)
class LoadPlan:
    """`missing_bytes`: how much more the load needs; `start_bytes`: KV budget that it needs at first."""

    decision: LoadDecision
    missing_bytes: int = 0
    start_bytes: int = 0


def plan_load(size: ModelSize, wish_bytes: int, others: Holders, total: int) -> LoadPlan:
    """Decide whether a model of this size, or a larger budget of a loaded one, fits beside the others."""
    start = max(size.floor_bytes, wish_bytes)
    pinned = sum(other.size.need_bytes for other in others.values() if other.is_pinned)
    most = min(size.kv_max_bytes(total), total - pinned - size.fixed_bytes)
    if start > most:
        return LoadPlan(LoadDecision.TOO_LARGE, start - most, start)
    floors = sum(other.fixed_bytes + other.floor_bytes for other in others.values())
    missing = size.fixed_bytes + start + floors - total
    return LoadPlan(LoadDecision.NO_ROOM if missing > 0 else LoadDecision.FITS, max(0, missing), start)


def divide_memory(holders: Holders, total: int, first: str = "") -> dict[str, int]:
    """KV budget of each model: its least one, then what it was asked to have, `first` before the others, then equal
    parts of the rest.
    """
    budgets = {name: holder.floor_bytes for name, holder in holders.items()}
    limits = {name: holder.limit_bytes(total) for name, holder in holders.items()}
    room = total - sum(holder.fixed_bytes for holder in holders.values())
    for name in sorted(holders, key=lambda each: each != first):
        wanted = min(max(holders[name].wish_bytes, holders[name].size.floor_bytes), limits[name]) - budgets[name]
        budgets[name] += max(0, min(wanted, room - sum(budgets.values())))
    weights = sum(holder.size.weight_bytes for holder in holders.values())
    asked = [limits[name] for name, holder in holders.items() if holder.size.kv_set_bytes]  # may be beyond the share
    pool = max([compute_memory_budget(weights, total), *asked])
    return _fill_equally(budgets, limits, min(pool, room) - sum(budgets.values()))


def divide_usable_bytes(holders: Holders, total: int) -> dict[str, int]:
    """All that each model's process may take: what it holds, and of what nobody holds an equal part.

    A process that can't be asked to give it back gets no part.
    """
    free = max(0, total - sum(holder.held_bytes for holder in holders.values()))
    part = free // max(1, sum(holder.can_shrink for holder in holders.values()))
    return {name: holder.held_bytes + (part if holder.can_shrink else 0) for name, holder in holders.items()}


def _fill_equally(budgets: Mapping[str, int], limits: Mapping[str, int], pool: int) -> dict[str, int]:
    """Raise the smallest budgets to one level, as far as the pool goes; none beyond its limit."""
    filled = dict(budgets)
    while pool > 0 and (open_names := [name for name in filled if filled[name] < limits[name]]):
        level = min(filled[name] for name in open_names)
        lowest = [name for name in open_names if filled[name] == level]
        above = [filled[name] for name in open_names if filled[name] > level]
        step = min([*(limits[name] - level for name in lowest), *(each - level for each in above)])
        step = min(step, pool // len(lowest))
        if not step:  # fewer bytes than models
            break
        for name in lowest:
            filled[name] += step
        pool -= step * len(lowest)
    return filled
