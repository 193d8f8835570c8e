"""GET /warmline/requests/ID and /v1/requests/ID: state of one request, from its arrival on."""

import asyncio
from pathlib import Path
from typing import Any

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_proxy.auth import key_store


async def read_state(proxy: ProxyHarness, name: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
    async with proxy.client.get(f"{proxy.url}/warmline/requests/{name}", headers=headers) as response:
        state: dict[str, Any] = await response.json()
        assert response.status == 200 and response.headers["Cache-Control"] == "no-store"
        return state


@on_loop
async def test_state_of_requests_on_their_way(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.reports_start, proxy.backend.hold_after = True, 0
        first = asyncio.create_task(proxy.chat("one", n=2, stream=True, headers={"X-Warmline-Request": "first"}))
        await proxy.backend.holding.wait()
        second = asyncio.create_task(proxy.chat("another", headers={"X-Warmline-Request": "second"}))
        await proxy.backend.wait_for_calls("prompts", 2)
        while (state := await read_state(proxy, "second"))["queue_position"] is None:
            pass
        assert (state["state"], state["queue_position"], state["expected_s"]) == ("queued", 1, None)
        prompt_tokens = len("<user>another\n<assistant>")
        assert (state["prompt_tokens"], state["processed_tokens"], state["source"]) == (prompt_tokens, 0, "")
        while (state := await read_state(proxy, "chatcmpl-first"))["state"] != "prefilling":
            pass
        assert (state["id"], state["choices"], state["model"]) == ("first", 1, "fake-model"), "the other one waits"
        assert state["expected_s"] > 0.0 and state["seconds"]["prefilling"] > 0.0 and state["ttft_s"] is None
        assert (await read_state(proxy, "first.0"))["seconds"].keys() == state["seconds"].keys()
        proxy.backend.hold_after = None
        proxy.backend.may_continue.set()
        assert ((await first).status, (await second).status) == (200, 200)
        await proxy.wait_until_saved()
        ended = await read_state(proxy, "second")
        assert (ended["state"], ended["outcome"], ended["error"]) == ("ended", "ok", "")
        assert (ended["model"], ended["client_model"]) == ("fake-model", "any")
        assert (ended["processed_tokens"], ended["generated_tokens"]) == (prompt_tokens, 6)
        assert ended["seconds"]["queued"] > 0.0 and ended["ttft_s"] <= ended["age_s"]
        assert (await read_state(proxy, "first"))["id"] == "first.0", "its choices have the records"


@on_loop
async def test_ended_request_is_its_clients_alone(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        one, two = ({"Authorization": f"Bearer {key_store.add_key(proxy.home, each).key}"} for each in ("one", "two"))
        proxy.backend.generation_faults = ["error"]
        assert (await proxy.chat(headers={**one, "X-Warmline-Request": "mine"})).status == 500
        await proxy.wait_until_saved()
        url = f"{proxy.url}/v1/requests"
        async with proxy.client.get(f"{url}/mine", headers=one) as response:
            state = await response.json()
            assert (state["state"], state["outcome"], state["error"]) == ("ended", "error", "500: as scripted")
        for name, headers in (("mine", two), ("never", one)):
            async with proxy.client.get(f"{url}/{name}", headers=headers) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (404, "unknown_request") and name in error["message"]
