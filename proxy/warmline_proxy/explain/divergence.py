"""Divergences of prompts from stored tokens: recorded during planning, analyzed while the engine works.

Recording only slices tokens that planning has; texts and stored tokens are fetched in a task later.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

import msgspec

from warmline_common.protocol.messages import PromptReply
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.explain.causes import find_cause
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.planner import RequestPlan, locate_token
from warmline_proxy.request.request import Request
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, DIVERGENCE_TOKENS_BEFORE, Divergence, PrefixMatch
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.client import UpstreamError

log = logging.getLogger(__name__)

NEEDLE_TOKENS = 16  # of the prompt, sought further on in the stored tokens
SEARCH_TOKENS_MAX = 262_144
ANALYSIS_WAIT_S = 1.0  # between a request's end and its record


@dataclass(eq=False)
class DivergenceRecorder:
    """Recorder of divergences in requests.  Event loop thread."""

    index: Index
    background: BackgroundTasks
    _recorded_requests: WeakSet[Request] = field(default_factory=WeakSet, init=False)
    _pause_count: int = field(default=0, init=False)

    def record(self, request: Request, plan: RequestPlan, match: PrefixMatch) -> None:
        """Record the tokens on both sides of the plan's divergence, if it has one; takes microseconds."""
        self.clear(request)
        if self._pause_count or (at := plan.diverges_at) is None:
            return
        resident = request.backend.state.resident_view.get(plan.diverges_from) if plan.diverges_from else None
        search_range = slice(at * TOKEN_BYTES, (at + SEARCH_TOKENS_MAX) * TOKEN_BYTES)
        if not (tokens := resident.tokens[search_range] if resident else match.divergent_tokens):
            return
        is_stored = match.tokens == at and match.divergent_tokens[:TOKEN_BYTES] == tokens[:TOKEN_BYTES]
        segment = match.divergent_segment if is_stored else ""
        request.log.divergence = build_divergence(request.rendered, at, tokens, segment)
        request.divergence_tokens = tokens if resident else b""
        self._recorded_requests.add(request)

    def clear(self, request: Request) -> None:
        """Remove a request's divergence."""
        request.log.divergence, request.divergence_tokens = None, b""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record none during a purge, and clear those of requests under way."""
        self._pause_count += 1
        for request in list(self._recorded_requests):
            self.clear(request)
        try:
            yield
        finally:
            self._pause_count -= 1

    def start_analysis(self, request: Request) -> None:
        """Start the task that fetches the texts and finds the cause."""
        if (divergence := request.log.divergence) is not None:
            name = f"divergence of {request.log.id}"
            request.divergence_task = self.background.spawn(self._analyze(request, divergence), name)

    async def wait_for_analysis(self, request: Request) -> None:
        """Wait for the task, at most ANALYSIS_WAIT_S."""
        if request.divergence_task is not None:
            await asyncio.wait({request.divergence_task}, timeout=ANALYSIS_WAIT_S)
        request.divergence_tokens = b""

    async def _analyze(self, request: Request, divergence: Divergence) -> None:
        tokens, why = request.divergence_tokens, request.log.plan.why_not_warmer if request.log.plan else ""
        comes_later = await asyncio.to_thread(self._is_found_later, divergence, tokens)
        found = msgspec.structs.replace(divergence, comes_later=comes_later)
        try:
            texts = await request.backend.upstream.detokenize([divergence.stored, divergence.prompt])
            found.stored_text, found.prompt_text = texts
        except UpstreamError as error:
            log.debug("the text at a prompt's divergence is not known: %s", error)
        found.cause = find_cause(why, found)
        if not self.index.keeps_texts:
            found.stored_text = found.prompt_text = ""
        if request.log.divergence is divergence:  # else the request was planned again, or a purge cleared it
            request.log.divergence = found

    def _is_found_later(self, divergence: Divergence, tokens: bytes) -> bool:
        """Say whether the prompt goes on with later tokens of the other side.  On a worker thread."""
        try:
            if not tokens and divergence.segment:
                tokens = self.index.tokens_from(divergence.segment, divergence.at, SEARCH_TOKENS_MAX)
        except IndexStoreError:
            return False
        return has_tokens(divergence.prompt[(divergence.at - divergence.begins) * TOKEN_BYTES :], tokens)


def build_divergence(prompt: PromptReply, at: int, stored_tokens: bytes, segment: str) -> Divergence:
    """Build the divergence of a prompt at token `at` from packed tokens that begin there."""
    begins = max(0, at - DIVERGENCE_TOKENS_BEFORE)
    before = prompt.tokens[begins * TOKEN_BYTES : at * TOKEN_BYTES]
    where = locate_token(prompt.messages, at)
    return Divergence(
        at=at,
        begins=begins,
        stored=before + stored_tokens[: DIVERGENCE_TOKENS_AFTER * TOKEN_BYTES],
        prompt=prompt.tokens[begins * TOKEN_BYTES : (at + DIVERGENCE_TOKENS_AFTER) * TOKEN_BYTES],
        segment=segment,
        message=where.first_message,
        message_last=where.last_message,
        role=where.role,
        messages=max((each.number for each in prompt.messages), default=0),
    )


def has_tokens(sought: bytes, tokens: bytes) -> bool:
    """Say whether the first NEEDLE_TOKENS packed tokens of `sought` are in `tokens`, after the first token."""
    needle = sought[: NEEDLE_TOKENS * TOKEN_BYTES]
    if len(needle) < NEEDLE_TOKENS * TOKEN_BYTES:
        return False
    at = tokens.find(needle, TOKEN_BYTES)
    while at >= 0 and at % TOKEN_BYTES:
        at = tokens.find(needle, at + 1)
    return at >= 0
