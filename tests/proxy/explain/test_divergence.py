"""Divergences in request records, with and without texts from the backend."""

from pathlib import Path
from typing import Any

import pytest

from support.proxy.fake_backend import pack_text
from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.messages import MessageEnd, PromptReply
from warmline_proxy.app import REQUEST_REGISTRY
from warmline_proxy.explain import divergence as divergence_module
from warmline_proxy.explain.divergence import DivergenceRecorder, build_divergence, has_tokens
from warmline_proxy.planner import COLD, RequestPlan
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import RequestLog
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, DIVERGENCE_TOKENS_BEFORE, Divergence, PrefixMatch

QUESTION = "Where do the ships that came this morning come from, and whose are they, if that is known to anybody?"
OTHER = QUESTION.replace("morning", "evening")


async def find_divergence(pair: ProxyHarness, text: str) -> Divergence:
    await pair.chat(text)
    divergence = (await pair.wait_until_saved())[0].parting
    assert divergence is not None
    return divergence


@on_loop
async def test_record_keeps_tokens_without_texts(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(QUESTION)
        assert (await proxy.wait_until_saved())[0].parting is None
        divergence = await find_divergence(proxy, OTHER)
        assert (divergence.stored_text, divergence.prompt_text, divergence.cause) == ("", "", "differs")
        before = min(divergence.at, DIVERGENCE_TOKENS_BEFORE) * 4
        assert divergence.stored[:before] == divergence.prompt[:before]
        assert divergence.stored[before:].startswith(pack_text(b"morning come from"))
        assert divergence.prompt[before:].startswith(pack_text(b"evening come from"))
        assert proxy.index.segment(divergence.segment) is not None


@on_loop
async def test_saving_does_not_wait_for_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_module, "ANALYSIS_WAIT_S", 600.0)
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(QUESTION)
        await proxy.wait_until_saved()
        proxy.backend.texts_allowed.clear()
        await proxy.chat(OTHER)
        await proxy.backend.wait_for_calls("texts")
        (request,) = proxy.app[REQUEST_REGISTRY]
        await request.saved.wait()
        assert len(proxy.app[REQUEST_REGISTRY]) == 1, "the record waits for the texts"
        proxy.backend.texts_allowed.set()
        assert (await proxy.wait_until_saved())[0].parting is not None


@on_loop
async def test_record_waits_limited_time_for_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_module, "ANALYSIS_WAIT_S", 0.0)
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(QUESTION)
        proxy.backend.texts_allowed.clear()
        divergence = await find_divergence(proxy, OTHER)
        assert (divergence.prompt_text, divergence.cause) == ("", ""), "explain fetches them later"
        proxy.backend.texts_allowed.set()


@on_loop
async def test_divergence_from_unsaved_resident_has_no_segment(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.save_failures = [500, 500]
        await proxy.chat(QUESTION)
        divergence = await find_divergence(proxy, OTHER)
        assert divergence.segment == "" and divergence.stored


@on_loop
async def test_cache_prompt_false_has_no_divergence(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(QUESTION)
        await proxy.chat(OTHER, cache_prompt=False)
        assert (await proxy.wait_until_saved())[0].parting is None


@on_loop
async def test_pause_clears_and_blocks_divergences() -> None:
    unused: Any = None
    recorder = DivergenceRecorder(unused, unused)
    request = Request(RequestLog("chat"), unused, unused, prompt=make_prompt(pack_text(b"it is evening")))
    plan = RequestPlan(COLD, 0, "differs from what is stored at token 6", diverges_at=6)
    match = PrefixMatch(
        tokens=6, chain=[], checkpoints=[], end_reason="", is_divergent=True, divergent_tokens=pack_text(b"morning")
    )
    recorder.record(request, plan, match)
    assert request.log.divergence is not None
    with recorder.pause():
        assert request.log.divergence is None
        recorder.record(request, plan, match)
        assert request.log.divergence is None
    recorder.record(request, plan, match)
    assert request.log.divergence is not None


def make_prompt(tokens: bytes, *ends: MessageEnd) -> PromptReply:
    return PromptReply(
        boot="b", generation=0, prompt_id="p", tokens=tokens, boundaries=[], turn_end=0, messages=list(ends),
        tokens_max=9, fingerprint="f",
    )  # fmt: skip


def test_windows_surround_the_divergence() -> None:
    tokens = pack_text(bytes(range(200)) + bytes(200))
    ends = (MessageEnd(end=20, number=1, role="system"), MessageEnd(end=300, number=2, role="user"))
    prompt = make_prompt(tokens, *ends)
    divergence = build_divergence(prompt, 100, pack_text(bytes(reversed(range(150)))), "")
    assert (divergence.begins, divergence.message, divergence.message_last, divergence.role, divergence.messages) == (
        68,
        2,
        2,
        "user",
        2,
    )
    assert divergence.prompt == pack_text(bytes(range(68, 196)))
    assert len(divergence.stored) == (DIVERGENCE_TOKENS_BEFORE + DIVERGENCE_TOKENS_AFTER) * 4
    assert build_divergence(prompt, 3, pack_text(b"a"), "").begins == 0


def test_has_tokens_matches_whole_tokens() -> None:
    sought, shifted = pack_text(bytes(range(1, 20))), pack_text(bytes(range(1, 17)))
    assert has_tokens(sought, pack_text(bytes(50) + bytes(range(1, 17))))
    assert not has_tokens(sought, shifted), "the first token does not count"
    assert not has_tokens(sought, b"\0" * 5 + shifted + b"\0" * 3), "between two tokens"
    assert not has_tokens(pack_text(b"short"), pack_text(b"not short"))
