"""One configured model as the keeper sees it: its process, size, share of the memory and pin.  Event loop thread."""

from dataclasses import dataclass

from warmline_common.protocol.keeper import HOLDS_MEMORY, ModelStage, ModelStatus
from warmline_common.settings.models import ModelConfig
from warmline_common.settings.resolve import ResolvedConfig
from warmline_run.keeper.backends.model_process import ModelProcess
from warmline_run.keeper.memory import MemoryHolder
from warmline_run.keeper.sizes import SizeReport

READS_SIZE = "its size is being read"


@dataclass
class KeptModel:
    """`kv_bytes`: present KV budget, 0 while it holds no memory; `wish_bytes`: budget that it was asked to have."""

    model: ModelConfig
    config: ResolvedConfig  # of its backend
    process: ModelProcess
    is_pinned: bool
    report: SizeReport | None = None
    kv_bytes: int = 0
    usable_bytes: int = 0  # all that its process may take, as it was told
    is_share_sure: bool = True  # False where it did not say whether that is in force
    wish_bytes: int = 0
    waiting_loads: int = 0  # that can't be decided yet
    failure: str = ""  # why it can't be started at all; "" while that is unknown
    is_refusal_logged: bool = False  # at the start
    unload_count: int = 0  # a load that waited meanwhile is void

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def holds_memory(self) -> bool:
        return self.process.state.stage in HOLDS_MEMORY

    @property
    def stage(self) -> ModelStage:
        stage = self.process.state.stage
        if stage not in (ModelStage.UNLOADED, ModelStage.FAILED):
            return stage
        if self.waiting_loads:
            return ModelStage.STARTING
        return ModelStage.FAILED if self.failure else stage

    @property
    def reason(self) -> str:
        if self.stage is self.process.state.stage:
            return self.process.state.reason
        return READS_SIZE if self.waiting_loads and self.report is None else self.failure

    @property
    def held_bytes(self) -> int:
        """Weights, a prefill step and the present budget of its process; 0 where there is none."""
        return self.report.size.fixed_bytes + self.kv_bytes if self.report and self.holds_memory else 0

    @property
    def claimed_bytes(self) -> int:
        """All that its process may take by now."""
        return max(self.held_bytes, self.usable_bytes) if self.held_bytes else 0

    def make_holder(self) -> MemoryHolder:
        """Holder of the model's share; it must hold memory."""
        assert self.report is not None
        stage = self.process.state.stage
        return MemoryHolder(
            size=self.report.size,
            kv_bytes=self.kv_bytes,
            wish_bytes=self.wish_bytes,
            can_shrink=stage is ModelStage.LOADED,
            can_grow=stage is not ModelStage.STOPPING,
            is_pinned=self.is_pinned,
            extra_bytes=self.claimed_bytes - self.held_bytes if stage is ModelStage.STOPPING else 0,
        )

    def adjust_budget(self) -> None:
        """Follow the process: one that is gone holds nothing, one that is started again has its first budget."""
        if not self.holds_memory:
            self.kv_bytes = self.wish_bytes = self.usable_bytes = 0
        elif self.process.state.stage is ModelStage.STARTING and self.report is not None:
            self.kv_bytes = min(self.kv_bytes, max(self.report.size.floor_bytes, self.wish_bytes))
            self.usable_bytes = self.held_bytes
            self.is_share_sure = True

    def describe(self) -> ModelStatus:
        state, size = self.process.state, self.report.size if self.report else None
        return ModelStatus(
            name=self.name,
            instance=self.model.instance,
            stage=self.stage,
            pinned=self.is_pinned,
            port=state.port,
            pid=state.pid,
            weight_bytes=size.weight_bytes if size else 0,
            need_bytes=size.need_bytes if size else 0,
            kv_min_bytes=size.floor_bytes if size else 0,
            held_bytes=self.held_bytes,
            kv_bytes=self.kv_bytes,
            starts=state.starts,
            down_s=state.down_s,
            load_s=state.load_s,
            reason=self.reason,
        )
