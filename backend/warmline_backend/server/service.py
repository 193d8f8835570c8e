"""The backend's operations behind its routes: prompts, generations, restores and saves.  Event loop thread.

Errors of prompts, generations, transfers (UnknownPromptError, UnknownGenerationError, BadRequestError,
OperationCancelledError ...) and of the engine (ResidentNotFoundError, ResidentMismatchError, KvTooLargeError) pass
through.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from warmline_backend.config import BackendConfig
from warmline_backend.engine.engine import Engine, EngineSnapshot, EngineStoppedError
from warmline_backend.engine.inflight import InflightGeneration, InflightGenerations
from warmline_backend.engine.kv_transfer import KvTransfer
from warmline_backend.generation.chunk_memory import bound_buffer_cache, compute_usable_bytes
from warmline_backend.generation.events import EndedEvent
from warmline_backend.generation.sequence import GenerationOptions, GenerationRequest
from warmline_backend.kv_cache.resident_listing import ResidentListing, omit_tokens
from warmline_backend.kv_cache.segment_io import BadChainError
from warmline_backend.model.model import get_device_name
from warmline_backend.output.dialect import detect_dialect
from warmline_backend.output.parser import make_turn_parser
from warmline_backend.prompt.render_limits import RenderCancellation
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.field_names import TypoNotices
from warmline_backend.request.params import BadRequestError
from warmline_backend.request.response_format import has_format_fields
from warmline_backend.scheduler.capacity import request_bytes
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_backend.server.chunk_encoder import TokenDecoder
from warmline_backend.server.health import EngineReadiness
from warmline_backend.server.metrics import BackendMetrics
from warmline_backend.server.prompt_store import PromptStore, StoredPrompt
from warmline_backend.server.runtime import Runtime, fingerprint_served_model
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher
from warmline_common.protocol import messages
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens
from warmline_common.protocol.vitals import read_process_stats
from warmline_common.storage.drafts import delete_drafts
from warmline_common.storage.home import Home

log = logging.getLogger(__name__)

T = TypeVar("T")

RENDER_THREADS = 2  # for usual bodies, and as many for large ones
INLINE_RENDER_BYTES_MAX = 8192
LARGE_BODY_BYTES_MIN = 1 << 20
SHUTTING_DOWN = "shutting down"
_SNAPSHOT_FIELDS = tuple(
    {*messages.BackendStatus.__struct_fields__} & {*EngineSnapshot.__struct_fields__} - {"residents"}
)


class NotReadyError(Exception):
    """The model is still loading, the engine has ended, or the process is shutting down; the text says which."""


COLD_OPTIONS = GenerationOptions()


class Service:
    """Operations of one backend process.  Owned by the event loop; computation is submitted to the engine."""

    def __init__(self, config: BackendConfig, home: Home, engine: Engine, boot: str) -> None:
        self._config, self._home, self._engine, self.boot = config, home, engine, boot
        self._runtime: Runtime | None = None
        self._shutting_down = False
        self._readiness = EngineReadiness(engine)
        self._render_pool = ThreadPoolExecutor(RENDER_THREADS, "renderer")
        self._large_render_pool = ThreadPoolExecutor(RENDER_THREADS, "large renderer")
        self._typo_notices = TypoNotices()
        self.prompts = PromptStore()
        self.inflight = InflightGenerations(engine, boot)
        self.metrics = BackendMetrics(engine, self.read_status)

    # ---- start and state

    async def wait_until_loaded(self) -> None:
        """Build the runtime once the model is loaded.  Raises what loading the model raised."""
        if deleted := await asyncio.to_thread(delete_drafts, self._home.segments, self._home.instance):
            log.info("%d drafts of saves that did not end are deleted", deleted)
        served = await asyncio.wrap_future(self._engine.loaded)
        tokenizer, vocabulary_size, config = served.tokenizer, served.vocabulary_size, self._config
        await asyncio.to_thread(detect_dialect, tokenizer)  # cached: slow for a large vocabulary
        fingerprint = await asyncio.to_thread(fingerprint_served_model, served, config, self._home, self._grid)
        self._runtime = Runtime(
            served,
            fingerprint,
            TemplateRenderer(tokenizer, vocabulary_size, config.template_args, make_turn_parser(tokenizer)),
            GrammarCompiler(tokenizer, vocabulary_size, self.metrics.observe_compile),
            TokenDecoder(tokenizer),
            KvTransfer(self._home, self._engine, served, fingerprint, compress=config.segment_compression == "auto"),
            config,
            int((served.path / "config.json").stat().st_mtime),
            get_device_name(),
        )
        self._render_pool.submit(self._runtime.grammar_compiler.prepare_tokenizer)
        asyncio.wrap_future(self._engine.ended).add_done_callback(lambda _: self.inflight.end_all(self.failure))

    @property
    def _grid(self) -> int:
        """Grid of the scheduler, which exists once the model is loaded."""
        return self._engine.scheduler.settings.grid

    def shut_down(self) -> None:
        """Refuse new requests and cancel background ones; others go on."""
        self._shutting_down = True
        self._engine.stop_keepalive()
        self.inflight.cancel_all(only_background=True)

    def cancel_all(self) -> None:
        """Cancel all generations and restores, without waiting; saves go on."""
        self.inflight.cancel_all()
        if self._runtime is not None:
            self._runtime.kv_transfer.cancel_restores()

    async def has_pending_saves(self) -> bool:
        """True where a save is running, or a resident was left a moment ago and may still be saved."""
        try:
            return self.runtime.kv_transfer.is_saving or await self._run_on_engine(
                lambda scheduler: scheduler.residents.has_leased
            )
        except (NotReadyError, EngineStoppedError):
            return False

    def close(self) -> None:
        """Cancel all transfers and rendering."""
        for pool in (self._render_pool, self._large_render_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._runtime is not None:
            self._runtime.kv_transfer.close()

    @property
    def served_name(self) -> str:
        return self._config.served_name

    @property
    def failure(self) -> str:
        """Why the process can do nothing; "" where it can."""
        return self._engine.failure or ("" if self._runtime else messages.LOADING)

    @property
    def runtime(self) -> Runtime:
        """Raises NotReadyError."""
        if self._runtime is None or self.failure:
            raise NotReadyError(self.failure)
        return self._runtime

    @property
    def refusal(self) -> str:
        """Why new requests are refused, though running ones may go on; "" where they are not."""
        return SHUTTING_DOWN if self._shutting_down else self.failure

    def check_accepting(self) -> None:
        """Raises NotReadyError."""
        if self.refusal:
            raise NotReadyError(self.refusal)

    def read_health(self) -> messages.HealthReply:
        heartbeat, failure = self._engine.heartbeat, self.refusal
        return messages.HealthReply(
            boot=self.boot,
            pid=os.getpid(),
            ready=not failure,
            busy=heartbeat.is_busy,
            steps=heartbeat.steps,
            step_age_s=heartbeat.step_age_s,
            slowest_recent_step_s=self._engine.snapshot.slowest_recent_step_s,
            failure=failure,
        )

    async def find_readiness_problem(self) -> str:
        """The reason why a request would not be computed now, or ""; probes an idle engine."""
        return self.refusal or await self._readiness.find_problem()

    def read_status(self) -> messages.BackendStatus:
        """Status from the engine's last snapshot, without waiting for the engine."""
        runtime, snapshot, failure = self._runtime, self._engine.snapshot, self.refusal
        shared = {name: getattr(snapshot, name) for name in _SNAPSHOT_FIELDS}
        return messages.BackendStatus(
            boot=self.boot,
            ready=not failure,
            model=self.served_name,
            model_path=self._config.model,
            device=runtime.device if runtime else "",
            fingerprint=runtime.fingerprint if runtime else "",
            layout=runtime.served.describe_layout(self._grid) if runtime else None,
            context_tokens_max=runtime.served.context_tokens_max if runtime else 0,
            residents=snapshot.residents,
            releasing=self.inflight.releasing_count,
            prefill_step_size=(self._engine.scheduler.settings if runtime else self._config).prefill_step_size,
            failure=failure,
            model_created=runtime.model_created if runtime else 0,
            vitals=read_process_stats(snapshot.bytes_unaccounted),
            **shared,
        )

    # ---- prompts and generations

    async def create_prompt(self, request: messages.PromptRequest, body_bytes: int) -> messages.PromptReply:
        stored = await self.render_prompt(request.endpoint, request.body, body_bytes, request.turns, request.root)
        return messages.PromptReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            prompt_id=stored.id,
            tokens=pack_tokens(stored.tokens),
            boundaries=stored.boundaries,
            turn_end=stored.turn_end,
            messages=stored.messages,
            tokens_max=stored.params.max_tokens,
            fingerprint=self.runtime.fingerprint,
            kv_bytes=request_bytes(self.runtime.served, len(stored.tokens), stored.params.max_tokens),
        )

    async def decode_texts(self, sequences: Sequence[bytes]) -> list[str]:
        """Texts of packed token sequences.  Raises BadRequestError, NotReadyError."""
        runtime = self.runtime
        return await asyncio.get_running_loop().run_in_executor(self._render_pool, runtime.decode_texts, sequences)

    async def render_prompt(
        self,
        endpoint: str,
        body: dict[str, Any],
        body_bytes: int,
        turns: Sequence[messages.SampledTurn] = (),
        root: bytes = b"",
    ) -> StoredPrompt:
        """Check, render, tokenize and store a body.  Raises BadRequestError, KvTooLargeError, NotReadyError.

        Bodies are rendered on a thread, where large ones wait for large ones alone; small ones here, since the switch
        would take longer than the work.  Cancelled, as by a client that leaves, it ends the work on the thread.
        """
        self.check_accepting()
        budget_bytes = self._engine.scheduler.settings.memory_budget_bytes
        cancellation = RenderCancellation()
        work = partial(self.runtime.make_prompt, endpoint, body, turns, root, budget_bytes, cancellation)
        with self.metrics.time_render():
            if body_bytes <= INLINE_RENDER_BYTES_MAX and not has_format_fields(body):
                stored = work()
            else:
                pool = self._large_render_pool if body_bytes >= LARGE_BODY_BYTES_MIN else self._render_pool
                try:
                    stored = await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, work)
                finally:
                    cancellation.cancel()
        self._typo_notices.log_typos(body)  # a body that is refused is told of its typos
        self.prompts.add(stored)
        return stored

    def accept(self, request_id: str) -> AbstractContextManager[InflightGeneration]:
        """Register a generation for as long as its client is connected.  Raises NotReadyError."""
        self.check_accepting()
        return self.inflight.accept(request_id)

    async def generate(
        self, inflight: InflightGeneration, prompt: StoredPrompt, options: GenerationOptions = COLD_OPTIONS
    ) -> None:
        """Submit a generation; its events arrive in `inflight.events`.  One of 0 tokens ends at once."""
        if not prompt.params.max_tokens:
            inflight.events.put_nowait(EndedEvent(self.inflight.make_empty_result(inflight.id, "length"), 0))
            return
        request = GenerationRequest(
            id=inflight.id,
            prompt=prompt.tokens,
            params=prompt.params,
            matcher=await self._make_matcher(prompt),
            listener=self.inflight.make_listener(inflight),
            expected_output=prompt.expected_output,
            prediction=prompt.prediction,
            **vars(options),
        )
        reused = options.reuse_tokens
        log.debug("computes %d tokens after %d that are there already", len(prompt.tokens) - reused, reused)
        if options.leader_id:
            await self.inflight.wait_until_submitted(options.leader_id)
        await self.inflight.submit(inflight, request)

    async def _make_matcher(self, prompt: StoredPrompt) -> Matcher | None:
        """Make a matcher for one run of the answer, off the loop: its grammar may have to be compiled again."""
        if (constraint := prompt.constraint) is None:
            return None
        create, loop = self.runtime.grammar_compiler.create_matcher, asyncio.get_running_loop()
        return await loop.run_in_executor(self._render_pool, create, constraint, prompt.expected_output)

    async def cancel(self, request_id: str) -> messages.GenerationResult:
        """End a generation, or a restore or save, and return once it has ended.

        A generation that has just ended returns its own result.  Raises UnknownGenerationError.
        """
        was_transfer = await self.runtime.kv_transfer.cancel(request_id)
        if was_transfer and request_id not in self.inflight.request_ids:
            return self.inflight.make_empty_result(request_id, "cancelled")
        return await self.inflight.cancel(request_id)

    async def finish_prefill(self, request_id: str) -> messages.GenerationResult | None:
        """As InflightGenerations.finish_prefill; restores, saves and unknown requests as `cancel`."""
        if request_id in self.inflight.request_ids:
            return await self.inflight.finish_prefill(request_id)
        return await self.cancel(request_id)

    # ---- residents

    def list_residents(
        self, *, with_ids: bool = False, since: int = 0, only_ids: Sequence[str] = ()
    ) -> messages.ResidentsReply:
        """List residents as ResidentsReply says, without waiting for the engine; `only_ids`: these, with token ids."""
        generation = self._engine.snapshot.generation  # first: what is evicted from now on makes the reader ask again
        listing = self._engine.scheduler.residents.listing if self._runtime else ResidentListing()
        changes = listing.list_changes(since)
        residents = listing.find(only_ids) if only_ids else changes.residents
        return messages.ResidentsReply(
            boot=self.boot,
            generation=generation,
            residents=residents if with_ids or only_ids else omit_tokens(residents),
            revision=changes.revision,
            since=changes.since,
            removed=changes.removed,
        )

    async def delete_resident(self, resident_id: str) -> bool:
        return await self._run_on_engine(lambda scheduler: scheduler.residents.delete(resident_id))

    async def clear_cache(self, keep_ids: Collection[str]) -> None:
        """Drop prompts, texts, results, grammars and residents, except these residents or those of these requests.

        Raises NotReadyError.
        """
        self.prompts.clear()
        self.inflight.clear_results()
        self.runtime.renderer.clear_cache()
        self.runtime.grammar_compiler.clear()

        def clear_residents(scheduler: Scheduler) -> None:
            scheduler.residents.delete_all(keep_ids)
            mx.clear_cache()

        await self._run_on_engine(clear_residents)

    async def set_eviction_order(self, evict_first: list[str], *, extends: bool) -> None:
        await self._run_on_engine(
            lambda scheduler: scheduler.residents.set_eviction_order(evict_first, extends=extends)
        )

    async def set_memory_share(self, share: messages.MemoryShare) -> messages.MemoryShareReply:
        """Change what KV, and the whole process, may take from now on.  Raises BadRequestError, NotReadyError."""
        for name in ("kv_bytes", "usable_bytes"):
            if (value := getattr(share, name)) < 0:
                raise BadRequestError(f"'{name}' must be a number of bytes of at least 0, not {value}", name)

        def apply_share(scheduler: Scheduler) -> int:
            weight_bytes = scheduler.served.weight_bytes
            scheduler.chunk_memory.usable_bytes = compute_usable_bytes(weight_bytes, share.usable_bytes)
            bound_buffer_cache(weight_bytes, share.usable_bytes, self._config.mlx_cache_bytes)
            budget_bytes = scheduler.admission.set_budget(share.kv_bytes)
            mx.clear_cache()  # else evicted KV would stay with this process
            return budget_bytes

        budget_bytes = await self._run_on_engine(apply_share)
        generation = self._engine.snapshot.generation
        return messages.MemoryShareReply(boot=self.boot, generation=generation, kv_bytes=budget_bytes)

    # ---- restore and save

    async def restore(self, request: messages.RestoreRequest) -> messages.RestoreReply:
        """Raises DamagedFileError, OperationCancelledError, BadChainError, KvTooLargeError, NotReadyError."""
        self.check_accepting()
        tokens = len(request.tokens) // TOKEN_BYTES
        if self._grid and tokens % self._grid:
            raise BadChainError(f"exact mode continues at multiples of {self._grid} tokens, the request names {tokens}")
        with self.metrics.restores.count_failures():
            resident, bytes_read, seconds, waits = await self.runtime.kv_transfer.restore(request)
        self.metrics.restores.observe(bytes_read, seconds)
        return messages.RestoreReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            resident=resident,
            position=tokens,
            bytes_read=bytes_read,
            seconds=seconds,
            waits=waits,
        )

    async def save(self, request: messages.SaveRequest) -> messages.SaveReply:
        """Raises ResidentNotFoundError, RowsUnavailableError, OperationCancelledError, OSError."""
        with self.metrics.saves.count_failures():
            written, states, seconds = await self.runtime.kv_transfer.save(request)
        self.metrics.saves.observe(sum(file.bytes_written for file in (*written, *states)), seconds)
        return messages.SaveReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            segments=written,
            checkpoints=states,
            seconds=seconds,
        )

    async def _run_on_engine(self, work: Callable[[Scheduler], T]) -> T:
        """Raises NotReadyError where the engine takes no commands."""
        if self.failure:
            raise NotReadyError(self.failure)
        return await asyncio.wrap_future(self._engine.submit(work))
