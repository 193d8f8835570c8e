"""What a generation tells on its way, taken down in its request's life, and acted on: parts are saved as they come."""

from warmline_common.protocol.messages import GenerationResult
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.planner import align_to_grid
from warmline_proxy.request.request import Request, resident_after_generation
from warmline_proxy.response.repetition import RepetitionDetector, chunk_text
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.backend_state import BackendState

FAILED_FINISHES = ("cancelled", "error")  # without an answer, and not to be dispatched again


class ProgressListener:
    """A generation.Listener for one try of one request."""

    def __init__(
        self,
        request: Request,
        backend_state: BackendState,
        saver: Saver,
        sampled_turns: SampledTurnCache,
        background: BackgroundTasks,
        partial_save_tokens: int,
        repetition_detector: RepetitionDetector | None = None,
    ) -> None:
        self._request, self._backend_state, self._saver, self._background = request, backend_state, saver, background
        self._sampled_turns = sampled_turns
        self._partial_save_tokens, self._repetition_detector = partial_save_tokens, repetition_detector
        self._is_saving = False
        self._attempted_tokens = 0  # how far the last save was to reach; one that failed is not tried again at once

    def on_started(self) -> None:
        self._request.started = True

    def on_progress(self) -> None:
        self._request.clock.mark_progress()

    def on_content(self, chunk: bytes) -> None:
        self._request.content_chunks += 1
        if (guard := self._repetition_detector) and not guard.reason:
            guard.feed(chunk_text(chunk))
            self._request.log.collapse = guard.reason

    def on_prefilled(self, tokens: int) -> None:
        request, step = self._request, self._partial_save_tokens
        request.prefilled_tokens = tokens
        tokens = align_to_grid(tokens, request.layout.grid) if request.layout else tokens
        if (
            request.started
            and step
            and tokens - max(request.stored_tokens, self._attempted_tokens) >= step
            and not self._is_saving
        ):
            self._is_saving, self._attempted_tokens = True, tokens
            self._background.spawn(self._save_prefix(tokens), f"part of {request.log.id}")

    def on_settled(self, settled: GenerationResult) -> None:
        """Told twice where a cancel met the end."""
        if self._request.log.generation_result is None:
            self._request.log.generation_result = settled
            if settled.turn and not self._request.purged:
                self._sampled_turns.add(self._request.root, self._request.model, settled.turn)
            if self._request.is_cacheable:
                self._backend_state.resident_view.add(
                    settled.resident, resident_after_generation(self._request, settled)
                )
            else:
                self._backend_state.resident_view.exclude(settled.resident)

    def on_over(self, whole: bool) -> None:
        """Its place is free, whether or not its client has read all of the answer.  Who was lost keeps it for a while:
        to be dispatched again, or until the answer says that it failed.
        """
        settled = self._request.log.generation_result
        self._request.clock.mark_idle()
        self._request.released.set()
        if self._request.ticket and (whole or (settled and settled.finish in FAILED_FINISHES)):
            self._request.ticket.release()

    async def _save_prefix(self, tokens: int) -> None:
        try:
            if await self._saver.save_prefix(self._request, tokens) and self._request.listener is self:
                self._request.stored_tokens = tokens
        finally:
            self._is_saving = False
