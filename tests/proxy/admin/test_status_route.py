"""GET /warmline/status while the backend loads its model or does not answer."""

from pathlib import Path

import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_proxy.admin import status
from warmline_proxy.upstream import watchdog


@on_loop
async def test_status_while_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.02)
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat()
        reply = await proxy.status()
        assert (reply["loading"], reply["backend"]) == (False, "")
        proxy.backend.ready = False
        while not (reply := await proxy.status())["backend"]:
            pass
        assert (reply["loading"], reply["backend"]) == (True, "the model is still loading")


@on_loop
async def test_status_with_silent_backend_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat()
        await proxy.wait_until_saved()
        monkeypatch.setattr(status, "BACKEND_TIMEOUT_S", 0.05)
        proxy.backend.listing_allowed.clear()
        reply = await proxy.status()
        assert (reply["loading"], reply["backend"]) == (False, "the backend has not answered for 0.05 s")
        proxy.backend.listing_allowed.set()
