"""What a generation tells on its way, taken down in its request's life, and acted on: parts are saved as they come."""

from warmline_common.protocol.messages import Settled
from warmline_proxy.pipeline.sampled_turns import Turns
from warmline_proxy.pipeline.saver import Settler
from warmline_proxy.planner import on_grid
from warmline_proxy.request.request import Life, held_after
from warmline_proxy.response.repetition import Guard, text_of
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.backend_state import Knowledge

ENDED = ("cancelled", "error")  # without an answer, and not to be dispatched again


class Hearing:
    """A generation.Listener for one try of one request."""

    def __init__(
        self,
        life: Life,
        knowledge: Knowledge,
        settler: Settler,
        turns: Turns,
        background: Background,
        partial_save_tokens: int,
        guard: Guard | None = None,
    ) -> None:
        self._life, self._knowledge, self._settler, self._background = life, knowledge, settler, background
        self._turns = turns
        self._partial_save_tokens, self._guard = partial_save_tokens, guard
        self._saving = False
        self._tried = 0  # how far the last save was to reach; one that failed is not tried again at once

    def started(self) -> None:
        self._life.started = True

    def progressed(self) -> None:
        self._life.clock.progresses()

    def spoke(self, chunk: bytes) -> None:
        self._life.spoken += 1
        if (guard := self._guard) and not guard.reason:
            guard.feed(text_of(chunk))
            self._life.trace.collapse = guard.reason

    def prefilled(self, tokens: int) -> None:
        life, step = self._life, self._partial_save_tokens
        life.prefilled = tokens
        tokens = on_grid(tokens, life.layout.grid) if life.layout else tokens
        if life.started and step and tokens - max(life.stored, self._tried) >= step and not self._saving:
            self._saving, self._tried = True, tokens
            self._background.spawn(self._save(tokens), f"part of {life.trace.id}")

    def settled(self, settled: Settled) -> None:
        """Told twice where a cancel met the end."""
        if self._life.trace.settled is None:
            self._life.trace.settled = settled
            if settled.turn and not self._life.purged:
                self._turns.remember(self._life.root, self._life.model, settled.turn)
            if self._life.is_kept:
                self._knowledge.mirror.add(settled.resident, held_after(self._life, settled))
            else:
                self._knowledge.mirror.shun(settled.resident)

    def over(self, whole: bool) -> None:
        """Its place is free, whether or not its client has read all of the answer.  Who was lost keeps it for a while:
        to be dispatched again, or until the answer says that it failed.
        """
        settled = self._life.trace.settled
        self._life.clock.rests()
        self._life.let_go.set()
        if self._life.ticket and (whole or (settled and settled.finish in ENDED)):
            self._life.ticket.release()

    async def _save(self, tokens: int) -> None:
        try:
            if await self._settler.save_part(self._life, tokens) and self._life.hearing is self:
                self._life.stored = tokens
        finally:
            self._saving = False
