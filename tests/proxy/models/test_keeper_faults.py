"""Keepers that are down, have just started, or refuse: what is loaded stays usable, and no wait is endless."""

import asyncio
from pathlib import Path

import pytest

from support.keeper.fake_keeper import hold, release, run_models, wait_for_stage, wait_until_waiting
from support.proxy.harness import on_loop
from warmline_common.protocol.keeper import ModelStage
from warmline_proxy.app import COMPONENTS
from warmline_proxy.models import model_state

TWO = {"large": 10, "small": 10}
SWAP_BACK = ("unload large", "load small")
LIMITS = {"X-Warmline-Connect-Timeout": "0.3"}
LONG = "words of a conversation " * 10


@on_loop
async def test_answer_that_outlives_its_keeper_is_saved(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        running = await hold(harness, "large", LONG)
        harness.keeper.ready, harness.keeper.boot = False, "keeper-2"
        await harness.keeper.publish("large", stage=ModelStage.UNLOADED, port=0)
        await wait_for_stage(harness, "large", "unloaded")
        waiting = asyncio.create_task(harness.ask("large", "new"))
        await wait_until_waiting(harness, "large")
        release(harness, "large")
        assert (await running).status == 200
        await harness.wait_until_saved()
        assert harness.index.totals().sessions == 1 and not waiting.done()
        await harness.keeper.end_process("large")
        harness.keeper.ready = True
        await harness.keeper.publish("large")
        assert (await waiting).status == 200 and harness.keeper.calls == ["load large"]


@on_loop
async def test_purge_before_the_keeper_answers_reaches_the_backends_later(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        assert (await harness.ask("large", LONG)).status == 200
        await harness.wait_until_saved()
        models, backend = harness.app[COMPONENTS].models, harness.keeper.backends["large"]
        upstream = models.default.upstream
        address, upstream.base_url, models.are_processes_known = upstream.base_url, "", False
        headers = {"Authorization": f"Bearer {harness.home.load_secret()}"}
        url = f"{harness.url}/warmline/purge"
        async with harness.client.post(url, headers=headers, json={"everything": True}) as response:
            assert response.status == 200
        assert harness.index.has_purge_notice() and backend.residents
        upstream.base_url, models.are_processes_known = address, True
        await models.default.state.refresh()
        assert not harness.index.has_purge_notice() and not backend.residents


@on_loop
async def test_owner_hears_that_the_keeper_is_down_and_what_is_loaded_is_served(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        assert (await harness.ask("large")).status == 200
        await harness.stop_backend()
        for path in ("/small/load", "/large/unload"):
            reply = await harness.as_owner("POST", path, status=503)
            assert "the keeper, which loads models, does not answer" in reply["error"]["message"]
        assert (await harness.models())["keeper_problem"] == "the keeper, which loads models, does not answer"
        assert (await harness.ask("large")).status == 200


@on_loop
async def test_unload_that_waits_ends_where_the_keeper_is_lost(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        running = await hold(harness, "large")
        await harness.as_owner("POST", "/large/unload", wait=False)
        unloading = asyncio.create_task(harness.as_owner("POST", "/large/unload", status=503))
        asking = asyncio.create_task(harness.ask("large"))
        await wait_until_waiting(harness, "large")
        await harness.stop_backend()
        assert "unloaded" in (await unloading)["error"]["message"]
        release(harness, "large")
        assert (await running).status == 200 == (await asking).status


@on_loop
async def test_model_that_never_starts_makes_room_once_nobody_waits_for_it(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        harness.keeper.loading_allowed.clear()
        patient = {"X-Warmline-Queue-Timeout": "2"}
        first = asyncio.create_task(harness.chat(model="small", headers=patient))
        await wait_for_stage(harness, "small", "starting")
        waiting = asyncio.create_task(harness.ask("large"))
        await wait_until_waiting(harness, "large")
        large = (await harness.models())["models"][0]
        assert large["wait_reason"] == "small, which is being loaded, has the memory"
        assert (await first).status == 503
        await harness.keeper.wait_for_call("unload small")
        harness.keeper.loading_allowed.set()
        assert (await waiting).status == 200


@on_loop
async def test_model_whose_process_dies_again_and_again_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "FAILING_S", 0.3)
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        harness.keeper.loading_allowed.clear()
        first = asyncio.create_task(harness.ask("small"))
        await wait_for_stage(harness, "small", "starting")
        waiting = asyncio.create_task(harness.ask("large"))
        await harness.keeper.publish("small", reason="its process was killed by SIGKILL; it is started again")
        await harness.keeper.wait_for_call("unload small")
        harness.keeper.loading_allowed.set()
        assert (await waiting).status == 200 == (await first).status
        assert harness.keeper.calls == ["unload large", "load small", "unload small", "load large", *SWAP_BACK]


@on_loop
async def test_load_by_the_owner_of_a_model_that_can_not_start_has_a_limit(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",), connect_timeout_s=0.5) as harness:
        harness.keeper.loading_allowed.clear()
        loading = asyncio.create_task(harness.as_owner("POST", "/small/load", status=503))
        await wait_for_stage(harness, "small", "starting")
        await harness.keeper.publish("small", down_s=0.1, reason="its process was killed by SIGKILL")
        assert "its process was killed by SIGKILL (waited 0.5 s)" in (await loading)["error"]["message"]


@on_loop
async def test_count_of_tokens_does_not_wait_without_end(tmp_path: Path) -> None:
    body = {"model": "small", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        running = await hold(harness, "large")
        url = f"{harness.url}/v1/messages/count_tokens"
        async with harness.client.post(url, json=body, headers=LIMITS) as response:
            message = (await response.json())["error"]["message"]
            assert response.status == 503 and "'small' is not loaded yet, since large is unloaded for it" in message
        release(harness, "large")
        assert (await running).status == 200 == (await harness.ask("large")).status


@on_loop
async def test_keeper_that_refuses_is_asked_at_a_steady_rate(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.stopping_replies = 1_000
        waiting = asyncio.create_task(harness.ask("small"))
        await asyncio.sleep(3.0)
        assert len(harness.keeper.calls) <= 7  # one each 0.5 s
        harness.keeper.stopping_replies = 0
        assert (await waiting).status == 200


@on_loop
async def test_wish_of_an_earlier_proxy_is_withdrawn_before_a_load(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.wishes["large"] = 10**6
        assert (await harness.ask("small")).status == 200
        assert harness.keeper.wishes["large"] == 0
