"""Decisions which model to load, and which to unload for it.  Pure.

A model is loaded when a request waits for it.  Where it does not fit beside the loaded ones, others make room: those
without requests first, the least recently used first, and only once they have stayed for a while.  One with requests
is closed: new requests for it wait, those inside go on, and it is unloaded when they are done.  One that is being
loaded makes room where no request wants it any more, or where its process dies again and again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from warmline_common.protocol.keeper import HOLDS_MEMORY, ModelStage


@dataclass(frozen=True, kw_only=True)
class ModelDemand:
    """A model, and the requests for it.  Times are of one clock, bytes include the weights."""

    name: str
    stage: ModelStage
    pinned: bool = False
    idle_s: float = 0.0  # without requests until it is unloaded; 0.0: never
    need_bytes: int = 0  # while it is loaded: for the requests inside, as far as is known
    wanted_bytes: int = 0  # for the requests that wait as well
    users: int = 0
    waiting_since: float = inf  # the longest wait; inf: none waits
    may_swap: bool = True  # other models may be unloaded for those that wait
    ignores_stay: bool = False  # and at once: its owner has it loaded, or pinned
    is_closed: bool = False  # loaded, and about to be unloaded
    is_failing: bool = False  # its process has died, and it has not been loaded again for a while
    has_given_way: bool = False  # it was unloaded for that, and no other one has been loaded since
    last_used_at: float = -inf
    loaded_at: float = -inf  # or seen to be, by a proxy that has just started
    stays_since: float = -inf  # when it was loaded for a request

    @property
    def is_loaded(self) -> bool:
        return self.stage is ModelStage.LOADED

    @property
    def is_wanted(self) -> bool:
        """True where requests need it to be loaded, or to have more memory."""
        if self.is_loaded:
            return self.waiting_since < inf and not self.is_closed  # for more memory: its gate is open
        return self.stage is ModelStage.UNLOADED and (self.waiting_since < inf or self.users > 0 or self.pinned)

    @property
    def is_busy(self) -> bool:
        return self.users > 0 or self.waiting_since < inf


@dataclass(frozen=True, kw_only=True)
class SwapDecision:
    """Names of models: to load, to unload, whose gates to close and to open again, whose waits to refuse; and when to
    decide again.  `prepare`: to load as soon as those that are stopping have ended.

    `target` is the model that it is about, `victims` are those that make room for it, `staying` those of them that
    have not been loaded long enough.
    """

    load: str = ""
    prepare: str = ""
    unload: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    refuse: str = ""  # waits that no other model may be unloaded for
    decide_at: float = inf
    target: str = ""
    victims: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()
    starting: tuple[str, ...] = ()  # models whose loads others wait for


@dataclass
class _Plan:
    """Decision in the making."""

    target: str = ""
    load: str = ""
    prepare: str = ""
    refuse: str = ""
    victims: list[ModelDemand] = field(default_factory=list)  # models that make room, now or later
    unload: list[str] = field(default_factory=list)
    close: list[str] = field(default_factory=list)
    staying: list[str] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    decide_at: float = inf


def decide_swap(models: Sequence[ModelDemand], memory_bytes: int, stay_s: float, now: float) -> SwapDecision:
    """Decide for the model whose requests have waited longest."""
    plan = _Plan()
    leaving = _find_idle(models, now, plan)
    for target in sorted((model for model in models if model.is_wanted), key=_rank_target):
        if _serve_target(target, models, memory_bytes, leaving, stay_s, now, plan):
            plan.target = target.name
            break
    victims = plan.victims
    opened = [
        each.name
        for each in models
        if each.is_loaded and each.is_closed and each not in victims and each not in leaving
    ]
    return SwapDecision(
        load=plan.load,
        prepare=plan.prepare,
        unload=tuple(plan.unload),
        close=tuple(plan.close),
        open=tuple(opened),
        refuse=plan.refuse,
        decide_at=plan.decide_at,
        target=plan.target,
        victims=tuple(each.name for each in victims),
        staying=tuple(plan.staying),
        starting=tuple(plan.starting),
    )


def _serve_target(
    target: ModelDemand,
    models: Sequence[ModelDemand],
    memory_bytes: int,
    leaving: Sequence[ModelDemand],
    stay_s: float,
    now: float,
    plan: _Plan,
) -> bool:
    """Decide for one model; False where nothing can be done for it now, so that another one has its turn."""
    held = sum(model.need_bytes for model in models if model.stage in HOLDS_MEMORY and model is not target)
    missing_bytes = target.wanted_bytes - (memory_bytes - held)
    stopping_bytes = sum(model.need_bytes for model in models if model.stage is ModelStage.STOPPING)
    missing_later = missing_bytes - stopping_bytes - sum(model.need_bytes for model in leaving)
    if missing_bytes <= 0:
        plan.load = target.name
        return True
    if not target.is_loaded and missing_bytes <= stopping_bytes:
        plan.prepare = target.name
    if target.may_swap:
        plan.victims = _choose_victims(models, target, missing_later, leaving)
        _make_room(plan.victims, 0.0 if target.ignores_stay else stay_s, now, plan)
    elif missing_later > 0:
        plan.refuse = target.name
    if missing_later <= 0 or plan.victims or plan.refuse:
        return True
    plan.starting = [model.name for model in models if model.stage is ModelStage.STARTING and model is not target]
    return False


def _rank_target(model: ModelDemand) -> tuple[bool, bool, float]:
    """Models that requests are inside go first, lost ones or ones that need more memory; then the longest wait; then
    pinned models without requests.  One that has given way comes after all others.
    """
    return model.has_given_way, model.users == 0, model.waiting_since


def _find_idle(models: Sequence[ModelDemand], now: float, plan: _Plan) -> list[ModelDemand]:
    """Loaded models that nobody has used for as long as they are to wait."""
    idle = []
    for model in models:
        if not (model.is_loaded and model.idle_s) or model.pinned or model.is_busy:
            continue
        leaves_at = max(model.last_used_at, model.loaded_at) + model.idle_s
        if leaves_at <= now:
            idle.append(model)
            plan.unload.append(model.name)
        else:
            plan.decide_at = min(plan.decide_at, leaves_at)
    return idle


def _choose_victims(
    models: Sequence[ModelDemand], target: ModelDemand, missing_bytes: int, leaving: Sequence[ModelDemand]
) -> list[ModelDemand]:
    """Models whose memory is enough, in their order of unloading; none where that of all would not be."""
    candidates = [model for model in models if _can_leave(model) and model is not target and model not in leaving]
    if sum(model.need_bytes for model in candidates) < missing_bytes:
        return []
    victims = []
    for model in sorted(candidates, key=lambda each: (not each.is_closed, each.is_busy, each.last_used_at)):
        if missing_bytes <= 0:
            break
        victims.append(model)
        missing_bytes -= model.need_bytes
    return victims


def _can_leave(model: ModelDemand) -> bool:
    """True for a model that may be unloaded for another one, now or once its requests are done."""
    is_wanted = model.is_busy and not model.is_failing
    return not model.pinned and (model.is_loaded or (model.stage is ModelStage.STARTING and not is_wanted))


def _make_room(victims: Sequence[ModelDemand], stay_s: float, now: float, plan: _Plan) -> None:
    for model in victims:
        leaves_at = model.stays_since + stay_s
        if model.is_closed:
            if not model.users:
                plan.unload.append(model.name)
        elif leaves_at > now:
            plan.staying.append(model.name)
            plan.decide_at = min(plan.decide_at, leaves_at)
        elif model.users and model.is_loaded:
            plan.close.append(model.name)
        else:
            plan.unload.append(model.name)
