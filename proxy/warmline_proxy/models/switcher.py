"""Switcher of models: asks the keeper to load and unload them as requests need, and opens and closes their gates.

One task polls the keeper, another acts on `decide_swap`.  Event loop thread.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

import msgspec

from warmline_common.protocol.keeper import HOLDS_MEMORY, RUNNING, ModelsReply, ModelStage, ModelStatus
from warmline_proxy.errors import ClientError, bad_request, service_unavailable
from warmline_proxy.metrics import ProxyMetrics
from warmline_proxy.models.backend import Backend
from warmline_proxy.models.directory import ServedModels
from warmline_proxy.models.gate import GateWait
from warmline_proxy.models.model_state import ModelState
from warmline_proxy.models.refusals import (
    build_down_error,
    build_failed_error,
    build_swap_refusal,
    build_too_large_error,
    describe_wait,
)
from warmline_proxy.models.swaps import ModelDemand, SwapDecision, decide_swap
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.keeper_client import (
    KeeperCallError,
    KeeperClient,
    KeeperRefusalError,
    KeeperUnreachableError,
)

log = logging.getLogger(__name__)

POLL_WAIT_S = 5.0
RETRY_INTERVAL_S = 0.5  # after a failed call
SHORTAGE_S = 5.0  # for which the keeper's word counts that a model does not fit
PROGRESS_INTERVAL_S = 1.0  # between the signs of a load that goes on
NO_ROOM = "no_room"
STOPPING = "stopping"  # the keeper
KEEPER_DOWN = "the keeper, which loads models, does not answer"
EMPTY_REPLY = ModelsReply(boot="", version=-1, memory_bytes=0, models=[], ready=False)


@dataclass(eq=False)
class ModelSwitcher:
    """Owner of the gates of several models."""

    models: ServedModels
    keeper: KeeperClient
    stay_s: float
    connect_timeout_s: float  # for the owner's loads of a model that can't start; 0: no limit
    save_residents: Callable[[Backend], Awaitable[None]]  # before a model is unloaded
    metrics: ProxyMetrics
    background: BackgroundTasks
    reply: ModelsReply = EMPTY_REPLY
    _states: dict[str, ModelState] = field(default_factory=dict, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _moved: asyncio.Event = field(default_factory=asyncio.Event, init=False)  # replaced at each change of a status
    _keeper_down_since: float | None = field(default=None, init=False)  # also until its first reply
    _has_call_failed: bool = field(default=False, init=False)  # since its last reply
    _pin_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._keeper_down_since = time.monotonic()
        for backend in self.models.backends:
            assert backend.model is not None
            unknown = ModelStatus(
                name=backend.model.name,
                instance=backend.model.instance,
                stage=ModelStage.UNLOADED,
                pinned=backend.model.pinned,
            )
            state = self._states[unknown.name] = ModelState(backend, unknown)
            backend.gate.find_refusal = partial(self._find_refusal, state)

    def wake(self) -> None:
        """Decide again: requests have come or gone."""
        self._wake.set()

    async def run(self) -> None:
        """Poll and decide.  Never returns."""
        await asyncio.gather(self._poll_keeper(), self._decide_forever(), self._note_progress())

    # ---- state of the keeper

    async def _poll_keeper(self) -> None:
        while True:
            try:
                self._take_reply(await self.keeper.fetch_models(self.reply.version, POLL_WAIT_S))
            except KeeperCallError as error:
                if self._keeper_down_since is None:
                    log.warning("%s", error)
                    self._keeper_down_since = time.monotonic()
                self.reply, self._has_call_failed = msgspec.structs.replace(self.reply, version=-1), True
                self._record_down_times()
                self._end_owners_waits()
                await asyncio.sleep(RETRY_INTERVAL_S)

    def _end_owners_waits(self) -> None:
        """Refuse loads and unloads of the owner while the keeper can't be asked for them."""
        for state in self._states.values():
            if state.is_unload_asked and state.unload_task is None:
                self._keep_loaded(state, KEEPER_DOWN)
            state.backend.gate.look_again()
        self._notify_waiting()

    def _take_reply(self, reply: ModelsReply) -> None:
        if reply.boot == self.reply.boot and reply.version < self.reply.version:
            return  # of a call that was overtaken
        if self._keeper_down_since is not None:
            log.info("the keeper answers: %d models, %.1f GB for them", len(reply.models), reply.memory_bytes / 1e9)
        is_another_keeper = reply.boot != self.reply.boot
        self.reply, self._keeper_down_since, self._has_call_failed = reply, None, False
        self.models.are_processes_known = self.models.are_processes_known or reply.ready
        for status in reply.models:
            if (state := self._states.get(status.name)) is not None:
                if is_another_keeper:
                    state.kv_bytes_asked = None
                self._take_status(state, status)
        self._record_down_times()
        for state in self._states.values():
            state.backend.gate.look_again()
        self._notify_waiting()
        self.wake()

    def _take_status(self, state: ModelState, status: ModelStatus) -> None:
        backend, before, was_asked = state.backend, state.status, state.is_load_asked
        state.take_status(status)
        # A keeper that starts does not know the ports of the backends of the one before, which end what they compute.
        is_gone = self.reply.ready and status.stage not in HOLDS_MEMORY
        if status.port or is_gone:
            self._set_address(backend, status.port)
        if status.stage is not before.stage:
            log.info("model %s is %s%s", state.name, status.stage, f": {status.reason}" if status.reason else "")
            if status.stage is ModelStage.LOADED:
                for other in self._states.values():
                    other.has_given_way = False
                if was_asked:
                    self.metrics.model_load_seconds.observe(status.load_s)
        if status.stage is ModelStage.UNLOADED and is_gone:
            backend.state.resident_view.clear()
        self._set_gate(state)

    def _set_address(self, backend: Backend, port: int) -> None:
        url = f"http://127.0.0.1:{port}" if port else ""
        if url != backend.upstream.base_url:
            backend.upstream.base_url = url
            backend.watchdog.recheck()

    def _set_gate(self, state: ModelState) -> None:
        gate, status = state.backend.gate, state.status
        is_open = status.stage is ModelStage.LOADED and not (state.is_draining or state.is_unload_asked)
        if is_open:
            gate.allow(status.kv_bytes)
        else:
            gate.close()

    def _find_refusal(self, state: ModelState, wait: GateWait | None = None) -> ClientError | None:
        """Refusal of those that wait for a model, or of this wait alone."""
        if self._has_call_failed and wait is not None and wait.is_owners:
            return service_unavailable(f"No model can be loaded now: {KEEPER_DOWN}.  Try again soon.")
        if wait is not None and wait.is_owners and self._is_down_too_long(state, wait):
            return build_down_error(state.name, state.backend.gate.down_reason, self.connect_timeout_s)
        if state.refuses_strangers and wait is not None and not wait.may_swap:
            return build_swap_refusal(state.status, self.models.configs)
        status = state.status
        if (refusal := state.refusal) is not None:
            return refusal
        if state.has_failed_lately and not state.is_load_asked:
            return build_failed_error(status)
        if (missing := self._count_missing_bytes(state, wait.kv_bytes if wait else 0)) > 0:
            if wait is not None and not wait.may_swap:
                return build_swap_refusal(state.status, self.models.configs)
            extra_bytes = state.count_extra_bytes(wait.kv_bytes if wait else 0)
            return build_too_large_error(status, self.reply, missing, extra_bytes)
        return None

    def _is_down_too_long(self, state: ModelState, wait: GateWait) -> bool:
        return 0 < self.connect_timeout_s < state.backend.gate.measure_outage_s(wait, time.monotonic())

    def _count_missing_bytes(self, state: ModelState, kv_bytes: int = 0) -> int:
        """Bytes that a model lacks for a request even where only pinned ones stay loaded; 0 or less: none.

        A pinned model that is not loaded has no memory to count: it may not fit beside the others itself.
        """
        held = sum(status.need_bytes for status in self._list_pinned(state) if status.stage in HOLDS_MEMORY)
        needed = state.status.need_bytes + state.count_extra_bytes(kv_bytes)
        return held + needed - self.reply.memory_bytes if self.reply.memory_bytes else 0

    def _list_pinned(self, but: ModelState) -> list[ModelStatus]:
        return [each.status for each in self._states.values() if each is not but and each.status.pinned]

    def _record_down_times(self) -> None:
        for state in self._states.values():
            gate, reason = state.backend.gate, KEEPER_DOWN
            down_since = self._keeper_down_since
            if down_since is None and state.status.down_s:
                down_since, reason = time.monotonic() - state.status.down_s, state.status.reason
            gate.down_since, gate.down_reason = down_since, reason or "its backend does not answer"

    async def _note_progress(self) -> None:
        """Note, for the clients that wait, that other requests are computed or a model is loaded; else have the owner's
        waits see whether they have lasted too long.
        """
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            for state in self._states.values():
                gate = state.backend.gate
                if gate.waiting and gate.down_since is None:
                    gate.progressed_at = time.monotonic()
                elif gate.waiting:
                    gate.look_again()

    @property
    def keeper_problem(self) -> str:
        """Why no model can be loaded or unloaded now; "" where they can be."""
        return KEEPER_DOWN if self._keeper_down_since is not None else ""

    # ---- decisions

    async def _decide_forever(self) -> None:
        while True:
            decide_at = inf
            if self._keeper_down_since is None and self.reply.ready:
                try:
                    decision = decide_swap(self._list_demands(), self.reply.memory_bytes, self.stay_s, time.monotonic())
                    await self._act(decision)
                    decide_at = min(decision.decide_at, self._find_next_retry())
                except KeeperUnreachableError as error:
                    log.warning("%s", error)
                    decide_at = time.monotonic() + RETRY_INTERVAL_S
                except Exception:  # without decisions, no request of an unloaded model would be served any more
                    log.exception("choosing the models to load failed")
                    decide_at = time.monotonic() + RETRY_INTERVAL_S
            with suppress(TimeoutError):
                async with asyncio.timeout(None if decide_at == inf else max(0.0, decide_at - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()

    def _find_next_retry(self) -> float:
        """Time at which a refused load may be tried again, or is reckoned anew, or a failing model gives way."""
        states = self._states.values()
        times = [at for state in states for at in (state.retry_at, state.shortage_until, state.gives_way_at)]
        return min((at for at in times if at > time.monotonic()), default=inf)

    def _list_demands(self) -> list[ModelDemand]:
        return [state.describe_demand() for state in self._states.values()]

    async def _act(self, decision: SwapDecision) -> None:
        self._explain_waits(decision)
        for name in decision.open:
            if not self._states[name].is_unload_asked:
                self._set_draining(self._states[name], False)
        for name in decision.close:
            log.info("model %s takes no new requests: another model waits for its memory", name)
            self._set_draining(self._states[name], True)
        for name in decision.unload:
            self._begin_unload(self._states[name])
        for state in self._states.values():
            if state.is_unload_asked and not state.backend.gate.users and state.status.stage in RUNNING:
                self._begin_unload(state)
        if decision.refuse:
            self._states[decision.refuse].refuses_strangers = True
            self._states[decision.refuse].backend.gate.look_again()
        if decision.prepare:
            await self._prepare(self._states[decision.prepare])
        if decision.load:
            await self._load(self._states[decision.load])

    def _explain_waits(self, decision: SwapDecision) -> None:
        for state in self._states.values():
            gate, before = state.backend.gate, state.backend.gate.wait_reason
            gate.wait_reason = describe_wait(state.name, decision, self.stay_s) if gate.waiting else ""
            if gate.wait_reason and gate.wait_reason != before:
                log.info("requests wait for model %s: %s", state.name, gate.wait_reason)

    def _set_draining(self, state: ModelState, is_draining: bool) -> None:
        state.is_draining = is_draining
        self._set_gate(state)

    def _begin_unload(self, state: ModelState) -> None:
        if state.unload_task is None:
            self._set_draining(state, True)
            state.has_given_way = state.gives_way_at <= time.monotonic()
            state.unload_task = self.background.spawn(self._unload(state), f"unloading of {state.name}")
            self.wake()  # the model that it makes room for can be prepared

    async def _unload(self, state: ModelState) -> None:
        """Save what is in memory alone, then unload."""
        try:
            if state.status.stage is ModelStage.LOADED:
                await self.save_residents(state.backend)
            self._take_reply(await self.keeper.unload(state.name))
        except KeeperCallError as error:
            log.warning("model %s was not unloaded: %s", state.name, error)
            await asyncio.sleep(RETRY_INTERVAL_S)
            self._keep_loaded(state, str(error))
        finally:
            state.unload_task = None
            self.wake()

    def _keep_loaded(self, state: ModelState, problem: str = "") -> None:
        """Give up an unload, and end the waits for it."""
        state.is_unload_asked, state.unload_problem = False, problem
        self._set_draining(state, False)
        self._notify_waiting()

    def _notify_waiting(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _prepare(self, state: ModelState) -> None:
        """Have a model prepared, once, while others end.  Raises KeeperUnreachableError."""
        if not state.is_prepared:
            state.is_prepared = True
            with suppress(KeeperRefusalError):
                await self.keeper.prepare(state.name, state.kv_bytes_needed)

    async def _load(self, state: ModelState) -> None:
        """Load a model, or give it the memory that its requests wait for.  Raises KeeperUnreachableError."""
        kv_bytes = state.kv_bytes_needed
        if state.status.stage is ModelStage.LOADED and state.kv_bytes_asked == kv_bytes <= state.status.kv_bytes:
            return  # the requests that waited for it are about to enter
        if time.monotonic() < state.retry_at:
            return
        try:
            await self._claim_kv_in_use(except_for=state)
            state.is_load_asked = state.is_load_asked or state.status.stage is not ModelStage.LOADED
            self._take_reply(await self.keeper.load(state.name, kv_bytes))
            state.kv_bytes_asked = kv_bytes
        except KeeperRefusalError as error:
            self._record_refusal(state, error)

    def _record_refusal(self, state: ModelState, error: KeeperRefusalError) -> None:
        now = time.monotonic()
        state.is_load_asked, state.retry_at = False, now + RETRY_INTERVAL_S
        log.info("model %s is not loaded yet: %s", state.name, error)
        if error.code == STOPPING:
            return  # the next keeper loads it
        if error.code != NO_ROOM:
            state.refusal = ClientError(error.status, error.body)
            state.backend.gate.look_again()
            return
        more_bytes = max(1, state.status.need_bytes // 10)
        state.shortage_bytes = more_bytes + (state.shortage_bytes if now < state.shortage_until else 0)
        state.shortage_until = now + SHORTAGE_S

    async def _claim_kv_in_use(self, except_for: ModelState) -> None:
        """Have the keeper leave the other loaded models what their requests need, and no more."""
        for state in self._states.values():
            needed = max(state.backend.gate.users.values(), default=0)
            if state is not except_for and state.kv_bytes_asked != needed and state.status.stage is ModelStage.LOADED:
                with suppress(KeeperRefusalError):
                    await self.keeper.load(state.name, needed)
                    state.kv_bytes_asked = needed

    # ---- for the owner

    async def load(self, backend: Backend) -> None:
        """Load a model, also one that has just failed, and wait until it is.  Raises ClientError where it can't be."""
        self._find_state(backend).failed_at = -inf
        user = object()
        await backend.gate.enter(user, is_owners=True)
        backend.gate.leave(user)

    def check_unpinned(self, backend: Backend) -> None:
        """Raise ClientError for a pinned model."""
        if self._find_state(backend).status.pinned:
            name = backend.name
            message = f"The model {name!r} is pinned: unpin it first (`warmline models pin {name} --off`)."
            raise bad_request(message, status=409, code="model_pinned")

    async def unload(self, backend: Backend) -> None:
        """Unload a model once its requests are done, and wait until it is.  Raises ClientError where that fails."""
        state = self._find_state(backend)
        while not (self.reply.boot or self._has_call_failed):
            await self._moved.wait()
        if self._has_call_failed:
            raise service_unavailable(f"No model can be unloaded now: {KEEPER_DOWN}.  Try again soon.")
        if state.status.stage in HOLDS_MEMORY:
            state.is_unload_asked = True
            self._set_gate(state)
            self.wake()
            while state.is_unload_asked:
                await self._moved.wait()
            if state.status.stage in RUNNING:
                self.check_unpinned(backend)  # it was pinned meanwhile
                raise service_unavailable(f"The model {state.name!r} was not unloaded: {state.unload_problem}.")

    async def pin(self, backend: Backend, pinned: bool) -> None:
        """Raises KeeperCallError, and ClientError for a model that does not fit beside the other pinned ones."""
        state = self._find_state(backend)
        async with self._pin_lock:
            needed = state.status.need_bytes + sum(status.need_bytes for status in self._list_pinned(state))
            if pinned and 0 < self.reply.memory_bytes < needed:
                raise build_too_large_error(state.status, self.reply, needed - self.reply.memory_bytes)
            self._take_reply(await self.keeper.pin(state.name, pinned))
        if pinned:
            self._keep_loaded(state)

    def find_loadable_backend(self) -> Backend:
        """Backend of a model that a request has loaded, the default one first.

        Raises ClientError while there is none: also while models are loaded without a request, as at a start.
        """
        if self._keeper_down_since is not None:
            raise service_unavailable(f"No model can be loaded: {KEEPER_DOWN}.")
        if not self.reply.ready:
            raise service_unavailable("Backends of an earlier start have to end before models are loaded.")
        for state in self._states.values():
            if state.status.stage in RUNNING and not state.is_load_asked:
                raise service_unavailable(f"The model {state.name!r} is {state.status.stage}, and does not answer yet.")
        refusals = [self.find_refusal(state.backend) for state in self._states.values()]
        for state, refusal in zip(self._states.values(), refusals, strict=True):
            if refusal is None and state.status.need_bytes:
                return state.backend
        raise next(filter(None, refusals), service_unavailable("The sizes of the models are being read."))

    def find_refusal(self, backend: Backend) -> ClientError | None:
        """Refusal of a model that can't be loaded; None where it is loaded, or can be."""
        state = self._find_state(backend)
        if state.status.stage is ModelStage.FAILED:
            return build_failed_error(state.status)
        return None if state.status.stage in HOLDS_MEMORY else self._find_refusal(state)

    def find_status(self, backend: Backend) -> ModelStatus:
        """Last known status of a model."""
        return self._find_state(backend).status

    def _find_state(self, backend: Backend) -> ModelState:
        return self._states[backend.name]
