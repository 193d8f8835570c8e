"""What the HTTP routes call: prompts rendered, generations submitted, KV restored and saved.  Event loop thread.

    NotReady    the model is still loading, the engine has ended, or this process is shutting down

What prompts, generations and storage raise (UnknownPrompt, UnknownRequest, BadRequest, Cancelled ...) passes through,
and what the engine does (ResidentGone, ResidentMismatch, TooLarge).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import msgspec

from warmline_backend.config import BackendConfig
from warmline_backend.engine.engine import Engine, EngineStopped
from warmline_backend.engine.inflight import Call, Generations
from warmline_backend.engine.kv_transfer import Storage
from warmline_backend.generation.sequence import Ended, Generation
from warmline_backend.kv_cache.segment_io import BadChain, sweep_drafts
from warmline_backend.model.model import device_name
from warmline_backend.output.dialect import dialect_of
from warmline_backend.output.turns import reader_of
from warmline_backend.prompt.renderer import Renderer
from warmline_backend.request.fields import Slips
from warmline_backend.request.response_format import asks_for_a_form
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_backend.server.chunks import TokenNames
from warmline_backend.server.health import Readiness, pulse
from warmline_backend.server.metrics import Metrics
from warmline_backend.server.prompt_store import PromptStore, StoredPrompt
from warmline_backend.server.runtime import Loaded, mark_of
from warmline_backend.structured_output.compiler import Grammars
from warmline_backend.structured_output.matcher import Guide
from warmline_common.protocol.messages import (
    LOADING,
    PromptReply,
    PromptRequest,
    Pulse,
    ResidentsReply,
    RestoreReply,
    RestoreRequest,
    SampledTurn,
    SaveReply,
    SaveRequest,
    Settled,
    Status,
)
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens
from warmline_common.protocol.vitals import take_vitals
from warmline_common.storage.home import Home

log = logging.getLogger(__name__)

T = TypeVar("T")

RENDERERS = 2
RENDERED_INLINE_BYTES_MAX = 8192
SHUTTING_DOWN = "shutting down"


class NotReady(Exception):
    pass


class Service:
    """One backend process.  Everything here belongs to the event loop; what computes is asked of the engine."""

    def __init__(self, config: BackendConfig, home: Home, engine: Engine, boot: str) -> None:
        self._config, self._home, self._engine, self.boot = config, home, engine, boot
        self._loaded: Loaded | None = None
        self._shutting_down = False
        self._readiness = Readiness(engine)
        self._renderers = ThreadPoolExecutor(RENDERERS, "renderer")
        self._slips = Slips()
        self.prompts = PromptStore()
        self.generations = Generations(engine, boot)
        self.metrics = Metrics(engine, self.status)

    # ---- start and state

    async def wait_until_loaded(self) -> None:
        """Raises what loading the model raised."""
        if swept := await asyncio.to_thread(sweep_drafts, self._home.segments):
            log.info("%d drafts of saves that did not end are deleted", swept)
        served = await asyncio.wrap_future(self._engine.loaded)
        await asyncio.to_thread(dialect_of, served.tokenizer)  # a large vocabulary takes a while, here and only here
        config = self._config
        mark = await asyncio.to_thread(mark_of, served, config, self._home, self._grid)
        self._loaded = Loaded(
            served,
            mark,
            Renderer(served.tokenizer, served.vocabulary_size, config.template_args, reader_of(served.tokenizer)),
            Grammars(served.tokenizer, served.vocabulary_size, self.metrics.compiled),
            TokenNames(served.tokenizer),
            Storage(self._home, self._engine, served, mark),
            int((served.path / "config.json").stat().st_mtime),
            device_name(),
        )
        self._renderers.submit(self._loaded.grammars.prepare)
        asyncio.wrap_future(self._engine.ended).add_done_callback(lambda _: self.generations.end_all(self.failure))

    @property
    def _grid(self) -> int:
        """Once the model is loaded, for the scheduler decides."""
        return self._engine.scheduler.settings.grid

    @property
    def _prefill_step_size(self) -> int:
        """0 while it is to be measured."""
        if self._loaded is None:
            return self._config.prefill_step_size
        return self._engine.scheduler.settings.prefill_step_size

    def shut_down(self) -> None:
        """Refuse what is new; what runs goes on, unless it is in the background."""
        self._shutting_down = True
        self._engine.let_sleep()
        self.generations.let_background_go()

    def let_all_go(self) -> None:
        """Cancel what is under way but saves; without waiting."""
        self.generations.let_all_go()
        if self._loaded is not None:
            self._loaded.storage.give_up_restores()

    async def saves_expected(self) -> bool:
        """Whether something is being saved, or was left a moment ago by a request, for somebody to save it."""
        try:
            return self.loaded.storage.saving or await self._ask(lambda scheduler: scheduler.residents.some_leased)
        except (NotReady, EngineStopped):
            return False

    def close(self) -> None:
        """Give up what is under way."""
        self._renderers.shutdown(wait=False, cancel_futures=True)
        if self._loaded is not None:
            self._loaded.storage.close()

    @property
    def served_name(self) -> str:
        return self._config.served_name

    @property
    def failure(self) -> str:
        """Why nothing can be asked of this process; "" where it can."""
        return self._engine.failure or ("" if self._loaded else LOADING)

    @property
    def loaded(self) -> Loaded:
        """Raises NotReady."""
        if self._loaded is None or self.failure:
            raise NotReady(self.failure)
        return self._loaded

    @property
    def refusal(self) -> str:
        """Why nothing new may be asked of this process, though what is under way may go on; "" where it may."""
        return SHUTTING_DOWN if self._shutting_down else self.failure

    def check_takes_new_work(self) -> None:
        """Raises NotReady."""
        if self.refusal:
            raise NotReady(self.refusal)

    def pulse(self) -> Pulse:
        return pulse(self._engine, self.boot, self.refusal)

    async def why_not_ready(self) -> str:
        """ "" where a request would be computed now; asks an idle engine for a token."""
        return self.refusal or await self._readiness.why_not()

    def status(self) -> Status:
        """At once, whatever the engine is busy with."""
        loaded, snapshot, failure = self._loaded, self._engine.snapshot, self.refusal
        return Status(
            boot=self.boot,
            generation=snapshot.generation,
            ready=not failure,
            model=self.served_name,
            model_path=self._config.model,
            device=loaded.device if loaded else "",
            fingerprint=loaded.fingerprint if loaded else "",
            layout=loaded.served.described(self._grid) if loaded else None,
            context_tokens_max=loaded.served.context_tokens_max if loaded else 0,
            memory_budget_bytes=snapshot.memory_budget_bytes,
            resident_bytes=snapshot.resident_bytes,
            running_bytes=snapshot.running_bytes,
            residents=len(snapshot.residents),
            running=snapshot.running,
            queued=snapshot.queued,
            prefill_rates=snapshot.prefill_rates,
            decode_tokens_per_s=snapshot.decode_tokens_per_s,
            restore_bytes_per_s=snapshot.restore_bytes_per_s,
            save_bytes_per_s=snapshot.save_bytes_per_s,
            slowest_recent_step_s=snapshot.slowest_recent_step_s,
            prefill_step_size=self._prefill_step_size,
            keepalive_steps=snapshot.keepalive_steps,
            failure=failure,
            model_created=loaded.created if loaded else 0,
            vitals=take_vitals(snapshot.bytes_unaccounted),
        )

    # ---- prompts and generations

    async def prompt(self, request: PromptRequest, body_bytes: int) -> PromptReply:
        stored = await self.render(request.endpoint, request.body, body_bytes, request.turns)
        return PromptReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            prompt_id=stored.id,
            tokens=pack_tokens(stored.tokens),
            boundaries=stored.boundaries,
            turn_end=stored.turn_end,
            messages=stored.messages,
            tokens_max=stored.params.max_tokens,
            fingerprint=self.loaded.fingerprint,
        )

    async def texts(self, sequences: Sequence[bytes]) -> list[str]:
        """What packed tokens say.  Raises BadRequest, NotReady."""
        loaded = self.loaded
        return await asyncio.get_running_loop().run_in_executor(self._renderers, loaded.texts_of, sequences)

    async def render(
        self, endpoint: str, body: dict[str, Any], body_bytes: int, turns: Sequence[SampledTurn] = ()
    ) -> StoredPrompt:
        """Check, render and tokenize a body, and remember it.  Raises BadRequest, TooLarge, NotReady.

        A large one on a thread of its own; for a small one the way there would take longer than the work.
        """
        self.check_takes_new_work()
        self._slips.tell(body)
        budget_bytes = self._engine.scheduler.settings.memory_budget_bytes
        work = partial(self.loaded.prompt_of, endpoint, body, turns, self._config, budget_bytes)
        with self.metrics.rendering():
            if body_bytes <= RENDERED_INLINE_BYTES_MAX and not asks_for_a_form(body):
                stored = work()
            else:
                stored = await asyncio.get_running_loop().run_in_executor(self._renderers, copy_context().run, work)
        self.prompts.add(stored)
        return stored

    @contextmanager
    def accepted(self, request_id: str) -> Iterator[Call]:
        """A generation's call, for as long as its client is there.  Raises NotReady."""
        self.check_takes_new_work()
        with self.generations.accepted(request_id) as call:
            yield call

    async def generate(
        self,
        call: Call,
        prompt: StoredPrompt,
        *,
        resident: str = "",
        follow: str = "",
        reuse: int = 0,
        keep: bool = False,
        kept: bool = True,
        background: bool = False,
        root: bytes = b"",
        checkpoints: tuple[int, ...] = (),
    ) -> None:
        """Submit a generation; what it says arrives in the call's events.  One of no tokens is over at once."""
        if not prompt.params.max_tokens:
            call.events.put_nowait(Ended(self.generations.nothing_kept(call.id, "length"), 0))
            return
        generation = Generation(
            id=call.id,
            prompt=prompt.tokens,
            params=prompt.params,
            guide=await self._guide(prompt),
            listener=self.generations.listener(call),
            resident=resident,
            follow=follow,
            reuse=reuse,
            keep=keep,
            kept=kept,
            background=background,
            root=root,
            checkpoints=checkpoints,
            expected=prompt.expected,
        )
        log.debug("computes %d tokens after %d that are there already", len(prompt.tokens) - reuse, reuse)
        await self.generations.submit(call, generation)

    async def _guide(self, prompt: StoredPrompt) -> Guide | None:
        """For this run of its answer.  Not on the loop: a grammar may have to be compiled again."""
        if (constraint := prompt.constraint) is None:
            return None
        grammars, loop = self.loaded.grammars, asyncio.get_running_loop()
        return await loop.run_in_executor(self._renderers, grammars.guide, constraint)

    async def cancel(self, request_id: str) -> Settled:
        """End a generation, and answer when the engine has let go; a restore or a save is given up.

        One that has just ended by itself is answered with how it did.  Raises UnknownRequest.
        """
        given_up = await self.loaded.storage.give_up(request_id)
        if given_up and request_id not in self.generations.under_way:
            return self.generations.nothing_kept(request_id, "cancelled")
        return await self.generations.cancel(request_id)

    async def finish_prefill(self, request_id: str) -> Settled | None:
        """As Generations.finish_prefill; a restore or a save, and what is not running, as `cancel`."""
        if request_id in self.generations.under_way:
            return await self.generations.finish_prefill(request_id)
        return await self.cancel(request_id)

    # ---- residents

    def residents(self, with_ids: bool) -> ResidentsReply:
        snapshot = self._engine.snapshot
        listed = snapshot.residents
        if not with_ids:
            listed = [msgspec.structs.replace(resident, ids=None) for resident in listed]
        return ResidentsReply(boot=self.boot, generation=snapshot.generation, residents=listed)

    async def drop_resident(self, resident_id: str) -> bool:
        return await self._ask(lambda scheduler: scheduler.residents.drop(resident_id))

    async def forget(self, keep: Collection[str]) -> None:
        """Let go of all that is held of conversations, but of these residents or requests, and of what is computed.

        Raises NotReady.
        """
        self.prompts.clear()
        self.generations.forget_settled()
        self.loaded.grammars.forget()
        await self._ask(lambda scheduler: _forget(scheduler, keep))

    async def order_residents(self, drop_first: list[str]) -> None:
        await self._ask(lambda scheduler: scheduler.residents.order(drop_first))

    # ---- restore and save

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Raises segments.Damaged, Cancelled, BadChain, TooLarge, NotReady."""
        self.check_takes_new_work()
        tokens = len(request.tokens) // TOKEN_BYTES
        if self._grid and tokens % self._grid:
            raise BadChain(f"exact mode continues at multiples of {self._grid} tokens, the request names {tokens}")
        with self.metrics.restores.watched():
            resident, bytes_read, seconds = await self.loaded.storage.restore(request)
        self.metrics.restores.done(bytes_read, seconds)
        return RestoreReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            resident=resident,
            position=len(request.tokens) // TOKEN_BYTES,
            bytes_read=bytes_read,
            seconds=seconds,
        )

    async def save(self, request: SaveRequest) -> SaveReply:
        """Raises ResidentGone, RowsGone, Cancelled, OSError."""
        with self.metrics.saves.watched():
            written, states, seconds = await self.loaded.storage.save(request)
        self.metrics.saves.done(sum(file.bytes_written for file in (*written, *states)), seconds)
        return SaveReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            segments=written,
            checkpoints=states,
            seconds=seconds,
        )

    async def _ask(self, work: Callable[[Scheduler], T]) -> T:
        """Raises NotReady where there is no engine to answer."""
        if self.failure:
            raise NotReady(self.failure)
        return await asyncio.wrap_future(self._engine.ask(work))


def _forget(scheduler: Scheduler, keep: Collection[str]) -> None:
    """Engine thread."""
    scheduler.residents.drop_all(keep)
    mx.clear_cache()
