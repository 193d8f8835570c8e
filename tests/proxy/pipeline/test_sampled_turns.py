"""Sampled turns with tool calls: sent with the next prompt, at once and later, until they are purged."""

import asyncio
from pathlib import Path
from typing import Any

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import namespace, pack_tokens

CALL_ID = "call_00112233445566778899aabb"
TURN = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
QUESTION = {"role": "user", "content": "look"}
NEXT_MESSAGES = [
    QUESTION,
    {"role": "assistant", "tool_calls": [{"id": CALL_ID, "function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": CALL_ID, "content": "a ship"},
]


async def chat_next_turn(proxy: ProxyHarness) -> Any:
    """Turns sent to the backend with the conversation's next prompt."""
    await proxy.chat(messages=NEXT_MESSAGES)
    return proxy.backend.calls["turns"][-1]


@on_loop
async def test_turn_is_found_before_its_save(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.turn = TURN
        proxy.backend.saving_allowed.clear()
        await proxy.chat(messages=[QUESTION])
        assert await chat_next_turn(proxy) == [TURN] and proxy.backend.calls["turns"][0] == []
        proxy.backend.saving_allowed.set()


@on_loop
async def test_turn_has_session_and_is_purged_with_it(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.turn = TURN
        await proxy.chat(messages=[QUESTION])
        record = (await proxy.wait_until_saved())[0]
        root = namespace("f" * 64, "")
        (row,) = await asyncio.to_thread(proxy.index.turns, root, [CALL_ID])
        assert record.session and row.session == record.session
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        purge = {"session": record.session}
        async with proxy.client.post(f"{proxy.url}/warmline/purge", json=purge, headers=owner) as response:
            assert response.status == 200
        assert await chat_next_turn(proxy) == []
