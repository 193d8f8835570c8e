"""What the HTTP routes call: prompts rendered, generations submitted, KV restored and saved.  Event loop thread.

    NotReady    the model is still loading, or the engine has ended
    UnknownPrompt, UnknownRequest    gone, or never there

What the engine raises (ResidentGone, ResidentMismatch, TooLarge) and what requests raise (BadRequest) passes through.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from warmline_backend.chunks import TokenNames
from warmline_backend.config import BackendConfig
from warmline_backend.engine import Engine
from warmline_backend.fingerprint import fingerprint
from warmline_backend.model import ServedModel
from warmline_backend.params import GenerationParams, parse_params
from warmline_backend.prompts import Renderer
from warmline_backend.scheduler import Scheduler
from warmline_backend.sequence import Ended, Event, Generation
from warmline_backend.storage import Storage
from warmline_wire.home import Home
from warmline_wire.keys import TOKEN_BYTES, pack_tokens
from warmline_wire.messages import (
    PromptReply,
    PromptRequest,
    ResidentsReply,
    RestoreReply,
    RestoreRequest,
    SaveReply,
    SaveRequest,
    Settled,
    Status,
    Timings,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

PROMPTS_KEPT_MAX = 4096
PROMPT_TOKENS_KEPT_MAX = 8_000_000
SETTLED_KEPT_MAX = 256
RENDERERS = 2
RENDERED_INLINE_BYTES_MAX = 8192


class NotReady(Exception):
    pass


class UnknownPrompt(Exception):
    pass


class UnknownRequest(Exception):
    pass


@dataclass(frozen=True)
class StoredPrompt:
    id: str
    endpoint: str
    tokens: list[int]
    params: GenerationParams
    boundaries: list[int]
    turn_end: int


@dataclass(frozen=True)
class Loaded:
    """All that exists once the model does."""

    served: ServedModel
    fingerprint: str
    renderer: Renderer
    names: TokenNames
    storage: Storage


class Service:
    """One backend process.  Everything here belongs to the event loop; what computes is asked of the engine."""

    def __init__(self, config: BackendConfig, home: Home, engine: Engine, boot: str) -> None:
        self._config, self._home, self._engine, self.boot = config, home, engine, boot
        self._loaded: Loaded | None = None
        self._prompts: OrderedDict[str, StoredPrompt] = OrderedDict()
        self._prompt_tokens_kept = 0
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._renderers = ThreadPoolExecutor(RENDERERS, "renderer")

    # ---- start and state

    async def wait_until_loaded(self) -> None:
        """Raises what loading the model raised."""
        served = await asyncio.wrap_future(self._engine.loaded)
        config = self._config
        mark = await asyncio.to_thread(
            fingerprint,
            served.path,
            Path(config.adapter_path) if config.adapter_path else None,
            config.kv_bits,
            config.kv_group_size,
            served.dtype,
            self._home.models,
        )
        self._loaded = Loaded(
            served,
            mark,
            Renderer(served.tokenizer, served.vocabulary_size),
            TokenNames(served.tokenizer),
            Storage(self._home, self._engine, served, mark),
        )

    def close(self) -> None:
        """Give up what is under way."""
        self._renderers.shutdown(wait=False, cancel_futures=True)
        if self._loaded is not None:
            self._loaded.storage.close()

    @property
    def loaded(self) -> Loaded:
        if self._loaded is None:
            raise NotReady("the model is still loading")
        if not self._engine.is_alive():
            raise NotReady("the engine has ended")
        return self._loaded

    def status(self) -> Status:
        """At once, whatever the engine is busy with."""
        loaded, snapshot = self._loaded, self._engine.snapshot
        ready = loaded is not None and self._engine.is_alive()
        return Status(
            boot=self.boot,
            generation=snapshot.generation,
            ready=ready,
            model=self._config.served_name,
            model_path=self._config.model,
            fingerprint=loaded.fingerprint if loaded else "",
            layout=loaded.served.described() if loaded else None,
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
            prefill_step_size=self._config.prefill_step_size,
            failure="" if ready else "the model is still loading" if loaded is None else "the engine has ended",
        )

    # ---- prompts and generations

    async def prompt(self, request: PromptRequest, body_bytes: int) -> PromptReply:
        stored = await self.render(request.endpoint, request.body, body_bytes)
        return PromptReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            prompt_id=stored.id,
            tokens=pack_tokens(stored.tokens),
            boundaries=stored.boundaries,
            turn_end=stored.turn_end,
            tokens_max=stored.params.max_tokens,
            fingerprint=self.loaded.fingerprint,
        )

    async def render(self, endpoint: str, body: dict[str, Any], body_bytes: int) -> StoredPrompt:
        """Check, render and tokenize a body, and remember it.  Raises BadRequest.

        A large one on a thread of its own; for a small one the way there would take longer than the work.
        """
        loaded = self.loaded

        def work() -> StoredPrompt:
            rendered = loaded.renderer.render(endpoint, body)
            params = parse_params(
                endpoint,
                body,
                context_tokens_max=loaded.served.context_tokens_max,
                prompt_tokens=len(rendered.tokens),
                vocabulary_size=loaded.served.vocabulary_size,
                default_max_tokens=self._config.max_tokens,
            )
            return StoredPrompt(
                secrets.token_hex(8), endpoint, rendered.tokens, params, rendered.boundaries, rendered.turn_end
            )

        if body_bytes <= RENDERED_INLINE_BYTES_MAX:
            stored = work()
        else:
            stored = await asyncio.get_running_loop().run_in_executor(self._renderers, work)
        self._store(stored)
        return stored

    def _store(self, prompt: StoredPrompt) -> None:
        """Keep it, and forget the oldest that are beyond the limits."""
        self._prompts[prompt.id] = prompt
        self._prompt_tokens_kept += len(prompt.tokens)
        while len(self._prompts) > 1 and (
            len(self._prompts) > PROMPTS_KEPT_MAX or self._prompt_tokens_kept > PROMPT_TOKENS_KEPT_MAX
        ):
            self._prompt_tokens_kept -= len(self._prompts.popitem(last=False)[1].tokens)

    def stored_prompt(self, prompt_id: str) -> StoredPrompt:
        if (stored := self._prompts.get(prompt_id)) is None:
            raise UnknownPrompt(f"no prompt {prompt_id}: it is too old, or this backend was restarted")
        return stored

    async def generate(
        self,
        request_id: str,
        prompt: StoredPrompt,
        *,
        resident: str = "",
        reuse: int = 0,
        keep: bool = False,
        kept: bool = True,
        checkpoints: tuple[int, ...] = (),
    ) -> "asyncio.Queue[Event]":
        """Submit a generation; what it says arrives in the queue, `Ended` last."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def hear(event: Event) -> None:
            if isinstance(event, Ended):
                self._remember(event.settled)
            events.put_nowait(event)

        generation = Generation(
            id=request_id,
            prompt=prompt.tokens,
            params=prompt.params,
            listener=lambda event: _call_soon(loop, hear, event),
            resident=resident,
            reuse=reuse,
            keep=keep,
            kept=kept,
            checkpoints=checkpoints,
        )
        try:
            await self._ask(lambda scheduler: scheduler.submit(generation))
        except asyncio.CancelledError:
            self.let_go(request_id)  # its client left in this moment; the engine may have it already
            raise
        return events

    async def cancel(self, request_id: str) -> Settled:
        """End a generation, and answer when the engine has let go; a restore or a save is given up.

        One that has just ended by itself is answered with how it did.  Raises UnknownRequest.
        """
        if await self.loaded.storage.give_up(request_id):
            return self._given_up(request_id)
        settled = await self._ask(lambda scheduler: scheduler.cancel(request_id))
        settled = settled or self._settled.get(request_id)
        if settled is None:
            raise UnknownRequest(request_id)
        return settled

    def _given_up(self, request_id: str) -> Settled:
        return Settled(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            request_id=request_id,
            finish="cancelled",
            resident="",
            generated=b"",
            prefilled_until=0,
            checkpoints=[],
            positions=[],
            timings=Timings(),
        )

    def let_go(self, request_id: str) -> None:
        """Cancel without waiting: its client is gone."""
        self._engine.ask(lambda scheduler: scheduler.cancel(request_id))

    def _remember(self, settled: Settled) -> None:
        self._settled[settled.request_id] = settled
        while len(self._settled) > SETTLED_KEPT_MAX:
            self._settled.popitem(last=False)

    # ---- residents

    def residents(self, with_ids: bool) -> ResidentsReply:
        snapshot = self._engine.snapshot
        listed = snapshot.residents
        if not with_ids:
            listed = [msgspec.structs.replace(resident, ids=None) for resident in listed]
        return ResidentsReply(boot=self.boot, generation=snapshot.generation, residents=listed)

    async def drop_resident(self, resident_id: str) -> bool:
        return await self._ask(lambda scheduler: scheduler.residents.drop(resident_id))

    async def order_residents(self, drop_first: list[str]) -> None:
        await self._ask(lambda scheduler: scheduler.residents.order(drop_first))

    # ---- restore and save

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Raises segments.Damaged, Cancelled, BadChain, TooLarge."""
        resident, bytes_read, seconds = await self.loaded.storage.restore(request)
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
        written, states, seconds = await self.loaded.storage.save(request)
        return SaveReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            segments=written,
            checkpoints=states,
            seconds=seconds,
        )

    async def _ask(self, work: Callable[[Scheduler], T]) -> T:
        """Raises NotReady where there is no engine to answer."""
        assert self.loaded
        return await asyncio.wrap_future(self._engine.ask(work))


def _call_soon(loop: asyncio.AbstractEventLoop, hear: Callable[[Event], None], event: Event) -> None:
    try:
        loop.call_soon_threadsafe(hear, event)
    except RuntimeError:
        log.debug("the event loop has ended, nobody hears %s", event)
