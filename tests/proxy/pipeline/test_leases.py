"""Leases of residents until they are saved: the backend is notified however a save ends."""

import errno
from pathlib import Path
from typing import Any

import pytest

from support.proxy.fake_backend import make_layout
from support.proxy.harness import ProxyHarness, on_loop, run_proxy


async def list_evictable(proxy: ProxyHarness, calls: int = 1) -> set[Any]:
    """Residents that the backend may evict, as it was notified in at least so many calls."""
    await proxy.wait_until_saved()
    await proxy.backend.wait_for_calls("order", calls)
    return {resident for names in proxy.backend.calls["order"] for resident in names}


@pytest.mark.parametrize("status", [410, 500, 507])
@on_loop
async def test_lease_ends_after_failed_save(tmp_path: Path, status: int) -> None:
    """410: the rows are gone, though the resident with rotating layers is not."""
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.save_failures = [status]
        await proxy.chat()
        assert await list_evictable(proxy) == set(proxy.backend.residents)
        assert not proxy.index.segments()


@on_loop
async def test_lease_ends_after_failed_index_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "as scripted")

    async with run_proxy(tmp_path) as proxy:
        monkeypatch.setattr(proxy.index, "begin_turn_save", fails)
        await proxy.chat()
        assert await list_evictable(proxy) == set(proxy.backend.residents) and not proxy.backend.calls["save"]


@on_loop
async def test_lease_ends_after_exceeded_budget(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, disk_budget_bytes=100) as proxy:
        await proxy.chat()
        assert await list_evictable(proxy) == set(proxy.backend.residents) and not proxy.backend.calls["save"]


@on_loop
async def test_lease_ends_where_all_rows_are_stored(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat()
        assert not await list_evictable(proxy, 0), "a save of its rows ends a lease by itself"
        first = set(proxy.backend.residents)
        await proxy.chat()
        assert await list_evictable(proxy) == set(proxy.backend.residents) - first
        assert len(proxy.backend.calls["save"]) == 1


@on_loop
async def test_lease_ends_after_save_of_checkpoints_alone(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        backend = proxy.backend
        backend.layout = make_layout(has_states=True, state_bytes=10)
        await proxy.chat()
        await proxy.wait_until_saved()
        (first,) = backend.residents
        backend.answer = backend.answer[:1]
        await proxy.chat()
        await proxy.wait_until_saved()
        states = backend.calls["save"][-1]
        assert states.resident != first and not states.segments and states.checkpoints
        assert states.resident in await list_evictable(proxy)
