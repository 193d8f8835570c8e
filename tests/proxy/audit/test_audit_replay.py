"""Stored conversations computed again on demand."""

from pathlib import Path
from typing import Any

import pytest

from support.proxy.audits import talk
from support.proxy.harness import Pair, on_loop, pair
from warmline_common.protocol.messages import FirstLogits, decode, encode
from warmline_proxy.store.rows import ReplayReply, ReplayRequest, ReplayResult
from warmline_proxy.upstream.client import UpstreamStatusError
from warmline_proxy.upstream.first_token_probe import FirstTokenProbe


async def replayed(proxy: Pair, **wanted: Any) -> list[ReplayResult]:
    headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
    body = encode(ReplayRequest(**wanted))
    async with proxy.client.post(f"{proxy.url}/warmline/replay", data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return decode(await response.read(), ReplayReply).replays


@on_loop
async def test_a_replay_restores_computes_cold_and_compares(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await talk(proxy)
        await proxy.settled()
        proxy.backend.restart()
        (replay,) = await replayed(proxy)
        stored = len(proxy.index.path_tokens(proxy.index.sessions()[0].leaf)) // 4
        assert (replay.outcome, replay.tokens, replay.reused) == ("equal", stored, stored)
        assert not proxy.backend.held, "nothing of it stays in memory"
        assert await replayed(proxy, session=replay.session) == [replay]


@on_loop
async def test_a_replay_that_differs_quarantines(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await talk(proxy)
        await proxy.settled()
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        (replay,) = await replayed(proxy)
        assert (replay.outcome, replay.difference) == ("differs", 2.75) and replay.quarantined
        assert not proxy.index.segments() and not proxy.backend.held
        assert not await replayed(proxy)


@pytest.mark.parametrize(("reason", "aside"), [("checksum", ["checksum"]), ("io", [])])
@on_loop
async def test_a_replay_that_can_not_be_restored_is_damaged(tmp_path: Path, reason: str, aside: list[str]) -> None:
    async with pair(tmp_path) as proxy:
        await talk(proxy, 1)
        await proxy.settled()
        proxy.backend.refuse_restores = [reason]
        (replay,) = await replayed(proxy)
        assert replay.outcome == "damaged" and reason in replay.detail and replay.quarantined == len(aside)
        assert [row.reason for row in proxy.index.quarantined()] == aside


@on_loop
async def test_a_conversation_that_the_backend_refuses_does_not_end_the_replay_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(self: FirstTokenProbe, root: bytes, tokens: bytes) -> FirstLogits:
        raise UpstreamStatusError(400, b'{"error": {"message": "too long"}}')

    async with pair(tmp_path) as proxy:
        await talk(proxy, 1)
        await proxy.settled()
        monkeypatch.setattr(FirstTokenProbe, "compute_cold", refuses)
        (replay,) = await replayed(proxy)
        assert (replay.outcome, replay.detail) == ("skipped", "400: too long")


@on_loop
async def test_a_replay_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        for body in (encode(ReplayRequest(session="none")), b"{"):
            async with proxy.client.post(f"{proxy.url}/warmline/replay", data=body, headers=headers) as response:
                assert response.status == 400 and "Not a replay" in await response.text()
