"""Replays of stored sessions on demand."""

from pathlib import Path
from typing import Any

import pytest

from support.keeper.fake_keeper import run_models
from support.proxy.audits import ask_turns
from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.messages import FirstLogits, decode, encode
from warmline_proxy.audit.first_token_probe import FirstTokenProbe
from warmline_proxy.store.rows import ReplayReply, ReplayRequest, ReplayResult
from warmline_proxy.upstream.client import UpstreamStatusError


async def replay_sessions(proxy: ProxyHarness, **fields: Any) -> list[ReplayResult]:
    headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
    body = encode(ReplayRequest(**fields))
    async with proxy.client.post(f"{proxy.url}/warmline/replay", data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return decode(await response.read(), ReplayReply).replays


@on_loop
async def test_replay_compares_restored_with_cold(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await ask_turns(proxy)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        (replay,) = await replay_sessions(proxy)
        stored = len(proxy.index.path_tokens(proxy.index.sessions()[0].leaf)) // 4
        assert (replay.outcome, replay.tokens, replay.reused) == ("equal", stored, stored)
        assert not proxy.backend.residents, "no resident of it stays"
        assert await replay_sessions(proxy, session=replay.session) == [replay]


@on_loop
async def test_replay_that_differs_quarantines_files(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await ask_turns(proxy)
        await proxy.wait_until_saved()
        proxy.backend.cold_logprobs = [-3.0, -3.0]
        (replay,) = await replay_sessions(proxy)
        assert (replay.outcome, replay.difference) == ("differs", 2.75) and replay.quarantined
        assert not proxy.index.segments() and not proxy.backend.residents
        assert not await replay_sessions(proxy)


@pytest.mark.parametrize(("reason", "aside"), [("checksum", ["checksum"]), ("io", [])])
@on_loop
async def test_unrestorable_replay_is_damaged_and_unreadable_file_stays(
    tmp_path: Path, reason: str, aside: list[str]
) -> None:
    async with run_proxy(tmp_path) as proxy:
        await ask_turns(proxy, 1)
        await proxy.wait_until_saved()
        proxy.backend.restore_refusals = [reason]
        (replay,) = await replay_sessions(proxy)
        assert replay.outcome == "damaged" and reason in replay.detail and replay.quarantined == len(aside)
        assert [row.reason for row in proxy.index.quarantined()] == aside


@on_loop
async def test_session_refused_by_backend_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(self: FirstTokenProbe, root: bytes, tokens: bytes) -> FirstLogits:
        raise UpstreamStatusError(400, b'{"error": {"message": "too long"}}')

    async with run_proxy(tmp_path) as proxy:
        await ask_turns(proxy, 1)
        await proxy.wait_until_saved()
        monkeypatch.setattr(FirstTokenProbe, "compute_cold", refuses)
        (replay,) = await replay_sessions(proxy)
        assert (replay.outcome, replay.detail) == ("skipped", "400: too long")


@on_loop
async def test_replay_of_unknown_session_or_bad_body_returns_400(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        headers = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        for body in (encode(ReplayRequest(session="none")), b"{"):
            async with proxy.client.post(f"{proxy.url}/warmline/replay", data=body, headers=headers) as response:
                assert response.status == 400 and "Not a replay" in await response.text()


@on_loop
async def test_replay_names_the_model_to_load_that_this_proxy_has_not_seen(tmp_path: Path) -> None:
    sizes = {"large": 10, "small": 10}
    async with run_models(tmp_path, sizes, 20, ("small",)) as earlier:
        assert (await earlier.ask("small", "words of a conversation " * 10)).status == 200
        await earlier.wait_until_saved()
    async with run_models(tmp_path, sizes, 20, ("large",)) as proxy:
        (replay,) = await replay_sessions(proxy)
        assert replay.detail == "its model is not loaded: `warmline models load small`"
