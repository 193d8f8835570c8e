"""Step 6: start of a generation, and its progress: recorded in the request, prefixes saved on the way."""

import logging
from dataclasses import dataclass, field

from warmline_common.protocol.messages import BACKGROUND_KEEP, GenerationResult
from warmline_proxy.config import ProxyConfig
from warmline_proxy.explain.divergence import DivergenceRecorder
from warmline_proxy.explain.prompt_head import PromptHeadCache, extract_head
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.planner import RequestPlan, align_to_grid
from warmline_proxy.request.request import Request, RequestStatus, resident_after_generation
from warmline_proxy.response.repetition import RepetitionDetector, chunk_text
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.client import ByteStream, UpstreamGoneError
from warmline_proxy.upstream.generation_stream import GenerationStream

log = logging.getLogger(__name__)

FAILED_FINISHES = ("cancelled", "error")  # without an answer, and not dispatched again


@dataclass(eq=False)
class Generator:
    """Dispatches planned requests.  Event loop thread."""

    config: ProxyConfig
    saver: Saver
    sampled_turns: SampledTurnCache
    prompt_heads: PromptHeadCache
    divergence_recorder: DivergenceRecorder
    background: BackgroundTasks

    async def start(self, request: Request, plan: RequestPlan) -> GenerationStream | None:
        """Start a generation; None where the plan's resident or leader is gone: to be planned again."""
        assert request.call is not None
        if plan.resident and not plan.copy_resident:
            request.backend.state.resident_view.exclude(plan.resident)  # a listing on its way may still have it
        if (stream := await self._send(request, plan)) is None:
            await request.backend.state.refresh()
            return None
        assert request.listener is not None
        request.generation = GenerationStream(stream, request.log.id, self.background, request.listener)
        request.advance(RequestStatus.WAITING)
        # Explanations come last: the engine computes meanwhile.
        self.prompt_heads.add(request.root, extract_head(request.call.fields))
        self.divergence_recorder.start_analysis(request)
        return request.generation

    async def _send(self, request: Request, plan: RequestPlan) -> ByteStream | None:
        """Send a request to the backend, from which moment others can follow it; None where its start is gone."""
        assert request.call is not None
        request.sent = request.is_dispatching = True
        request.stored_tokens = plan.reuse
        request.listener = ProgressListener(request, self)
        request.clock.mark_waiting()
        request.log.mark_dispatched()
        try:
            background = BACKGROUND_KEEP if request.is_background else ""
            names = request.call.api.endpoint, request.log.id, request.rendered.prompt_id
            return await request.backend.upstream.generate(*names, plan, root=request.root, background=background)
        except UpstreamGoneError as error:
            log.info("request %s is planned again: %s", request.log.id, error)
            return None
        finally:
            request.is_dispatching = False


@dataclass(eq=False)
class ProgressListener:
    """A GenerationListener for one dispatch of one request."""

    request: Request
    generator: Generator
    _detector: RepetitionDetector = field(default_factory=RepetitionDetector, init=False)
    _is_saving: bool = field(default=False, init=False)
    _attempted_tokens: int = field(default=0, init=False)  # of the last save; after a failure the next step is awaited

    def on_started(self) -> None:
        self.request.started = True
        self.request.log.prefill_began_s = self.request.log.elapsed_s()
        self.request.advance(RequestStatus.PREFILLING)

    def on_progress(self) -> None:
        self.request.clock.mark_progress()

    def on_content(self, chunk: bytes) -> None:
        self.request.content_chunks += 1
        if self.generator.config.garbage_guard == "observe" and not self._detector.reason:
            self._detector.feed(chunk_text(chunk))
            self.request.log.collapse = self._detector.reason

    def on_prefilled(self, tokens: int) -> None:
        request, step = self.request, self.generator.config.partial_save_tokens
        request.prefilled_tokens = tokens
        if request.started:  # a follower may have had to go on in its leader's place, from less than it was to share
            request.stored_tokens = min(request.stored_tokens, tokens)
        tokens = align_to_grid(tokens, request.layout.grid) if request.layout else tokens
        new_tokens = tokens - max(request.stored_tokens, self._attempted_tokens)
        if request.started and step and new_tokens >= step and not self._is_saving:
            self._is_saving, self._attempted_tokens = True, tokens
            self.generator.background.spawn(self._save_prefix(tokens), f"part of {request.log.id}")

    def on_result(self, result: GenerationResult) -> None:
        """Record the result; called twice where a cancel met the end."""
        request, resident_view = self.request, self.request.backend.state.resident_view
        if request.log.generation_result is not None:
            return
        request.log.generation_result = result
        if result.turn and not request.purged:
            self.generator.sampled_turns.add(request.root, request.model, result.turn)
        if request.is_cacheable:
            resident_view.add(result.resident, resident_after_generation(request, result))
        else:
            resident_view.exclude(result.resident)

    def on_end(self, is_complete: bool) -> None:
        """Release the ticket, read or not; a broken stream keeps it for the next dispatch, or the failure's writing."""
        result = self.request.log.generation_result
        self.request.clock.mark_idle()
        self.request.mark_released()
        if self.request.ticket and (is_complete or (result and result.finish in FAILED_FINISHES)):
            self.request.ticket.release()

    async def _save_prefix(self, tokens: int) -> None:
        try:
            if await self.generator.saver.save_prefix(self.request, tokens) and self.request.listener is self:
                self.request.stored_tokens = tokens
        finally:
            self._is_saving = False
