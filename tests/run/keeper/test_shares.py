"""Shares of the memory as a keeper's backends are told: what they all may take is within the total, at each moment."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from warmline_common.measurement.model_memory import ModelSize
from warmline_common.protocol.keeper import ModelStage
from warmline_common.protocol.messages import MemoryShare
from warmline_common.settings.models import ModelConfig
from warmline_run.keeper.backends.backend_client import BackendUnreachableError
from warmline_run.keeper.memory import LoadDecision, MemoryHolder, plan_load
from warmline_run.keeper.models import KeptModel
from warmline_run.keeper.shares import MemoryShares
from warmline_run.keeper.sizes import SizeReport

TOTAL = 1000
SIZE = ModelSize(100, 10, 20)


class Backends:
    """Backends by their ports.  `usable`: all that each may take; an answer may be lost, once the share is in force."""

    def __init__(self) -> None:
        self.usable: dict[int, int] = {}
        self.in_use: dict[int, int] = {}
        self.lost: set[int] = set()
        self.calls = 0

    async def set_memory_share(self, port: int, share: MemoryShare) -> int:
        self.calls += 1
        await asyncio.sleep(0)  # all are asked at once
        granted = max(share.kv_bytes, self.in_use.get(port, 0))
        self.usable[port] = max(share.usable_bytes, SIZE.fixed_bytes + granted)
        assert sum(self.usable.values()) <= TOTAL, self.usable
        if port in self.lost:
            raise BackendUnreachableError("TimeoutError")
        return granted


class Models:
    """Models of a keeper, whose processes are their states alone."""

    def __init__(self, *names: str) -> None:
        self.backends = Backends()
        client: Any = self.backends
        self.by_name = {name: self._make(name, number) for number, name in enumerate(names, 1)}
        self.shares = MemoryShares(self.by_name, client)

    def _make(self, name: str, port: int) -> KeptModel:
        unused: Any = None
        state = SimpleNamespace(stage=ModelStage.UNLOADED, port=port, starts=0)
        process: Any = SimpleNamespace(state=state)
        report = SizeReport("", "", SIZE, TOTAL)
        return KeptModel(ModelConfig(name, "/m"), unused, process, False, report)

    async def start(self, name: str, wish: int = 0) -> bool:
        """Start a model, as the keeper does; False where it does not fit."""
        model, others = self.by_name[name], self.shares.list_holders(name)
        plan = plan_load(SIZE, wish, others, TOTAL)
        if plan.decision is not LoadDecision.FITS:
            return False
        holder = MemoryHolder(SIZE, plan.start_bytes, wish, can_shrink=False)
        await self.shares.shrink({name: holder}, TOTAL, name)
        if holder.held_bytes + self.shares.sum_claimed_bytes(name) > TOTAL:
            return False
        model.kv_bytes, model.wish_bytes = plan.start_bytes, wish
        self.set_stage(name, ModelStage.STARTING)
        return True

    def set_stage(self, name: str, stage: ModelStage) -> None:
        model = self.by_name[name]
        model.process.state.stage = stage
        model.adjust_budget()
        port = model.process.state.port
        if stage is ModelStage.STARTING:
            model.process.state.starts += 1
            self.backends.usable[port] = model.usable_bytes
        elif stage is ModelStage.UNLOADED:
            self.backends.usable.pop(port, None)
            self.backends.in_use.pop(port, None)
        assert sum(self.backends.usable.values()) <= TOTAL

    async def load(self, name: str) -> None:
        assert await self.start(name)
        self.set_stage(name, ModelStage.LOADED)
        await self.shares.rebalance(TOTAL)

    def list_usable(self) -> dict[str, int]:
        return {name: model.usable_bytes for name, model in self.by_name.items() if model.holds_memory}


def test_free_memory_is_lent_in_equal_parts() -> None:
    async def run() -> None:
        models = Models("a", "b")
        await models.load("a")
        assert models.list_usable() == {"a": 1000}
        assert await models.start("b")
        assert models.list_usable() == {"a": 870, "b": 130}, "which is what it was started with"
        models.set_stage("b", ModelStage.LOADED)
        await models.shares.rebalance(TOTAL)
        assert models.list_usable() == {"a": 500, "b": 500}
        calls = models.backends.calls
        await models.shares.rebalance(TOTAL)
        assert models.backends.calls == calls, "nothing has changed"

    asyncio.run(run())


def test_memory_of_a_process_that_stops_is_lent_again_once_it_is_gone() -> None:
    async def run() -> None:
        models = Models("a", "b", "c")
        await models.load("a")
        await models.load("b")
        models.set_stage("a", ModelStage.STOPPING)
        await models.shares.rebalance(TOTAL)
        assert models.list_usable() == {"a": 500, "b": 500}
        models.set_stage("a", ModelStage.UNLOADED)
        await models.shares.rebalance(TOTAL)
        assert models.list_usable() == {"b": 1000}

    asyncio.run(run())


def test_lost_answer_counts_as_the_larger_share_until_it_is_set_again() -> None:
    async def run() -> None:
        models = Models("a", "b")
        await models.load("a")
        models.backends.lost.add(1)
        assert not await models.start("b"), "the other may still take all"
        assert models.backends.calls == 2, "it was asked once"
        models.backends.lost.clear()
        await models.load("b")
        assert models.list_usable() == {"a": 500, "b": 500}

    asyncio.run(run())


def test_what_processes_may_take_is_within_the_total_in_any_order_of_changes() -> None:
    async def run(chance: random.Random) -> None:
        models = Models(*"abcde")
        for _ in range(60):
            name = chance.choice("abcde")
            model = models.by_name[name]
            stage, port = model.process.state.stage, model.process.state.port
            if stage is ModelStage.UNLOADED:
                await models.start(name, chance.choice([0, 0, chance.randrange(300)]))
            elif stage is ModelStage.STARTING:
                models.set_stage(name, ModelStage.LOADED)
            elif stage is ModelStage.STOPPING:
                models.set_stage(name, ModelStage.UNLOADED)
            else:
                kind = chance.choice(["stop", "crash", "use", "lose"])
                if kind == "stop":
                    models.set_stage(name, ModelStage.STOPPING)
                elif kind == "crash":
                    models.backends.in_use.pop(port, None)
                    models.set_stage(name, ModelStage.STARTING)
                elif kind == "use":
                    models.backends.in_use[port] = chance.randrange(model.kv_bytes + 1)
                else:
                    models.backends.lost ^= {port}
            await models.shares.rebalance(TOTAL)

    for seed in range(40):
        asyncio.run(run(random.Random(seed)))
