"""Keeper: loads and unloads models, divides the memory, and tells of each change.  Event loop thread.

Nothing is unloaded here but on request: the proxy knows which model is idle.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from warmline_common.process.arguments import GB
from warmline_common.protocol.keeper import RUNNING, ModelsReply, ModelStage
from warmline_common.settings.models import NAME_CHARS_MAX, ModelConfig, find_model, parse_models
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.storage.home import Home
from warmline_run.keeper.backends.backend_client import BackendClient
from warmline_run.keeper.backends.earlier_processes import wait_for_earlier_processes
from warmline_run.keeper.backends.model_process import ModelProcess
from warmline_run.keeper.backends.process_starter import ProcessStarter
from warmline_run.keeper.errors import (
    KeeperStoppingError,
    LoadRefusedError,
    ModelPinnedError,
    ModelTooLargeError,
    NoRoomError,
    PinNotWrittenError,
    UnknownModelError,
)
from warmline_run.keeper.memory import LoadDecision, LoadPlan, MemoryHolder, plan_load
from warmline_run.keeper.models import KeptModel
from warmline_run.keeper.saved_state import KeptModels, read_kept_models, write_kept_models
from warmline_run.keeper.shares import MemoryShares
from warmline_run.keeper.sizes import ModelSizeError, SizeReader, SizeReport
from warmline_run.processes import Command, StartMemory, model_command
from warmline_run.settings.model_config import make_model_config

log = logging.getLogger(__name__)

STANDBY_DELAY_S = 3.0
WARM_UP_S = 0.05  # of a load that requests wait for: their own work warms the rest up
RESTING = (ModelStage.UNLOADED, ModelStage.FAILED)
STOPPING = "Warmline stops: models are neither loaded nor unloaded now; try again when it has started"


@dataclass(frozen=True)
class KeeperSurroundings:
    """Surroundings of a keeper.  `environment`: variables of its backends; `pipe`: read end of its parent pipe."""

    home: Home
    environment: Mapping[str, str]
    pipe: int
    client: BackendClient
    hurry: asyncio.Event  # set once processes are to end at once


class Keeper:
    """Owner of all backends' processes and of the memory's division; `start` it first."""

    def __init__(self, config: ResolvedConfig, surroundings: KeeperSurroundings) -> None:
        self._config, self._surroundings = config, surroundings
        self._boot, self._version = secrets.token_hex(8), 1
        self._changed, self._stopping = asyncio.Event(), asyncio.Event()
        self._is_ready = self._is_restored = self._is_stopped = self._is_memory_checked = False
        self._is_unwritten_logged = False
        self._pins_loaded = asyncio.Event()  # pinned models have their memory: others may be loaded
        self.nothing_fits = asyncio.Event()  # none of the models can be loaded, as configured
        self._memory_lock = asyncio.Lock()  # held while memory is decided on and shares are set
        self._starter = ProcessStarter(surroundings.environment, surroundings.pipe)
        self._configured = parse_models(str(config["models"]))
        self._kept = read_kept_models(self._kept_file, [each.name for each in self._configured])
        self._models = {each.name: self._make_model(each) for each in self._configured}
        self._sizes = SizeReader(surroundings.home, surroundings.environment, surroundings.pipe)
        self._shares = MemoryShares(self._models, surroundings.client)
        self._size_tasks: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _make_model(self, model: ModelConfig) -> KeptModel:
        home = Home(self._surroundings.home.root, model.instance)
        log_file, on_change = home.logs / f"{home.backend_name}.log", partial(self._handle_process_change, model.name)
        process = ModelProcess(model.name, log_file, self._starter, self._surroundings.client, on_change)
        is_pinned = self._kept.pins.get(model.name, model.pinned)
        return KeptModel(model, make_model_config(self._config, model), process, is_pinned)

    # ---- start and end

    def start(self) -> None:
        """Begin to load what is pinned, and what was loaded, in the background."""
        self._spawn(self._restore())

    async def stop(self) -> None:
        """Stop all processes; returns when they are gone."""
        self._stopping.set()  # from now on the file keeps what was loaded
        tasks = [*self._tasks, *self._size_tasks.values()]
        for task in tasks:
            task.cancel()
        running = [model for model in self._models.values() if model.process.state.stage not in RESTING]
        if waits := [*tasks, *map(self._begin_stop, running)]:
            await asyncio.wait(waits)
        await self._starter.close()
        self._is_stopped = True
        self._publish()

    async def _restore(self) -> None:
        await wait_for_earlier_processes(self._surroundings.home)
        self._is_ready = True
        self._publish()
        for model in self._models.values():
            if model.is_pinned:
                await self._load_or_log(model)
        self._pins_loaded.set()
        for model in self._models.values():
            if model.name in self._kept.loaded:
                await self._load_or_log(model)
        default = self._models[self._configured[0].name]
        if all(model.stage in RESTING for model in self._models.values()) and not default.is_pinned:
            await self._load_or_log(default)
        self._is_restored = True
        self._publish()
        for model in self._models.values():
            if not model.failure:
                await self._wait_for_size(model)
        can_load = [self._check_fits_alone(model) for model in self._models.values()]
        if not any(can_load):
            self.nothing_fits.set()
        await self._prepare_standby()

    async def _load_or_log(self, model: KeptModel) -> None:
        try:
            await self._load(model, 0)
        except LoadRefusedError as error:
            model.is_refusal_logged = True
            log.warning("%s", error)

    def _check_fits_alone(self, model: KeptModel) -> bool:
        """True for a model that can be loaded if no other one is; else that is logged."""
        if model.report is None:
            return False
        plan = plan_load(model.report.size, 0, {}, self._total_bytes)
        if plan.decision is not LoadDecision.FITS and not model.is_refusal_logged:
            log.warning("%s", _make_refusal(model.name, plan, model.report.size.fixed_bytes, ()))
        return plan.decision is LoadDecision.FITS

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._handle_task_end)

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the keeper failed", exc_info=error)

    # ---- state

    def describe(self) -> ModelsReply:
        return ModelsReply(
            boot=self._boot,
            version=self._version,
            memory_bytes=self._total_bytes,
            models=[model.describe() for model in self._models.values()],
            ready=self._is_ready,
        )

    async def wait_for_change(self, version: int, wait_s: float) -> None:
        """Wait until the version is another one, at most `wait_s`, and not beyond the keeper's end."""
        try:
            async with asyncio.timeout(wait_s):
                while self._version == version and not self._is_stopped:
                    await self._changed.wait()
        except TimeoutError:
            return

    def _publish(self) -> None:
        """Notify waiting callers of a change, and write down what is loaded."""
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        if not self._stopping.is_set():
            try:
                self._write_kept()
                self._is_unwritten_logged = False
            except OSError as error:  # the next start then begins with what was written last
                if not self._is_unwritten_logged:
                    log.warning("loaded models and pins can't be written down: %s", error)
                self._is_unwritten_logged = True

    def _write_kept(self) -> None:
        """Write down pins and loaded models, where they have changed.  Raises OSError."""
        if (kept := self._list_kept()) != self._kept:
            write_kept_models(self._kept_file, kept)
            self._kept = kept

    def _list_kept(self) -> KeptModels:
        """Pins and loaded models to keep; until all that was loaded is loaded again, that counts as loaded."""
        models = self._models.values()
        pins = {model.name: model.is_pinned for model in models if model.is_pinned != model.model.pinned}
        loaded = [model.name for model in models if model.stage in RUNNING] if self._is_restored else self._kept.loaded
        return KeptModels(pins, loaded)

    @property
    def _kept_file(self) -> Path:
        return self._surroundings.home.run / "models.json"

    @property
    def _total_bytes(self) -> int:
        """Memory of all models together: what is configured, as far as the machine has it.

        0 while it is unknown: the machine decides, and no report names it yet.
        """
        configured, machine = self._configured_bytes, self._machine_bytes
        return min(configured, machine) if configured and machine else configured or machine

    @property
    def _configured_bytes(self) -> int:
        return int(float(self._config["models_memory_gb"]) * GB)

    @property
    def _machine_bytes(self) -> int:
        """Memory that this machine has for models; 0 while no report names it."""
        return max((model.report.machine_bytes for model in self._models.values() if model.report), default=0)

    def _check_configured_memory(self) -> None:
        """Warn, once, of a setting that asks for more than there is."""
        configured, machine = self._configured_bytes, self._machine_bytes
        if configured > machine > 0 and not self._is_memory_checked:
            log.warning(
                "models_memory_gb is %g, and this machine has %.3f GB for models: %.3f GB are used",
                *(configured / GB, machine / GB, self._total_bytes / GB),
            )
        self._is_memory_checked = self._is_memory_checked or machine > 0

    def _handle_process_change(self, name: str) -> None:
        self._models[name].adjust_budget()
        if not self._stopping.is_set() and self._models[name].process.state.stage in (ModelStage.LOADED, *RESTING):
            self._spawn(self._rebalance())
            self._spawn(self._prepare_standby())
        self._publish()

    async def _prepare_standby(self) -> None:
        """Start a process ahead of the next load, once the first requests of the last one have been served."""
        await asyncio.sleep(STANDBY_DELAY_S)
        if any(model.process.state.stage is ModelStage.UNLOADED for model in self._models.values()):
            await self._starter.prepare_standby()

    async def _rebalance(self) -> None:
        async with self._memory_lock:
            await self._shares.rebalance(self._total_bytes)
        self._publish()

    # ---- calls

    async def load(self, name: str, kv_bytes: int) -> None:
        """Begin to load a model, or give a loaded one more memory.

        Waits until that is decided on.  Raises UnknownModelError, LoadRefusedError, KeeperStoppingError.
        """
        model = self._find(name)
        with self._waiting_load(model):
            await self._unless_stopping(self._pins_loaded.wait())
            await self._load(model, kv_bytes)

    async def prepare(self, name: str, kv_bytes: int) -> None:
        """Have a process prepare all but the weights of a model, whose load waits for memory.

        Raises UnknownModelError, KeeperStoppingError.
        """
        model = self._find(name)
        if model.report is not None and not model.holds_memory:
            share_bytes = max(model.report.size.floor_bytes, kv_bytes)
            await self._starter.hold(self._make_command(model, model.report, share_bytes))

    def unload(self, name: str) -> None:
        """Begin to unload a model.  Raises UnknownModelError, ModelPinnedError, KeeperStoppingError."""
        model = self._find(name)
        if model.is_pinned:
            raise ModelPinnedError(f"{model.name} is pinned, and stays loaded; unpin it first")
        model.failure = ""
        model.unload_count += 1
        if model.process.state.stage is not ModelStage.UNLOADED:
            self._begin_stop(model)
        self._publish()

    def pin(self, name: str, is_pinned: bool) -> None:
        """Pin a model, or unpin it, also for later starts.

        Raises UnknownModelError, PinNotWrittenError, KeeperStoppingError.
        """
        model = self._find(name)
        was_pinned, model.is_pinned = model.is_pinned, is_pinned
        try:
            self._write_kept()
        except OSError as error:
            model.is_pinned = was_pinned
            verb = "pinned" if is_pinned else "unpinned"
            raise PinNotWrittenError(
                f"{model.name} is not {verb}: that can't be written to {self._kept_file} ({error.strerror or error})"
            ) from None
        self._publish()

    def _find(self, name: str) -> KeptModel:
        if self._stopping.is_set():
            raise KeeperStoppingError(STOPPING)
        if (found := find_model(self._configured, name)) is None:
            known = ", ".join(self._models)
            raise UnknownModelError(f"no model {name[:NAME_CHARS_MAX]!r} is configured; expected one of {known}")
        return self._models[found.name]

    def _begin_stop(self, model: KeptModel) -> asyncio.Task[None]:
        return model.process.stop(self._surroundings.hurry, float(self._config["drain_timeout_s"]))

    # ---- loading

    async def _load(self, model: KeptModel, kv_bytes: int) -> None:
        unload_count = model.unload_count
        with self._waiting_load(model):
            await self._unless_stopping(self._wait_for_size(model))
            while model.process.state.stage is ModelStage.STOPPING:
                await self._unless_stopping(asyncio.wait([self._begin_stop(model)]))
            async with self._memory_lock:
                if self._stopping.is_set():
                    raise KeeperStoppingError(STOPPING)
                if model.report is not None and model.unload_count == unload_count:
                    await self._decide(model, model.report, kv_bytes)

    async def _decide(self, model: KeptModel, report: SizeReport, kv_bytes: int) -> None:
        """Start a model, or give it more memory, where that fits.  Raises LoadRefusedError."""
        if model.holds_memory and kv_bytes <= model.kv_bytes:
            model.wish_bytes = kv_bytes
            return
        total, others = self._total_bytes, self._shares.list_holders(model.name)
        plan = plan_load(report.size, kv_bytes, others, total)
        if plan.decision is LoadDecision.FITS:
            holder = MemoryHolder(report.size, plan.start_bytes, kv_bytes, can_shrink=False)
            await self._shares.shrink({model.name: holder}, total, model.name)
            if (missing := holder.held_bytes + self._shares.sum_claimed_bytes(model.name) - total) > 0:
                plan = LoadPlan(LoadDecision.NO_ROOM, missing, plan.start_bytes)
        if plan.decision is not LoadDecision.FITS:
            self._spawn(self._rebalance())
            pinned = [name for name, other in others.items() if other.is_pinned]
            raise _make_refusal(model.name, plan, report.size.fixed_bytes, pinned)
        model.wish_bytes = kv_bytes
        if model.holds_memory:
            await self._shares.rebalance(total, model.name)
        elif not self._stopping.is_set():
            model.kv_bytes, model.failure = plan.start_bytes, ""
            model.process.start(lambda: self._make_command(model, report, model.kv_bytes))
            self._spawn(self._rebalance())

    def _make_command(self, model: KeptModel, report: SizeReport, share_bytes: int) -> Command:
        usable_bytes = report.size.fixed_bytes + share_bytes  # others may have the rest until it is loaded
        return model_command(
            model.config,
            report.path,
            self._surroundings.environment,
            model.model.instance,
            StartMemory(self._total_bytes, share_bytes, usable_bytes),
            warm_up_s=WARM_UP_S if self._is_restored else 0.0,  # requests wait for it
        )

    @contextmanager
    def _waiting_load(self, model: KeptModel) -> Iterator[None]:
        """Show the model as one that starts."""
        model.waiting_loads += 1
        self._publish()
        try:
            yield
        finally:
            model.waiting_loads -= 1
            self._publish()

    async def _wait_for_size(self, model: KeptModel) -> None:
        """Wait until the size is read, or can't be; a cancel leaves that to others who wait."""
        if model.report and not model.holds_memory and not self._sizes.is_current(model.config, model.report):
            model.report = None
        if model.report is None:
            if model.name not in self._size_tasks:
                self._size_tasks[model.name] = asyncio.create_task(self._read_size(model))
            await asyncio.wait([self._size_tasks[model.name]])

    async def _read_size(self, model: KeptModel) -> None:
        try:
            model.report, model.failure = await self._sizes.read_size(model.config), ""
            self._check_configured_memory()
        except (ModelSizeError, OSError) as error:
            log.warning("%s can't be served: %s", model.name, error)
            model.failure = str(error)
        finally:
            del self._size_tasks[model.name]
            self._publish()

    async def _unless_stopping(self, work: Awaitable[object]) -> None:
        """Await work of others.  Raises KeeperStoppingError once the keeper stops."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
        if self._stopping.is_set():
            raise KeeperStoppingError(STOPPING)


def _make_refusal(name: str, plan: LoadPlan, fixed_bytes: int, pinned: Sequence[str]) -> LoadRefusedError:
    gigabytes, need = f"{plan.missing_bytes / GB:.3f} GB", (fixed_bytes + plan.start_bytes) / GB
    if plan.decision is LoadDecision.NO_ROOM:
        return NoRoomError(f"{name} needs {need:.3f} GB, and {gigabytes} of them are not free; unload another model")
    beside = f"beside the pinned {', '.join(pinned)}; unpin one" if pinned else "for all models"
    remedy = f"{beside}, raise models_memory_gb" if pinned else f"{beside}; raise models_memory_gb"
    return ModelTooLargeError(
        f"{name} needs {need:.3f} GB for its weights, a prefill step and KV, {gigabytes} more than there are {remedy}, "
        "use a conversion with fewer bits, a smaller prefill_step_size, or shorter prompts"
    )
