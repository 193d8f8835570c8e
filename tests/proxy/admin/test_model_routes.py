"""The owner's routes for several models, and readiness.  A fake keeper, for the timing."""

import asyncio
from pathlib import Path

from support.keeper.fake_keeper import hold, release, run_models, wait_for_stage
from support.proxy.harness import on_loop, run_proxy
from warmline_common.protocol.keeper import ModelStage

TWO = {"large": 10, "small": 10}


@on_loop
async def test_owner_loads_pins_and_unloads(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        reply = await harness.as_owner("POST", "/small/load")
        assert [(each["name"], each["stage"]) for each in reply["models"]] == [("large", "loaded"), ("small", "loaded")]
        assert (await harness.as_owner("POST", "/small/pin", pinned=True))["models"][1]["pinned"]
        refused = await harness.as_owner("POST", "/small/unload", status=409)
        assert refused["error"]["code"] == "model_pinned"
        await harness.as_owner("POST", "/small/pin", pinned=False)
        reply = await harness.as_owner("POST", "/small/unload")
        assert reply["models"][1]["stage"] == "unloaded"
        assert (await harness.as_owner("POST", "/none/load", status=404))["error"]["code"] == "unknown_model"


@on_loop
async def test_model_that_does_not_fit_beside_pinned_ones_is_not_pinned(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 15, ("large",), configs={"large": {"pinned": True}}) as harness:
        assert (await harness.ask("large")).status == 200  # the proxy knows the memory by now
        refused = await harness.as_owner("POST", "/small/pin", 400, pinned=True)
        assert refused["error"]["code"] == "model_too_large"
        assert not (await harness.as_owner("POST", "/small/pin", pinned=False))["models"][1]["pinned"]
        await harness.as_owner("POST", "/large/pin", pinned=False)
        assert (await harness.as_owner("POST", "/small/pin", pinned=True))["models"][1]["pinned"]


@on_loop
async def test_owner_loads_a_failed_model_at_once(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.load_failures["small"] = "its weights can't be read"
        refused = await harness.as_owner("POST", "/small/load", status=503)
        assert refused["error"]["code"] == "model_failed"
        assert (await harness.as_owner("POST", "/small/load"))["models"][1]["stage"] == "loaded"
        assert harness.keeper.calls == ["load small"] * 2


@on_loop
async def test_unload_by_the_owner_waits_for_running_requests(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large", "small")) as harness:
        running = await hold(harness, "small")
        unloading = asyncio.create_task(harness.as_owner("POST", "/small/unload"))
        await asyncio.sleep(0.2)
        assert harness.keeper.calls == []
        release(harness, "small")
        assert (await running).status == 200 and (await unloading)["models"][1]["stage"] == "unloaded"


@on_loop
async def test_pin_ends_an_unload_that_waits_for_requests(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large", "small")) as harness:
        running = await hold(harness, "small")
        unloading = asyncio.create_task(harness.as_owner("POST", "/small/unload", status=409))
        await asyncio.sleep(0.1)
        await harness.as_owner("POST", "/small/pin", pinned=True)
        assert (await unloading)["error"]["code"] == "model_pinned"
        release(harness, "small")
        assert (await running).status == 200 and (await harness.ask("small", "again")).status == 200
        assert harness.keeper.calls == []


@on_loop
async def test_unload_of_a_model_that_fails_to_start_ends(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.loading_allowed.clear()
        harness.keeper.load_failures["small"] = "its weights can't be read"
        await harness.as_owner("POST", "/small/load", wait=False)
        await harness.keeper.wait_for_call("load small")
        unloading = asyncio.create_task(harness.as_owner("POST", "/small/unload"))
        harness.keeper.loading_allowed.set()
        assert (await unloading)["models"][1]["stage"] in ("failed", "unloaded")


@on_loop
async def test_second_model_that_does_not_fit_beside_a_pinned_one_is_not_pinned(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 15, ("large",)) as harness:
        await harness.ask("large")
        assert (await harness.as_owner("POST", "/small/load"))["models"][1]["stage"] == "loaded"
        await harness.as_owner("POST", "/small/pin", pinned=True)
        refused = await harness.as_owner("POST", "/large/pin", status=400, pinned=True)
        assert refused["error"]["code"] == "model_too_large"


@on_loop
async def test_owner_loads_and_pins_a_model_at_once(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, model_stay_s=60.0) as harness:
        assert (await harness.ask("large")).status == 200
        await harness.wait_until_saved()
        await harness.as_owner("POST", "/small/load")
        assert harness.keeper.loaded == ["small"]
        await harness.as_owner("POST", "/large/pin", pinned=True)
        await wait_for_stage(harness, "large", "loaded")
        assert harness.keeper.loaded == ["large"]


@on_loop
async def test_proxy_is_ready_where_any_model_is_served(tmp_path: Path) -> None:
    async with run_models(tmp_path, {"large": 30, "small": 10}, 20) as harness:
        await harness.wait_for_keeper()
        assert await harness.get_ready() == {"ready": True, "model": "small"}, "the default one never fits"
        large, small = (await harness.models())["models"]
        assert "can't be loaded" in large["reason"] and small["reason"] == ""
        harness.keeper.load_failures["small"] = "its weights can't be read"
        assert (await harness.ask("small")).status == 503
        assert "'large' can't be loaded" in (await harness.get_ready())["reason"]


@on_loop
async def test_proxy_is_not_ready_while_models_are_loaded_without_a_request(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20) as harness:
        harness.keeper.loading_allowed.clear()
        loading = asyncio.create_task(harness.keeper.load("small"))
        await wait_for_stage(harness, "small", "starting")
        assert "'small' is starting" in (await harness.get_ready())["reason"]
        harness.keeper.loading_allowed.set()
        await loading
        assert (await harness.ask("small")).status == 200 and (await harness.get_ready())["model"] == "small"


@on_loop
async def test_unknown_fields_are_refused(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20) as harness:
        refused = await harness.as_owner("POST", "/small/pin", status=400, pin=False)
        assert "pin" in refused["error"]["message"] and not (await harness.models())["models"][1]["pinned"]


@on_loop
async def test_pair_of_one_model_says_that_it_stays_loaded(tmp_path: Path) -> None:

    async with run_proxy(tmp_path) as proxy:
        headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        await proxy.chat()
        async with proxy.client.get(f"{proxy.url}/warmline/models", headers=headers) as response:
            reply = await response.json()
        assert not reply["keeper"] and reply["models"][0]["stage"] == ModelStage.LOADED
        path = f"{proxy.url}/warmline/models/fake-model/unload"
        async with proxy.client.post(path, headers=headers) as response:
            assert response.status == 409 and (await response.json())["error"]["code"] == "one_model"
