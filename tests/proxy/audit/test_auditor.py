"""Audits of warm requests against a fake backend: when they run, and their outcomes."""

import asyncio
from pathlib import Path

import pytest

from support.proxy.audits import (
    COLLAPSED,
    RENDERED,
    TEXT,
    ask_turns,
    count_audits,
    list_records,
    make_metric_reader,
    make_turn,
    wait_for_audits,
)
from support.proxy.fake_backend import make_layout
from support.proxy.harness import on_loop, run_proxy
from warmline_common.protocol.messages import HEADER_REUSE


@on_loop
async def test_warm_request_is_audited_with_cold_run_and_cold_request_is_not(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        assert await ask_turns(proxy) == ["cold 0", f"resident {len(RENDERED + 'Paris.')}"]
        await wait_for_audits(proxy)
        assert count_audits(proxy.backend) == 1
        headers, body = proxy.backend.calls["generate"][-1], proxy.backend.calls["prompts"][-1]
        assert HEADER_REUSE not in headers
        prompt = f"<user>{TEXT}\n<assistant>Paris.\n<user>And of Spain?\n<assistant>"
        assert (bytes(body["prompt"]).decode(), body["max_tokens"]) == (prompt, 1)
        assert [record.audit for record in await list_records(proxy)] == ["", "equal"]
        assert await make_metric_reader(proxy, 'warmline_audits_total{outcome="equal",why="chance"}')() == 1


@on_loop
async def test_difference_within_tolerance_is_within(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.layout = make_layout(dtype="float32")
        proxy.backend.logprob, proxy.backend.cold_logprobs = -0.2501, [-0.2506]
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert [record.audit for record in await list_records(proxy)] == ["", "within"]
        assert not proxy.index.quarantined()


@on_loop
async def test_small_cold_noise_does_not_hide_large_difference(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.layout = make_layout(dtype="float32")
        proxy.backend.logprob, proxy.backend.cold_logprobs = -0.2501, [-3.0001, -3.0021]
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert (await list_records(proxy))[-1].audit == "differs"


@pytest.mark.parametrize("cold", [[-3.0, -0.25], [-3.0, -7.0]])
@on_loop
async def test_differing_cold_runs_are_unstable_and_nothing_is_quarantined(tmp_path: Path, cold: list[float]) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.cold_logprobs = cold
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert [record.audit for record in await list_records(proxy)] == ["", "unstable"]
        assert not proxy.index.quarantined() and proxy.backend.residents


@on_loop
async def test_one_bit_differs_in_exact_mode(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.layout = make_layout(grid=8, dtype="float32")
        proxy.backend.logprob, proxy.backend.cold_logprobs = -0.25, [-0.25000003, -0.25000003]
        starts = await ask_turns(proxy)
        assert starts[1] == f"resident {len(RENDERED + 'Paris.') // 8 * 8}"
        await wait_for_audits(proxy)
        assert (await list_records(proxy))[-1].audit == "differs"


@on_loop
async def test_audit_waits_until_no_request_runs(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        backend = proxy.backend
        await ask_turns(proxy, 1)
        backend.hold_after = 1
        other = asyncio.create_task(proxy.client.post(f"{proxy.url}/v1/completions", json={"prompt": "another"}))
        await backend.holding.wait()
        backend.hold_after = None
        await proxy.chat(**make_turn(1, backend))
        assert not count_audits(backend)
        backend.may_continue.set()
        await other
        await wait_for_audits(proxy)
        assert (await list_records(proxy))[1].audit == "equal"


@pytest.mark.parametrize(("ended", "outcome"), [(2, "equal"), (3, "abandoned")])
@on_loop
async def test_lost_runs_are_retried_up_to_limit(tmp_path: Path, ended: int, outcome: str) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.background_cancels = ended
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        assert (await list_records(proxy))[-1].audit == outcome and count_audits(proxy.backend) == 3


@on_loop
async def test_proxy_stop_abandons_audits(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.background_allowed.clear()
        await ask_turns(proxy)
        await proxy.backend.wait_for_calls("generate", 3)
        await proxy.stop_proxy()
        proxy.index.flush()
        assert proxy.index.requests(1)[0].audit == "abandoned"
        proxy.backend.background_allowed.set()


# ---- answers that collapse


@on_loop
async def test_collapsed_answer_is_always_audited(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.answer = COLLAPSED
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        cold, warm = await list_records(proxy)
        assert cold.guard == warm.guard == "model: one token repeated over 65 tokens"
        assert (cold.audit, warm.audit) == ("", "equal")
        assert await make_metric_reader(proxy, 'warmline_audits_total{outcome="model",why="guard"}')() == 1
        assert not proxy.index.quarantined()


@on_loop
async def test_collapsed_answer_that_differs_from_cold_blames_cache(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.answer, proxy.backend.cold_logprobs = COLLAPSED, [-3.0, -3.0]
        await ask_turns(proxy)
        await wait_for_audits(proxy)
        warm = (await list_records(proxy))[-1]
        assert (warm.audit, warm.guard) == ("differs", "cache: one token repeated over 65 tokens")
        assert proxy.index.quarantined() and not proxy.index.segments()
        next_turn = await proxy.chat(**make_turn(2, proxy.backend))
        assert next_turn.headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_collapsed_answer_is_audited_after_client_left(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        backend = proxy.backend
        backend.answer = COLLAPSED
        await ask_turns(proxy, 1)
        backend.hold_after = 75
        body = {**make_turn(1, backend), "stream": True}
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=body) as response:
            await response.content.readuntil(b"!")
            await backend.holding.wait()
        await wait_for_audits(proxy)
        warm = (await list_records(proxy))[-1]
        assert (warm.outcome, warm.audit) == ("cancelled", "equal")


@on_loop
async def test_garbage_guard_off_audits_no_collapse(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, garbage_guard="off") as proxy:
        proxy.backend.answer = COLLAPSED
        await ask_turns(proxy)
        assert [record.guard for record in await list_records(proxy)] == ["", ""] and not count_audits(proxy.backend)
