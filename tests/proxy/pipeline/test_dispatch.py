"""Dispatch of requests: lost backends, leaders, superseded tries."""

import asyncio
import json
from pathlib import Path

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_proxy.upstream.client import DISPATCHES_MAX


async def read_text(proxy: ProxyHarness, **fields: object) -> str:
    answer = await proxy.chat(**fields)
    assert answer.status == 200
    return str((await answer.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("mishap", ["cut", "discarded", "leaderless", "cancelled"])
@on_loop
async def test_lost_backend_before_content_dispatches_again(tmp_path: Path, mishap: str) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = [mishap]
        assert await read_text(proxy) == "Paris."
        assert len(proxy.backend.calls["generate"]) == 2
        streamed = await proxy.chat(stream=True)
        assert '"Par"' in await streamed.text()


@on_loop
async def test_lost_backend_in_json_response_dispatches_again(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut after content"]
        assert await read_text(proxy) == "Paris."


@on_loop
async def test_lost_backend_after_content_ends_stream_with_error(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut after content"]
        text = await (await proxy.chat(stream=True)).text()
        *_, last = (line for line in text.splitlines() if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "backend_failed"
        assert "[DONE]" not in text and len(proxy.backend.calls["generate"]) == 1
        (record,) = await proxy.wait_until_saved()
        assert record.outcome == "error"


@pytest.mark.parametrize(("mishap", "status"), [("cut", 502), ("discarded", 502)])
@on_loop
async def test_dispatches_are_limited(tmp_path: Path, mishap: str, status: int) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = [mishap] * 10
        answer = await proxy.chat()
        assert answer.status == status and len(proxy.backend.calls["generate"]) == DISPATCHES_MAX
        assert (await proxy.chat("Another one")).status == 502
        proxy.backend.generation_faults = []
        assert await read_text(proxy) == "Paris."


@on_loop
async def test_lost_leaders_do_not_count_as_dispatches(tmp_path: Path) -> None:
    """A leader that leaves has computed something: planning again is no failure."""
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["leaderless"] * 10
        assert await read_text(proxy) == "Paris."


@on_loop
async def test_concurrent_same_prompt_follows_leader(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 0
        question = "A long question. " * 20
        first = asyncio.create_task(proxy.chat(question))
        await proxy.backend.holding.wait()
        second = asyncio.create_task(proxy.chat(question))
        await proxy.backend.wait_for_calls("generate", 2)
        leader, follower = proxy.backend.calls["generate"]
        assert follower["X-Warmline-Follow"] == leader["X-Warmline-Request"]
        assert int(follower["X-Warmline-Reuse"]) == len(f"<user>{question}\n<assistant>") - 1
        proxy.backend.may_continue.set()
        answers = [await first, await second]
        assert [answer.headers["X-Warmline-Cache"].split()[0] for answer in answers] == ["cold", "shared"]


@on_loop
async def test_requests_at_once_follow_first(tmp_path: Path) -> None:
    """The first is still being restored when the others come; they follow it as soon as it is sent."""
    question = "A long question. " * 20
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(question)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        asked = [asyncio.create_task(proxy.chat(question)) for _ in range(5)]
        await proxy.backend.wait_for_calls("restore", 1)
        await proxy.backend.wait_for_calls("prompts", 6)
        proxy.backend.hold_after = 0
        proxy.backend.restoring_allowed.set()
        await proxy.backend.wait_for_calls("generate", 6)
        leader, *followers = proxy.backend.calls["generate"][1:]
        assert {call.get("X-Warmline-Follow") for call in followers} == {leader["X-Warmline-Request"]}
        assert len(proxy.backend.calls["restore"]) == 1
        proxy.backend.may_continue.set()
        assert {(await each).status for each in asked} == {200}


@on_loop
async def test_request_at_once_leads_where_first_is_cancelled(tmp_path: Path) -> None:
    question = "A long question. " * 20
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(question)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        first = asyncio.create_task(proxy.chat(question, headers={"X-Warmline-Request": "first"}))
        await proxy.backend.wait_for_calls("restore", 1)
        others = [asyncio.create_task(proxy.chat(question)) for _ in range(2)]
        await proxy.backend.wait_for_calls("prompts", 4)
        proxy.backend.restoring_allowed.set()
        first.cancel()
        assert [(await other).status for other in others] == [200, 200]


@on_loop
async def test_refused_leader_is_not_followed_again(tmp_path: Path) -> None:
    """A rotating layer that has passed the position can't be copied there any more."""
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 0
        question = "A long question. " * 20
        first = asyncio.create_task(proxy.chat(question))
        await proxy.backend.holding.wait()
        proxy.backend.gone_count = 1
        second = asyncio.create_task(proxy.chat(question))
        await proxy.backend.wait_for_calls("generate", 3)
        followed = [call.get("X-Warmline-Follow") for call in proxy.backend.calls["generate"]]
        assert followed == [None, proxy.backend.calls["generate"][0]["X-Warmline-Request"], None]
        proxy.backend.may_continue.set()
        _, answer = await first, await second
        assert answer.headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_retry_cancels_superseded_request(tmp_path: Path) -> None:
    """The first connection may look alive for a while, as a sleeping laptop's."""
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        session = {"X-Session-ID": "one"}
        first = asyncio.create_task(proxy.chat(headers={**session, "X-Stainless-Retry-Count": "0"}))
        await proxy.backend.holding.wait()
        proxy.backend.hold_after = None
        second = await proxy.chat(headers={**session, "X-Stainless-Retry-Count": "1"})
        assert second.status == 200
        assert (await first).status == 499
        assert len(proxy.backend.calls["cancel"]) == 1


@pytest.mark.parametrize("session", [{}, {"X-Session-ID": "another"}])
@on_loop
async def test_retry_of_other_session_cancels_nothing(tmp_path: Path, session: dict[str, str]) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat(headers={"X-Session-ID": "one", "X-Stainless-Retry-Count": "0"}))
        await proxy.backend.holding.wait()
        proxy.backend.hold_after = None
        assert (await proxy.chat(headers={**session, "X-Stainless-Retry-Count": "1"})).status == 200
        proxy.backend.may_continue.set()
        assert (await first).status == 200


@on_loop
async def test_retry_cancels_superseded_request_in_full_queue(tmp_path: Path) -> None:
    """The superseded request may hold the only ticket."""
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.hold_after = 1
        session = {"X-Session-ID": "one"}
        first = asyncio.create_task(proxy.chat(headers={**session, "X-Stainless-Retry-Count": "0"}))
        await proxy.backend.holding.wait()
        proxy.backend.hold_after = None
        second = proxy.chat(headers={**session, "X-Stainless-Retry-Count": "1"})
        assert (await asyncio.wait_for(second, 15.0)).status == 200
        assert (await first).status == 499


@on_loop
async def test_retry_of_one_sample_keeps_its_siblings(tmp_path: Path) -> None:
    """One of several samples of one prompt is sent again."""
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        session = {"X-Session-ID": "one"}
        samples = [
            asyncio.create_task(proxy.chat(headers={**session, "X-Stainless-Retry-Count": "0"})) for _ in range(3)
        ]
        await proxy.backend.wait_for_calls("generate", 3)
        proxy.backend.hold_after = None
        assert (await proxy.chat(headers={**session, "X-Stainless-Retry-Count": "1"})).status == 200
        proxy.backend.may_continue.set()
        statuses = sorted([(await sample).status for sample in samples])
        assert statuses.count(499) <= 1, statuses


@on_loop
async def test_huge_retry_count_is_accepted(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        assert (await proxy.chat(headers={"X-Stainless-Retry-Count": "9" * 5000})).status == 200


@on_loop
async def test_cancel_request_named_like_response_id(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(headers={"X-Warmline-Request": "cmpl-mine"}))
        await proxy.backend.holding.wait()
        async with proxy.client.delete(f"{proxy.url}/v1/requests/cmpl-mine") as deleted:
            status = deleted.status
        proxy.backend.may_continue.set()
        await asking
        assert status == 200
