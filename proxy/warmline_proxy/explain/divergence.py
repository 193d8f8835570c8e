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
from warmline_proxy.explain.causes import cause_of
from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.planner import Plan, place
from warmline_proxy.request.request import Life
from warmline_proxy.store.rows import AFTER_TOKENS, BEFORE_TOKENS, Match, Parting
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.client import Upstream, UpstreamError
from warmline_proxy.upstream.resident_view import Mirror

log = logging.getLogger(__name__)

SOUGHT_TOKENS = 16  # of the prompt, in what is known further on
LOOKED_THROUGH_TOKENS_MAX = 262_144
PATIENCE_S = 1.0  # of a request that is over, until its parting is looked into


class Partings:
    """Its state is the lives'; event loop thread."""

    def __init__(self, upstream: Upstream, index: Index, mirror: Mirror, background: Background) -> None:
        self._upstream, self._index, self._mirror, self._background = upstream, index, mirror, background
        self._noted = WeakSet[Life]()
        self._pauses = 0

    def note(self, life: Life, plan: Plan, match: Match) -> None:
        """Take what stands on both sides while it is there; microseconds."""
        assert life.prompt is not None
        if self._pauses:
            return self.forget(life)
        held = self._mirror.held(plan.parts_with) if plan.parts_with else None
        if (at := plan.parts_at) is None:
            return self.forget(life)
        looked_through = slice(at * TOKEN_BYTES, (at + LOOKED_THROUGH_TOKENS_MAX) * TOKEN_BYTES)
        if not (known := held.tokens[looked_through] if held else match.beside):
            return self.forget(life)
        is_stored = match.tokens == at and match.beside[:TOKEN_BYTES] == known[:TOKEN_BYTES]
        life.trace.parting = parting(life.prompt, at, known, match.beside_in if is_stored else "")
        life.parted_from = known if held else b""
        self._noted.add(life)

    def forget(self, life: Life) -> None:
        """It was not planned by what is known, or that is no longer to be known."""
        life.trace.parting, life.parted_from = None, b""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While something is purged: none is noted, and those that are not yet recorded are forgotten."""
        self._pauses += 1
        for life in list(self._noted):
            self.forget(life)
        try:
            yield
        finally:
            self._pauses -= 1

    def look_into(self, life: Life) -> None:
        """Begin to find out what the tokens say, and why they differ."""
        if life.trace.parting is not None:
            life.looking = self._background.spawn(
                self._look_into(life, life.trace.parting), f"parting of {life.trace.id}"
            )

    async def known(self, life: Life) -> None:
        """Wait until that is done, or has taken too long."""
        if life.looking is not None:
            await asyncio.wait({life.looking}, timeout=PATIENCE_S)
        life.parted_from = b""

    async def _look_into(self, life: Life, seen: Parting) -> None:
        known, why = life.parted_from, life.trace.plan.why_not_warmer if life.trace.plan else ""
        comes_later = await asyncio.to_thread(self._comes_later, seen, known)
        stored_text, prompt_text = await self._texts(seen)
        found = msgspec.structs.replace(seen, comes_later=comes_later, stored_text=stored_text, prompt_text=prompt_text)
        found.cause = cause_of(why, found)
        if life.trace.parting is seen:  # else it was planned again, or is to be forgotten
            life.trace.parting = found

    async def _texts(self, seen: Parting) -> tuple[str, str]:
        try:
            stored, prompt = await self._upstream.texts([seen.stored, seen.prompt])
        except UpstreamError as error:
            log.debug("what stands where a prompt differs is not known as text: %s", error)
            return "", ""
        return stored, prompt

    def _comes_later(self, seen: Parting, known: bytes) -> bool:
        """On a thread."""
        try:
            if not known and seen.segment:
                known = self._index.tokens_from(seen.segment, seen.at, LOOKED_THROUGH_TOKENS_MAX)
        except IndexFailure:
            return False
        return stands_in(seen.prompt[(seen.at - seen.begins) * TOKEN_BYTES :], known)


def parting(prompt: PromptReply, at: int, known: bytes, segment: str) -> Parting:
    """Of a prompt that differs at token `at` from known packed tokens that go on there."""
    begins = max(0, at - BEFORE_TOKENS)
    before = prompt.tokens[begins * TOKEN_BYTES : at * TOKEN_BYTES]
    where = place(prompt.messages, at)
    return Parting(
        at=at,
        begins=begins,
        stored=before + known[: AFTER_TOKENS * TOKEN_BYTES],
        prompt=prompt.tokens[begins * TOKEN_BYTES : (at + AFTER_TOKENS) * TOKEN_BYTES],
        segment=segment,
        message=where.first,
        message_last=where.last,
        role=where.role,
        messages=max((each.number for each in prompt.messages), default=0),
    )


def stands_in(sought: bytes, known: bytes) -> bool:
    """Whether the first of these packed tokens stand anywhere in the others, after their first."""
    needle = sought[: SOUGHT_TOKENS * TOKEN_BYTES]
    if len(needle) < SOUGHT_TOKENS * TOKEN_BYTES:
        return False
    at = known.find(needle, TOKEN_BYTES)
    while at >= 0 and at % TOKEN_BYTES:
        at = known.find(needle, at + 1)
    return at >= 0
