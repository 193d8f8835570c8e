"""A request's lookups: once a plan, also where it looked before whether to wait for a save."""

from pathlib import Path

import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_proxy.index.index import Index
from warmline_proxy.upstream.backend_state import BackendState

TEXT = "a text that is longer than one block of tokens, so that it is worth waiting for: " * 3


@on_loop
async def test_lookups_are_made_once_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(TEXT)
        await proxy.wait_until_saved()
        proxy.backend.saving_allowed.clear()
        await proxy.chat(f"{TEXT} and on")  # is being saved, and shares enough to be worth a look
        calls: list[str] = []
        candidates, match_prefix = BackendState.candidates, Index.match_prefix

        def count_candidates(self: BackendState, *args: object) -> object:
            calls.append("candidates")
            return candidates(self, *args)  # type: ignore[arg-type]

        def count_matches(self: Index, *args: object) -> object:
            calls.append("match")
            return match_prefix(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(BackendState, "candidates", count_candidates)
        monkeypatch.setattr(Index, "match_prefix", count_matches)
        assert (await proxy.chat(f"{TEXT} and elsewhere")).status == 200
        assert sorted(calls) == ["candidates", "match"]
        proxy.backend.saving_allowed.set()
        await proxy.wait_until_saved()
