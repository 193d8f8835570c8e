"""Several choices in one response: contents, dispatches, cancels and failures."""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_proxy.app import REQUEST_REGISTRY

QUESTION = "A long question. " * 20


def parse_events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def join_texts(chunks: list[Any]) -> dict[int, str]:
    contents: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk["choices"]:
            contents[choice["index"]] += choice["delta"].get("content") or ""
    return dict(contents)


async def post_completion(proxy: ProxyHarness, **fields: Any) -> aiohttp.ClientResponse:
    response = await proxy.client.post(f"{proxy.url}/v1/completions", json={"model": "any", **fields})
    await response.read()
    return response


def list_dispatched(proxy: ProxyHarness) -> list[str]:
    return [call["X-Warmline-Request"] for call in proxy.backend.calls["generate"]]


@on_loop
async def test_json_response_has_choices_with_a_record_each(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        response = await proxy.chat(QUESTION, n=3, seed=5, headers={"X-Warmline-Request": "mine"})
        answer = await response.json()
        assert [(each["index"], each["message"]["content"]) for each in answer["choices"]] == [
            (0, "Paris."),
            (1, "Paris."),
            (2, "Paris."),
        ]
        prompt = len(f"<user>{QUESTION}\n<assistant>")
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 18)
        assert usage["total_tokens"] == prompt + 18 and usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["model"] == "any" and response.headers["X-Warmline-Request"] == "mine"
        assert response.headers["X-Warmline-Cache"] == "cold 0"
        assert sorted(body["seed"] for body in proxy.backend.calls["prompts"]) == [5, 6, 7]
        records = {record.id: record for record in await proxy.wait_until_saved()}
        assert records.keys() == {"mine.0", "mine.1", "mine.2"}
        assert {record.outcome for record in records.values()} == {"ok"}
        assert records["mine.0"].source == "cold"
        assert all(records[f"mine.{index}"].cached_tokens == prompt - 1 for index in (1, 2)), "they share its prefill"
        assert not (await proxy.status())["lives"]


@on_loop
async def test_stream_has_all_choices(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        options = {"include_usage": True}
        response = await proxy.chat(QUESTION, n=2, stream=True, stream_options=options)
        *chunks, last, done = parse_events(await response.text())
        assert done == "[DONE]" and join_texts(chunks) == {0: "Paris.", 1: "Paris."}
        finishes = [each["index"] for chunk in chunks for each in chunk["choices"] if each["finish_reason"] == "stop"]
        assert sorted(finishes) == [0, 1]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1 and {chunk["model"] for chunk in chunks} == {"any"}
        plain = parse_events(await (await proxy.chat(QUESTION, n=2, stream=True)).text())
        assert all("usage" not in chunk and chunk["choices"] for chunk in plain[:-1])


@on_loop
async def test_completion_of_several_prompts(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        answer = await (await post_completion(proxy, prompt=["one", "three", list(b"ids")], n=2)).json()
        assert [each["index"] for each in answer["choices"]] == list(range(6))
        assert {each["text"] for each in answer["choices"]} == {"Paris."}
        assert answer["usage"]["prompt_tokens"] == len("one" + "three" + "ids")
        assert answer["usage"]["completion_tokens"] == 36
        proxy.backend.calls.clear()
        refused = await post_completion(proxy, prompt=["good", "bad"], stream=True)
        assert refused.status == 400 and not proxy.backend.calls["generate"]


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_lost_choice_without_content_is_dispatched_again(tmp_path: Path, stream: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["", "discarded"]
        response = await proxy.chat(QUESTION, n=2, stream=stream)
        text = await response.text()
        contents = (
            join_texts(parse_events(text)[:-1])
            if stream
            else [each["message"]["content"] for each in json.loads(text)["choices"]]
        )
        assert contents == ({0: "Paris.", 1: "Paris."} if stream else ["Paris."] * 2)
        assert len(list_dispatched(proxy)) == 3


@on_loop
async def test_lost_choice_in_json_is_not_repeated(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["", "cut after content"]
        answer = await (await proxy.chat(QUESTION, n=2)).json()
        assert [each["message"]["content"] for each in answer["choices"]] == ["Paris."] * 2


@on_loop
async def test_failed_choice_cancels_all(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 0
        proxy.backend.generation_faults = ["", "invalid"]
        response = await proxy.chat(QUESTION, n=3)
        assert response.status == 500 and (await response.json())["error"]["message"] == "as scripted"
        outcomes = {record.outcome for record in await proxy.wait_until_saved()}
        assert outcomes == {"error", "cancelled"} and not proxy.backend.is_running


@on_loop
async def test_failed_choice_after_content_ends_stream_with_error(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        proxy.backend.generation_faults = ["", "invalid"]
        response = await proxy.chat(QUESTION, n=2, stream=True)
        last = parse_events(await response.text())[-1]
        assert response.status == 200 and last["error"]["message"] == "as scripted"


@pytest.mark.parametrize("ending", ["DELETE", "DELETE its answer's id", "leaving", "a deadline"])
@on_loop
async def test_cancel_and_deadline_end_all_choices(tmp_path: Path, ending: str) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(QUESTION, n=3, headers={"X-Warmline-Request": "mine"}))
        await proxy.backend.wait_for_calls("generate", 3)
        if ending.startswith("DELETE"):
            name = "chatcmpl-mine" if "id" in ending else "mine"
            async with proxy.client.delete(f"{proxy.url}/v1/requests/{name}") as response:
                assert response.status == 200 and (await response.json())["id"] == "mine"
            assert not proxy.backend.is_running, "answered after the engine has released all"
            assert (await asking).status == 499
        elif ending == "leaving":
            asking.cancel()
        else:
            proxy.pass_total_timeouts()
            assert (await asking).status == 504
        assert len(await proxy.wait_until_saved()) == 3 and sorted(proxy.backend.calls["cancel"])[0] == "mine.0"
        assert not proxy.backend.is_running and not (await proxy.status())["running"]


@on_loop
async def test_choices_complete_with_few_tickets(tmp_path: Path) -> None:
    """One after the other with one ticket and no queue, and beside other requests."""
    async with run_proxy(tmp_path, running_count_max=1, queue_count_max=0) as proxy:
        answer = await (await post_completion(proxy, prompt=["a", "b"], n=3)).json()
        assert [each["text"] for each in answer["choices"]] == ["Paris."] * 6
    async with run_proxy(tmp_path / "two", running_count_max=2, queue_count_max=2) as proxy:
        answers = await asyncio.gather(*(proxy.chat(f"{number} {QUESTION}", n=4) for number in range(3)))
        assert [len((await each.json())["choices"]) for each in answers] == [4, 4, 4]
        assert not (await proxy.status())["running"]


@on_loop
async def test_running_choices_are_limited_by_tickets(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=2, queue_count_max=1) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(QUESTION, n=4))
        await proxy.backend.wait_for_calls("generate", 2)
        status = await proxy.status()
        assert (status["running"], status["queued"], status["lives"]) == (2, 0, 3), "the request itself is one"
        assert proxy.app[REQUEST_REGISTRY].unanswered_count == 1
        proxy.backend.may_continue.set()
        assert (await asking).status == 200 and len(list_dispatched(proxy)) == 4


@on_loop
async def test_retry_cancels_superseded_choices(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        headers = {"X-Session-ID": "s"}
        first = asyncio.create_task(proxy.chat(QUESTION, n=2, headers=headers))
        await proxy.backend.wait_for_calls("generate", 2)
        second = asyncio.create_task(proxy.chat(QUESTION, n=2, headers={**headers, "X-Stainless-Retry-Count": "1"}))
        assert (await first).status == 499
        proxy.backend.may_continue.set()
        assert (await second).status == 200


@on_loop
async def test_cache_prompt_false_starts_cold(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(QUESTION)
        cold = await proxy.chat(QUESTION, cache_prompt=False)
        assert cold.headers["X-Warmline-Cache"] == "cold 0"
        warm = await proxy.chat(QUESTION, cache_prompt=True)
        assert warm.headers["X-Warmline-Cache"].startswith("resident ")
        _, record, _ = await proxy.wait_until_saved()
        assert record.why_not_warmer == "the client asked for no reuse"
