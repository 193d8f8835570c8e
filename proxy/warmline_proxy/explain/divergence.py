"""Where prompts leave what is known: noted while planning, looked into once the engine has something to do.

Planning only slices tokens that it has in its hands; texts are asked for, and what is stored is read, off its way.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.resident_view import ResidentView

log = logging.getLogger(__name__)

NEEDLE_TOKENS = 16  # of the prompt, in what is known further on
SEARCH_TOKENS_MAX = 262_144
ANALYSIS_WAIT_S = 1.0  # of a request that is over, until its parting is looked into


class DivergenceRecorder:
    """Its state is the lives'; event loop thread."""

    def __init__(
        self, upstream: Upstream, index: Index, resident_view: ResidentView, background: BackgroundTasks
    ) -> None:
        self._upstream, self._index, self._resident_view, self._background = upstream, index, resident_view, background
        self._recorded_requests = WeakSet[Request]()
        self._pause_count = 0

    def record(self, request: Request, plan: RequestPlan, match: PrefixMatch) -> None:
        """Take what stands on both sides while it is there; microseconds."""
        assert request.prompt is not None
        if self._pause_count:
            return self.clear(request)
        held = self._resident_view.get(plan.diverges_from) if plan.diverges_from else None
        if (at := plan.diverges_at) is None:
            return self.clear(request)
        search_range = slice(at * TOKEN_BYTES, (at + SEARCH_TOKENS_MAX) * TOKEN_BYTES)
        if not (known := held.tokens[search_range] if held else match.divergent_tokens):
            return self.clear(request)
        is_stored = match.tokens == at and match.divergent_tokens[:TOKEN_BYTES] == known[:TOKEN_BYTES]
        request.log.divergence = build_divergence(
            request.prompt, at, known, match.divergent_segment if is_stored else ""
        )
        request.divergence_tokens = known if held else b""
        self._recorded_requests.add(request)

    def clear(self, request: Request) -> None:
        """It was not planned by what is known, or that is no longer to be known."""
        request.log.divergence, request.divergence_tokens = None, b""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While something is purged: none is noted, and those that are not yet recorded are forgotten."""
        self._pause_count += 1
        for life in list(self._recorded_requests):
            self.clear(life)
        try:
            yield
        finally:
            self._pause_count -= 1

    def start_analysis(self, request: Request) -> None:
        """Begin to find out what the tokens say, and why they differ."""
        if request.log.divergence is not None:
            request.divergence_task = self._background.spawn(
                self._analyze(request, request.log.divergence), f"parting of {request.log.id}"
            )

    async def wait_for_analysis(self, request: Request) -> None:
        """Wait until that is done, or has taken too long."""
        if request.divergence_task is not None:
            await asyncio.wait({request.divergence_task}, timeout=ANALYSIS_WAIT_S)
        request.divergence_tokens = b""

    async def _analyze(self, request: Request, divergence: Divergence) -> None:
        known_tokens, why = request.divergence_tokens, request.log.plan.why_not_warmer if request.log.plan else ""
        comes_later = await asyncio.to_thread(self._is_found_later, divergence, known_tokens)
        stored_text, prompt_text = await self._fetch_texts(divergence)
        found = msgspec.structs.replace(
            divergence, comes_later=comes_later, stored_text=stored_text, prompt_text=prompt_text
        )
        found.cause = find_cause(why, found)
        if request.log.divergence is divergence:  # else it was planned again, or is to be forgotten
            request.log.divergence = found

    async def _fetch_texts(self, divergence: Divergence) -> tuple[str, str]:
        try:
            stored, prompt = await self._upstream.detokenize([divergence.stored, divergence.prompt])
        except UpstreamError as error:
            log.debug("what stands where a prompt differs is not known as text: %s", error)
            return "", ""
        return stored, prompt

    def _is_found_later(self, divergence: Divergence, known_tokens: bytes) -> bool:
        """On a thread."""
        try:
            if not known_tokens and divergence.segment:
                known_tokens = self._index.tokens_from(divergence.segment, divergence.at, SEARCH_TOKENS_MAX)
        except IndexStoreError:
            return False
        return has_tokens(divergence.prompt[(divergence.at - divergence.begins) * TOKEN_BYTES :], known_tokens)


def build_divergence(prompt: PromptReply, at: int, known_tokens: bytes, segment: str) -> Divergence:
    """Of a prompt that differs at token `at` from known packed tokens that go on there."""
    begins = max(0, at - DIVERGENCE_TOKENS_BEFORE)
    before = prompt.tokens[begins * TOKEN_BYTES : at * TOKEN_BYTES]
    where = locate_token(prompt.messages, at)
    return Divergence(
        at=at,
        begins=begins,
        stored=before + known_tokens[: DIVERGENCE_TOKENS_AFTER * TOKEN_BYTES],
        prompt=prompt.tokens[begins * TOKEN_BYTES : (at + DIVERGENCE_TOKENS_AFTER) * TOKEN_BYTES],
        segment=segment,
        message=where.first_message,
        message_last=where.last_message,
        role=where.role,
        messages=max((each.number for each in prompt.messages), default=0),
    )


def has_tokens(sought: bytes, known_tokens: bytes) -> bool:
    """Whether the first of these packed tokens stand anywhere in the others, after their first."""
    needle = sought[: NEEDLE_TOKENS * TOKEN_BYTES]
    if len(needle) < NEEDLE_TOKENS * TOKEN_BYTES:
        return False
    at = known_tokens.find(needle, TOKEN_BYTES)
    while at >= 0 and at % TOKEN_BYTES:
        at = known_tokens.find(needle, at + 1)
    return at >= 0
