"""Decisions which model to load and which to unload: single cases, and a simulation with random requests."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from warmline_common.protocol.keeper import HOLDS_MEMORY, ModelStage
from warmline_proxy.models.swaps import ModelDemand, SwapDecision, decide_swap

LOADED, UNLOADED, STARTING, STOPPING = (
    ModelStage.LOADED,
    ModelStage.UNLOADED,
    ModelStage.STARTING,
    ModelStage.STOPPING,
)
STAY_S = 20.0


def make_demand(name: str, stage: ModelStage, size: int = 10, **fields: Any) -> ModelDemand:
    return ModelDemand(**{"name": name, "stage": stage, "need_bytes": size, "wanted_bytes": size, **fields})


def decide(*models: ModelDemand, memory: int = 20, now: float = 100.0) -> SwapDecision:
    """Actions alone."""
    return replace(explain(*models, memory=memory, now=now), target="", victims=(), staying=(), starting=())


def explain(*models: ModelDemand, memory: int = 20, now: float = 100.0) -> SwapDecision:
    """Whole decision."""
    return decide_swap(models, memory, STAY_S, now)


def test_waiting_request_loads_model_that_fits() -> None:
    decision = decide(make_demand("a", LOADED), make_demand("b", UNLOADED, waiting_since=99.0))
    assert decision == SwapDecision(load="b")


def test_model_without_requests_is_not_loaded() -> None:
    assert decide(make_demand("a", UNLOADED), make_demand("b", UNLOADED)) == SwapDecision()


def test_longest_wait_is_served_first() -> None:
    waiting = [make_demand(name, UNLOADED, waiting_since=since) for name, since in (("a", 99.0), ("b", 98.0))]
    assert decide(*waiting).load == "b"


def test_model_that_has_given_way_comes_after_others() -> None:
    given_way = make_demand("a", UNLOADED, users=1, waiting_since=1.0, has_given_way=True)
    assert decide(given_way, make_demand("b", UNLOADED, waiting_since=99.0)).load == "b"
    assert decide(given_way, make_demand("b", LOADED)).load == "a"


def test_lost_model_with_requests_is_loaded_before_waiting_ones() -> None:
    assert decide(make_demand("a", UNLOADED, users=1), make_demand("b", UNLOADED, waiting_since=1.0)).load == "a"


def test_least_recently_used_model_without_requests_is_unloaded() -> None:
    models = [make_demand("a", LOADED, last_used_at=50.0), make_demand("b", LOADED, last_used_at=40.0)]
    assert decide(*models, make_demand("c", UNLOADED, waiting_since=99.0)) == SwapDecision(unload=("b",))


def test_idle_model_goes_before_busy_one_that_was_used_earlier() -> None:
    models = [make_demand("a", LOADED, users=1, last_used_at=40.0), make_demand("b", LOADED, last_used_at=50.0)]
    assert decide(*models, make_demand("c", UNLOADED, waiting_since=99.0)) == SwapDecision(unload=("b",))


def test_model_that_is_being_loaded_makes_room_where_no_request_wants_it() -> None:
    waiting = make_demand("b", UNLOADED, 20, waiting_since=99.0)
    assert decide(make_demand("a", STARTING), waiting) == SwapDecision(unload=("a",))
    failing = make_demand("a", STARTING, users=1, is_failing=True)
    assert decide(failing, waiting) == SwapDecision(unload=("a",))
    for wanted in ({"users": 1}, {"waiting_since": 99.5}, {"pinned": True}):
        decision = explain(make_demand("a", STARTING, **wanted), waiting)
        assert decision == SwapDecision(starting=("a",)), wanted


def test_busy_model_is_closed_and_unloaded_once_its_requests_are_done() -> None:
    waiting = make_demand("b", UNLOADED, 20, waiting_since=99.0)
    assert decide(make_demand("a", LOADED, users=2), waiting) == SwapDecision(close=("a",))
    assert decide(make_demand("a", LOADED, users=1, is_closed=True), waiting) == SwapDecision()
    assert decide(make_demand("a", LOADED, is_closed=True), waiting) == SwapDecision(unload=("a",))


def test_closed_model_opens_again_once_nobody_waits_for_its_memory() -> None:
    assert decide(make_demand("a", LOADED, users=1, is_closed=True), make_demand("b", UNLOADED)).open == ("a",)


def test_nothing_is_unloaded_for_an_unconfigured_name() -> None:
    stranger = make_demand("a", UNLOADED, waiting_since=1.0, may_swap=False)
    assert decide(stranger, make_demand("b", LOADED)).load == "a", "it fits"
    assert decide(stranger, make_demand("b", LOADED, 15)) == SwapDecision(refuse="a")


def test_pinned_model_is_never_unloaded() -> None:
    pinned = make_demand("a", LOADED, 15, pinned=True)
    assert decide(pinned, make_demand("b", UNLOADED, waiting_since=0.0)) == SwapDecision()


def test_pinned_model_is_loaded_without_requests() -> None:
    assert decide(make_demand("a", UNLOADED, pinned=True)).load == "a"


def test_model_stays_for_a_while_after_its_load() -> None:
    waiting = make_demand("b", UNLOADED, 20, waiting_since=95.0)
    decision = decide(make_demand("a", LOADED, stays_since=90.0), waiting)
    assert decision == SwapDecision(decide_at=90.0 + STAY_S)
    assert decide(make_demand("a", LOADED, stays_since=80.0), waiting).unload == ("a",)


def test_decision_names_the_model_that_has_not_stayed_long_enough() -> None:
    waiting = make_demand("b", UNLOADED, 20, waiting_since=95.0)
    decision = explain(make_demand("a", LOADED, stays_since=90.0), waiting)
    assert (decision.target, decision.victims, decision.staying) == ("b", ("a",), ("a",))
    decision = explain(make_demand("a", LOADED, stays_since=80.0), waiting)
    assert (decision.target, decision.victims, decision.staying) == ("b", ("a",), ())


def test_owner_does_not_wait_for_the_stay_of_another_model() -> None:
    waiting = make_demand("b", UNLOADED, 20, waiting_since=95.0, ignores_stay=True)
    assert decide(make_demand("a", LOADED, stays_since=90.0), waiting).unload == ("a",)


def test_stopping_model_counts_as_room_to_come() -> None:
    models = [make_demand("a", STOPPING), make_demand("b", LOADED), make_demand("c", UNLOADED, waiting_since=99.0)]
    assert decide(*models) == SwapDecision(prepare="c"), "b stays: a's memory will be enough"


def test_as_many_models_leave_as_are_needed() -> None:
    models = [make_demand(name, LOADED, last_used_at=at) for name, at in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    decision = decide(*models, make_demand("d", UNLOADED, 18, waiting_since=9.0), memory=30)
    assert decision.unload == ("b", "c")


def test_nothing_is_unloaded_for_a_model_that_would_not_fit_anyway() -> None:
    models = [make_demand("a", LOADED, 10), make_demand("b", STARTING, 10, users=1)]
    assert decide(*models, make_demand("c", UNLOADED, 20, waiting_since=1.0)) == SwapDecision()


def test_unused_model_is_unloaded_after_its_idle_time() -> None:
    model = make_demand("a", LOADED, idle_s=30.0, last_used_at=60.0)
    assert decide(model, now=89.0) == SwapDecision(decide_at=90.0)
    assert decide(model, now=90.0) == SwapDecision(unload=("a",))
    assert decide(make_demand("a", LOADED, idle_s=30.0, last_used_at=0.0, users=1)) == SwapDecision()
    assert decide(make_demand("a", LOADED, idle_s=30.0, last_used_at=0.0, pinned=True)) == SwapDecision()


def test_request_that_needs_more_memory_takes_it_from_idle_models() -> None:
    wanting = make_demand("a", LOADED, 10, wanted_bytes=15, waiting_since=99.0)
    assert decide(wanting, make_demand("b", LOADED, 5)) == SwapDecision(load="a")
    assert decide(wanting, make_demand("b", LOADED, 10)) == SwapDecision(unload=("b",))


# ---- a simulation


@dataclass
class _Model:
    name: str
    size: int
    pinned: bool
    stage: ModelStage = UNLOADED
    ready_at: float = 0.0  # end of its load or stop
    is_closed: bool = False
    loaded_at: float = -inf
    last_used_at: float = -inf
    ends: list[float] = field(default_factory=list)  # of its requests
    waiting: list[tuple[float, float]] = field(default_factory=list)  # arrival, duration


@dataclass
class _Simulation:
    """Time in steps of a second; loads take 3, stops 2."""

    models: list[_Model]
    memory: int
    now: float = 0.0
    waits: list[float] = field(default_factory=list)
    loads: list[tuple[float, str]] = field(default_factory=list)

    def step(self) -> None:
        self.now += 1.0
        for model in self.models:
            self._advance(model)
        decision = decide_swap([self._describe(model) for model in self.models], self.memory, STAY_S, self.now)
        by_name = {model.name: model for model in self.models}
        for name in decision.open:
            by_name[name].is_closed = False
        for name in decision.close:
            by_name[name].is_closed = True
        for name in decision.unload:
            model = by_name[name]
            assert model.stage is LOADED and not model.ends and not model.pinned
            model.stage, model.ready_at = STOPPING, self.now + 2.0
        if decision.load:
            model = by_name[decision.load]
            assert model.stage is UNLOADED
            model.stage, model.ready_at = STARTING, self.now + 3.0
            self.loads.append((self.now, model.name))
        assert sum(model.size for model in self.models if model.stage in HOLDS_MEMORY) <= self.memory

    def _advance(self, model: _Model) -> None:
        if model.stage is STARTING and self.now >= model.ready_at:
            model.stage, model.loaded_at = LOADED, self.now
        elif model.stage is STOPPING and self.now >= model.ready_at:
            model.stage, model.is_closed = UNLOADED, False
        model.ends = [end for end in model.ends if end > self.now]
        if model.stage is LOADED and not model.is_closed:
            for arrived, duration in model.waiting:
                self.waits.append(self.now - arrived)
                model.ends.append(self.now + duration)
                model.last_used_at = self.now
            model.waiting = []

    def _describe(self, model: _Model) -> ModelDemand:
        return make_demand(
            model.name,
            model.stage,
            model.size,
            pinned=model.pinned,
            users=len(model.ends),
            waiting_since=min((arrived for arrived, _ in model.waiting), default=inf),
            is_closed=model.is_closed,
            last_used_at=model.last_used_at,
            loaded_at=model.loaded_at,
            stays_since=model.loaded_at,
        )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 10), st.booleans()), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 120), st.integers(1, 30)), max_size=60),
)
def test_every_request_is_served_and_memory_is_never_exceeded(
    models: list[tuple[int, bool]], requests: list[tuple[int, int, int]]
) -> None:
    """Requests are (model, arrival, duration); pinned models leave room for any other one."""
    sizes = [(size, pinned and number == 0) for number, (size, pinned) in enumerate(models)]
    pinned_size = sum(size for size, pinned in sizes if pinned)
    memory = pinned_size + max(size for size, _ in sizes)
    simulation = _Simulation([_Model(f"m{n}", size, pinned) for n, (size, pinned) in enumerate(sizes)], memory)
    pending = sorted((at, number % len(models), duration) for number, at, duration in requests)
    while simulation.now < 6000 and (pending or any(model.waiting or model.ends for model in simulation.models)):
        while pending and pending[0][0] <= simulation.now:
            _, number, duration = pending.pop(0)
            simulation.models[number].waiting.append((simulation.now, float(duration)))
        simulation.step()
    assert len(simulation.waits) == len(requests)


def test_two_alternating_clients_swap_at_most_once_a_stay() -> None:
    models = [_Model("a", 10, False), _Model("b", 10, False)]
    simulation = _Simulation(models, memory=15)
    while simulation.now < 1000:
        for model in models:
            if not (model.waiting or model.ends):
                model.waiting.append((simulation.now, 1.0))
        simulation.step()
    times = [at for at, _ in simulation.loads]
    assert min(later - earlier for earlier, later in pairwise(times)) >= STAY_S
    assert max(simulation.waits) <= 2 * (STAY_S + 3.0 + 2.0) + 2.0, "a swap there and one back"


def test_twenty_clients_and_one_client_of_another_model_both_go_on() -> None:
    many, one = _Model("many", 10, False), _Model("one", 10, False)
    simulation = _Simulation([many, one], memory=15)
    served = {"many": 0, "one": 0}
    while simulation.now < 2000:
        for model, clients in ((many, 20), (one, 1)):
            missing = clients - len(model.waiting) - len(model.ends)
            served[model.name] += missing
            model.waiting += [(simulation.now, 4.0)] * missing
        simulation.step()
    assert served["one"] > 60 and served["many"] > 20 * 60
    assert max(simulation.waits) <= 2 * (STAY_S + 5.0) + 10.0
