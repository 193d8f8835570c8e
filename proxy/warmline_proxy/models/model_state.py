"""State of one of several models, as the switcher knows it.  Event loop thread."""

import asyncio
import time
from dataclasses import dataclass
from math import inf

from warmline_common.protocol.keeper import HOLDS_MEMORY, RUNNING, ModelStage, ModelStatus
from warmline_proxy.errors import ClientError
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.swaps import ModelDemand

FAILED_RETRY_S = 30.0  # after which a request has a failed model loaded again
FAILING_S = 30.0  # after its process died, until a model that is still not loaded makes room for others


@dataclass(eq=False)
class ModelState:
    """A model as the switcher knows it.  Times are time.monotonic()."""

    backend: Backend
    status: ModelStatus
    is_draining: bool = False  # closed, to be unloaded once no request uses it
    is_unload_asked: bool = False  # by its owner
    unload_problem: str = ""  # why the last unload was given up
    unload_task: asyncio.Task[None] | None = None
    is_prepared: bool = False  # since it was loaded last
    is_load_asked: bool = False  # by this proxy, and not loaded since
    loaded_at: float = -inf  # or first seen to be
    stays_since: float = -inf  # when it was loaded for a request
    failed_at: float = -inf
    failing_since: float = inf  # its process has died, and it is being loaded again
    has_given_way: bool = False  # as it was failing, and no other model has been loaded since
    refusal: ClientError | None = None  # of the last load, until the next status
    refuses_strangers: bool = False  # until the next status: others would have to be unloaded
    shortage_bytes: int = 0  # beyond what was reckoned, as the keeper said last
    shortage_until: float = -inf
    retry_at: float = -inf  # when it may be loaded, after a refusal
    kv_bytes_asked: int | None = None  # that the keeper was told last; None: nothing, or an earlier proxy's wish

    @property
    def name(self) -> str:
        return self.status.name

    def take_status(self, status: ModelStatus) -> None:
        """Take what the keeper says now."""
        now, stage, has_changed = time.monotonic(), status.stage, status.stage is not self.status.stage
        self.status, self.refusal, self.refuses_strangers, self.retry_at = status, None, False, -inf
        if has_changed and stage is ModelStage.LOADED:
            self.is_prepared, self.loaded_at = False, now
            self.stays_since = now if self.is_load_asked else self.stays_since
            self.is_load_asked = False
        elif has_changed:
            self.is_draining = self.is_draining and stage is ModelStage.STARTING
        if has_changed and stage is ModelStage.FAILED:
            self.failed_at, self.is_load_asked = now, False
        if stage not in RUNNING:
            self.kv_bytes_asked = None
        if stage in (ModelStage.UNLOADED, ModelStage.FAILED):
            self.is_unload_asked = False
        is_started_again = stage is ModelStage.STARTING and bool(status.reason)
        self.failing_since = min(self.failing_since, now) if is_started_again else inf

    @property
    def has_failed_lately(self) -> bool:
        return self.status.stage is ModelStage.FAILED and time.monotonic() - self.failed_at < FAILED_RETRY_S

    @property
    def gives_way_at(self) -> float:
        """Time from which a model whose process dies again and again makes room for others."""
        return self.failing_since + FAILING_S

    def count_extra_bytes(self, kv_bytes: int) -> int:
        """Bytes that a request with this KV needs beyond what each loaded model has at least."""
        return max(0, kv_bytes - self.status.kv_min_bytes)

    @property
    def kv_bytes_needed(self) -> int:
        """KV budget that the requests inside, and those that wait, need."""
        gate = self.backend.gate
        return max([0, *(wait.kv_bytes for wait in gate.waiting.values()), *gate.users.values()])

    def describe_demand(self) -> ModelDemand:
        """Model and its requests, for `decide_swap`."""
        status, gate, now = self.status, self.backend.gate, time.monotonic()
        stage = status.stage
        if stage is ModelStage.FAILED and not self.has_failed_lately and (gate.waiting or gate.users):
            stage = ModelStage.UNLOADED  # a pinned one without requests is not: others would be unloaded for it in vain
        if self.unload_task is not None and stage in HOLDS_MEMORY:
            stage = ModelStage.STOPPING
        waits = [wait for wait in gate.waiting.values() if wait.may_swap] or list(gate.waiting.values())
        is_lost = bool(gate.users) and stage is ModelStage.UNLOADED  # its requests began while it was loaded
        need_bytes = status.need_bytes + self.count_extra_bytes(max(gate.users.values(), default=0))
        wanted_kv = max((wait.kv_bytes for wait in waits), default=0)
        shortage_bytes = self.shortage_bytes if now < self.shortage_until else 0
        wanted_bytes = max(need_bytes, status.need_bytes + self.count_extra_bytes(wanted_kv)) + shortage_bytes
        return ModelDemand(
            name=self.name,
            stage=stage,
            pinned=status.pinned,
            idle_s=self.backend.model.idle_s if self.backend.model else 0.0,
            need_bytes=need_bytes,
            wanted_bytes=wanted_bytes,
            users=len(gate.users),
            waiting_since=min((wait.since for wait in gate.waiting.values()), default=inf),
            may_swap=is_lost or status.pinned or any(wait.may_swap for wait in waits),
            ignores_stay=status.pinned or any(wait.is_owners for wait in waits),
            is_closed=self.is_draining or self.is_unload_asked,
            is_failing=self.gives_way_at <= now,
            has_given_way=self.has_given_way,
            last_used_at=now - (time.time() - gate.last_used_at) if gate.last_used_at else -inf,
            loaded_at=self.loaded_at,
            stays_since=self.stays_since,
        )
