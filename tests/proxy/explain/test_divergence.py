"""Where prompts leave what is known: what a record keeps of it, also where the backend has no texts."""

from pathlib import Path
from typing import Any

import pytest

from support.proxy.fake_backend import packed
from support.proxy.harness import Pair, on_loop, pair
from warmline_common.protocol.messages import MessageEnd, PromptReply
from warmline_proxy.explain import divergence as partings
from warmline_proxy.explain.divergence import DivergenceRecorder, build_divergence, has_tokens
from warmline_proxy.planner import COLD, RequestPlan
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import RequestLog
from warmline_proxy.routes.dispatch import REQUEST_REGISTRY
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, DIVERGENCE_TOKENS_BEFORE, Divergence, PrefixMatch
from warmline_proxy.upstream.resident_view import ResidentView

ASKED = "Where do the ships that came this morning come from, and whose are they, if that is known to anybody?"
OTHER = ASKED.replace("morning", "evening")


async def parted(pair: Pair, text: str) -> Divergence:
    await pair.chat(text)
    seen = (await pair.settled())[0].parting
    assert seen is not None
    return seen


@on_loop
async def test_without_texts_the_tokens_are_kept(tmp_path: Path) -> None:
    async with pair(tmp_path) as here:
        await here.chat(ASKED)
        assert (await here.settled())[0].parting is None
        seen = await parted(here, OTHER)
        assert (seen.stored_text, seen.prompt_text, seen.cause) == ("", "", "differs")
        before = min(seen.at, DIVERGENCE_TOKENS_BEFORE) * 4
        assert seen.stored[:before] == seen.prompt[:before]
        assert seen.stored[before:].startswith(packed(b"morning come from"))
        assert seen.prompt[before:].startswith(packed(b"evening come from"))
        assert here.index.segment(seen.segment) is not None


@on_loop
async def test_who_waits_for_what_is_saved_does_not_wait_for_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partings, "PATIENCE_S", 600.0)
    async with pair(tmp_path) as here:
        await here.chat(ASKED)
        await here.settled()
        here.backend.texts_allowed.clear()
        await here.chat(OTHER)
        await here.backend.called("texts")
        (life,) = here.app[REQUEST_REGISTRY]
        await life.saved.wait()
        assert len(here.app[REQUEST_REGISTRY]) == 1, "it is recorded with what they say"
        here.backend.texts_allowed.set()
        assert (await here.settled())[0].parting is not None


@on_loop
async def test_texts_that_take_too_long_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partings, "PATIENCE_S", 0.0)
    async with pair(tmp_path) as here:
        await here.chat(ASKED)
        here.backend.texts_allowed.clear()
        seen = await parted(here, OTHER)
        assert (seen.prompt_text, seen.cause) == ("", ""), "explaining asks again"
        here.backend.texts_allowed.set()


@on_loop
async def test_what_is_in_memory_alone_has_no_segment(tmp_path: Path) -> None:
    async with pair(tmp_path) as here:
        here.backend.saves_fail = [500, 500]
        await here.chat(ASKED)
        seen = await parted(here, OTHER)
        assert seen.segment == "" and seen.stored


@on_loop
async def test_who_is_computed_cold_on_purpose_has_none(tmp_path: Path) -> None:
    async with pair(tmp_path) as here:
        await here.chat(ASKED)
        await here.chat(OTHER, cache_prompt=False)
        assert (await here.settled())[0].parting is None


@on_loop
async def test_a_purge_forgets_those_of_requests_on_their_way() -> None:
    nobody: Any = None
    noted = DivergenceRecorder(nobody, nobody, ResidentView(), nobody)
    life = Request(RequestLog("chat"), nobody, nobody, prompt=prompt_of(packed(b"it is evening")))
    plan = RequestPlan(COLD, 0, "differs from what is stored at token 6", diverges_at=6)
    match = PrefixMatch(
        tokens=6, chain=[], checkpoints=[], end_reason="", is_divergent=True, divergent_tokens=packed(b"morning")
    )
    noted.record(life, plan, match)
    assert life.log.divergence is not None
    with noted.pause():
        assert life.log.divergence is None
        noted.record(life, plan, match)
        assert life.log.divergence is None
    noted.record(life, plan, match)
    assert life.log.divergence is not None


def prompt_of(tokens: bytes, *ends: MessageEnd) -> PromptReply:
    return PromptReply(
        boot="b", generation=0, prompt_id="p", tokens=tokens, boundaries=[], turn_end=0, messages=list(ends),
        tokens_max=9, fingerprint="f",
    )  # fmt: skip


def test_windows_lie_around_the_place() -> None:
    tokens = packed(bytes(range(200)) + bytes(200))
    ends = (MessageEnd(end=20, number=1, role="system"), MessageEnd(end=300, number=2, role="user"))
    prompt = prompt_of(tokens, *ends)
    seen = build_divergence(prompt, 100, packed(bytes(reversed(range(150)))), "")
    assert (seen.begins, seen.message, seen.message_last, seen.role, seen.messages) == (68, 2, 2, "user", 2)
    assert seen.prompt == packed(bytes(range(68, 196)))
    assert len(seen.stored) == (DIVERGENCE_TOKENS_BEFORE + DIVERGENCE_TOKENS_AFTER) * 4
    assert build_divergence(prompt, 3, packed(b"a"), "").begins == 0


def test_tokens_are_sought_whole() -> None:
    sought, shifted = packed(bytes(range(1, 20))), packed(bytes(range(1, 17)))
    assert has_tokens(sought, packed(bytes(50) + bytes(range(1, 17))))
    assert not has_tokens(sought, shifted), "that is the place itself"
    assert not has_tokens(sought, b"\0" * 5 + shifted + b"\0" * 3), "between two tokens"
    assert not has_tokens(packed(b"short"), packed(b"not short"))
