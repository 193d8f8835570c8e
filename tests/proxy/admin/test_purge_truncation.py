"""Running requests on a segment that a purge truncates because others share it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import on_loop, run_proxy
from support.proxy.purges import (
    ALIKE,
    LONG,
    LONGER,
    hold_request,
    purge_during_restore,
    release,
    run_purge,
    store_conversation,
)
from warmline_common.protocol.messages import SavedFile
from warmline_common.storage.home import Home
from warmline_proxy.retention import truncate as index_cut
from warmline_proxy.store.rows import SavePlan, SegmentRow


def fake_rewrite(home: Home, row: SegmentRow, plan: SavePlan) -> SavedFile:
    """Shortened file as the fake backend writes files: without content."""
    path = home.segment_file(plan.segments[0].id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(b"rest")
    return SavedFile(id=plan.segments[0].id, bytes_written=4, checksum="rest")


@pytest.fixture
def fake_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cut, "_write_shortened", fake_rewrite)


@pytest.mark.usefixtures("fake_truncation")
@on_loop
async def test_running_request_on_truncated_tail_is_not_saved(tmp_path: Path) -> None:
    """A request on the kept part of the same file is saved."""
    async with run_proxy(tmp_path) as proxy:
        session, other = await store_conversation(proxy, LONG), await store_conversation(proxy, ALIKE)
        running = await hold_request(proxy, LONGER)
        (cut,) = (await run_purge(proxy, session=session))["cuts"]
        assert cut["until"] < cut["end"] and not cut["why_not"]
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens == 0
        assert [row.id for row in proxy.index.sessions()] == [other]
        assert proxy.index.segment(cut["became"])
        running = await hold_request(proxy, [*ALIKE, *LONGER[1:]])
        await run_purge(proxy, session="0" * 12)
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens > 0


@on_loop
async def test_request_started_during_truncation_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        session, _ = await store_conversation(proxy, LONG), await store_conversation(proxy, ALIKE)
        began, resume, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        def slow_rewrite(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(began.set)
            resume.wait()
            return fake_rewrite(*arguments)

        monkeypatch.setattr(index_cut, "_write_shortened", slow_rewrite)
        purge = asyncio.create_task(run_purge(proxy, session=session))
        await began.wait()
        running = await hold_request(proxy, LONGER)
        resume.set()
        assert [cut["why_not"] for cut in (await purge)["cuts"]] == [""]
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens == 0
        assert len(proxy.index.sessions()) == 1


@pytest.mark.usefixtures("fake_truncation")
@on_loop
async def test_truncated_file_under_restore_is_deleted_before_reply(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session, _ = await store_conversation(proxy, LONG), await store_conversation(proxy, ALIKE)
        (old,) = [row.id for row in proxy.index.segments() if not row.parent]
        running, purge = await purge_during_restore(proxy, session, ALIKE)
        assert proxy.home.segment_file(old).exists() and not purge.done()
        proxy.backend.restoring_allowed.set()
        await purge
        assert not proxy.home.segment_file(old).exists()
        assert (await running).status == 200
        assert (await proxy.wait_until_saved())[0].source == "restored"
