"""Sets of models that fit into one memory together.  Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from warmline_common.process.arguments import GB, MB

ROUNDING_STEPS = (GB // 10, GB // 100, MB, MB // 10, MB // 100, 1000, 1)  # bytes, the coarsest first
SETS_OF_MODELS_MAX = 8  # 256 sets at most
PART_STEPS_MIN = 2  # of the least part of a need


@dataclass(frozen=True)
class ModelNeed:
    """Memory of a model: weights, a prefill step, and the KV of a conversation of `CONTEXT_TOKENS_MIN` tokens."""

    name: str
    weight_bytes: int
    step_bytes: int = 0
    kv_bytes: int = 0
    is_pinned: bool = False

    @property
    def parts(self) -> tuple[int, int, int]:
        return self.weight_bytes, self.step_bytes, self.kv_bytes

    @property
    def need_bytes(self) -> int:
        return sum(self.parts)


@dataclass(frozen=True)
class FitPlan:
    """Models by name, in their configured order.  Each set of `sets` includes those that are pinned."""

    memory_bytes: int
    need_bytes: int  # of all models
    too_large: tuple[str, ...]  # that do not even fit alone
    pinned: tuple[str, ...]  # that fit alone
    pinned_bytes: int
    beside_pinned: tuple[str, ...]  # that fit alone, but never beside the pinned ones
    sets: tuple[tuple[str, ...], ...]  # no other model fits into any of them; each model that can be loaded is in one
    pairs: tuple[tuple[str, str], ...]  # that are never loaded at once, though each is at some time

    @property
    def is_all(self) -> bool:
        """True where all models fit together: none is ever unloaded for another."""
        return self.need_bytes <= self.memory_bytes

    @property
    def is_pinned_too_large(self) -> bool:
        return self.pinned_bytes > self.memory_bytes

    @property
    def unservable(self) -> tuple[str, ...]:
        """Models that can never be loaded."""
        return (*self.too_large, *self.beside_pinned)


def plan_fit(needs: Sequence[ModelNeed], memory_bytes: int) -> FitPlan:
    """Plan which models fit together, always beside the pinned ones.

    Beyond SETS_OF_MODELS_MAX models, each set begins with one of them and takes the next ones as they are configured:
    there are too many others.
    """
    too_large = [each for each in needs if each.need_bytes > memory_bytes]
    pinned = [each for each in needs if each.is_pinned and each not in too_large]
    room = memory_bytes - _sum_bytes(pinned)
    others = [each for each in needs if not each.is_pinned and each not in too_large]
    loadable = [each for each in others if each.need_bytes <= room]
    filled = _list_full_sets(loadable, room)
    sets = dict.fromkeys(_list_names(needs, {*pinned, *each}) for each in filled)
    alone = [_list_names(needs, set(pinned))] if pinned else []
    return FitPlan(
        memory_bytes=memory_bytes,
        need_bytes=_sum_bytes(needs),
        too_large=tuple(each.name for each in too_large),
        pinned=tuple(each.name for each in pinned),
        pinned_bytes=_sum_bytes(pinned),
        beside_pinned=tuple(each.name for each in others if each.need_bytes > room),
        sets=tuple(sorted(sets or alone, key=len, reverse=True)) if room >= 0 else (),
        pairs=tuple(
            (one.name, other.name)
            for one, other in combinations(loadable, 2)
            if one.need_bytes + other.need_bytes > room
        ),
    )


@dataclass(frozen=True)
class RoundedFit:
    """Needs and a plan in whole steps of `step_bytes`: sums of what is shown are what is shown as sums."""

    step_bytes: int
    needs: tuple[ModelNeed, ...]
    fit: FitPlan


def round_fit(needs: Sequence[ModelNeed], memory_bytes: int) -> RoundedFit:
    """Round to the coarsest step that shows the least part, and with which the same models fit together."""
    exact = plan_fit(needs, memory_bytes)
    least = min((part for each in needs for part in each.parts if part), default=0)
    for step in ROUNDING_STEPS:
        rounded = tuple(_round_need(each, step) for each in needs)
        fit = plan_fit(rounded, _round_bytes(memory_bytes, step))
        if least >= step * PART_STEPS_MIN and _list_results(fit) == _list_results(exact):
            return RoundedFit(step, rounded, fit)
    return RoundedFit(1, tuple(needs), exact)


def _list_results(fit: FitPlan) -> tuple[object, ...]:
    """All of a plan but its bytes."""
    return fit.is_all, fit.is_pinned_too_large, fit.too_large, fit.beside_pinned, fit.sets, fit.pairs


def _round_need(need: ModelNeed, step: int) -> ModelNeed:
    weights, prefill, kv = (_round_bytes(part, step) for part in need.parts)
    return ModelNeed(need.name, weights, prefill, kv, need.is_pinned)


def _round_bytes(count: int, step: int) -> int:
    return (count + step // 2) // step * step


def _list_full_sets(candidates: Sequence[ModelNeed], room: int) -> list[set[ModelNeed]]:
    """Sets that fit, and into which no other candidate does."""
    if len(candidates) > SETS_OF_MODELS_MAX:
        return [_fill_set(first, candidates, room) for first in candidates]
    counts = range(len(candidates), 0, -1)
    fitting = (set(each) for count in counts for each in combinations(candidates, count) if _sum_bytes(each) <= room)
    full: list[set[ModelNeed]] = []
    for each in fitting:
        if not any(each < larger for larger in full):
            full.append(each)
    return full


def _fill_set(first: ModelNeed, candidates: Iterable[ModelNeed], room: int) -> set[ModelNeed]:
    """The first and, in the order of candidates, each that still fits."""
    chosen = {first}
    for each in candidates:
        if _sum_bytes({*chosen, each}) <= room:
            chosen.add(each)
    return chosen


def _list_names(needs: Iterable[ModelNeed], chosen: set[ModelNeed]) -> tuple[str, ...]:
    return tuple(each.name for each in needs if each in chosen)


def _sum_bytes(needs: Iterable[ModelNeed]) -> int:
    return sum(each.need_bytes for each in needs)
