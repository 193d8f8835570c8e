"""Several models behind one proxy: choice by name, loads, swaps, refusals.  A fake keeper, for the timing."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from support.keeper.fake_keeper import hold, list_served, release, run_models, wait_for_stage, wait_until_waiting
from support.proxy.harness import on_loop, perf_lines
from warmline_common.protocol.tokens import namespace
from warmline_proxy.app import COMPONENTS
from warmline_proxy.models import model_state, switcher
from warmline_proxy.pipeline import deadline_monitor, saver

MB = 10**6
TWO = {"large": 10, "small": 10}


@on_loop
async def test_request_goes_to_the_model_of_its_name_or_alias(tmp_path: Path) -> None:
    configs = {"small": {"aliases": ("claude-haiku", "mini")}}
    async with run_models(tmp_path, TWO, 20, ("large", "small"), configs=configs) as harness:
        for name in ("large", "small", "claude-haiku", "mini"):
            response = await harness.ask(name)
            assert response.status == 200 and (await response.json())["model"] == name
        assert list_served(harness) == {"large": 1, "small": 3}


@on_loop
async def test_unconfigured_name_goes_to_the_default_model_and_loads_nothing(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        for name in ("gpt-4o", "small-model", ""):
            assert (await harness.ask(name)).status == 200
        assert list_served(harness) == {"large": 3, "small": 0} and harness.keeper.calls == []


@on_loop
async def test_unconfigured_name_loads_the_default_model_only_where_it_fits(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20) as harness:
        assert (await harness.ask("gpt-4o")).status == 200 and harness.keeper.calls == ["load large"]
    async with run_models(tmp_path / "other", TWO, 10, ("small",)) as harness:
        response = await harness.ask("gpt-4o")
        error = (await response.json())["error"]
        assert response.status == 503 and error["code"] == "model_not_loaded" and "large, small" in error["message"]
        assert harness.keeper.calls == [] and (await harness.ask("large")).status == 200


@on_loop
async def test_request_loads_its_model_and_the_least_recently_used_one_leaves(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 10, "c": 10}
    async with run_models(tmp_path, sizes, 20) as harness:
        for name in ("a", "b", "a", "c"):
            assert (await harness.ask(name)).status == 200
            await harness.wait_until_saved()
        assert harness.keeper.calls == ["load a", "load b", "unload b", "load c"]
        assert harness.keeper.peak_bytes <= 20


@on_loop
async def test_model_is_prepared_while_the_other_one_stops(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        harness.keeper.stopping_allowed.clear()
        asking = asyncio.create_task(harness.ask("small"))
        await harness.keeper.wait_for_call("unload large")
        await harness.keeper.wait_until_prepared("small")
        harness.keeper.stopping_allowed.set()
        assert (await asking).status == 200
        assert harness.keeper.calls == ["unload large", "load small"]


@on_loop
async def test_conversations_of_two_models_are_kept_apart_and_restored_after_swaps(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10) as harness:
        sources = []
        for name in ("large", "small", "large", "small"):
            response = await harness.ask(name, "the same question of some length, " * 8)
            sources.append(response.headers["X-Warmline-Cache"].split()[0])
            await harness.wait_until_saved()
        assert sources == ["cold", "cold", "restored", "restored"]


@on_loop
async def test_residents_of_an_earlier_proxy_are_saved_before_their_model_is_unloaded(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        large = harness.keeper.backends["large"]
        await large.wait_for_calls("residents", 1)  # what is listed at the start is saved anyway
        large.roots["old"] = namespace(large.fingerprint)
        large.residents["old"] = b"".join(byte.to_bytes(4, "little") for byte in b"computed for an earlier proxy " * 8)
        assert (await harness.ask("small")).status == 200
        assert harness.keeper.calls == ["unload large", "load small"]
        assert [save.resident for save in large.calls["save"]] == ["old"]


@on_loop
async def test_leases_end_before_unload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that stops would wait for the save of a turn that had nothing new to save."""
    monkeypatch.setattr(saver, "LEASE_INTERVAL_S", 3600.0)
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        large = harness.keeper.backends["large"]
        for _ in range(2):
            assert (await harness.ask("large")).status == 200
            await harness.wait_until_saved()
        assert not large.calls["order"]
        assert (await harness.ask("small")).status == 200
        (names,) = large.calls["order"]
        assert names


@on_loop
async def test_leases_of_an_unloaded_model_are_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        assert (await harness.ask("small")).status == 200
        components = harness.app[COMPONENTS]
        components.saver._leased_backends.add(components.models.default)
        while components.saver._leased_backends:  # noqa: ASYNC110  a set has no event
            await asyncio.sleep(0.01)
        assert "evictable" not in caplog.text


@on_loop
async def test_model_with_a_running_request_is_unloaded_after_its_end(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        running = await hold(harness, "large")
        waiting = asyncio.create_task(harness.ask("small"))
        await wait_until_waiting(harness, "small")
        late = asyncio.create_task(harness.ask("large", "comes while it is closed"))
        await wait_until_waiting(harness, "large")
        assert harness.keeper.calls == [] and list_served(harness)["large"] == 1
        release(harness, "large")
        assert [each.status for each in await asyncio.gather(running, waiting, late)] == [200] * 3
        assert harness.keeper.calls == ["unload large", "load small", "unload small", "load large"]


@on_loop
async def test_closed_model_opens_again_where_the_waiting_client_leaves(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",)) as harness:
        running = await hold(harness, "large")
        waiting = asyncio.create_task(harness.ask("small"))
        await wait_until_waiting(harness, "small")
        late = asyncio.create_task(harness.ask("large", "comes while it is closed"))
        await wait_until_waiting(harness, "large")
        waiting.cancel()
        release(harness, "large")
        assert (await running).status == (await late).status == 200
        assert harness.keeper.calls == []


@on_loop
async def test_too_large_model_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    sizes = {"large": 30 * 10**9, "small": 10 * 10**9}
    configs = {"small": {"pinned": True}}
    async with run_models(tmp_path, sizes, 35 * 10**9, ("small",), configs=configs) as harness:
        response = await harness.ask("large")
        error = (await response.json())["error"]
        assert response.status == 400 and error["code"] == "model_too_large"
        for part in ("needs 30.000 GB", "5.000 GB are missing beside the pinned small"):
            assert part in error["message"]
        assert (await harness.ask("small")).status == 200 and harness.keeper.calls == []


@on_loop
async def test_failed_model_is_refused_with_its_reason_and_loaded_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.load_failures["small"] = "its weights can't be read"
        response = await harness.ask("small")
        assert response.status == 503 and "its weights can't be read" in (await response.json())["error"]["message"]
        assert (await harness.ask("small")).status == 503 and harness.keeper.calls == ["load small"]
        monkeypatch.setattr(model_state, "FAILED_RETRY_S", 0.0)
        assert (await harness.ask("small")).status == 200


@on_loop
async def test_request_waits_for_the_next_keeper_where_this_one_stops(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.stopping_replies = 1
        assert (await harness.ask("small")).status == 200
        assert harness.keeper.calls == ["load small"] * 2


@on_loop
async def test_waiting_for_a_load_counts_against_the_queue_timeout(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.loading_allowed.clear()
        response = await harness.chat(model="small", headers={"X-Warmline-Queue-Timeout": "0.3"})
        assert response.status == 503 and (await response.json())["error"]["code"] == "queue_timeout"
        harness.keeper.loading_allowed.set()
        assert (await harness.ask("small")).status == 200


@on_loop
async def test_keeper_that_is_down_costs_the_connect_timeout(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        assert (await harness.ask("large")).status == 200
        await harness.stop_backend()
        response = await harness.chat(model="small", headers={"X-Warmline-Connect-Timeout": "0.3"})
        assert response.status == 503 and "the keeper" in (await response.json())["error"]["message"]
        assert (await harness.ask("large")).status == 200, "what is loaded is served meanwhile"


@on_loop
async def test_streaming_client_hears_that_its_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_monitor, "HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr(switcher, "PROGRESS_INTERVAL_S", 0.05)
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.loading_allowed.clear()
        body = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        async with harness.client.post(f"{harness.url}/v1/chat/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            harness.keeper.loading_allowed.set()
            rest = (await response.read()).decode()
        assert first.startswith(b": loading small, for ") and rest.endswith("data: [DONE]\n\n")


@on_loop
async def test_client_that_asks_for_progress_hears_of_the_load_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline_monitor, "LOAD_INTERVAL_S", 0.1)
    monkeypatch.setattr(switcher, "PROGRESS_INTERVAL_S", 0.05)
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        harness.keeper.loading_allowed.clear()
        body = {
            "model": "small",
            "stream": True,
            "return_progress": True,
            "messages": [{"role": "user", "content": "x"}],
        }
        async with harness.client.post(f"{harness.url}/v1/chat/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            harness.keeper.loading_allowed.set()
            await response.read()
        chunk = json.loads(first.removeprefix(b"data: "))
        assert chunk["choices"][0]["delta"] == {} and chunk["loading"] == chunk["model"] == "small"
        assert chunk["prompt_progress"] | {"time_ms": 0} == {"total": 0, "cache": 0, "processed": 0, "time_ms": 0}
        assert "return_progress" not in harness.keeper.backends["small"].calls["prompts"][0]


@on_loop
async def test_perf_line_names_model_and_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",), configs={"small": {"aliases": ("mini",)}}) as harness:
        for name in ("mini", "large"):
            await harness.ask(name)
            await harness.wait_until_saved()
        loading, loaded = perf_lines(caplog)
        assert ' model="small" client_model="mini"' in loading and " load=" in loading
        assert ' model="large"' in loaded and "client_model" not in loaded and " load=" not in loaded


@on_loop
async def test_unused_model_is_unloaded_after_its_idle_time(tmp_path: Path) -> None:
    configs = {"small": {"idle_s": 0.2}}
    async with run_models(tmp_path, TWO, 20, ("large", "small"), configs=configs) as harness:
        await harness.ask("small")
        await harness.keeper.wait_for_call("unload small")
        assert (await harness.ask("small")).status == 200 and harness.keeper.calls[:2] == ["unload small", "load small"]


@on_loop
async def test_request_with_more_kv_than_the_present_budget_has_its_model_given_more(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large", "small")) as harness:
        harness.keeper.backends["large"].kv_bytes = 5 * 10**6
        harness.keeper.memory_bytes = 10**9
        assert (await harness.ask("large")).status == 200
        assert harness.keeper.calls[-1] == f"load large {5 * 10**6}"


@on_loop
async def test_request_that_needs_more_kv_has_an_idle_model_unloaded(tmp_path: Path) -> None:
    sizes = {"large": 10 * MB, "small": 10 * MB}
    async with run_models(tmp_path, sizes, 21 * MB, ("large", "small")) as harness:
        harness.keeper.backends["large"].kv_bytes = 6 * MB  # its budget is 1 MB, as in each loaded model
        assert (await harness.ask("large")).status == 200
        assert harness.keeper.calls == ["unload small", f"load large {6 * MB}"]


@on_loop
async def test_request_that_never_fits_is_refused_and_others_are_served(tmp_path: Path) -> None:
    sizes = {"large": 10 * MB, "small": 10 * MB, "other": 10 * MB}
    configs = {"large": {"pinned": True}}
    async with run_models(tmp_path, sizes, 21 * MB, ("large", "small"), configs=configs) as harness:
        harness.keeper.backends["small"].kv_bytes = 30 * MB
        response = await harness.ask("small")
        assert response.status == 400 and (await response.json())["error"]["code"] == "model_too_large"
        assert harness.keeper.calls == [] and (await harness.ask("other")).status == 200


@on_loop
async def test_wait_for_the_stay_of_another_model_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_models(tmp_path, TWO, 10, model_stay_s=60.0) as harness:
        assert (await harness.ask("large")).status == 200
        await harness.wait_until_saved()
        headers = {"X-Warmline-Queue-Timeout": "1.5"}
        waiting = asyncio.create_task(harness.chat("a question", model="small", headers=headers))
        await wait_until_waiting(harness, "small")
        small = {each["name"]: each for each in (await harness.models())["models"]}["small"]
        reason = "large must have been loaded for 60 s before it is unloaded (model_stay_s)"
        assert (small["wait_reason"], small["reason"]) == (reason, "")
        assert [each["phase"] for each in (await harness.status())["live"]] == ["loading"]
        response = await waiting
        message = (await response.json())["error"]["message"]
        assert response.status == 503 and message.endswith(
            f"1.5 s: the model 'small' is not loaded yet, since {reason}."
        )
        assert caplog.text.count(f"requests wait for model small: {reason}") == 1


@on_loop
async def test_unconfigured_name_hears_which_models_there_are_where_the_default_does_not_fit(tmp_path: Path) -> None:
    configs = {"small": {"pinned": True}}
    async with run_models(tmp_path, TWO, 15, ("small",), configs=configs) as harness:
        response = await harness.ask("gpt-4o")
        error = (await response.json())["error"]
        assert response.status == 503 and error["code"] == "model_not_loaded" and "large, small" in error["message"]


@on_loop
async def test_batch_of_prompts_does_not_keep_its_model_from_a_swap(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 10, ("large",), running_count_max=1) as harness:
        backend = harness.keeper.backends["large"]
        backend.hold_after = 1
        backend.holding.clear()
        backend.may_continue.clear()
        body = {"model": "large", "prompt": ["one prompt", "two prompts", "three prompts"], "max_tokens": 4}
        batch = asyncio.create_task(harness.client.post(f"{harness.url}/v1/completions", json=body))
        await backend.holding.wait()
        waiting = asyncio.create_task(harness.ask("small"))
        await wait_until_waiting(harness, "small")
        release(harness, "large")
        assert (await waiting).status == 200
        choices = (await (await batch).json())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]


@on_loop
async def test_pinned_model_that_fails_has_no_other_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_state, "FAILED_RETRY_S", 0.1)
    configs = {"large": {"pinned": True}}
    async with run_models(tmp_path, TWO, 20, (), configs=configs) as harness:
        harness.keeper.load_failures["large"] = "a file is damaged"
        assert (await harness.ask("small")).status == 200
        await wait_for_stage(harness, "large", "failed")
        harness.keeper.memory_bytes = 10
        await harness.keeper.publish("large")
        for _ in range(3):
            await asyncio.sleep(0.15)
            assert (await harness.ask("small")).status == 200
        assert "unload small" not in harness.keeper.calls
        harness.keeper.memory_bytes = 20
        await harness.keeper.publish("large")
        assert (await harness.ask("large")).status == 200, "a request has it loaded"


@on_loop
async def test_idle_time_begins_anew_with_a_proxy(tmp_path: Path) -> None:
    began, idle_s = time.monotonic(), 0.5
    async with run_models(tmp_path, TWO, 20, ("large", "small"), configs={"small": {"idle_s": idle_s}}) as harness:
        await harness.wait_for_keeper()
        assert (await harness.ask("large")).status == 200
        await harness.keeper.wait_for_call("unload small")
        assert harness.keeper.calls == ["unload small"] and time.monotonic() - began >= idle_s


@on_loop
async def test_lost_model_is_loaded_again_for_its_requests(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        backend = harness.keeper.backends["large"]
        backend.generation_faults = ["cut"]
        harness.keeper.loading_allowed.clear()
        asking = asyncio.create_task(harness.ask("large"))
        await backend.wait_for_calls("generate")
        await harness.keeper._finish_unload("large")
        harness.keeper.loading_allowed.set()
        assert (await asking).status == 200 and harness.keeper.calls == ["load large"]
