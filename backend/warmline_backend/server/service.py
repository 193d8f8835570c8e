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
from warmline_backend.engine.engine import Engine, EngineStoppedError
from warmline_backend.engine.inflight import InflightGeneration, InflightGenerations
from warmline_backend.engine.kv_transfer import KvTransfer
from warmline_backend.generation.sequence import EndedEvent, GenerationRequest
from warmline_backend.kv_cache.segment_io import BadChainError, delete_drafts
from warmline_backend.model.model import get_device_name
from warmline_backend.output.dialect import detect_dialect
from warmline_backend.output.parser import make_turn_parser
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.field_names import TypoNotices
from warmline_backend.request.response_format import has_format_fields
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_backend.server.chunks import TokenDecoder
from warmline_backend.server.health import EngineReadiness, read_health
from warmline_backend.server.metrics import BackendMetrics
from warmline_backend.server.prompt_store import PromptStore, StoredPrompt
from warmline_backend.server.runtime import Runtime, fingerprint_served_model
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.matcher import Matcher
from warmline_common.protocol.messages import (
    LOADING,
    BackendStatus,
    GenerationResult,
    HealthReply,
    PromptReply,
    PromptRequest,
    ResidentsReply,
    RestoreReply,
    RestoreRequest,
    SampledTurn,
    SaveReply,
    SaveRequest,
)
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens
from warmline_common.protocol.vitals import read_process_stats
from warmline_common.storage.home import Home

log = logging.getLogger(__name__)

T = TypeVar("T")

RENDER_THREADS = 2
INLINE_RENDER_BYTES_MAX = 8192
SHUTTING_DOWN = "shutting down"


class NotReadyError(Exception):
    pass


class Service:
    """One backend process.  Everything here belongs to the event loop; what computes is asked of the engine."""

    def __init__(self, config: BackendConfig, home: Home, engine: Engine, boot: str) -> None:
        self._config, self._home, self._engine, self.boot = config, home, engine, boot
        self._runtime: Runtime | None = None
        self._shutting_down = False
        self._readiness = EngineReadiness(engine)
        self._render_pool = ThreadPoolExecutor(RENDER_THREADS, "renderer")
        self._typo_notices = TypoNotices()
        self.prompts = PromptStore()
        self.inflight = InflightGenerations(engine, boot)
        self.metrics = BackendMetrics(engine, self.read_status)

    # ---- start and state

    async def wait_until_loaded(self) -> None:
        """Raises what loading the model raised."""
        if swept := await asyncio.to_thread(delete_drafts, self._home.segments):
            log.info("%d drafts of saves that did not end are deleted", swept)
        served = await asyncio.wrap_future(self._engine.loaded)
        await asyncio.to_thread(
            detect_dialect, served.tokenizer
        )  # a large vocabulary takes a while, here and only here
        config = self._config
        mark = await asyncio.to_thread(fingerprint_served_model, served, config, self._home, self._grid)
        self._runtime = Runtime(
            served,
            mark,
            TemplateRenderer(
                served.tokenizer, served.vocabulary_size, config.template_args, make_turn_parser(served.tokenizer)
            ),
            GrammarCompiler(served.tokenizer, served.vocabulary_size, self.metrics.observe_compile),
            TokenDecoder(served.tokenizer),
            KvTransfer(self._home, self._engine, served, mark),
            int((served.path / "config.json").stat().st_mtime),
            get_device_name(),
        )
        self._render_pool.submit(self._runtime.grammar_compiler.prepare_tokenizer)
        asyncio.wrap_future(self._engine.ended).add_done_callback(lambda _: self.inflight.end_all(self.failure))

    @property
    def _grid(self) -> int:
        """Once the model is loaded, for the scheduler decides."""
        return self._engine.scheduler.settings.grid

    @property
    def _prefill_step_size(self) -> int:
        """0 while it is to be measured."""
        if self._runtime is None:
            return self._config.prefill_step_size
        return self._engine.scheduler.settings.prefill_step_size

    def shut_down(self) -> None:
        """Refuse what is new; what runs goes on, unless it is in the background."""
        self._shutting_down = True
        self._engine.stop_keepalive()
        self.inflight.cancel_background()

    def cancel_all(self) -> None:
        """Cancel what is under way but saves; without waiting."""
        self.inflight.cancel_all()
        if self._runtime is not None:
            self._runtime.kv_transfer.cancel_restores()

    async def has_pending_saves(self) -> bool:
        """Whether something is being saved, or was left a moment ago by a request, for somebody to save it."""
        try:
            return self.runtime.kv_transfer.is_saving or await self._run_on_engine(
                lambda scheduler: scheduler.residents.has_leased
            )
        except (NotReadyError, EngineStoppedError):
            return False

    def close(self) -> None:
        """Give up what is under way."""
        self._render_pool.shutdown(wait=False, cancel_futures=True)
        if self._runtime is not None:
            self._runtime.kv_transfer.close()

    @property
    def served_name(self) -> str:
        return self._config.served_name

    @property
    def failure(self) -> str:
        """Why nothing can be asked of this process; "" where it can."""
        return self._engine.failure or ("" if self._runtime else LOADING)

    @property
    def runtime(self) -> Runtime:
        """Raises NotReady."""
        if self._runtime is None or self.failure:
            raise NotReadyError(self.failure)
        return self._runtime

    @property
    def refusal(self) -> str:
        """Why nothing new may be asked of this process, though what is under way may go on; "" where it may."""
        return SHUTTING_DOWN if self._shutting_down else self.failure

    def check_accepting(self) -> None:
        """Raises NotReady."""
        if self.refusal:
            raise NotReadyError(self.refusal)

    def read_health(self) -> HealthReply:
        return read_health(self._engine, self.boot, self.refusal)

    async def find_readiness_problem(self) -> str:
        """ "" where a request would be computed now; asks an idle engine for a token."""
        return self.refusal or await self._readiness.find_problem()

    def read_status(self) -> BackendStatus:
        """At once, whatever the engine is busy with."""
        loaded, snapshot, failure = self._runtime, self._engine.snapshot, self.refusal
        return BackendStatus(
            boot=self.boot,
            generation=snapshot.generation,
            ready=not failure,
            model=self.served_name,
            model_path=self._config.model,
            device=loaded.device if loaded else "",
            fingerprint=loaded.fingerprint if loaded else "",
            layout=loaded.served.describe_layout(self._grid) if loaded else None,
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
            model_created=loaded.model_created if loaded else 0,
            vitals=read_process_stats(snapshot.bytes_unaccounted),
        )

    # ---- prompts and generations

    async def create_prompt(self, request: PromptRequest, body_bytes: int) -> PromptReply:
        stored = await self.render_prompt(request.endpoint, request.body, body_bytes, request.turns)
        return PromptReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            prompt_id=stored.id,
            tokens=pack_tokens(stored.tokens),
            boundaries=stored.boundaries,
            turn_end=stored.turn_end,
            messages=stored.messages,
            tokens_max=stored.params.max_tokens,
            fingerprint=self.runtime.fingerprint,
        )

    async def decode_texts(self, sequences: Sequence[bytes]) -> list[str]:
        """What packed tokens say.  Raises BadRequest, NotReady."""
        loaded = self.runtime
        return await asyncio.get_running_loop().run_in_executor(self._render_pool, loaded.decode_texts, sequences)

    async def render_prompt(
        self, endpoint: str, body: dict[str, Any], body_bytes: int, turns: Sequence[SampledTurn] = ()
    ) -> StoredPrompt:
        """Check, render and tokenize a body, and remember it.  Raises BadRequest, TooLarge, NotReady.

        A large one on a thread of its own; for a small one the way there would take longer than the work.
        """
        self.check_accepting()
        self._typo_notices.log_typos(body)
        budget_bytes = self._engine.scheduler.settings.memory_budget_bytes
        work = partial(self.runtime.make_prompt, endpoint, body, turns, self._config, budget_bytes)
        with self.metrics.time_render():
            if body_bytes <= INLINE_RENDER_BYTES_MAX and not has_format_fields(body):
                stored = work()
            else:
                stored = await asyncio.get_running_loop().run_in_executor(self._render_pool, copy_context().run, work)
        self.prompts.add(stored)
        return stored

    @contextmanager
    def accept(self, request_id: str) -> Iterator[InflightGeneration]:
        """A generation's call, for as long as its client is there.  Raises NotReady."""
        self.check_accepting()
        with self.inflight.accept(request_id) as call:
            yield call

    async def generate(
        self,
        inflight: InflightGeneration,
        prompt: StoredPrompt,
        *,
        resident_id: str = "",
        leader_id: str = "",
        reuse_tokens: int = 0,
        copy_resident: bool = False,
        leaves_resident: bool = True,
        background: bool = False,
        root: bytes = b"",
        checkpoints: tuple[int, ...] = (),
    ) -> None:
        """Submit a generation; what it says arrives in the call's events.  One of no tokens is over at once."""
        if not prompt.params.max_tokens:
            inflight.events.put_nowait(EndedEvent(self.inflight.make_empty_result(inflight.id, "length"), 0))
            return
        generation = GenerationRequest(
            id=inflight.id,
            prompt=prompt.tokens,
            params=prompt.params,
            matcher=await self._make_matcher(prompt),
            listener=self.inflight.make_listener(inflight),
            resident_id=resident_id,
            leader_id=leader_id,
            reuse_tokens=reuse_tokens,
            copy_resident=copy_resident,
            leaves_resident=leaves_resident,
            background=background,
            root=root,
            checkpoints=checkpoints,
            expected_output=prompt.expected_output,
        )
        log.debug("computes %d tokens after %d that are there already", len(prompt.tokens) - reuse_tokens, reuse_tokens)
        await self.inflight.submit(inflight, generation)

    async def _make_matcher(self, prompt: StoredPrompt) -> Matcher | None:
        """For this run of its answer.  Not on the loop: a grammar may have to be compiled again."""
        if (constraint := prompt.constraint) is None:
            return None
        grammars, loop = self.runtime.grammar_compiler, asyncio.get_running_loop()
        return await loop.run_in_executor(self._render_pool, grammars.create_matcher, constraint)

    async def cancel(self, request_id: str) -> GenerationResult:
        """End a generation, and answer when the engine has let go; a restore or a save is given up.

        One that has just ended by itself is answered with how it did.  Raises UnknownRequest.
        """
        given_up = await self.runtime.kv_transfer.cancel(request_id)
        if given_up and request_id not in self.inflight.request_ids:
            return self.inflight.make_empty_result(request_id, "cancelled")
        return await self.inflight.cancel(request_id)

    async def finish_prefill(self, request_id: str) -> GenerationResult | None:
        """As Generations.finish_prefill; a restore or a save, and what is not running, as `cancel`."""
        if request_id in self.inflight.request_ids:
            return await self.inflight.finish_prefill(request_id)
        return await self.cancel(request_id)

    # ---- residents

    def list_residents(self, with_ids: bool) -> ResidentsReply:
        snapshot = self._engine.snapshot
        listed = snapshot.residents
        if not with_ids:
            listed = [msgspec.structs.replace(resident, ids=None) for resident in listed]
        return ResidentsReply(boot=self.boot, generation=snapshot.generation, residents=listed)

    async def delete_resident(self, resident_id: str) -> bool:
        return await self._run_on_engine(lambda scheduler: scheduler.residents.delete(resident_id))

    async def clear_cache(self, keep_ids: Collection[str]) -> None:
        """Let go of all that is held of conversations, but of these residents or requests, and of what is computed.

        Raises NotReady.
        """
        self.prompts.clear()
        self.inflight.clear_results()
        self.runtime.grammar_compiler.clear()
        await self._run_on_engine(lambda scheduler: _clear_engine_cache(scheduler, keep_ids))

    async def set_eviction_order(self, evict_first: list[str]) -> None:
        await self._run_on_engine(lambda scheduler: scheduler.residents.set_eviction_order(evict_first))

    # ---- restore and save

    async def restore(self, request: RestoreRequest) -> RestoreReply:
        """Raises segments.Damaged, Cancelled, BadChain, TooLarge, NotReady."""
        self.check_accepting()
        tokens = len(request.tokens) // TOKEN_BYTES
        if self._grid and tokens % self._grid:
            raise BadChainError(f"exact mode continues at multiples of {self._grid} tokens, the request names {tokens}")
        with self.metrics.restores.count_failures():
            resident, bytes_read, seconds = await self.runtime.kv_transfer.restore(request)
        self.metrics.restores.observe(bytes_read, seconds)
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
        with self.metrics.saves.count_failures():
            written, states, seconds = await self.runtime.kv_transfer.save(request)
        self.metrics.saves.observe(sum(file.bytes_written for file in (*written, *states)), seconds)
        return SaveReply(
            boot=self.boot,
            generation=self._engine.snapshot.generation,
            segments=written,
            checkpoints=states,
            seconds=seconds,
        )

    async def _run_on_engine(self, work: Callable[[Scheduler], T]) -> T:
        """Raises NotReady where there is no engine to answer."""
        if self.failure:
            raise NotReadyError(self.failure)
        return await asyncio.wrap_future(self._engine.submit(work))


def _clear_engine_cache(scheduler: Scheduler, keep_ids: Collection[str]) -> None:
    """Engine thread."""
    scheduler.residents.delete_all(keep_ids)
    mx.clear_cache()
